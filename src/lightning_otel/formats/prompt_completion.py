"""``prompt-completion``: each step once, what was given and what was answered.

Only the completion is trained. Where the server gave token ids they are there too, with the mask of
what was sampled; ``tokens`` holds these alone, ready to be trained as they are.

Source: TRL's conversational prompt-completion type (``prompt``, ``completion``, ``tools``).
"""

from collections.abc import Iterable
from typing import Final

from lightning_otel.formats.format import FURTHER_CHOICES, ORIGIN, Format, LeftOut, Made, distinct
from lightning_otel.formats.steps import answered
from lightning_otel.types import Trajectory


def make(trajectories: Iterable[Trajectory]) -> Made:
    """One row a step that has messages.

    Args:
        trajectories: What is made into rows.
    """
    for step, _ in distinct(trajectories):
        row = answered(step)
        if isinstance(row, LeftOut):
            yield row
            continue
        if step.capture == "exact":
            row["prompt_ids"] = list(step.prompt_ids)
            row["completion_ids"] = list(step.response_ids)
            row["completion_mask"] = [0] * len(step.prompt_ids) + [1] * len(step.response_ids)
        if len(step.action) > 1:
            yield LeftOut(step, FURTHER_CHOICES, is_row_written=True)
        yield row


FORMAT: Final = Format(
    make,
    {
        "prompt": "JSON",
        "completion": "JSON",
        "tools": "JSON",
        "prompt_ids": "INTEGER[]",
        "completion_ids": "INTEGER[]",
        "completion_mask": "INTEGER[]",
        **ORIGIN,
    },
    consumer="TRL SFTTrainer",
    needs="messages",
)
