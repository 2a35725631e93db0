"""AG2, both products of that name: chats, turns, agents' replies and tools as spans.

The classic AutoGen API, ``autogen`` of AG2 0.x, is wrapped where every way of starting a chat
passes; AG2 1.x, ``ag2``, is given a middleware. Where a client's own instrumentor sees the request,
the model call's payload is left to it. AG2's own instrumentation of either, where a program uses
it, goes on as it was: it is put onto single agents by hand.
"""

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from lightning_otel import conventions as c
from lightning_otel import operations
from lightning_otel.instrumentors.ag2 import turns
from lightning_otel.instrumentors.library import LibraryInstrumentor, Patch
from lightning_otel.instrumentors.reading import word
from lightning_otel.instrumentors.steps import (
    Arguments,
    Step,
    agent_step,
    answered,
    steps,
    tool_step,
    workflow_step,
)
from lightning_otel.values import text_of


class AG2Instrumentor(LibraryInstrumentor):
    """Switches the capture of AG2 on and off; neither ``autogen`` nor ``ag2`` is ever imported."""

    requires = ("ag2 >= 0.14",)

    def patches(self) -> Mapping[str, Patch]:
        """The modules of the class that all agents are, of either product."""
        return {
            "autogen.agentchat.conversable_agent": self._patch_classic_agent,
            "ag2.agent": self._patch_agent,
        }

    def _patch_agent(self, module: ModuleType) -> None:
        self.wrap(module.Agent, "_turn_scope", turns.make_scope(self.is_wanted))

    def _patch_classic_agent(self, module: ModuleType) -> None:
        agent = module.ConversableAgent
        chat = steps(("recipient",), _begin_chat, _keep_summary)
        self.wrap_calls(agent, chat, "initiate_chat", "a_initiate_chat")
        reply = steps(("messages", "sender"), _begin_reply, _keep_reply)
        self.wrap_calls(agent, reply, "generate_reply", "a_generate_reply")
        tool = steps(("func_call", "call_id"), _begin_tool, _keep_result)
        self.wrap_calls(agent, tool, "execute_function", "a_execute_function")


def _begin_chat(owner: Any, arguments: Arguments) -> Step | None:
    """Begin a chat: that of a group where its manager is talked to, else of two agents."""
    recipient, first = arguments.get("recipient"), arguments.get("message")
    asked = None if first is None else _message_text(first)
    if _is_group(recipient):
        # The manager's own reply is the group's talk: the same step, so it is its owner.
        return workflow_step(recipient, _agent_name(recipient), asked)
    return workflow_step(object(), f"{_agent_name(owner)} and {_agent_name(recipient)}", asked)


def _keep_summary(operation: operations.Operation, result: Any) -> None:
    operation.body.update(answered(text_of(getattr(result, "summary", None))))


def _begin_reply(owner: Any, arguments: Arguments) -> Step | None:
    """Begin an agent's reply to the last message."""
    messages = arguments.get("messages")
    if messages is None:
        # Not by its index: the agent's own dict would make an entry of it.
        messages = dict.get(owner._oai_messages, arguments.get("sender"))
    asked = _message_text(messages[-1]) if type(messages) is list and messages else None
    step = workflow_step if _is_group(owner) else agent_step
    return step(owner, _agent_name(owner), asked)


def _keep_reply(operation: operations.Operation, result: Any) -> None:
    if result is not None:  # an agent may have none
        operation.body.update(answered(_message_text(result)))


def _begin_tool(owner: Any, arguments: Arguments) -> Step | None:
    """Begin a function that the agent executes for a model's call."""
    call = arguments.get("func_call")
    asked = call if isinstance(call, Mapping) else {}
    call_id, name = word(arguments.get("call_id")), word(asked.get("name")) or "tool"
    agent = _agent_name(owner)
    return tool_step(object(), name, asked.get("arguments"), call_id=call_id, agent=agent)


def _keep_result(operation: operations.Operation, result: Any) -> None:
    """Keep the function's result; an exception of its own has become a text by then."""
    is_success, told = result
    content = told.get("content")
    operation.body[c.TOOL_RESULT] = text_of(content)
    if not is_success:
        operation.fail_with("tool_error", content if isinstance(content, str) else "")


def _is_group(agent: Any) -> bool:
    # By name, not isinstance: the class is in a module that may not be imported yet.
    return any(cls.__name__ == "GroupChatManager" for cls in type(agent).__mro__)


def _agent_name(agent: Any) -> str:
    return word(getattr(agent, "name", None)) or "agent"


def _message_text(message: Any) -> str:
    """Return a message's words, or all of it where there is more to it, such as calls of tools."""
    if isinstance(message, dict):
        content = message.get("content")
        if isinstance(content, str) and content and not message.get("tool_calls"):
            return content
    return text_of(message)
