"""Links of rewards: a span's id or trace, or any attributes, which all must match.

A link is a question that is asked within the attempt that the reward belongs to. What answers to
none of its spans is reported by whoever asks.
"""

from bisect import bisect_left
from collections.abc import Container, Sequence
from typing import Final

from lightning_otel import conventions as c
from lightning_otel.adapter.rewards import matched_text
from lightning_otel.adapter.tree import Tree
from lightning_otel.types import Reward, Span

Links = tuple[tuple[str, str], ...]
_IDS: Final = frozenset({c.LINK_SPAN_ID, c.LINK_TRACE_ID})


def find_targets(
    tree: Tree, rewards: Sequence[tuple[int, Reward]], calls: Container[int]
) -> dict[int, int]:
    """Return the span that each linked reward names, by position, where there is one.

    A server may repeat its ids, and many spans have one attribute: the latest of them before the
    reward is meant, else the first.

    Args:
        tree: The attempt's spans.
        rewards: Rewards with their positions; none of them is a target unless it is a call.
        calls: Positions of the calls.
    """
    found: dict[Links, list[int]] = {each.links: [] for _, each in rewards if each.links}
    if not found:
        return {}
    keys_asked = {tuple(key for key, _ in links) for links in found}
    bare = {position for position, _ in rewards if position not in calls}
    for position, span in enumerate(tree.spans):
        if position in bare:
            continue
        for keys in keys_asked:
            answer = tuple([(key, _value_at(span, key)) for key in keys])
            if answer in found and all(value for _, value in answer):
                found[answer].append(position)
    return {
        position: spans[max(bisect_left(spans, position) - 1, 0)]
        for position, reward in rewards
        if (spans := found.get(reward.links))
    }


def _value_at(span: Span, key: str) -> str:
    """Return what a span has at a key of a link; empty if it has nothing there."""
    if key in _IDS:
        return span.span_id if key == c.LINK_SPAN_ID else span.trace_id
    return matched_text(span.attributes[key]) if key in span.attributes else ""
