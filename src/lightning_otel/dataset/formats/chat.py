"""Chat messages as one reader takes them: chat templates, or OpenAI's files.

Source: OpenAI's API reference for chat completions and fine-tuning files; for templates, how vLLM
and TRL hand messages to them.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, Literal, TypeAlias

from lightning_otel.adapter.continuations import NOT_HERE, SERVER_HISTORY
from lightning_otel.adapter.histories import find_choice
from lightning_otel.dataset.formats.format import LeftOut, UnheldError, other_choices
from lightning_otel.messages import RULES, objects
from lightning_otel.messages.chat import messages_of, result_parts
from lightning_otel.messages.media import to_text
from lightning_otel.types import Message, Transition
from lightning_otel.types.values import parse_json

OPENAI_PARTS: Final = frozenset({"text", "refusal", "image_url", "input_audio", "file"})
_TEXTS: Final = ("text", "refusal")
_HELD: Final = OPENAI_PARTS | {
    "tool_call", "tool_call_response", "reasoning", "uri", "blob", "thinking",
}  # fmt: skip
"""Kinds of stored parts that have a place in chat."""
_UNHELD: Final = "a part of type {!r}; export triplets, which hold every part"
_NO_OBJECT: Final = (
    "arguments of a tool call that are no JSON object; write them as they are: arguments 'text'"
)
_TOO_LARGE: Final = "a whole number beyond 64 bits; write it as it is: arguments 'text'"
_NO_TEXT: Final = "content that is not text; leave arguments 'text' out"
Arguments: TypeAlias = Literal["object", "text"]
"""Form of the arguments of tool calls, and of tools."""
_TEMPLATE_PARTS: Final = OPENAI_PARTS | {"audio_url", "video_url", "image_file"}


def for_templates(
    messages: Iterable[Message], arguments: Arguments = "object"
) -> list[dict[str, Any]]:
    """Return messages as chat templates take them: several texts as one, ``system`` alone.

    With ``arguments`` as ``text`` there is no content but text.
    """
    turns = hold_parts(messages_of(messages), _TEMPLATE_PARTS)
    for item in turns:
        item["content"] = _join_texts(item)
        if refusal := item.pop("refusal", ""):
            item["content"] = _add_text(item["content"], refusal)
        if arguments == "text":
            if not isinstance(item["content"], str):
                raise UnheldError(_NO_TEXT)
            continue
        for call in item.get("tool_calls", ()):
            call["function"]["arguments"] = _parse_arguments(call["function"]["arguments"])
    return _merge_rules(turns)


def answer_of(step: Transition) -> Message:
    """Return the first answer of a step; its tracer may have named no role."""
    answer = step.action[0]
    if answer.get("role", "assistant") != "assistant":
        raise UnheldError("an answer that is no message of the assistant; export triplets")
    return {**answer, "role": "assistant"}


def _merge_rules(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return turns in which a developer is the system, and part of the first instructions.

    Templates leave a developer out in silence, or refuse a second system message.
    """
    first = next((turn for turn in turns if turn["role"] in RULES), None)
    merged: list[dict[str, Any]] = []
    for turn in turns:
        if turn["role"] == "developer":
            turn["role"] = "system"
            if first is not None and first is not turn and isinstance(turn["content"], str):
                first["content"] = _add_text(first["content"], turn["content"])
                continue
        merged.append(turn)
    return merged


def has_messages(step: Transition) -> bool:
    """Return whether a step has its prompt and its answer as messages that can be read."""
    parts = [part for message in step.action[:1] for part in objects(message.get("parts"))]
    # Reasoning that is encrypted alone says nothing.
    is_said = any(part.get("type") != "reasoning" or part.get("content") for part in parts)
    return bool(step.observation) and is_said


def is_continued(before: Transition, step: Transition) -> bool:
    """Return whether a prompt goes on with the first answer of a step: the one that is written."""
    return find_choice(before.observation, before.action[:1], step.observation) is not None


def hold_parts(messages: list[dict[str, Any]], kinds: frozenset[str]) -> list[dict[str, Any]]:
    """Return messages without the parts that a reader does not know.

    An answer is whole or raises, since it is trained; so does a tool's result, and all that was
    said before an answer beside instructions, if nothing of it is left.
    """
    turns: list[dict[str, Any]] = []
    lost, is_asked = "", False
    for item in messages:
        unknown = _check_parts(item, kinds)
        is_answer = item["role"] == "assistant"
        if unknown and is_answer:
            raise UnheldError(_UNHELD.format(unknown))
        if unknown:
            parts = [part for part in item["content"] if part.get("type") in kinds]
            is_text = len(parts) == 1 and parts[0].get("type") == "text"
            item, lost = {**item, "content": parts[0]["text"] if is_text else parts}, unknown
        if unknown and not item["content"] and item["role"] != "tool":
            continue
        if (is_answer and lost and not is_asked) or (unknown and not item["content"]):
            raise UnheldError(_UNHELD.format(lost))
        lost = "" if is_answer else lost
        is_asked = not is_answer and (is_asked or item["role"] not in RULES)
        turns.append(item)
    if lost and not is_asked:
        raise UnheldError(_UNHELD.format(lost))
    return turns


def note_parts(step: Transition) -> Iterator[LeftOut]:
    """Yield notes of parts and choices that a row does not hold."""
    yield from other_choices(step)
    kinds = {
        to_text(part.get("type"))
        for item in step.observation
        for outer in objects(item.get("parts"))
        for part in (outer, *result_parts(outer.get("response")))
        if item.get("role") != "assistant"
    }
    for kind in sorted(kinds - _HELD):
        yield LeftOut(step, _UNHELD.format(kind), is_row_written=True)


def _check_parts(item: Mapping[str, Any], kinds: frozenset[str]) -> str:
    """Return the kind of an unknown part; empty if there is none."""
    content, unknown = item["content"], ""
    for part in content if isinstance(content, list) else ():
        kind = part.get("type")
        if kind == SERVER_HISTORY:
            raise UnheldError(f"{NOT_HERE}; record the calls that it goes on from in this store")
        if kind not in kinds:
            unknown = str(kind)
        elif not isinstance(part.get(kind), (str if kind in _TEXTS else Mapping)):
            raise UnheldError(f"a part of type {kind!r} without one; export triplets")
    return unknown


def _join_texts(item: Mapping[str, Any]) -> Any:
    """Return text for text models' templates, which leave lists out silently."""
    content = item["content"]
    if content is None:
        return ""
    if isinstance(content, str) or any(part["type"] != "text" for part in content):
        return content
    # vLLM joins what was given by lines, too; what a model said it said in one piece.
    return ("" if item["role"] == "assistant" else "\n").join(part["text"] for part in content)


def _add_text(content: str | list[dict[str, Any]], text: str) -> str | list[dict[str, Any]]:
    if isinstance(content, list):
        return [*content, {"type": "text", "text": text}]
    return f"{content}\n{text}" if content else text


def _parse_arguments(arguments: str) -> dict[str, Any]:
    value = parse_json(arguments)
    if not isinstance(value, dict):
        raise UnheldError(_NO_OBJECT)
    check_numbers(value)
    return value


def check_numbers(value: object) -> None:
    """Refuse whole numbers beyond int64, and infinite ones."""
    if isinstance(value, (Mapping, list, tuple)):
        for part in value.values() if isinstance(value, Mapping) else value:
            check_numbers(part)
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise UnheldError(_TOO_LARGE)
    elif isinstance(value, float) and not math.isfinite(value):
        raise UnheldError(_NO_OBJECT)
