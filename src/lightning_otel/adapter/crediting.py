"""Where rewards went among steps that are known already: no message is read for it.

The rules are :mod:`credit`'s own. What the general way alone sees is not seen here: which of two
calls came first where only their messages tell, and records of one request that have no id.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import cast

from lightning_otel.adapter import credit, duplicates, readers
from lightning_otel.adapter.attempts import group
from lightning_otel.adapter.calls import is_call
from lightning_otel.adapter.rewards import read_reward
from lightning_otel.adapter.tree import Tree, build
from lightning_otel.types import Call, Credited, Reward, Span


def credited(spans: Iterable[Span], steps: Collection[tuple[str, str]]) -> list[Credited]:
    """Where each reward went under the rule ``previous``, those that went nowhere left out.

    Args:
        spans: Those of whole rollouts, in any order; messages, tools and tokens may be missing.
        steps: Trace and span ids of the spans that became transitions.
    """
    return [
        each for own in group(readers.read(spans)).values() for each in _credited(build(own), steps)
    ]


def _credited(tree: Tree, steps: Collection[tuple[str, str]]) -> Iterator[Credited]:
    """Those of one attempt."""
    spans = tree.spans
    read = ((position, read_reward(span)) for position, span in enumerate(spans))
    rewards = [(position, each) for position, each in read if isinstance(each, Reward)]
    own = [at for at, span in enumerate(spans) if (span.trace_id, span.span_id) in steps]
    # Rules by name look at where a call stands, and not at what was said in it.
    calls = dict.fromkeys(own, cast(Call, None))
    placement = credit.place(tree, calls, _duplicates(tree, own), rewards, "previous")
    for reward, positions, by in placement.placed:
        targets = tuple(spans[position].span_id for position in positions)
        yield Credited(reward.span.span_id, reward.span.trace_id, targets, by)


def _duplicates(tree: Tree, own: Sequence[int]) -> dict[int, int]:
    """For each further record of a request the position of the one that became a step."""
    known = frozenset(own)
    found: dict[int, int] = {}
    for members in duplicates.find(
        tree, [at for at, span in enumerate(tree.spans) if is_call(span)]
    ):
        kept = next((each for each in members if each in known), None)
        if kept is not None:
            found |= {each: kept for each in members if each != kept}
    return found
