"""Spans sorted into attempts, with each reward in the attempt it judges.

A reward may come from another process, days later and in a trace of its own. If its link names a
span or a response of another attempt, it belongs to that one; if it names only a rollout, to the
attempt that had begun before it. A retraction counts wherever and whenever it was given. The
store's views say the same in SQL.

Records with the same ids are one span if they began at the same instant; else the first one counts.
Ids of zeros are none: such spans are one only if they say the same.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from lightning_otel.adapter.attributes import get_text, has_id, read_links, to_number
from lightning_otel.adapter.rewards import Retracted
from lightning_otel.types import Span
from lightning_otel.types import conventions as c

NEVER: Final = 1 << 100
"""When a span ends that did not: after everything."""
_FIRST_LINK: Final = f"{c.LINK_PREFIX}.0.key_match"


class AttemptKey(NamedTuple):
    """Names an attempt."""

    rollout_id: str
    attempt_id: str


class Attempts(NamedTuple):
    """Spans sorted into attempts, each span once, attempts in order of their start.

    ``repeated`` are other spans with the ids of one that counts, by its attempt; ``waiting`` are
    rewards alone, whose rollout, span or response is not there yet.
    """

    members: dict[AttemptKey, list[Span]]
    repeated: dict[AttemptKey, list[Span]]
    waiting: list[Span]


def sort_attempts(spans: Iterable[Span]) -> Attempts:
    """Sort spans into attempts, and set those apart that have the ids of others."""
    records, others = _drop_repeated(spans)
    members: dict[AttemptKey, list[Span]] = {}
    rewards: list[Span] = []
    for span in _withdraw_rewards(records):
        if may_move(span):
            rewards.append(span)
        else:
            members.setdefault(AttemptKey(span.rollout_id, span.attempt_id), []).append(span)
    if rewards:
        _add_rewards(members, rewards)
    starts = {key: min(span.start_ns for span in group) for key, group in members.items()}
    members = {key: members[key] for key in sorted(members, key=lambda key: (starts[key], key))}
    # Rewards that name no rollout, alone.
    alone = [key for key, group in members.items() if all(map(_is_lone, group))]
    strays = [span for key in alone for span in members.pop(key)]
    strays.sort(key=lambda span: (_record_rank(span), span.trace_id, span.span_id))
    repeated: dict[AttemptKey, list[Span]] = {}
    if others:
        owner = {(s.trace_id, s.span_id): key for key, group in members.items() for s in group}
        for span in sorted(others, key=_record_rank):
            if key := owner.get((span.trace_id, span.span_id)):
                repeated.setdefault(key, []).append(span)
    return Attempts(members, repeated, strays)


def _drop_repeated(spans: Iterable[Span]) -> tuple[list[Span], list[Span]]:
    """Return each span once, an ended record rather than another; and others with their ids."""
    unique: dict[tuple[str, ...], Span] = {}
    rivals: dict[tuple[str, ...], list[Span]] = {}
    for span in spans:
        key: tuple[str, ...] = (span.trace_id, span.span_id)
        if not has_id(span.span_id):
            key = (*key, _dump_span(span))
        record = unique.setdefault(key, span)
        if record is not span:
            rivals.setdefault(key, [record]).append(span)
    others: list[Span] = []
    for key, records in rivals.items():
        by_start: dict[int, Span] = {}
        for span in sorted(records, key=lambda span: (*_record_rank(span), _dump_span(span))):
            by_start.setdefault(span.start_ns, span)
        unique[key], *repeats = sorted(by_start.values(), key=_record_rank)
        others += repeats
    # Those without an id have nothing else to be told apart by where they start at one instant.
    nameless = [unique.pop(key) for key in sorted(key for key in unique if len(key) > 2)]
    return [*unique.values(), *nameless], others


def _dump_span(span: Span) -> str:
    attributes = [f"{key}={_dump_value(span.attributes[key])}" for key in sorted(span.attributes)]
    return "\n".join([_dump_value(replace(span, attributes={})), *attributes])


def _dump_value(value: object) -> str:
    try:
        return repr(value)
    except (ValueError, RecursionError):  # Python writes no whole number of 5,000 digits
        return hex(value) if isinstance(value, int) else type(value).__name__


def _record_rank(span: Span) -> tuple[bool, int, str, int, str]:
    return span.is_incomplete, span.start_ns, span.process, span.sequence, span.name


def _is_bare(span: Span) -> bool:
    """Return whether a span is a reward and nothing else; only such a span moves."""
    value = span.attributes.get(c.REWARD_VALUE)
    return (
        value is not None
        and to_number(value) is not None
        and not isinstance(span.attributes.get(c.OPERATION), str)
    )


def _is_lone(span: Span) -> bool:
    """Return whether a span is nothing but a reward, and can be retracted."""
    return span.name == c.SPAN_ANNOTATION and _is_bare(span)


def _withdraw_rewards(spans: list[Span]) -> list[Span]:
    results = [span for span in spans if not _is_retraction(span)]
    if len(results) == len(spans):
        return spans
    targets = {
        read_links(span.attributes).get(c.LINK_SPAN_ID) for span in spans if _is_retraction(span)
    }
    for place, span in enumerate(results):
        if span.span_id in targets and _is_lone(span):
            results[place] = replace(span, attributes=Retracted(span.attributes))
    return results


def _is_retraction(span: Span) -> bool:
    return (
        span.name == c.SPAN_ANNOTATION
        and span.attributes.get(c.REWARD_RETRACTED) is not None
        and to_number(span.attributes.get(c.REWARD_VALUE)) is None
    )


def may_move(span: Span) -> bool:
    """Return whether a reward goes to the attempt it judges, wherever it was given."""
    if c.REWARD_VALUE not in span.attributes or not _is_bare(span):
        return False
    return _FIRST_LINK in span.attributes or get_text(span.attributes, c.ATTEMPT_ID) is None


_Name = tuple[str, str | None]
"""Something a reward may name: a span, a response or a rollout."""


def _add_rewards(groups: dict[AttemptKey, list[Span]], rewards: Sequence[Span]) -> None:
    names = [_linked_name(reward) for reward in rewards]
    keys = [AttemptKey(reward.rollout_id, reward.attempt_id) for reward in rewards]
    lookups = {*names, *((c.ROLLOUT_ID, key.rollout_id) for key in keys)}
    places: dict[_Name, list[tuple[int, AttemptKey]]] = {}  # when attempts came to hold them
    for key, members in groups.items():
        starts = []
        for span in members:
            if _is_bare(span):
                continue
            starts.append(span.start_ns)
            response_id = get_text(span.attributes, c.RESPONSE_ID)
            for name in ((c.LINK_SPAN_ID, span.span_id), (c.RESPONSE_ID, response_id)):
                if name in lookups:
                    places.setdefault(name, []).append((span.start_ns, key))
        if starts and (rollout := (c.ROLLOUT_ID, key.rollout_id)) in lookups:
            places.setdefault(rollout, []).append((min(starts), key))
    holders = {name: {key for _, key in group} for name, group in places.items()}
    for group in places.values():
        group.sort()
    for reward, name, key in zip(rewards, names, keys, strict=True):
        if key not in holders.get(name, ()):
            entries = places.get(name)
            if entries is None and get_text(reward.attributes, c.ATTEMPT_ID) is None:
                entries = places.get((c.ROLLOUT_ID, key.rollout_id))
            if entries:  # the latest before the reward, else the first
                before = bisect_right(entries, reward.start_ns, key=lambda place: place[0])
                key = entries[max(before - 1, 0)][1]
        groups.setdefault(key, []).append(reward)


def _linked_name(reward: Span) -> _Name:
    """Return the response or span that a reward's link names; empty if it names none."""
    links = read_links(reward.attributes)
    keys = (key for key in (c.RESPONSE_ID, c.LINK_SPAN_ID) if links.get(key))
    return next(((key, links[key]) for key in keys), ("", ""))


class Ordered(NamedTuple):
    """Spans by start, with comparable clocks; an end may lie before its start."""

    spans: list[Span]
    starts: list[int]
    ends: list[int]
    is_counted: bool


def order_by_time(spans: list[Span]) -> Ordered:
    """Order spans as their process counted them, if it is one and counted all; else by clock."""
    if len({span.process for span in spans}) == 1 and all(
        span.sequence >= 0 and (span.end_sequence >= 0 or span.end_ns is None) for span in spans
    ):
        spans.sort(key=lambda span: (span.sequence, span.trace_id, span.span_id))
        ends = [span.end_sequence if span.end_ns is not None else NEVER for span in spans]
        return Ordered(spans, [span.sequence for span in spans], ends, is_counted=True)
    spans.sort(key=lambda span: (span.start_ns, span.trace_id, span.span_id))
    # At one instant ends come before starts.
    ends = [2 * span.end_ns if span.end_ns is not None else NEVER for span in spans]
    return Ordered(spans, [2 * span.start_ns + 1 for span in spans], ends, is_counted=False)
