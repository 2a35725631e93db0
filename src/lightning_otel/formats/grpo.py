"""``grpo``: token sequences with what was sampled, how likely, how good, and in which group.

Source: OpenEnv's ``TrainingTurn``, whose names TRL reads (``prompt_token_ids``,
``completion_token_ids``, ``per_token_logps``, ``loss_mask``).
"""

from collections.abc import Iterable
from typing import Final

from lightning_otel.adapter.rows import token_advantages
from lightning_otel.formats.format import ORIGIN, Format, LeftOut, Made, Row, origin
from lightning_otel.formats.sequences import Sequence, compared
from lightning_otel.types import TrainingRow, Trajectory


def make(trajectories: Iterable[Trajectory]) -> Made:
    """One row a sequence that has a reward or an advantage; those of a group are neighbours.

    Args:
        trajectories: What is made into rows, group by group.
    """
    for each in compared(trajectories, _is_judged):
        yield each if isinstance(each, LeftOut) else _make_row(*each)


def _is_judged(each: Sequence) -> bool:
    return each.reward is not None or _row_advantage(each.row) is not None


def _make_row(group_id: str, each: Sequence) -> Row:
    row, last, advantage = each.row, each.last, _row_advantage(each.row)
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
        "steps": len(row.transitions),
        "model": last.model,
        "resource_version": last.resource_version,
        "sampling": dict(last.sampling),
        **origin(last, each.reward),
    }


def _row_advantage(row: TrainingRow) -> float | list[float] | None:
    """The advantage of all that was sampled; one for each token where steps differ, [C]."""
    values = {step.advantage for step in row.transitions}
    return next(iter(values)) if len(values) == 1 else token_advantages(row)


FORMAT: Final = Format(
    make,
    {
        "prompt_token_ids": "INTEGER[]",
        "completion_token_ids": "INTEGER[]",
        "per_token_logps": "DOUBLE[]",
        "loss_mask": "INTEGER[]",
        "advantage": "DOUBLE",
        "per_token_advantages": "DOUBLE[]",
        "weight": "DOUBLE",
        "group_id": "VARCHAR",
        "steps": "INTEGER",
        "model": "VARCHAR",
        "resource_version": "VARCHAR",
        "sampling": "JSON",
        **ORIGIN,
    },
    used_by="TRL (recorded GRPO), OpenEnv",
    needs="token ids, logprobs, rewards",
    is_grouped=True,
)
