"""``openai-sft``: chats in the file format of OpenAI's fine-tuning, which other services take too.

Source: OpenAI's guide to supervised fine-tuning (``messages`` with ``weight``, ``tools``).
"""

from collections.abc import Iterable
from typing import Final

from lightning_otel.formats.chat import (
    UnheldError,
    answer_for_openai,
    for_openai,
    has_messages,
    has_reasoning,
    openai_tools,
)
from lightning_otel.formats.format import (
    NO_MESSAGES,
    NO_REWARD,
    Format,
    LeftOut,
    Made,
    Row,
    distinct,
    other_choices,
)
from lightning_otel.types import Trajectory, Transition

BELOW: Final = "reward below the threshold; lower it to keep more"
REASONING: Final = "reasoning; OpenAI's files have no place for it"


def make(trajectories: Iterable[Trajectory], *, threshold: float | None = None) -> Made:
    """One row a step; the answers before the last one have ``weight`` 0, for rows of their own.

    Args:
        trajectories: What is made into rows.
        threshold: Only steps whose reward is no less.
    """
    for step, _ in distinct(trajectories):
        if threshold is not None and step.reward is None:
            yield LeftOut(step, NO_REWARD)
        elif threshold is not None and (step.reward or 0.0) < threshold:
            yield LeftOut(step, BELOW)
        elif not has_messages(step):
            yield LeftOut(step, NO_MESSAGES)
        else:
            yield from _row(step)


def _row(step: Transition) -> Made:
    try:
        given = map(_unweighted, for_openai(step.observation))
        row: Row = {"messages": [*given, answer_for_openai(step)]}
        if step.tools:
            row["tools"] = openai_tools(step.tools)
    except UnheldError as exc:
        yield LeftOut(step, str(exc))
        return
    if has_reasoning((*step.observation, *step.action[:1])):
        yield LeftOut(step, REASONING, is_row_written=True)
    yield from other_choices(step)
    yield row


def _unweighted(message: Row) -> Row:
    return {**message, "weight": 0} if message["role"] == "assistant" else message


FORMAT: Final = Format(
    make,
    {"messages": "JSON", "tools": "JSON"},
    used_by="OpenAI, Azure, Together, Fireworks",
    needs="messages",
)
