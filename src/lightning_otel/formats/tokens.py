"""``tokens``: recorded token ids, and which of them were sampled, for TRL's ``SFTTrainer``.

Nothing is tokenized again: what is trained is what was sampled, each token once.

Source: TRL's ``SFTTrainer``, which takes ``input_ids`` and ``labels`` as they are.
"""

from collections.abc import Iterable
from typing import Final

from lightning_otel.formats.format import (
    NO_REWARD,
    ORIGIN,
    Format,
    LeftOut,
    Made,
    origin,
)
from lightning_otel.formats.sequences import sequences
from lightning_otel.types import TrainingRow, Trajectory

_IGNORED: Final = -100
"""The label of a token that no loss is taken of, as PyTorch's cross entropy has it."""
BELOW: Final = "reward below the threshold; lower it to keep more"


def make(trajectories: Iterable[Trajectory], *, threshold: float | None = None) -> Made:
    """One row for steps whose prompts go on exactly, token by token, from each other.

    Args:
        trajectories: What is made into rows.
        threshold: Only trajectories whose last reward is no less.
    """
    for each in sequences(trajectories):
        if isinstance(each, LeftOut):
            yield each
            continue
        row, reward = each
        if threshold is not None and (reward is None or reward < threshold):
            reason = NO_REWARD if reward is None else BELOW
            yield from (LeftOut(step, reason) for step in row.transitions)
            continue
        yield {
            "input_ids": [*row.prompt_ids, *row.completion_ids],
            # The trainer looks at masks only if its settings say so, at labels always.
            "labels": [_IGNORED] * len(row.prompt_ids) + _labels(row),
            "steps": len(row.transitions),
            **origin(each.last, reward),
        }


def _labels(row: TrainingRow) -> list[int]:
    pairs = zip(row.completion_ids, row.loss_mask, strict=True)
    return [token if kept else _IGNORED for token, kept in pairs]


FORMAT: Final = Format(
    make,
    {
        "input_ids": "INTEGER[]",
        "labels": "INTEGER[]",
        "steps": "INTEGER",
        **ORIGIN,
    },
    used_by="TRL SFTTrainer",
    needs="token ids",
)
