"""AutoGen's messages in the conventions' form, read without running any code of theirs."""

from collections.abc import Mapping
from typing import Any, Final

from lightning_otel.messages import (
    fields_of,
    message,
    reasoning_part,
    text_part,
    tool_call_part,
    tool_response_part,
)
from lightning_otel.types.values import TEXT_LIMIT, dump, text_of

_ROLES: Final = {
    "SystemMessage": "system",
    "AssistantMessage": "assistant",
    "FunctionExecutionResultMessage": "tool",
}


def text_field(value: object, name: str) -> str | None:
    """Return a field of an object, if it is text."""
    held = fields_of(value).get(name)
    return held if isinstance(held, str) else None


def chat_messages(found: object, role: str) -> str | None:
    """Return what an agent or a team is told or says, as messages; None if nothing."""
    if found is None:
        return None
    items = found if isinstance(found, list | tuple) else [found]
    return dump([_read_chat(item, role) for item in items])


def _read_chat(item: object, role: str) -> dict[str, Any]:
    held = fields_of(item)
    source = held.get("source")
    name = source if isinstance(source, str) and source != "user" else None
    return message(role, _read_content(held.get("content", item)), name=name)


def model_messages(messages: object) -> str | None:
    """Return a model's input; None if it is no list: only a list can be read without a trace."""
    if not isinstance(messages, list | tuple):
        return None
    return dump([_read_model_message(item) for item in messages])


def model_answer(result: object, finish_reason: str | None) -> str:
    """Return a model's answer, a result or the text of one."""
    found = _read_model_message(result)
    return dump([message("assistant", found["parts"], finish_reason=finish_reason)])


def _read_model_message(item: object) -> dict[str, Any]:
    held = fields_of(item)
    thought = [reasoning_part(held["thought"])] if isinstance(held.get("thought"), str) else []
    parts = [*thought, *_read_content(held.get("content", item))]
    return message(_ROLES.get(str(held.get("type")), "user"), parts)


def _read_content(content: object) -> list[Any]:
    if isinstance(content, str):
        return [text_part(_bound_text(content))] if content else []
    if isinstance(content, list | tuple):
        return [_read_part(item) for item in content]
    return [text_part(text_of(content))]


def _read_part(item: object) -> Any:
    if isinstance(item, str):
        return text_part(_bound_text(item))
    held = fields_of(item)
    if "arguments" in held:
        return tool_call_part(held.get("id"), held.get("name"), _bound_text(held["arguments"]))
    if "call_id" in held:
        return tool_response_part(held["call_id"], _bound_text(held.get("content")))
    if type(item).__name__ == "Image":
        # Its bytes would have to be encoded anew, with every call of a long chat.
        return {"type": "blob", "modality": "image"}
    return text_part(text_of(item))


def _bound_text(value: Any) -> Any:
    # By its own method: a subclass may have overridden it. Of a short text this is the same object.
    return str.__getitem__(value, slice(TEXT_LIMIT)) if isinstance(value, str) else value


def tool_definitions(tools: object) -> str | None:
    """Return the tools a model was offered, as schemas or by what is kept of their schemas."""
    if not isinstance(tools, list | tuple) or not tools:
        return None
    return text_of([{"type": "function", **_read_schema(tool)} for tool in tools])


def _read_schema(tool: object) -> Mapping[str, Any]:
    if isinstance(tool, dict):
        return tool
    known = ((key, text_field(tool, f"_{key}")) for key in ("name", "description"))
    return {key: value for key, value in known if value is not None}


def tool_result(result: object, *, is_last_only: bool) -> str:
    """Return a tool's result; of a run of agents the text that the model gets.

    Source: ``TaskRunnerTool.return_value_as_string`` of ``autogen_agentchat``.
    """
    held = fields_of(result)
    messages = held.get("messages")
    if "stop_reason" not in held or not isinstance(messages, list):
        return text_of(result)
    texts = [(text_field(item, "source"), text_field(item, "content")) for item in messages]
    if is_last_only:
        return text_of(texts[-1][1] if texts else None)
    lines = [f"{source}: {text}" for source, text in texts if text is not None and source != "user"]
    return text_of("\n\n".join(lines))
