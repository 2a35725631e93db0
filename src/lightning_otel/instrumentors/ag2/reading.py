"""Readers of the classic API's agents and messages: names, words, tool results."""

from collections.abc import Mapping
from typing import Any

from lightning_otel import capture
from lightning_otel import conventions as c
from lightning_otel.instrumentors.reading import word
from lightning_otel.instrumentors.steps import (
    Arguments,
    Step,
    agent_step,
    answered,
    tool_step,
    workflow_step,
)
from lightning_otel.values import text_of


def chat(owner: Any, arguments: Arguments) -> Step | None:
    """The step of a chat: that of a group where its manager is talked to, else of two agents."""
    recipient = arguments.get("recipient")
    said = arguments.get("message")
    asked = None if said is None else _message_text(said)
    if _is_group(recipient):
        # The manager's own reply is the group's talk: the same step, so it is its owner.
        return workflow_step(recipient, _agent_name(recipient), asked)
    return workflow_step(object(), f"{_agent_name(owner)} and {_agent_name(recipient)}", asked)


def chat_result(operation: capture.Operation, result: Any) -> None:
    """Take what the chat came to, as it sums itself up."""
    operation.body.update(answered(text_of(getattr(result, "summary", None))))


def reply(owner: Any, arguments: Arguments) -> Step | None:
    """The step of an agent that is asked for its reply to the last message."""
    messages = arguments.get("messages")
    if messages is None:
        # Not by its index: the agent's own dict would make an entry of it.
        messages = dict.get(owner._oai_messages, arguments.get("sender"))
    asked = _message_text(messages[-1]) if type(messages) is list and messages else None
    if _is_group(owner):
        return workflow_step(owner, _agent_name(owner), asked)
    return agent_step(owner, _agent_name(owner), asked)


def reply_result(operation: capture.Operation, result: Any) -> None:
    """Take the reply; an agent may have none."""
    if result is not None:
        operation.body.update(answered(_message_text(result)))


def tool(owner: Any, arguments: Arguments) -> Step | None:
    """The step of a function that the agent executes for a model's call."""
    call = arguments.get("func_call")
    asked = call if isinstance(call, Mapping) else {}
    return tool_step(
        object(),
        word(asked.get("name")) or "tool",
        asked.get("arguments"),
        call_id=word(arguments.get("call_id")),
        agent=_agent_name(owner),
    )


def tool_result(operation: capture.Operation, result: Any) -> None:
    """Take the function's result; an exception of its own has become a text by then."""
    is_success, said = result
    content = said.get("content")
    operation.body[c.TOOL_RESULT] = text_of(content)
    if not is_success:
        operation.fail_with("tool_error", content if isinstance(content, str) else "")


def _is_group(agent: Any) -> bool:
    # By name, not isinstance: the class is in a module that may not be imported yet.
    return any(cls.__name__ == "GroupChatManager" for cls in type(agent).__mro__)


def _agent_name(agent: Any) -> str:
    return word(getattr(agent, "name", None)) or "agent"


def _message_text(message: Any) -> str:
    """A message's words, or all of it where there is more to it, such as calls of tools."""
    if isinstance(message, dict):
        content = message.get("content")
        if isinstance(content, str) and content and not message.get("tool_calls"):
            return content
    return text_of(message)
