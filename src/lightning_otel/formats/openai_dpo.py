"""``openai-dpo``: preferences in the file format of OpenAI's fine-tuning.

Source: OpenAI's guide to direct preference optimisation (``input``, ``preferred_output``,
``non_preferred_output``).
"""

from collections.abc import Iterable
from typing import Any, Final

from lightning_otel.formats.chat import (
    UnheldError,
    answer_for_openai,
    for_openai,
    has_reasoning,
    openai_tools,
)
from lightning_otel.formats.format import Format, LeftOut, Made, other_choices
from lightning_otel.formats.pairs import Pair, pairs
from lightning_otel.types import Trajectory

REASONING: Final = "reasoning; OpenAI's files have no place for it"


def make(trajectories: Iterable[Trajectory], *, gap: float = 0.0) -> Made:
    """One row a pair of answers whose rewards differ.

    Args:
        trajectories: What is made into rows, group by group.
        gap: By how much at least.
    """
    for pair in pairs(trajectories, gap):
        if isinstance(pair, LeftOut):
            yield pair
        else:
            yield from _row(pair)


def _row(pair: Pair) -> Made:
    chosen, rejected = pair
    try:
        given: dict[str, Any] = {"messages": for_openai(chosen.observation)}
        if chosen.tools:
            given["tools"] = openai_tools(chosen.tools)
        row = {
            "input": given,
            "preferred_output": [answer_for_openai(chosen)],
            "non_preferred_output": [answer_for_openai(rejected)],
        }
    except UnheldError as exc:
        yield from (LeftOut(step, str(exc)) for step in pair)
        return
    for step in pair:
        yield from other_choices(step)
        if has_reasoning((*step.observation, *step.action[:1])):
            yield LeftOut(step, REASONING, is_row_written=True)
    yield row


FORMAT: Final = Format(
    make,
    {"input": "JSON", "preferred_output": "JSON", "non_preferred_output": "JSON"},
    used_by="OpenAI, Azure",
    needs="messages, and several rewarded answers to one prompt",
    is_grouped=True,
)
