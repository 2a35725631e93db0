"""``prompt-completion``: each step once, what was given and what was answered.

Only the completion is trained. Where the server gave token ids they are there too, with the mask of
what was sampled; ``tokens`` holds these alone, ready to be trained as they are.

Source: TRL's conversational prompt-completion type (``prompt``, ``completion``, ``tools``).
"""

from collections.abc import Iterable
from typing import Final

from lightning_otel.formats.format import ORIGIN, Format, LeftOut, Made, distinct, other_choices
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
        yield from other_choices(step)
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
    used_by="TRL SFTTrainer",
    needs="messages",
)
