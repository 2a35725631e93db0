"""Chat messages and tools as one reader takes them: chat templates, or OpenAI's files.

Source: OpenAI's API reference for chat completions and fine-tuning files; for templates, how vLLM
and TRL hand messages to them.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from lightning_otel.formats.format import (
    NO_MESSAGES,
    LeftOut,
    Row,
    UnheldError,
    origin,
    other_choices,
)
from lightning_otel.messages.chat import messages_of
from lightning_otel.messages.chat import tools_of as tools_of
from lightning_otel.types import Message, Transition

OPENAI_PARTS: Final = frozenset({"text", "refusal", "image_url", "input_audio", "file"})
REASONING: Final = "reasoning; OpenAI's files have no place for it"
TEMPLATE_PARTS: Final = OPENAI_PARTS | {"audio_url", "video_url", "image_file"}


def for_templates(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """Return messages as chat templates take them: arguments as objects, several texts as one.

    Raises:
        UnheldError: A part has no place in them.
    """
    found = messages_of(messages)
    for item in found:
        _check_keys(item, TEMPLATE_PARTS)
        item["content"] = _one_text(item)
        if item.get("refusal"):
            item["content"] = "\n".join(filter(None, (item["content"], item.pop("refusal"))))
        for call in item.get("tool_calls", ()):
            call["function"]["arguments"] = _parse_arguments(call["function"]["arguments"])
    return found


def for_openai(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """Return messages as OpenAI's files hold them: arguments as text, and no reasoning.

    Raises:
        UnheldError: A part has no place in them.
    """
    found = messages_of(messages)
    for item in found:
        _check_keys(item, OPENAI_PARTS)
        item.pop("reasoning_content", None)
    return found


def answer_for_openai(step: Transition) -> dict[str, Any]:
    """Return the first choice as OpenAI's files hold it: one message.

    Raises:
        UnheldError: A part has no place in them, or a tool's result is among its parts.
    """
    found = for_openai(step.action[:1])
    if len(found) != 1:
        raise UnheldError("a tool's result in an answer; export triplets, which hold every part")
    return found[0]


def openai_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return tools as OpenAI's files hold them.

    Raises:
        UnheldError: One is no function.
    """
    found = tools_of(tools)
    for tool in found:
        if tool.get("type") != "function":
            raise UnheldError(
                f"a tool of type {tool.get('type')!r}; OpenAI's files hold functions alone"
            )
    return found


def has_messages(step: Transition) -> bool:
    """Return whether a step has its prompt and its answer as messages."""
    return bool(step.observation) and any(each.get("parts") for each in step.action[:1])


def answered(step: Transition) -> Row:
    """Return ``prompt``, ``completion`` and ``tools`` as chat templates take them, and the origin.

    Raises:
        UnheldError: There are no messages, or a part of them has no place.
    """
    if not has_messages(step):
        raise UnheldError(NO_MESSAGES)
    row: Row = {
        "prompt": for_templates(step.observation),
        "completion": for_templates(step.action[:1]),
    }
    if step.tools:
        row["tools"] = tools_of(step.tools)
    return {**row, **origin(step, step.reward)}


def openai_notes(step: Transition) -> Iterator[LeftOut]:
    """Yield notes of what a row in OpenAI's files does not hold of its step."""
    if any(
        isinstance(part, Mapping) and part.get("type") == "reasoning"
        for message in (*step.observation, *step.action[:1])
        for part in message.get("parts") or ()
    ):
        yield LeftOut(step, REASONING, is_row_written=True)
    yield from other_choices(step)


def _check_keys(item: Mapping[str, Any], known: frozenset[str]) -> None:
    content = item["content"]
    for part in content if isinstance(content, list) else ():
        if part.get("type") not in known:
            raise UnheldError(
                f"a part of type {part.get('type')!r}; export triplets, which hold every part"
            )


def _one_text(item: Mapping[str, Any]) -> Any:
    """Return content for templates of text models, which leave a list out without a word."""
    content = item["content"]
    if content is None:
        return ""
    if isinstance(content, str) or any(part["type"] != "text" for part in content):
        return content
    # vLLM joins what was given by lines, too; what a model said it said in one piece.
    return ("" if item["role"] == "assistant" else "\n").join(part["text"] for part in content)


def _parse_arguments(arguments: str) -> Any:
    """Return arguments as the object that templates write out; text that is none stays text."""
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments
