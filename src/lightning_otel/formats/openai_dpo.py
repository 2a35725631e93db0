"""``openai-dpo``: preferences in the file format of OpenAI's fine-tuning.

Source: OpenAI's guide to direct preference optimisation (``input``, ``preferred_output``,
``non_preferred_output``).
"""

from collections.abc import Iterable
from typing import Final

from lightning_otel.formats.chat import (
    answer_for_openai,
    for_openai,
    openai_notes,
    openai_tools,
)
from lightning_otel.formats.format import Format, Made, Row
from lightning_otel.formats.pairs import Pair, pair_rows
from lightning_otel.types import Trajectory


def make(trajectories: Iterable[Trajectory], *, gap: float = 0.0) -> Made:
    """Return one row a pair of answers whose rewards differ.

    Args:
        trajectories: What is made into rows, group by group.
        gap: By how much at least.
    """
    return pair_rows(trajectories, gap, _make_row, openai_notes)


def _make_row(pair: Pair) -> Row:
    given: Row = {"messages": for_openai(pair.chosen.observation)}
    if pair.chosen.tools:
        given["tools"] = openai_tools(pair.chosen.tools)
    return {
        "input": given,
        "preferred_output": [answer_for_openai(pair.chosen)],
        "non_preferred_output": [answer_for_openai(pair.rejected)],
    }


FORMAT: Final = Format(
    make,
    {"input": "JSON", "preferred_output": "JSON", "non_preferred_output": "JSON"},
    used_by="OpenAI, Azure",
    needs="messages, and several rewarded answers to one prompt",
    is_grouped=True,
)
