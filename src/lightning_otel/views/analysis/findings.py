"""Findings in a rollout: what a person wants to know first. Pure."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

from lightning_otel.messages import objects
from lightning_otel.store.fact_rows import read_error
from lightning_otel.types import Transition
from lightning_otel.types import conventions as c
from lightning_otel.types.text import count_noun, one_line
from lightning_otel.views.trace import Row, SpanKey, Trace

if TYPE_CHECKING:
    from lightning_otel.views.analysis import CallTotals, CreditedReward, Step

Kind: TypeAlias = Literal[
    "error", "incomplete", "abandoned", "retried", "no_steps", "no_reward", "uncredited",
    "left_out", "repeated", "cut_off", "inexact", "slow", "moved", "unpriced", "uncounted",
    "no_advantage",
]  # fmt: skip
_LONGEST: Final = 240
_QUOTED: Final = 120
_NAMED: Final = 5
_SLOW_S: Final = 1.0
_FEW: Final = 3


class Finding(NamedTuple):
    """Something that stands out: its kind, a text, and the spans it is about."""

    kind: Kind
    text: str
    span_ids: tuple[str, ...] = ()


def list_findings(
    trace: Trace,
    steps: "Mapping[SpanKey, Step]",
    rewards: "Sequence[CreditedReward]",
    totals: "CallTotals",
) -> Iterator[Finding]:
    """Yield the findings, errors first."""
    all_steps = list(steps.values())
    yield from _find_faults(trace, all_steps, rewards)
    yield from _find_repeated(trace, steps)
    yield from _find_oddities(trace, all_steps, totals)


def _find_faults(
    trace: Trace, steps: "Sequence[Step]", rewards: "Sequence[CreditedReward]"
) -> Iterator[Finding]:
    rows = trace.rows
    outer: set[int] = set()
    # A parent stands before its children: one way back reaches every span around a failed one.
    for at in range(len(rows) - 1, -1, -1):
        if at in outer or rows[at].span.status == "ERROR":
            outer.add(rows[at].parent)
    failed = [n for at, n in enumerate(rows) if n.span.status == "ERROR" and at not in outer]
    yield from _group(
        "error", failed, _word_error,
        lambda reason, rows: reason + (f", {len(rows):,} times" if len(rows) > 1 else ""),
    )  # fmt: skip
    if unended := [row for row in rows if row.span.is_incomplete]:
        yield Finding(
            "incomplete", f"{count_noun(len(unended), 'span')} never ended", _ids_of(unended)
        )
    if unended := [row for row in rows if row.span.attributes.get(c.ABANDONED)]:
        text = f"{count_noun(len(unended), 'stream')} left before the end"
        yield Finding("abandoned", text, _ids_of(unended))
    attempts = {path.attempt_id for path in trace.trajectories}
    if len(attempts) > 1:
        yield Finding("retried", f"tried {len(attempts)} times")
    if not steps:
        yield Finding("no_steps", "there is no step to learn from")
    if not rewards:
        yield Finding("no_reward", "nobody gave it a reward")
    yield from _group(
        "uncredited", rewards, lambda reward: reward.left_out,
        lambda reason, rewards: (
            f"a reward of {rewards[0].value} is in no step: {reason}"
            if len(rewards) == 1
            else f"{len(rewards):,} rewards are in no step: {reason}"
        ),
    )  # fmt: skip
    # Another record of a call that is in a step is no loss.
    lost = [n for n in rows if n.step is None and (n.is_call or n.kind == "mark")]
    yield from _group(
        "left_out", lost, lambda row: row.left_out,
        lambda reason, calls: f"{count_noun(len(calls), 'call')} in no step: {reason}",
    )  # fmt: skip


def _find_repeated(trace: Trace, steps: "Mapping[SpanKey, Step]") -> Iterator[Finding]:
    texts: dict[tuple[str, str, int, str], dict[str, Step]] = {}
    for path in trace.trajectories:
        for transition in path.transitions:
            step = steps.get((transition.trace_id, transition.span_id))
            calls = dict.fromkeys(_calls_of_tools(transition))
            if step is not None:
                for text in calls or ([f"“{step.action}”"] if step.action else []):
                    key = (path.attempt_id, path.agent, path.branch, text)
                    texts.setdefault(key, {})[step.span_id] = step
    reported: set[tuple[str, ...]] = set()
    for (*_, text), places in texts.items():
        if len(places) > 1 and tuple(places) not in reported:
            reported.add(tuple(places))
            where = _join_labels(list(places.values()))
            repeated = f"{one_line(text, _QUOTED)}, {len(places)} times: {where}"
            yield Finding("repeated", repeated, tuple(places))


def _calls_of_tools(step: Transition) -> Iterator[str]:
    for message in step.action[:1]:
        for part in objects(message.get("parts")):
            if part.get("type") == "tool_call":
                try:
                    text = json.dumps(
                        part.get("arguments"), sort_keys=True, ensure_ascii=False, default=str
                    )
                except (RecursionError, ValueError):
                    continue
                yield f"{part.get('name')}({text})"


def _find_oddities(
    trace: Trace, steps: "Sequence[Step]", totals: "CallTotals"
) -> Iterator[Finding]:
    if cut := [step for step in steps if step.finish_reason == "length"]:
        yield Finding("cut_off", f"cut off at their length: {_join_labels(cut)}", _ids_of(cut))
    yield from _group(
        "inexact", [step for step in steps if step.capture != "exact"],
        lambda step: step.inexact or "no token ids",
        lambda reason, members: (
            f"{len(members)} of {count_noun(len(steps), 'step')} not exact: {reason}"
        ),
    )  # fmt: skip
    for step in steps:
        took = step.duration_s or 0.0
        if len(steps) >= _FEW and took > _SLOW_S and took > totals.duration_s / 2:
            part = took / totals.duration_s
            text = f"{step.label} took {took:.1f} s, {part:.0%} of it all"
            yield Finding("slow", text, (step.span_id,))
    yield from _group(
        "moved", trace.rows, lambda row: row.repair,
        lambda rule, spans: f"{count_noun(len(spans), 'span')} moved: {rule}",
    )  # fmt: skip
    if totals.uncounted:
        calls = count_noun(totals.uncounted, "call")
        yield Finding("uncounted", f"nothing says how many tokens {calls} took")
    if totals.unpriced:
        calls = count_noun(totals.unpriced, "call")
        yield Finding("unpriced", f"{calls} not in the cost: no price")


def _group(
    kind: Kind,
    items: Iterable[Any],
    reason_of: Callable[[Any], str],
    word: Callable[[str, list[Any]], str],
) -> Iterator[Finding]:
    groups: dict[str, list[Any]] = {}
    for item in items:
        if reason := reason_of(item):
            groups.setdefault(reason, []).append(item)
    for reason, members in groups.items():
        yield Finding(kind, one_line(word(reason, members), _LONGEST + 40), _ids_of(members))


def _word_error(row: Row) -> str:
    get = row.span.attributes.get
    who = f"{row.span.name} {get(c.OPERATION_NAME) or ''}".rstrip()
    words = " ".join(filter(None, read_error(row.span)))
    return one_line(f"{who}: {words or 'failed'}", _LONGEST)


def _join_labels(steps: "Sequence[Step]") -> str:
    more = f" and {len(steps) - _NAMED} more" if len(steps) > _NAMED else ""
    return ", ".join(one_line(step.label, 40) for step in steps[:_NAMED]) + more


def _ids_of(items: "Iterable[Row | Step | CreditedReward]") -> tuple[str, ...]:
    return tuple(item.span.span_id if isinstance(item, Row) else item.span_id for item in items)
