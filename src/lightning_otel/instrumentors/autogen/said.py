"""AutoGen's messages in the conventions' form, read without running any code of theirs."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from lightning_otel.instrumentors.reading import fields_of
from lightning_otel.messages import (
    message,
    reasoning_part,
    text_part,
    tool_call_part,
    tool_response_part,
)
from lightning_otel.messages.values import TEXT_LIMIT, dump, text_of

_USER: Final = "user"


def text_field(value: object, name: str) -> str | None:
    """A field of an object, if it is text."""
    held = fields_of(value).get(name)
    return held if isinstance(held, str) else None


def given(task: object) -> str | None:
    """The messages of a task: a text, a message or a list of these; None if there is no task."""
    if task is None:
        return None
    if isinstance(task, str):
        return dump([message(_USER, [text_part(_bound_text(task))])])
    items = task if isinstance(task, list | tuple) else [task]
    return dump([_chat_message(item, "user") for item in items])


def answered(item: object) -> str:
    """The message an agent or a team ended with."""
    return dump([_chat_message(item, "assistant")])


def handoff_target(item: object) -> str | None:
    """Whom a message hands the conversation to; None if it is no hand-off."""
    return text_field(item, "target") if fields_of(item).get("type") == "HandoffMessage" else None


def _chat_message(item: object, role: str) -> dict[str, Any]:
    held = fields_of(item)
    source = held.get("source")
    name = source if isinstance(source, str) and source != _USER else None
    return message(role, parts(held.get("content", item)), name=name)


def _bound_text(value: Any) -> Any:
    """The value, if it is text no longer than can be kept."""
    # By its own method: a subclass may have overridden it. Of a short text this is the same object.
    return str.__getitem__(value, slice(TEXT_LIMIT)) if isinstance(value, str) else value


def parts(content: object) -> list[Any]:
    """Text, or a list of texts, images and calls, as parts; of anything else its fields."""
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


def model_messages(messages: object) -> str | None:
    """Return a model's input; None if it is no list: only a list can be read without a trace."""
    if not isinstance(messages, list | tuple):
        return None
    return dump([_model_message(item) for item in messages])


_ROLES: Final = {
    "SystemMessage": "system",
    "UserMessage": "user",
    "AssistantMessage": "assistant",
    "FunctionExecutionResultMessage": "tool",
}


def _model_message(item: object) -> dict[str, Any]:
    held = fields_of(item)
    role = _ROLES.get(str(held.get("type")), "user")
    thought = [reasoning_part(held["thought"])] if isinstance(held.get("thought"), str) else []
    return message(role, [*thought, *parts(held.get("content", item))])


def model_answer(result: object, finish_reason: str | None) -> str:
    """Return a model's answer."""
    found = _model_message(result)
    return dump([message("assistant", found["parts"], finish_reason=finish_reason)])


def tool_definitions(tools: object) -> str | None:
    """The tools a model was offered, of those that are given as schemas or whose schema is kept."""
    if not isinstance(tools, list | tuple) or not tools:
        return None
    return text_of([{"type": "function", **_read_schema(tool)} for tool in tools])


def _read_schema(tool: object) -> Mapping[str, Any]:
    if isinstance(tool, dict):
        return tool
    named = ((key, text_field(tool, f"_{key}")) for key in ("name", "description"))
    return {key: value for key, value in named if value is not None}


def result_text(messages: Iterable[object], *, is_last_only: bool) -> str:
    """Return the text of a run of agents, as the model gets it that called it as a tool.

    Source: ``TaskRunnerTool.return_value_as_string`` of ``autogen_agentchat``.
    """
    said = [(text_field(item, "source"), text_field(item, "content")) for item in messages]
    if is_last_only:
        return text_of(said[-1][1] if said else None)
    lines = [f"{source}: {text}" for source, text in said if text is not None and source != _USER]
    return text_of("\n\n".join(lines))
