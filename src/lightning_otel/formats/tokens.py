"""``tokens``: recorded token ids, and which of them were sampled, for TRL's ``SFTTrainer``.

Nothing is tokenized again: what is trained is what was sampled, each token once.

Source: TRL's ``SFTTrainer``, which takes ``input_ids`` and ``labels`` as they are.
"""

from collections.abc import Iterable
from typing import Final

from lightning_otel.formats.format import ORIGIN, Format, LeftOut, Made, origin, reward_fault
from lightning_otel.formats.sequences import sequences
from lightning_otel.types import TrainingRow, Trajectory

_IGNORED: Final = -100
"""The label of a token that no loss is taken of, as PyTorch's cross entropy has it."""


def make(trajectories: Iterable[Trajectory], *, threshold: float | None = None) -> Made:
    """Yield one row for steps whose prompts go on exactly, token by token, from each other.

    Args:
        trajectories: What is made into rows.
        threshold: Only trajectories whose last reward is no less.
    """
    for each in sequences(trajectories):
        if isinstance(each, LeftOut):
            yield each
            continue
        row, reward = each
        if fault := reward_fault(reward, threshold):
            yield from (LeftOut(step, fault) for step in row.transitions)
            continue
        yield {
            "input_ids": [*row.prompt_ids, *row.completion_ids],
            # The trainer looks at masks only if its settings say so, at labels always.
            "labels": [_IGNORED] * len(row.prompt_ids) + _make_labels(row),
            "steps": len(row.transitions),
            **origin(each.last, reward),
        }


def _make_labels(row: TrainingRow) -> list[int]:
    pairs = zip(row.completion_ids, row.loss_mask, strict=True)
    return [token if kept else _IGNORED for token, kept in pairs]


FORMAT: Final = Format(
    make,
    {"input_ids": "INTEGER[]", "labels": "INTEGER[]", "steps": "INTEGER", **ORIGIN},
    used_by="TRL SFTTrainer",
    needs="token ids",
)
