"""LangChain's message objects in the conventions' JSON.

Read past the objects' own ``__str__`` and ``__repr__``: nothing of the program's runs for it.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import orjson

from lightning_otel.adapter.messages import (
    message,
    reasoning_part,
    text_part,
    tool_call_part,
    tool_response_part,
)
from lightning_otel.instrumentors.content import text_of

_ROLES: Final = {"human": "user", "ai": "assistant", "function": "tool"}
_TEXTS: Final = frozenset({"text", "input_text", "output_text", "plaintext"})
_REASONINGS: Final = {"reasoning": "reasoning", "thinking": "thinking"}
_CALLS: Final = frozenset({"tool_use", "tool_call", "function_call", "invalid_tool_call"})
"""Blocks that say again what the message's list of tool calls says."""


def dump(value: object) -> str:
    """JSON text; what has no place in JSON is left out or repaired."""
    try:
        return orjson.dumps(value).decode()
    except (TypeError, ValueError):
        return text_of(value)


def messages_text(messages: Iterable[Any]) -> str:
    """A prompt's messages; a text is what the user said."""
    return dump([_message(item) for item in messages])


def answers_text(generations: Iterable[Any]) -> str:
    """What a model answered, one message for each choice."""
    return dump([_answer(generation) for generation in generations])


def _message(item: Any) -> dict[str, Any]:
    if isinstance(item, str):
        return message("user", [text_part(item)])
    role = role_of(item)
    content = getattr(item, "content", None)
    if role == "tool":
        call_id = getattr(item, "tool_call_id", None)
        return message(role, [tool_response_part(call_id, content)])
    return message(role, _parts(item, content), name=getattr(item, "name", None))


def role_of(item: Any) -> str:
    """The conventions' role of a message."""
    kind = getattr(item, "type", None)
    if not isinstance(kind, str):
        return "user"
    kind = kind.removesuffix("MessageChunk").lower()
    if kind == "chat":
        kind = str(getattr(item, "role", kind))
    return _ROLES.get(kind, kind)


def _answer(generation: Any) -> dict[str, Any]:
    reason = finish_reason(generation)
    held = getattr(generation, "message", None)
    if held is None:
        text = getattr(generation, "text", "")
        return message("assistant", [text_part(text)] if text else [], finish_reason=reason)
    return message(role_of(held), _parts(held, held.content), finish_reason=reason)


def finish_reason(generation: Any) -> str | None:
    """Why a model stopped, where it said so."""
    held = getattr(generation, "message", None)
    for told in (getattr(generation, "generation_info", None), response_metadata(held)):
        if isinstance(told, Mapping):
            reason = told.get("finish_reason") or told.get("stop_reason") or told.get("done_reason")
            if isinstance(reason, str):
                return reason
    return None


def response_metadata(item: Any) -> Mapping[str, Any]:
    """What a model told beside its answer."""
    found = getattr(item, "response_metadata", None)
    return found if isinstance(found, dict) else {}


def _parts(item: Any, content: object) -> list[dict[str, Any]]:
    """Reasoning, content and tool calls of a message, in that order."""
    parts: list[dict[str, Any]] = []
    extra = getattr(item, "additional_kwargs", None)
    reasoning = extra.get("reasoning_content") if isinstance(extra, dict) else None
    if isinstance(reasoning, str) and reasoning:
        parts.append(reasoning_part(reasoning))
    if isinstance(content, str):
        if content:
            parts.append(text_part(content))
    elif isinstance(content, list):
        parts += [part for block in content if (part := _part(block)) is not None]
    for name in ("tool_calls", "invalid_tool_calls"):
        calls = getattr(item, name, None)
        for call in calls if isinstance(calls, list) else ():
            parts.append(tool_call_part(call.get("id"), call.get("name"), call.get("args")))
    return parts


def _part(block: object) -> dict[str, Any] | None:
    if isinstance(block, str):
        return text_part(block)
    if not isinstance(block, dict):
        return {"type": type(block).__name__}
    kind = block.get("type")
    if kind in _TEXTS:
        return text_part(block.get("text", ""))
    if kind in _REASONINGS:
        return reasoning_part(str(block.get(_REASONINGS[kind], "")))
    if kind in _CALLS:
        return None
    if kind == "image_url":
        image = block.get("image_url")
        url = image.get("url") if isinstance(image, dict) else image
        return {"type": "uri", "modality": "image", "uri": url}
    return dict(block)


def tools_text(tools: object) -> str | None:
    """The tools a model was given, as far as their definitions are at hand."""
    if not isinstance(tools, Sequence) or isinstance(tools, str) or not tools:
        return None
    return dump([_tool(tool) for tool in tools])


def _tool(tool: Any) -> dict[str, Any]:
    if isinstance(tool, dict):
        function = tool.get("function")
        return {"type": "function", **function} if isinstance(function, dict) else tool
    # Its schema is not asked for: making one runs code of the program's.
    name, description = getattr(tool, "name", None), getattr(tool, "description", None)
    found = {"type": "function", "name": name if isinstance(name, str) else type(tool).__name__}
    return {**found, "description": description} if isinstance(description, str) else found
