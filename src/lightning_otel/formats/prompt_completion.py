"""``prompt-completion``: each step once, what was given and what was answered.

Only the completion is trained. Where the server gave token ids they are there too, with the mask of
what was sampled; ``tokens`` holds these alone, ready to be trained as they are.

Source: TRL's conversational prompt-completion type (``prompt``, ``completion``, ``tools``).
"""

from collections.abc import Iterable
from typing import Final

from lightning_otel.formats.chat import answered
from lightning_otel.formats.format import ORIGIN, Format, Made, Row, step_rows
from lightning_otel.types import Trajectory, Transition


def make(trajectories: Iterable[Trajectory]) -> Made:
    """Return one row a step that has messages.

    Args:
        trajectories: What is made into rows.
    """
    return step_rows(trajectories, _make_row)


def _make_row(step: Transition) -> Row:
    row = answered(step)
    if step.capture == "exact":
        row["prompt_ids"] = list(step.prompt_ids)
        row["completion_ids"] = list(step.response_ids)
        row["completion_mask"] = [0] * len(step.prompt_ids) + [1] * len(step.response_ids)
    return row


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
