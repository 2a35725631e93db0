"""Chat messages as one reader takes them: chat templates, or OpenAI's files.

Source: OpenAI's API reference for chat completions and fine-tuning files; for templates, how vLLM
and TRL hand messages to them.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from lightning_otel.adapter.continuations import NOT_HERE, SERVER_HISTORY
from lightning_otel.adapter.histories import find_choice
from lightning_otel.dataset.formats.format import UnheldError
from lightning_otel.messages.chat import messages_of
from lightning_otel.types import Message, Transition
from lightning_otel.types.values import parse_json

OPENAI_PARTS: Final = frozenset({"text", "refusal", "image_url", "input_audio", "file"})
_TEXTS: Final = ("text", "refusal")
_TEMPLATE_PARTS: Final = OPENAI_PARTS | {"audio_url", "video_url", "image_file"}


def for_templates(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """Return messages as chat templates take them: arguments as objects, several texts as one."""
    found = messages_of(messages)
    for item in found:
        check_parts(item, _TEMPLATE_PARTS)
        item["content"] = _join_texts(item)
        if refusal := item.pop("refusal", ""):
            item["content"] = _add_text(item["content"], refusal)
        for call in item.get("tool_calls", ()):
            call["function"]["arguments"] = _parse_arguments(call["function"]["arguments"])
    return found


def has_messages(step: Transition) -> bool:
    """Return whether a step has its prompt and its answer as messages."""
    return bool(step.observation) and any(each.get("parts") for each in step.action[:1])


def is_continued(before: Transition, step: Transition) -> bool:
    """Return whether a prompt goes on with the first answer of a step: the one that is written."""
    return find_choice(before.observation, before.action[:1], step.observation) is not None


def check_parts(item: Mapping[str, Any], known: frozenset[str]) -> None:
    """Check that a reader knows every part of a message."""
    content = item["content"]
    for part in content if isinstance(content, list) else ():
        kind = part.get("type")
        if kind == SERVER_HISTORY:
            raise UnheldError(f"{NOT_HERE}; record the calls that it goes on from in this store")
        if kind not in known:
            raise UnheldError(f"a part of type {kind!r}; export triplets, which hold every part")
        if not isinstance(part.get(kind), (str if kind in _TEXTS else Mapping)):
            raise UnheldError(f"a part of type {kind!r} without one; export triplets")


def _join_texts(item: Mapping[str, Any]) -> Any:
    """Return content for templates of text models, which leave a list out without a word."""
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


def _parse_arguments(arguments: str) -> Any:
    """Return arguments as the object that templates write out; text that is none stays text."""
    found = parse_json(arguments)
    return found if isinstance(found, dict) else arguments
