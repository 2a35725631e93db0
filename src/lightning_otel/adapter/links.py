"""What the links of rewards name: a span's id or trace, or any attributes, which all must match.

A link is a question that is asked within the attempt that the reward belongs to. What answers to
none of its spans is reported by whoever asks.
"""

from bisect import bisect_left
from collections.abc import Collection, Sequence
from typing import Final

from lightning_otel import conventions as c
from lightning_otel.adapter.rewards import matched_text
from lightning_otel.adapter.tree import Tree
from lightning_otel.types import Reward, Span

Links = tuple[tuple[str, str], ...]
_IDS: Final = frozenset({c.LINK_SPAN_ID, c.LINK_TRACE_ID})


class Targets:
    """The spans of an attempt that links name."""

    def __init__(self, tree: Tree, rewards: Sequence[tuple[int, Reward]], calls: Collection[int]):
        """Look for what the rewards are linked to.

        Args:
            tree: The attempt's spans.
            rewards: Rewards with their positions; none of them is a target unless it is a call.
            calls: Positions of the calls.
        """
        wanted = {reward.links for _, reward in rewards if reward.links}
        self._found: dict[Links, list[int]] = {links: [] for links in wanted}
        if not wanted:
            return
        by_keys: dict[tuple[str, ...], set[Links]] = {}
        for links in wanted:
            by_keys.setdefault(tuple(key for key, _ in links), set()).add(links)
        bare = {position for position, _ in rewards if position not in calls}
        for position, span in enumerate(tree.spans):
            if position in bare:
                continue
            for keys, asked in by_keys.items():
                if (answer := _answer(span, keys)) in asked:
                    self._found[answer].append(position)

    def find(self, position: int, reward: Reward) -> int | None:
        """The span that a reward is linked to; None if there is none.

        A server may repeat its ids, and many spans have one attribute: the latest of them before
        the reward is meant, else the first.
        """
        found = self._found[reward.links]
        return found[max(bisect_left(found, position) - 1, 0)] if found else None


def _answer(span: Span, keys: Sequence[str]) -> Links:
    """What a span has at the keys; nothing if it lacks one, or has an empty one."""
    answer: list[tuple[str, str]] = []
    for key in keys:
        if key in _IDS:
            value = span.span_id if key == c.LINK_SPAN_ID else span.trace_id
        elif key in span.attributes:
            value = matched_text(span.attributes[key])
        else:
            return ()
        if not value:
            return ()
        answer.append((key, value))
    return tuple(answer)
