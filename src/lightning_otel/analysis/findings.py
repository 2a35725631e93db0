"""Findings in a rollout: what a person wants to know first. Pure."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeAlias, TypeVar

from lightning_otel import conventions as c
from lightning_otel.adapter.outline import Node, Outline
from lightning_otel.analysis.episode import (
    Given,
    Step,
    Totals,
    calls_of_tools,
    is_counted,
)
from lightning_otel.markup import one_line
from lightning_otel.types.wording import count_noun

Kind: TypeAlias = Literal[
    "error", "incomplete", "abandoned", "retried", "no_steps", "no_reward", "uncredited",
    "left_out", "repeated", "cut_off", "inexact", "slow", "moved", "unpriced", "uncounted",
    "no_advantage",
]  # fmt: skip

_T = TypeVar("_T")
_SHORT: Final = 120
_NAMED: Final = 5
_SLOW_S: Final = 1.0
_FEW: Final = 3


class Finding(NamedTuple):
    """Something that stands out: its kind, a text, and the spans it is about."""

    kind: Kind
    text: str
    span_ids: tuple[str, ...] = ()


def findings(
    found: Outline, steps: Sequence[Step], rewards: Sequence[Given], totals: Totals
) -> list[Finding]:
    """Return the findings, errors first."""
    return [
        *_find_errors(found),
        *_broken_off(found),
        *_find_attempts(found),
        *_find_unrewarded(steps, rewards),
        *_left_out(found),
        *_find_repeated(found, steps),
        *_cut_off(steps),
        *_find_inexact(steps),
        *_find_slow(steps, totals),
        *_find_moved(found),
        *_find_uncounted(totals),
    ]


def _find_errors(found: Outline) -> Iterator[Finding]:
    """Yield each span that failed, but for those around one that did: an error is told once."""
    failed = [node.span.status == "ERROR" for node in found.nodes]
    outer: set[int] = set()
    for position, node in enumerate(found.nodes):
        if failed[position] and node.parent >= 0:
            outer.add(node.parent)
    # A parent stands before its children, so that one way back reaches every span around one.
    for position in range(len(found.nodes) - 1, -1, -1):
        if position in outer and found.nodes[position].parent >= 0:
            outer.add(found.nodes[position].parent)
    inner = [n for at, n in enumerate(found.nodes) if failed[at] and at not in outer]
    for told, nodes in _group_by_reason(inner, _word_error):
        times = f", {len(nodes):,} times" if len(nodes) > 1 else ""
        yield Finding("error", told + times, _span_ids(nodes))


def _broken_off(found: Outline) -> Iterator[Finding]:
    if left := [node for node in found.nodes if node.span.is_incomplete]:
        yield Finding("incomplete", f"{count_noun(len(left), 'span')} never ended", _span_ids(left))
    if left := [node for node in found.nodes if node.span.attributes.get(c.ABANDONED)]:
        told = f"{count_noun(len(left), 'stream')} left before the end"
        yield Finding("abandoned", told, _span_ids(left))


def _find_attempts(found: Outline) -> Iterator[Finding]:
    attempts = {path.attempt_id for path in found.trajectories}
    if len(attempts) > 1:
        yield Finding("retried", f"tried {len(attempts)} times")


def _find_unrewarded(steps: Sequence[Step], rewards: Sequence[Given]) -> Iterator[Finding]:
    if not steps:
        yield Finding("no_steps", "there is no step to learn from")
    if not rewards:
        yield Finding("no_reward", "nobody gave it a reward")
    for reason, held in _group_by_reason(rewards, lambda given: given.left_out):
        what = f"a reward of {held[0].value} is" if len(held) == 1 else f"{len(held):,} rewards are"
        yield Finding("uncredited", _one_line_of(f"{what} in no step: {reason}"), _span_ids(held))


def _left_out(found: Outline) -> Iterator[Finding]:
    # Another record of a call that is in a step is no loss.
    lost = [n for n in found.nodes if n.step is None and (is_counted(n) or n.kind == "mark")]
    for reason, nodes in _group_by_reason(lost, lambda node: node.left_out):
        calls = count_noun(len(nodes), "call")
        yield Finding("left_out", _one_line_of(f"{calls} in no step: {reason}"), _span_ids(nodes))


def _find_repeated(found: Outline, steps: Sequence[Step]) -> Iterator[Finding]:
    """Yield tools called again with the same arguments, and words said again, by one agent."""
    known = {(step.trace_id, step.span_id): step for step in steps}
    told: dict[tuple[str, str, int, str], dict[str, Step]] = {}
    for path in found.trajectories:
        for each in path.transitions:
            step = known.get((each.trace_id, each.span_id))
            calls = list(dict.fromkeys(calls_of_tools(each)))
            for what in calls or ([f"“{step.action}”"] if step and step.action else []):
                key = (path.attempt_id, path.agent, path.branch, what)
                if step is not None:
                    told.setdefault(key, {})[step.span_id] = step
    seen: set[tuple[str, ...]] = set()
    for (*_, what), held in told.items():
        if len(held) > 1 and tuple(held) not in seen:
            seen.add(tuple(held))
            where = _join_labels(list(held.values()))
            yield Finding(
                "repeated", f"{one_line(what, _SHORT)}, {len(held)} times: {where}", tuple(held)
            )


def _cut_off(steps: Sequence[Step]) -> Iterator[Finding]:
    if cut := [step for step in steps if step.finish_reason == "length"]:
        yield Finding("cut_off", f"cut off at their length: {_join_labels(cut)}", _span_ids(cut))


def _find_inexact(steps: Sequence[Step]) -> Iterator[Finding]:
    inexact = [step for step in steps if step.capture != "exact"]
    for reason, held in _group_by_reason(inexact, lambda step: step.inexact or "no token ids"):
        told = f"{len(held)} of {count_noun(len(steps), 'step')} not exact: {reason}"
        yield Finding("inexact", _one_line_of(told), _span_ids(held))


def _find_slow(steps: Sequence[Step], totals: Totals) -> Iterator[Finding]:
    """Yield a step that took more than half of the time of several."""
    for step in steps:
        took = step.duration_s or 0.0
        if len(steps) >= _FEW and took > _SLOW_S and took > totals.duration_s / 2:
            part = took / totals.duration_s
            yield Finding("slow", f"{step.label} took {took:.1f} s, {part:.0%} of it all",
                          (step.span_id,))  # fmt: skip


def _find_moved(found: Outline) -> Iterator[Finding]:
    for rule, nodes in _group_by_reason(found.nodes, lambda node: node.repair):
        told = _one_line_of(f"{count_noun(len(nodes), 'span')} moved: {rule}")
        yield Finding("moved", told, _span_ids(nodes))


def _find_uncounted(totals: Totals) -> Iterator[Finding]:
    if totals.uncounted:
        calls = count_noun(totals.uncounted, "call")
        yield Finding("uncounted", f"nothing says how many tokens {calls} took")
    if totals.unpriced:
        yield Finding(
            "unpriced", f"{count_noun(totals.unpriced, 'call')} not in the cost: no price"
        )


def _word_error(node: Node) -> str:
    named: Mapping[str, Any] = node.span.attributes
    who = f"{node.span.name} {named.get(c.OPERATION_NAME) or ''}".rstrip()
    words = (named.get(c.ERROR_TYPE), node.span.status_message)
    return _one_line_of(f"{who}: {' '.join(str(word) for word in words if word) or 'failed'}")


def _one_line_of(text: str) -> str:
    return one_line(text, 2 * _SHORT)


def _join_labels(steps: Sequence[Step]) -> str:
    more = f" and {len(steps) - _NAMED} more" if len(steps) > _NAMED else ""
    return ", ".join(one_line(step.label, 40) for step in steps[:_NAMED]) + more


def _span_ids(items: Iterable[Node | Step | Given]) -> tuple[str, ...]:
    return tuple(item.span.span_id if isinstance(item, Node) else item.span_id for item in items)


def _group_by_reason(
    items: Iterable[_T], reason_of: Callable[[_T], str]
) -> Iterator[tuple[str, list[_T]]]:
    """Yield the items of each reason, in order of its first; those without one are left out."""
    groups: dict[str, list[_T]] = {}
    for item in items:
        if reason := reason_of(item):
            groups.setdefault(reason, []).append(item)
    yield from groups.items()
