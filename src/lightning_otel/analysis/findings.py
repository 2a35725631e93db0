"""What stands out in a rollout: what a person would want to be told first. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeAlias

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

Kind: TypeAlias = Literal[
    "error", "incomplete", "abandoned", "retried", "no_steps", "no_reward", "uncredited",
    "left_out", "repeated", "cut_off", "inexact", "slow", "moved", "unpriced", "uncounted",
    "no_advantage",
]  # fmt: skip

_SHORT: Final = 120
_NAMED: Final = 5
_SLOW_S: Final = 1.0
_FEW: Final = 3


class Finding(NamedTuple):
    """Something that stands out.

    Attributes:
        kind: What sort of thing it is.
        text: What it is, in words.
        span_ids: The spans it is about.
    """

    kind: Kind
    text: str
    span_ids: tuple[str, ...] = ()


def findings(
    found: Outline, steps: Sequence[Step], rewards: Sequence[Given], totals: Totals
) -> list[Finding]:
    """What stands out, what is broken first."""
    return [
        *_errors(found),
        *_broken_off(found),
        *_attempts(found),
        *_rewards(steps, rewards),
        *_left_out(found),
        *_repeated(found, steps),
        *_cut_off(steps),
        *_inexact(steps),
        *_slow(steps, totals),
        *_moved(found),
        *_uncounted(totals),
    ]


def _errors(found: Outline) -> Iterator[Finding]:
    """Each span that failed, but for those around one that did: an error is told where it began."""
    failed = [node.span.status == "ERROR" for node in found.nodes]
    outer: set[int] = set()
    for position, node in enumerate(found.nodes):
        if failed[position] and node.parent >= 0:
            outer.add(node.parent)
    # A parent stands before its children, so that one way back reaches every span around one.
    for position in range(len(found.nodes) - 1, -1, -1):
        if position in outer and found.nodes[position].parent >= 0:
            outer.add(found.nodes[position].parent)
    for position, node in enumerate(found.nodes):
        if failed[position] and position not in outer:
            words = (node.span.attributes.get(c.ERROR_TYPE), node.span.status_message)
            told = " ".join(str(word) for word in words if word) or "failed"
            yield Finding("error", _line(f"{_who(node)}: {told}"), (node.span.span_id,))


def _broken_off(found: Outline) -> Iterator[Finding]:
    open_ = [node for node in found.nodes if node.span.is_incomplete]
    if open_:
        yield Finding("incomplete", f"{_spans(len(open_))} never ended", _ids(open_))
    left = [node for node in found.nodes if node.span.attributes.get(c.ABANDONED)]
    if left:
        yield Finding(
            "abandoned", f"{_counted(len(left), 'stream')} left before the end", _ids(left)
        )


def _attempts(found: Outline) -> Iterator[Finding]:
    attempts = {path.attempt_id for path in found.trajectories}
    if len(attempts) > 1:
        yield Finding("retried", f"tried {len(attempts)} times")


def _rewards(steps: Sequence[Step], rewards: Sequence[Given]) -> Iterator[Finding]:
    if not steps:
        yield Finding("no_steps", "there is no step to learn from")
    if not rewards:
        yield Finding("no_reward", "nobody gave it a reward")
    for given in rewards:
        if given.left_out:
            told = f"a reward of {given.value} is in no step: {given.left_out}"
            yield Finding("uncredited", _line(told), (given.span_id,))


def _left_out(found: Outline) -> Iterator[Finding]:
    """Calls and marks that are in no step, by the reason."""
    reasons: dict[str, list[Node]] = {}
    for node in found.nodes:
        # Another record of a call that is in a step is no loss.
        is_loss = is_counted(node) or node.kind == "mark"
        if node.left_out and node.step is None and is_loss:
            reasons.setdefault(node.left_out, []).append(node)
    for reason, nodes in reasons.items():
        calls = _counted(len(nodes), "call")
        yield Finding("left_out", _line(f"{calls} in no step: {reason}"), _ids(nodes))


def _repeated(found: Outline, steps: Sequence[Step]) -> Iterator[Finding]:
    """The same tool called with the same arguments, and the same words said, by one agent."""
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
            where = _labels(list(held.values()))
            yield Finding(
                "repeated", f"{one_line(what, _SHORT)}, {len(held)} times: {where}", tuple(held)
            )


def _cut_off(steps: Sequence[Step]) -> Iterator[Finding]:
    cut = [step for step in steps if step.finish_reason == "length"]
    if cut:
        yield Finding("cut_off", f"cut off at their length: {_labels(cut)}", _step_ids(cut))


def _inexact(steps: Sequence[Step]) -> Iterator[Finding]:
    """Why tokens cannot be trained on, by the reason."""
    reasons: dict[str, list[Step]] = {}
    for step in steps:
        if step.capture != "exact":
            reasons.setdefault(step.inexact or "no token ids", []).append(step)
    for reason, held in reasons.items():
        told = f"{len(held)} of {_counted(len(steps), 'step')} not exact: {reason}"
        yield Finding("inexact", _line(told), _step_ids(held))


def _slow(steps: Sequence[Step], totals: Totals) -> Iterator[Finding]:
    """One step that took more than half of the time of several."""
    for step in steps:
        took = step.duration_s or 0.0
        if len(steps) >= _FEW and took > _SLOW_S and took > totals.duration_s / 2:
            part = took / totals.duration_s
            yield Finding("slow", f"{step.label} took {took:.1f} s, {part:.0%} of it all",
                          (step.span_id,))  # fmt: skip


def _moved(found: Outline) -> Iterator[Finding]:
    rules: dict[str, list[Node]] = {}
    for node in found.nodes:
        if node.repair:
            rules.setdefault(node.repair, []).append(node)
    for rule, nodes in rules.items():
        yield Finding("moved", _line(f"{_spans(len(nodes))} moved: {rule}"), _ids(nodes))


def _uncounted(totals: Totals) -> Iterator[Finding]:
    if totals.uncounted:
        calls = _counted(totals.uncounted, "call")
        yield Finding("uncounted", f"nothing says how many tokens {calls} took")
    if totals.unpriced:
        yield Finding("unpriced", f"{_counted(totals.unpriced, 'call')} not in the cost: no price")


def _who(node: Node) -> str:
    named: Mapping[str, Any] = node.span.attributes
    return f"{node.span.name} {named.get(c.OPERATION_NAME) or ''}".rstrip()


def _line(text: str) -> str:
    return one_line(text, 2 * _SHORT)


def _labels(steps: Sequence[Step]) -> str:
    more = f" and {len(steps) - _NAMED} more" if len(steps) > _NAMED else ""
    return ", ".join(one_line(step.label, 40) for step in steps[:_NAMED]) + more


def _ids(nodes: Sequence[Node]) -> tuple[str, ...]:
    return tuple(node.span.span_id for node in nodes)


def _step_ids(steps: Sequence[Step]) -> tuple[str, ...]:
    return tuple(step.span_id for step in steps)


def _spans(count: int) -> str:
    return _counted(count, "span")


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
