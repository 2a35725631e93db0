"""``kto``: answers that were good and answers that were not, without a need for pairs.

Source: TRL's unpaired preference type (``prompt``, ``completion``, ``label``).
"""

from collections.abc import Iterable
from typing import Final

from lightning_otel.formats.format import (
    NO_REWARD,
    ORIGIN,
    Format,
    LeftOut,
    Made,
    distinct,
    other_choices,
)
from lightning_otel.formats.steps import answered
from lightning_otel.types import Trajectory


def make(trajectories: Iterable[Trajectory], *, threshold: float = 0.5) -> Made:
    """One row a step that has messages and a reward.

    Args:
        trajectories: What is made into rows.
        threshold: A reward that is no less makes an answer a good one.
    """
    for step, _ in distinct(trajectories):
        if step.reward is None:
            yield LeftOut(step, NO_REWARD)
            continue
        row = answered(step)
        if isinstance(row, LeftOut):
            yield row
            continue
        yield from other_choices(step)
        yield {**row, "label": step.reward >= threshold}


FORMAT: Final = Format(
    make,
    {"prompt": "JSON", "completion": "JSON", "label": "BOOLEAN", "tools": "JSON", **ORIGIN},
    used_by="TRL KTOTrainer",
    needs="messages and a reward",
)
