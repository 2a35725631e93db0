"""``openai-sft`` and ``openai-dpo``: the files of OpenAI's fine-tuning, which others take too.

Source: OpenAI's guides to supervised fine-tuning (``messages`` with ``weight``, ``tools``) and to
direct preference optimisation (``input``, ``preferred_output``, ``non_preferred_output``).
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from lightning_otel.dataset.formats.chat import OPENAI_PARTS, has_messages, hold_parts, note_parts
from lightning_otel.dataset.formats.format import (
    NO_MESSAGES,
    Format,
    LeftOut,
    Made,
    Row,
    UnheldError,
    reward_fault,
    step_rows,
)
from lightning_otel.dataset.formats.groups import PreferencePair, pair_rows
from lightning_otel.messages.chat import messages_of, tools_of
from lightning_otel.types import Message, Trajectory, Transition

REASONING: Final = "reasoning; OpenAI's files have no place for it"


def make_sft(trajectories: Iterable[Trajectory], *, threshold: float | None = None) -> Made:
    """Return one row a step; answers before the last have ``weight`` 0, for rows of their own."""

    def row_of(step: Transition) -> Row:
        if fault := reward_fault(step.reward, threshold):
            raise UnheldError(fault)
        if not has_messages(step):
            raise UnheldError(NO_MESSAGES)
        row = _prompt_row(step)
        for message in row["messages"]:
            if message["role"] == "assistant":
                message["weight"] = 0
        row["messages"].append(_answer(step))
        return row

    return step_rows(trajectories, row_of, _notes)


def make_dpo(trajectories: Iterable[Trajectory], *, gap: float = 0.0) -> Made:
    """Return one row a pair of answers to a prompt whose rewards differ by the gap at least."""

    def row_of(pair: PreferencePair) -> Row:
        return {
            "input": _prompt_row(pair.chosen),
            "preferred_output": [_answer(pair.chosen)],
            "non_preferred_output": [_answer(pair.rejected)],
        }

    return pair_rows(trajectories, gap, row_of, _notes)


def _prompt_row(step: Transition) -> Row:
    row: Row = {"messages": _plain_messages(step.observation)}
    for tool in tools_of(step.tools):
        if tool.get("type") != "function":
            raise UnheldError(
                f"a tool of type {tool.get('type')!r}; OpenAI's files hold functions alone"
            )
        row.setdefault("tools", []).append(tool)
    return row


def _answer(step: Transition) -> dict[str, Any]:
    turns = _plain_messages(step.action[:1])
    if len(turns) != 1:
        raise UnheldError("a tool's result in an answer; export triplets, which hold every part")
    return turns[0]


def _plain_messages(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """Return messages with arguments as text, and no reasoning."""
    turns = hold_parts(messages_of(messages), OPENAI_PARTS)
    for item in turns:
        item.pop("reasoning_content", None)
    return turns


def _notes(step: Transition) -> Iterator[LeftOut]:
    if any(
        isinstance(part, Mapping) and part.get("type") == "reasoning"
        for message in (*step.observation, *step.action[:1])
        for part in message.get("parts") or ()
    ):
        yield LeftOut(step, REASONING, is_row_written=True)
    yield from note_parts(step)


SFT: Final = Format(
    make_sft,
    {"messages": "JSON", "tools": "JSON"},
    used_by="OpenAI, Azure, Together, Fireworks",
    needs="messages",
    steps_of=lambda _: 1,
)
DPO: Final = Format(
    make_dpo,
    {"input": "JSON", "preferred_output": "JSON", "non_preferred_output": "JSON"},
    used_by="OpenAI, Azure",
    needs="messages, and several rewarded answers to one prompt",
    is_grouped=True,
    steps_of=lambda _: 2,
)
