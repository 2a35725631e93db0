"""Chat messages and tools as one reader takes them: chat templates, or OpenAI's files.

Source: OpenAI's API reference for chat completions and fine-tuning files; for templates, how vLLM
and TRL hand messages to them.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from lightning_otel.messages.chat import messages_of
from lightning_otel.messages.chat import tools_of as tools_of
from lightning_otel.types import Message, Transition

OPENAI_PARTS: Final = frozenset({"text", "refusal", "image_url", "input_audio", "file"})
TEMPLATE_PARTS: Final = OPENAI_PARTS | {"audio_url", "video_url", "image_file"}


class UnheldError(ValueError):
    """A part of a message, or a tool, has no place in the format; says which and what to do."""


def for_templates(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """Messages as chat templates take them: arguments as objects, several texts as one.

    Raises:
        UnheldError: A part has no place in them.
    """
    found = messages_of(messages)
    for item in found:
        _check(item, TEMPLATE_PARTS)
        item["content"] = _one_text(item)
        if item.get("refusal"):
            item["content"] = "\n".join(filter(None, (item["content"], item.pop("refusal"))))
        for call in item.get("tool_calls", ()):
            call["function"]["arguments"] = _object(call["function"]["arguments"])
    return found


def for_openai(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """Messages as OpenAI's files hold them: arguments as text, and no reasoning.

    Raises:
        UnheldError: A part has no place in them.
    """
    found = messages_of(messages)
    for item in found:
        _check(item, OPENAI_PARTS)
        item.pop("reasoning_content", None)
    return found


def answer_for_openai(step: Transition) -> dict[str, Any]:
    """The first choice as OpenAI's files hold it: one message.

    Raises:
        UnheldError: A part has no place in them, or a tool's result is among its parts.
    """
    found = for_openai(step.action[:1])
    if len(found) != 1:
        raise UnheldError("a tool's result in an answer; export triplets, which hold every part")
    return found[0]


def openai_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tools as OpenAI's files hold them.

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
    """Whether what the model was given and what it answered are there as messages."""
    return bool(step.observation) and any(each.get("parts") for each in step.action[:1])


def has_reasoning(messages: Iterable[Message]) -> bool:
    """Whether one of the messages holds a model's reasoning."""
    return any(
        isinstance(part, Mapping) and part.get("type") == "reasoning"
        for each in messages
        for part in each.get("parts") or ()
    )


def _check(item: Mapping[str, Any], known: frozenset[str]) -> None:
    content = item["content"]
    for part in content if isinstance(content, list) else ():
        if part.get("type") not in known:
            raise UnheldError(
                f"a part of type {part.get('type')!r}; export triplets, which hold every part"
            )


def _one_text(item: Mapping[str, Any]) -> Any:
    """Content that templates of text models read: they leave a list out without a word."""
    content = item["content"]
    if content is None:
        return ""
    if isinstance(content, str) or any(part["type"] != "text" for part in content):
        return content
    # vLLM joins what was given by lines, too; what a model said it said in one piece.
    return ("" if item["role"] == "assistant" else "\n").join(part["text"] for part in content)


def _object(arguments: str) -> Any:
    """Arguments as an object, as templates write it out; text that is none stays text."""
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments
