"""Training rows: consecutive steps of a trajectory as one sequence of exact tokens.

Steps are joined only where the next prompt begins with exactly the tokens held so far; no loss is
taken of what it adds. Nothing sampled is overwritten, and nothing is trained on twice.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from lightning_otel.types import RowCause, TrainingRow, Trajectory, Transition

_WIDE: Final = "q"
"""Ids of 64 bits: nothing that anybody calls a token id is too large."""


def rows_of(trajectories: Iterable[Trajectory]) -> Iterator[TrainingRow]:
    """Yield every training row of trajectories, in their order.

    Steps without token ids make none. A step that several trajectories share is in a row of the
    first of them; in the others it is part of the prompt.
    """
    keys: set[tuple[object, ...]] = set()
    for trajectory in trajectories:
        yield from _join_steps(trajectory, keys)


def _join_steps(trajectory: Trajectory, keys: set[tuple[object, ...]]) -> Iterator[TrainingRow]:
    steps: list[Transition] = []
    cause: RowCause = "start"
    for step in trajectory.transitions:
        fork: RowCause | None = None
        if not is_trainable(step):
            fork = "gap"
        elif step.is_shared and (key := _step_key(step)) in keys:
            fork = "shared"
        else:
            if step.is_shared:
                keys.add(key)
            reason = _find_fork(steps[-1], step) if steps else None
            if steps and reason is not None:
                yield _make_row(steps, cause)
                steps, cause = [], reason
            steps.append(step)
            continue
        if steps:
            yield _make_row(steps, cause)
        steps, cause = [], fork
    if steps:
        yield _make_row(steps, cause)


def _find_fork(last: Transition, step: Transition) -> RowCause | None:
    """Return why a step cannot be joined to the last one; None if it can."""
    if step.model != last.model:
        return "model"
    if step.capture != last.capture:
        return "capture"
    # Of a row with a gap none could be used: apart, those that are there can.
    if has_logprobs(step) != has_logprobs(last):
        return "logprobs"
    prefix = array(_WIDE, last.prompt_ids) + array(_WIDE, last.response_ids)
    return None if array(_WIDE, step.prompt_ids[: len(prefix)]) == prefix else "drift"


def _make_row(steps: Sequence[Transition], cause: RowCause) -> TrainingRow:
    size = len(steps[0].prompt_ids)
    mask, logprobs = bytearray(), array("d")
    for step in steps:
        gap = len(step.prompt_ids) - size - len(mask)
        mask += bytes(gap) + b"\1" * len(step.response_ids)
        if has_logprobs(step):
            logprobs.extend(array("d", bytes(8 * gap)))
            logprobs.extend(array("d", step.logprobs))
    return TrainingRow(
        transitions=tuple(steps),
        prompt_ids=tuple(steps[0].prompt_ids),
        completion_ids=(*steps[-1].prompt_ids[size:], *steps[-1].response_ids),
        loss_mask=tuple(mask),
        logprobs=tuple(logprobs),
        cause=cause,
    )


def is_trainable(step: Transition) -> bool:
    """Return whether a step has the token ids of its prompt and response."""
    return len(step.prompt_ids) > 0 and len(step.response_ids) > 0


def has_logprobs(step: Transition) -> bool:
    """Return whether a step has a log-probability for each sampled token."""
    return len(step.logprobs) == len(step.response_ids)


def _step_key(step: Transition) -> tuple[object, ...]:
    """Return a key of a step; ids alone do not do, since broken tracers repeat them."""
    return (
        step.trace_id,
        step.span_id,
        step.start_ns,
        step.end_ns,
        len(step.prompt_ids),
        tuple(step.response_ids),
    )


def last_tokens(row: TrainingRow) -> list[int]:
    """Return the position of each step's last sampled token in the completion, [steps]."""
    skipped = len(row.prompt_ids)
    return [len(step.prompt_ids) + len(step.response_ids) - skipped - 1 for step in row.transitions]


def token_rewards(row: TrainingRow) -> list[float] | None:
    """Each step's reward on the last token it sampled, 0.0 elsewhere, [C]; None if none has one."""
    if all(step.reward is None for step in row.transitions):
        return None
    rewards = [0.0] * len(row.completion_ids)
    for place, step in zip(last_tokens(row), row.transitions, strict=True):
        rewards[place] = step.reward or 0.0
    return rewards


def token_advantages(row: TrainingRow) -> list[float] | None:
    """Each step's advantage on all it sampled, 0.0 on what was given, [C].

    None unless every step has one: a step without is not one that did as well as its group.
    """
    return _spread_values(row, [step.advantage for step in row.transitions])


def token_weights(row: TrainingRow) -> list[float]:
    """Each step's weight on all it sampled, 0.0 on what was given, [C]."""
    return _spread_values(row, [step.weight for step in row.transitions]) or []


def _spread_values(row: TrainingRow, values: Sequence[float | None]) -> list[float] | None:
    result = [0.0] * len(row.completion_ids)
    for end, step, value in zip(last_tokens(row), row.transitions, values, strict=True):
        if value is None:
            return None
        start = end + 1 - len(step.response_ids)
        result[start : end + 1] = [value] * len(step.response_ids)
    return result
