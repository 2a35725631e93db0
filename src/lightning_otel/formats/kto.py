"""``kto``: answers that were good and answers that were not, without a need for pairs.

Source: TRL's unpaired preference type (``prompt``, ``completion``, ``label``).
"""

from collections.abc import Iterable
from typing import Final

from lightning_otel.formats.chat import answered
from lightning_otel.formats.format import (
    NO_REWARD,
    ORIGIN,
    Format,
    Made,
    Row,
    UnheldError,
    step_rows,
)
from lightning_otel.types import Trajectory, Transition


def make(trajectories: Iterable[Trajectory], *, threshold: float = 0.5) -> Made:
    """Return one row a step that has messages and a reward.

    Args:
        trajectories: What is made into rows.
        threshold: A reward that is no less makes an answer a good one.
    """

    def row_of(step: Transition) -> Row:
        if step.reward is None:
            raise UnheldError(NO_REWARD)
        return {**answered(step), "label": step.reward >= threshold}

    return step_rows(trajectories, row_of)


FORMAT: Final = Format(
    make,
    {"prompt": "JSON", "completion": "JSON", "label": "BOOLEAN", "tools": "JSON", **ORIGIN},
    used_by="TRL KTOTrainer",
    needs="messages and a reward",
)
