"""``openai-sft``: chats in the file format of OpenAI's fine-tuning, which other services take too.

Source: OpenAI's guide to supervised fine-tuning (``messages`` with ``weight``, ``tools``).
"""

from collections.abc import Iterable
from typing import Final

from lightning_otel.formats.chat import (
    answer_for_openai,
    for_openai,
    has_messages,
    openai_notes,
    openai_tools,
)
from lightning_otel.formats.format import (
    NO_MESSAGES,
    Format,
    Made,
    Row,
    UnheldError,
    reward_fault,
    step_rows,
)
from lightning_otel.types import Trajectory, Transition


def make(trajectories: Iterable[Trajectory], *, threshold: float | None = None) -> Made:
    """Return one row a step; answers before the last have ``weight`` 0, for rows of their own.

    Args:
        trajectories: What is made into rows.
        threshold: Only steps whose reward is no less.
    """

    def row_of(step: Transition) -> Row:
        if fault := reward_fault(step.reward, threshold):
            raise UnheldError(fault)
        if not has_messages(step):
            raise UnheldError(NO_MESSAGES)
        given = map(_drop_weight, for_openai(step.observation))
        row: Row = {"messages": [*given, answer_for_openai(step)]}
        return {**row, "tools": openai_tools(step.tools)} if step.tools else row

    return step_rows(trajectories, row_of, openai_notes)


def _drop_weight(message: Row) -> Row:
    return {**message, "weight": 0} if message["role"] == "assistant" else message


FORMAT: Final = Format(
    make,
    {"messages": "JSON", "tools": "JSON"},
    used_by="OpenAI, Azure, Together, Fireworks",
    needs="messages",
)
