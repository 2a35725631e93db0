"""``tokens`` and ``grpo``: recorded token ids, which of them were sampled, and their worth.

Nothing is tokenized again: what is trained is what was sampled, each token once.

Source: TRL's ``SFTTrainer``, which takes ``input_ids`` and ``labels`` as they are; OpenEnv's
``TrainingTurn``, whose names TRL reads (``prompt_token_ids``, ``completion_token_ids``,
``per_token_logps``, ``loss_mask``).
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import Final, NamedTuple

from lightning_otel.adapter.rows import is_trainable, rows_of, token_advantages
from lightning_otel.dataset.formats.format import (
    NO_LOGPROBS,
    NO_REWARD,
    NO_TOKENS,
    ORIGINS,
    Format,
    LeftOut,
    Made,
    Row,
    origins,
    reward_fault,
    with_rewards,
)
from lightning_otel.dataset.formats.groups import group_of
from lightning_otel.types import TrainingRow, Trajectory
from lightning_otel.types.transitions import distinct

_IGNORED: Final = -100
"""The label of a token that no loss is taken of, as PyTorch's cross entropy has it."""


class Sequence(NamedTuple):
    """A training row with the last reward along its trajectory."""

    row: TrainingRow
    reward: float | None


def sequences(trajectories: Iterable[Trajectory]) -> Iterator[Sequence | LeftOut]:
    """Every training row, and the steps that are in none for want of token ids."""
    for _, found in groupby(trajectories, lambda each: (each.rollout_id, each.attempt_id)):
        attempt = list(found)
        worth: dict[tuple[str, str], float | None] = {}
        for trajectory, reward in with_rewards(attempt):
            for step in trajectory.transitions:
                worth[step.trace_id, step.span_id] = reward
        for step, _ in distinct(attempt):
            if not is_trainable(step):
                reason, _, remedy = NO_TOKENS.partition("; ")
                yield LeftOut(step, f"{step.inexact or reason}; {remedy}")
        for row in rows_of(attempt):
            last = row.transitions[-1]
            yield Sequence(row, worth[last.trace_id, last.span_id])


def compared(
    trajectories: Iterable[Trajectory], is_judged: Callable[[Sequence], bool]
) -> Iterator[tuple[str, Sequence] | LeftOut]:
    """Every sequence that was judged, with its group; those of a group are neighbours."""
    for group_id, group in groupby(trajectories, group_of):
        for each in sequences(group):
            if isinstance(each, LeftOut):
                yield each
            elif not is_judged(each):
                yield from (LeftOut(step, NO_REWARD) for step in each.row.transitions)
            else:
                if not len(each.row.logprobs):
                    yield from (LeftOut(step, NO_LOGPROBS, True) for step in each.row.transitions)
                yield group_id, each


def make_tokens(trajectories: Iterable[Trajectory], *, threshold: float | None = None) -> Made:
    """Yield one row for steps whose prompts go on exactly, token by token, from each other."""
    for each in sequences(trajectories):
        if isinstance(each, LeftOut):
            yield each
            continue
        row, reward = each
        if fault := reward_fault(reward, threshold):
            yield from (LeftOut(step, fault) for step in row.transitions)
            continue
        pairs = zip(row.completion_ids, row.loss_mask, strict=True)
        sampled = [token if mask else _IGNORED for token, mask in pairs]
        yield {
            "input_ids": [*row.prompt_ids, *row.completion_ids],
            # The trainer looks at masks only if its settings say so, at labels always.
            "labels": [_IGNORED] * len(row.prompt_ids) + sampled,
            **origins(row.transitions, reward),
        }


def make_grpo(trajectories: Iterable[Trajectory]) -> Made:
    """One row a sequence that has a reward or an advantage; those of a group are neighbours."""
    for each in compared(trajectories, _is_judged):
        yield each if isinstance(each, LeftOut) else _make_row(*each)


def _is_judged(each: Sequence) -> bool:
    return each.reward is not None or _row_advantage(each.row) is not None


def _make_row(group_id: str, each: Sequence) -> Row:
    row, last, advantage = each.row, each.row.transitions[-1], _row_advantage(each.row)
    is_even = not isinstance(advantage, list)
    return {
        "prompt_token_ids": list(row.prompt_ids),
        "completion_token_ids": list(row.completion_ids),
        "per_token_logps": list(row.logprobs) if len(row.logprobs) else None,
        "loss_mask": [0] * len(row.prompt_ids) + list(row.loss_mask),
        "advantage": advantage if is_even else None,
        "per_token_advantages": None if is_even else advantage,
        "weight": last.weight,
        "group_id": group_id,
        "model": last.model,
        "resource_version": last.resource_version,
        "sampling": dict(last.sampling),
        **origins(row.transitions, each.reward),
    }


def _row_advantage(row: TrainingRow) -> float | list[float] | None:
    """The advantage of what was sampled; by token where steps differ, [C]."""
    values = {step.advantage for step in row.transitions}
    return next(iter(values)) if len(values) == 1 else token_advantages(row)


TOKENS: Final = Format(
    make_tokens,
    {"input_ids": "INTEGER[]", "labels": "INTEGER[]", **ORIGINS},
    used_by="TRL SFTTrainer",
    needs="token ids",
)
GRPO: Final = Format(
    make_grpo,
    {
        "prompt_token_ids": "INTEGER[]",
        "completion_token_ids": "INTEGER[]",
        "per_token_logps": "DOUBLE[]",
        "loss_mask": "INTEGER[]",
        "advantage": "DOUBLE",
        "per_token_advantages": "DOUBLE[]",
        "weight": "DOUBLE",
        "group_id": "VARCHAR",
        "model": "VARCHAR",
        "resource_version": "VARCHAR",
        "sampling": "JSON",
        **ORIGINS,
    },
    used_by="TRL (recorded GRPO), OpenEnv",
    needs="token ids, logprobs, rewards",
    is_grouped=True,
)
