"""Spans sorted into attempts, with each reward in the attempt it judges.

A reward may come from another process, days later and in a trace of its own. If its link names a
span or a response of another attempt, it belongs to that one; if it names only a rollout, it
belongs to the attempt that had begun before it. The store's views say the same in SQL.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from lightning_otel import conventions as c
from lightning_otel.adapter.attributes import number, text
from lightning_otel.adapter.rewards import read_links
from lightning_otel.types import Span

_FIRST_LINK: Final = f"{c.LINK_PREFIX}.0.key_match"


class AttemptKey(NamedTuple):
    """Names an attempt."""

    rollout_id: str
    attempt_id: str


def group(spans: Iterable[Span]) -> dict[AttemptKey, list[Span]]:
    """The spans of each attempt, each span once, attempts in order of their start."""
    groups: dict[AttemptKey, list[Span]] = {}
    apart: list[Span] = []
    for span in _unique(spans):
        if _may_move(span):
            apart.append(span)
        else:
            groups.setdefault(_own(span), []).append(span)
    if apart:
        homes = _Homes(groups, apart)
        for span in apart:
            groups.setdefault(homes.home(span), []).append(span)
    begun = {key: min(span.start_ns for span in members) for key, members in groups.items()}
    return {key: groups[key] for key in sorted(groups, key=lambda key: (begun[key], key))}


def _unique(spans: Iterable[Span]) -> Iterable[Span]:
    """Of spans with equal ids an ended one, then the earliest, then the first given."""
    found: dict[tuple[str, str], Span] = {}
    for span in spans:
        held = found.setdefault((span.trace_id, span.span_id), span)
        if held is not span and _precedence(span) < _precedence(held):
            found[span.trace_id, span.span_id] = span
    return found.values()


def _precedence(span: Span) -> tuple[bool, int, str, int]:
    return span.is_incomplete, span.start_ns, span.process, span.sequence


def _own(span: Span) -> AttemptKey:
    """The attempt a span names; else its trace, and the first attempt."""
    return AttemptKey(
        text(span.attributes, c.ROLLOUT_ID) or span.trace_id,
        text(span.attributes, c.ATTEMPT_ID) or "1",
    )


def _is_bare(span: Span) -> bool:
    """Whether a span is a reward and nothing else; only such a one moves, and none is a target."""
    value = span.attributes.get(c.REWARD_VALUE)
    return (
        value is not None
        and number(value) is not None
        and not isinstance(span.attributes.get(c.OPERATION), str)
    )


def _may_move(span: Span) -> bool:
    if c.REWARD_VALUE not in span.attributes or not _is_bare(span):
        return False
    return _FIRST_LINK in span.attributes or text(span.attributes, c.ATTEMPT_ID) is None


class _Homes:
    """Finds the attempt that each reward judges.

    Attributes:
        _places: For each thing a reward may name the instants at which attempts came to hold it.
    """

    def __init__(self, groups: Mapping[AttemptKey, list[Span]], rewards: Iterable[Span]) -> None:
        wanted = {name for span in rewards for name in (_named(span), _rollout(span))}
        places: dict[tuple[str, str | None], list[tuple[int, AttemptKey]]] = {}
        for key, members in groups.items():
            begun = []
            for span in members:
                if _is_bare(span):
                    continue
                begun.append(span.start_ns)
                response_id = text(span.attributes, c.RESPONSE_ID)
                for name in ((c.LINK_SPAN_ID, span.span_id), (c.RESPONSE_ID, response_id)):
                    if name in wanted:
                        places.setdefault(name, []).append((span.start_ns, key))
            if begun and (name := (c.ROLLOUT_ID, key.rollout_id)) in wanted:
                places.setdefault(name, []).append((min(begun), key))
        self._places = {name: sorted(held) for name, held in places.items()}
        self._holders = {name: {key for _, key in held} for name, held in places.items()}

    def home(self, reward: Span) -> AttemptKey:
        """The attempt a reward judges; its own if what it names is not among the spans."""
        named, own = _named(reward), _own(reward)
        if own in self._holders.get(named, ()):
            return own
        found = self._latest(named, reward)
        if found is None and text(reward.attributes, c.ATTEMPT_ID) is None:
            found = self._latest(_rollout(reward), reward)
        return found or own

    def _latest(self, name: tuple[str, str | None], reward: Span) -> AttemptKey | None:
        """Of several attempts that hold it, the latest before the reward, else the first."""
        held = self._places.get(name)
        if held is None:
            return None
        before = bisect_right(held, reward.start_ns, key=lambda place: place[0])
        return held[max(before - 1, 0)][1]


def _named(reward: Span) -> tuple[str, str]:
    """What a reward's link names: a response rather than a span; empty if it names neither."""
    links = read_links(reward.attributes)
    for key in (c.RESPONSE_ID, c.LINK_SPAN_ID):
        if links.get(key):
            return key, links[key]
    return "", ""


def _rollout(reward: Span) -> tuple[str, str]:
    return c.ROLLOUT_ID, _own(reward).rollout_id
