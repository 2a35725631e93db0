"""LangChain's message objects in the conventions' JSON.

Read past the objects' own ``__str__`` and ``__repr__``: nothing of the program's runs for it.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from lightning_otel.instrumentors.reading import fields_of
from lightning_otel.messages import (
    flat_tools,
    message,
    objects,
    part_of,
    read_message,
    reasoning_part,
    text_part,
    tool_response_part,
)
from lightning_otel.values import dump

_ROLES: Final = {
    "human": "user",
    "ai": "assistant",
    "system": "system",
    "tool": "tool",
    "function": "tool",
}
_NO_FIELDS: Final[Mapping[str, Any]] = {}
_REASONINGS: Final = ("reasoning", "thinking")
_MORE: Final = ("name", "tool_calls", "invalid_tool_calls", "additional_kwargs")
"""Fields that say more than the content."""
_CALLS: Final = frozenset({"tool_use", "tool_call", "function_call", "invalid_tool_call"})
"""Blocks that say again what the message's list of tool calls says."""


def messages_text(messages: Iterable[Any]) -> str:
    """A prompt's messages; a text is what the user said."""
    return dump([_read_message(item) for item in messages])


def answers_text(generations: Iterable[Any]) -> str:
    """Return a model's answer, one message for each choice."""
    return dump([_read_answer(generation) for generation in generations])


def _read_message(item: Any, **extra: Any) -> dict[str, Any]:
    if isinstance(item, str):
        return message("user", [text_part(item)])
    held = fields_of(item)
    role, content = _role_of(held), held.get("content")
    if content and type(content) is str and role != "tool" and not any(map(held.get, _MORE)):
        # Most messages of a long history are this plain, and each is read anew with every call.
        return message(role, [text_part(content)], **extra)
    if role == "tool":
        return message(role, [tool_response_part(held.get("tool_call_id"), content)])
    if isinstance(content, list):
        content = [part for block in content if (part := _read_block(block)) is not None]
    more = held.get("additional_kwargs")
    calls = objects(held.get("tool_calls")) + objects(held.get("invalid_tool_calls"))
    spoken = {
        "role": role,
        "content": content,
        "name": held.get("name"),
        "tool_calls": [{**call, "arguments": call.get("args")} for call in calls],
        "reasoning_content": more.get("reasoning_content") if isinstance(more, dict) else None,
    }
    return read_message(spoken, **extra)


def _role_of(held: Mapping[str, Any]) -> str:
    """The conventions' role of a message."""
    kind = held.get("type")
    if not isinstance(kind, str):
        return "user"
    if kind in _ROLES:
        return _ROLES[kind]
    kind = kind.removesuffix("MessageChunk").lower()
    if kind == "chat":
        kind = str(held.get("role", kind))
    return _ROLES.get(kind, kind)


def _read_answer(generation: Any) -> dict[str, Any]:
    reason, answer = finish_reason(generation), getattr(generation, "message", None)
    if fields_of(answer):
        return _read_message(answer, finish_reason=reason)
    text = getattr(generation, "text", "")
    return message("assistant", [text_part(text)] if text else [], finish_reason=reason)


def finish_reason(generation: Any) -> str | None:
    """Return why a model stopped, if it said so."""
    answer = getattr(generation, "message", None)
    for told in (getattr(generation, "generation_info", None), response_metadata(answer)):
        if told and isinstance(told, dict):
            reason = told.get("finish_reason") or told.get("stop_reason") or told.get("done_reason")
            if isinstance(reason, str):
                return reason
    return None


def response_metadata(answer: Any) -> Mapping[str, Any]:
    """Return the metadata beside a model's answer."""
    found = fields_of(answer).get("response_metadata")
    return found if isinstance(found, dict) else _NO_FIELDS


def _read_block(block: object) -> dict[str, Any] | None:
    """Return a block of a message's content as a part; None if it repeats a tool call."""
    if isinstance(block, str):
        return text_part(block)
    if not isinstance(block, dict):
        return {"type": type(block).__name__}
    kind = block.get("type")
    if kind in _REASONINGS:
        return reasoning_part(str(block.get(kind, "")))
    return None if kind in _CALLS else part_of(block)


def tools_text(tools: object) -> str | None:
    """The tools a model was given, as far as their definitions are at hand."""
    if not isinstance(tools, list | tuple) or not tools:
        return None
    return dump([part for tool in tools for part in flat_tools([tool]) or [_read_tool(tool)]])


def _read_tool(tool: Any) -> dict[str, Any]:
    # Its schema is not asked for: making one runs code of the program's.
    name, description = getattr(tool, "name", None), getattr(tool, "description", None)
    found = {"type": "function", "name": name if isinstance(name, str) else type(tool).__name__}
    return {**found, "description": description} if isinstance(description, str) else found
