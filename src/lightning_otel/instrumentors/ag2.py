"""AG2, both products of that name: chats, turns, agents' replies and tools as spans.

The classic API, ``autogen`` of AG2 0.x, is wrapped where every chat starts; AG2 1.x, ``ag2``, gets
a middleware. A client's own instrumentor records the model call's payload.
"""

import functools
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import ModuleType
from typing import Any

from lightning_otel import capture
from lightning_otel.capture import operations
from lightning_otel.instrumentors.base import LibraryInstrumentor, Patch
from lightning_otel.instrumentors.steps import (
    Arguments,
    FrameworkStep,
    ModelCall,
    begin_owned_step,
    begin_tool_step,
    bind_step,
    input_content,
    output_content,
)
from lightning_otel.instrumentors.wrappers import wrap_call
from lightning_otel.messages import (
    message,
    read_word,
    text_part,
    tool_call_part,
    tool_response_part,
)
from lightning_otel.types import conventions as c
from lightning_otel.types.values import text_of


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
        self.wrap(module.Agent, "_turn_scope", _make_scope(self.is_wanted))

    def _patch_classic_agent(self, module: ModuleType) -> None:
        agent = module.ConversableAgent
        chat = bind_step(("recipient",), _begin_chat, _keep_summary)
        self.wrap_calls(agent, chat, "initiate_chat", "a_initiate_chat")
        reply = bind_step(("messages", "sender"), _begin_reply, _keep_reply)
        self.wrap_calls(agent, reply, "generate_reply", "a_generate_reply")
        tool = bind_step(("func_call", "call_id"), _begin_tool, _keep_result)
        self.wrap_calls(agent, tool, "execute_function", "a_execute_function")


def _begin_chat(owner: Any, arguments: Arguments) -> FrameworkStep | None:
    """Begin a chat: that of a group where its manager is talked to, else of two agents."""
    recipient, first = arguments.get("recipient"), arguments.get("message")
    prompt = None if first is None else _message_text(first)
    if _is_group(recipient):
        # The manager's own reply is the group's talk: the same step, so it is its owner.
        return _begin_talk(recipient, _agent_name(recipient), prompt)
    return _begin_talk(None, f"{_agent_name(owner)} and {_agent_name(recipient)}", prompt)


def _begin_talk(owner: object, name: str, prompt: str | None) -> FrameworkStep | None:
    return begin_owned_step(owner, c.INVOKE_WORKFLOW, name, body=input_content(prompt))


def _keep_summary(operation: operations.Operation, result: Any) -> None:
    operation.body.update(output_content(text_of(getattr(result, "summary", None))))


def _begin_reply(owner: Any, arguments: Arguments) -> FrameworkStep | None:
    messages = arguments.get("messages")
    if messages is None:
        # Not by its index: the agent's own dict would make an entry of it.
        messages = dict.get(owner._oai_messages, arguments.get("sender"))
    prompt = _message_text(messages[-1]) if type(messages) is list and messages else None
    operation = c.INVOKE_WORKFLOW if _is_group(owner) else c.INVOKE_AGENT
    return begin_owned_step(owner, operation, _agent_name(owner), body=input_content(prompt))


def _keep_reply(operation: operations.Operation, result: Any) -> None:
    if result is not None:  # an agent may have none
        operation.body.update(output_content(_message_text(result)))


def _begin_tool(owner: Any, arguments: Arguments) -> FrameworkStep | None:
    call = arguments.get("func_call")
    fields = call if isinstance(call, Mapping) else {}
    call_id, name = read_word(arguments.get("call_id")), read_word(fields.get("name")) or "tool"
    agent = _agent_name(owner)
    return begin_tool_step(None, name, fields.get("arguments"), call_id=call_id, agent=agent)


def _keep_result(operation: operations.Operation, result: Any) -> None:
    """Keep the function's result; an exception of its own has become a text by then."""
    is_success, text = result
    content = text.get("content")
    operation.body[c.TOOL_RESULT] = text_of(content)
    if not is_success:
        operation.fail_with("tool_error", content if isinstance(content, str) else "")


def _is_group(agent: Any) -> bool:
    # By name, not isinstance: the class is in a module that may not be imported yet.
    return any(cls.__name__ == "GroupChatManager" for cls in type(agent).__mro__)


def _agent_name(agent: Any) -> str:
    return read_word(capture.read_attribute(agent, "name")) or "agent"


def _message_text(message: Any) -> str:
    if isinstance(message, dict):
        content = message.get("content")
        if isinstance(content, str) and content and not message.get("tool_calls"):
            return content
    return text_of(message)


# --- AG2 1.x, another product than 0.x ------------------------------------------------------------
#
# By its own extension point, a middleware, which each turn gets from us last of all: no agent is
# changed by it. AG2's own ``TelemetryMiddleware`` does much the same, but puts all that was said on
# the spans, and knows nothing of the client's span for the same request.


def _make_scope(is_wanted: Any) -> Any:
    def make(original: Any) -> Any:
        def _turn_scope(self: Any, event: Any, **kwargs: Any) -> Any:
            if not capture.guard_call(is_wanted):
                return original(self, event, **kwargs)
            others = kwargs.get("additional_middleware", ())
            kwargs["additional_middleware"] = (*others, _Middleware)
            return _open_scope(original(self, event, **kwargs), self, event)

        return _turn_scope

    return make


@asynccontextmanager
async def _open_scope(scope: Any, agent: Any, event: Any) -> AsyncIterator[Any]:
    async with scope as drive:

        async def turn(_: Any) -> Any:
            return await drive()

        begin = bind_step((), lambda agent, _: _begin_turn(agent, event), _keep_turn_reply)
        yield functools.partial(wrap_call(begin)(turn), agent)


def _begin_turn(agent: Any, event: Any) -> FrameworkStep | None:
    prompt = _join_values(getattr(event, "parts", None))
    # Not the agent itself: a turn within its own turn is one of its own.
    return begin_owned_step(None, c.INVOKE_AGENT, _agent_name(agent), body=input_content(prompt))


def _keep_turn_reply(operation: operations.Operation, reply: Any) -> None:
    operation.body.update(output_content(read_word(getattr(reply, "body", None))))


class _Middleware:
    """One turn's middleware; AG2 calls it around each tool and each model call."""

    def __init__(self, event: Any, context: Any) -> None:
        self.initial_event, self.context = event, context

    async def on_turn(self, call_next: Any, event: Any, context: Any) -> Any:
        return await call_next(event, context)

    on_human_input = on_turn

    async def on_tool_execution(self, call_next: Any, event: Any, context: Any) -> Any:
        return await _execute(event, call_next, context)

    async def on_llm_call(self, call_next: Any, events: Any, context: Any) -> Any:
        return await _ask(events, call_next, context)


def _begin_turn_tool(event: Any, _: Any) -> FrameworkStep | None:
    name = read_word(event.name) or "tool"
    return begin_tool_step(None, name, event.arguments, call_id=read_word(event.id), agent=None)


def _keep_turn_result(operation: operations.Operation, result: Any) -> None:
    text = _join_values(getattr(getattr(result, "result", None), "parts", None))
    if text is not None:
        operation.body[c.TOOL_RESULT] = text
    error = getattr(result, "error", None)
    if isinstance(error, BaseException):
        operation.fail(error)


class _Ag2Call(ModelCall):
    def __init__(self, events: Any) -> None:
        super().__init__(c.CHAT, None, {})
        self._events = events

    def fill(self, answer: Any) -> None:
        if answer is not None:
            _fill_call(self._events, self.operation, answer)


async def _call_next(value: Any, call_next: Any, context: Any) -> Any:
    return await call_next(value, context)


_execute = wrap_call(bind_step((), _begin_turn_tool, _keep_turn_result))(_call_next)
_ask = wrap_call(lambda args, _: _Ag2Call(args[0]))(_call_next)


def _fill_call(events: Any, operation: operations.Operation, response: Any) -> None:
    """Say what AG2 knows of a call that no instrumented client sent."""
    usage = response.usage
    attributes = {
        c.PROVIDER: response.provider,
        c.REQUEST_MODEL: response.model,
        c.RESPONSE_MODEL: response.model,
        c.RESPONSE_ID: response.response_id,
        c.INPUT_TOKENS: getattr(usage, "prompt_tokens", None),
        c.OUTPUT_TOKENS: getattr(usage, "completion_tokens", None),
        c.CACHED_TOKENS: getattr(usage, "cache_read_input_tokens", None),
    }
    for key, value in attributes.items():
        if (isinstance(value, str | float) and value) or type(value) is int:
            operation.attributes[key] = int(value) if isinstance(value, float) else value
    finish = read_word(response.finish_reason)
    if finish:
        operation.attributes[c.FINISH_REASONS] = [finish]
    if read_word(response.model):
        operation.rename(f"{c.CHAT} {response.model}")
    operation.body[c.INPUT_MESSAGES] = text_of(_read_history(events))
    answer = message("assistant", _read_answer(response), finish_reason=finish)
    operation.body[c.OUTPUT_MESSAGES] = text_of([answer])


def _read_history(events: Sequence[Any]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for event in events:
        if type(getattr(event, "parts", None)) is list:
            messages.append(message("user", [text_part(_join_values(event.parts) or "")]))
        elif hasattr(event, "message") and hasattr(event, "tool_calls"):
            messages.append(message("assistant", _read_answer(event)))
        elif type(getattr(event, "results", None)) is list:
            messages += [
                message(
                    "tool", [tool_response_part(item.parent_id, _join_values(item.result.parts))]
                )
                for item in event.results
            ]
    return messages


def _read_answer(response: Any) -> list[dict[str, Any]]:
    text = response.content
    calls = getattr(response.tool_calls, "calls", ())
    return [
        *([text_part(text)] if isinstance(text, str) and text else ()),
        *(tool_call_part(call.id, call.name, call.arguments) for call in calls),
    ]


def _join_values(parts: Any) -> str | None:
    if type(parts) is not list:
        return None
    values = [
        next((vars(part)[name] for name in _PARTS if name in vars(part)), None) for part in parts
    ]
    return "\n".join(text_of(value) for value in values if value is not None)


_PARTS = ("content", "data", "url")
