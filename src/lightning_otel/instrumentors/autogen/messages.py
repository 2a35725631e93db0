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
    text = fields_of(value).get(name)
    return text if isinstance(text, str) else None


def chat_messages(value: object, role: str) -> str | None:
    """Return what an agent or a team is told or says, as messages; None if nothing."""
    if value is None:
        return None
    items = value if isinstance(value, list | tuple) else [value]
    return dump([_read_chat(item, role) for item in items])


def _read_chat(item: object, role: str) -> dict[str, Any]:
    data = fields_of(item)
    source = data.get("source")
    name = source if isinstance(source, str) and source != "user" else None
    return message(role, _read_content(data.get("content", item)), name=name)


def model_messages(messages: object) -> str | None:
    """Return a model's input; None if it is no list: only a list can be read without a trace."""
    if not isinstance(messages, list | tuple):
        return None
    return dump([_read_model_message(item) for item in messages])


def model_answer(result: object, finish_reason: str | None) -> str:
    """Return a model's answer, a result or the text of one."""
    answer = _read_model_message(result)
    return dump([message("assistant", answer["parts"], finish_reason=finish_reason)])


def _read_model_message(item: object) -> dict[str, Any]:
    data = fields_of(item)
    thought = [reasoning_part(data["thought"])] if isinstance(data.get("thought"), str) else []
    parts = [*thought, *_read_content(data.get("content", item))]
    return message(_ROLES.get(str(data.get("type")), "user"), parts)


def _read_content(content: object) -> list[Any]:
    if isinstance(content, str):
        return [text_part(_bound_text(content))] if content else []
    if isinstance(content, list | tuple):
        return [_read_part(item) for item in content]
    return [text_part(text_of(content))]


def _read_part(item: object) -> Any:
    if isinstance(item, str):
        return text_part(_bound_text(item))
    data = fields_of(item)
    if "arguments" in data:
        return tool_call_part(data.get("id"), data.get("name"), _bound_text(data["arguments"]))
    if "call_id" in data:
        return tool_response_part(data["call_id"], _bound_text(data.get("content")))
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
    pairs = ((key, text_field(tool, f"_{key}")) for key in ("name", "description"))
    return {key: value for key, value in pairs if value is not None}


def tool_result(result: object, *, is_last_only: bool) -> str:
    """Return a tool's result; of a run of agents the text that the model gets.

    Source: ``TaskRunnerTool.return_value_as_string`` of ``autogen_agentchat``.
    """
    data = fields_of(result)
    messages = data.get("messages")
    if "stop_reason" not in data or not isinstance(messages, list):
        return text_of(result)
    texts = [(text_field(item, "source"), text_field(item, "content")) for item in messages]
    if is_last_only:
        return text_of(texts[-1][1] if texts else None)
    lines = [f"{source}: {text}" for source, text in texts if text is not None and source != "user"]
    return text_of("\n\n".join(lines))
