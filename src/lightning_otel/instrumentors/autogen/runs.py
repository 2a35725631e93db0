"""Runs of agents, teams and tools as operations.

AutoGen's runtime delivers messages in tasks of its own, in the context it was once started in.
Messages to a team get the context of its run; any other message carries its sender's.
"""

import functools
import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Final

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import INVALID_SPAN, ProxyTracerProvider, Span

from lightning_otel import capture, config
from lightning_otel.capture import operations
from lightning_otel.instrumentors import steps, wrappers
from lightning_otel.instrumentors.autogen import messages
from lightning_otel.instrumentors.patches import MARK
from lightning_otel.messages import fields_of
from lightning_otel.types import conventions as c
from lightning_otel.types.values import text_of

PROVIDER: Final = "autogen"

_TURN_KEY = otel_context.create_key("lightning-otel-autogen-turn")
"""Where a context has the identity of the agent at work, or the id of the participant to speak."""
_ENTRY_KEY = otel_context.create_key("lightning-otel-autogen-entry")
_CARRIED: Final = "_lightning_otel_carried"
"""Key in a message's metadata: the contexts of its sender and of the first sender."""
_WITHOUT_SPAN: Final = frozenset({"SequentialRoutedAgent", "ToolAgent"})
"""Agents of the runtime that are none to a reader: a team's parts, and what runs tools."""
_TOOL_PARAMETERS: Final = ("args", "cancellation_token", "call_id")
SERVER_TOOL_PARAMETERS: Final = ("name", "arguments", "cancellation_token", "call_id")
_RESULT_FIELDS: Final = frozenset({"chat_message", "stop_reason", "finish_reason"})
"""Fields by which a stream's result, of an agent, a team or a model, is told from other items."""

_teams: weakref.WeakValueDictionary[str, "AutoGenRun"] = weakref.WeakValueDictionary()
"""The run of each team that is running, by the team's id."""


class AutoGenRun(steps.FrameworkStep):
    """A step of AutoGen's, which may give its result as the item of a stream."""

    def note_item(self, item: Any) -> None:
        """Keep a stream's result."""
        if self.read is not None and not _RESULT_FIELDS.isdisjoint(fields_of(item)):
            self.is_complete = True
            self.read(self.operation, item)


class ToolRun(steps.FrameworkStep):
    """A run of a tool; the last item of its stream is its result."""

    _last: Any = None

    def note_item(self, item: Any) -> None:
        """Hold what may be the last item."""
        self._last = item

    def stop(self) -> None:
        """End it with the last item."""
        if self._last is not None:
            self.succeed(self._last)
        self.operation.stop()


def _start(
    operation: str, name: str, attributes: steps.Known, body: Mapping[str, str | None]
) -> tuple[operations.Operation, Context]:
    started = steps.start_operation(operation, name, {c.PROVIDER: PROVIDER, **attributes}, body)
    return started, operations.context_within(started)


def _keep_message(operation: operations.Operation, answer: object) -> None:
    text = messages.chat_messages(answer, "assistant")
    if text is not None:
        operation.body[c.OUTPUT_MESSAGES] = text


def skip_span(*_: Any, **__: Any) -> AbstractContextManager[Span]:
    """Return the replacement of a span of AutoGen's that is not wanted."""
    return nullcontext(INVALID_SPAN)


# --- agents ---------------------------------------------------------------------------------------


def begin_agent(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> AutoGenRun:
    """Begin the run of ``BaseChatAgent.run`` or ``run_stream``."""
    return _begin_agent(args[0], kwargs.get("task"))


def begin_turn(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> AutoGenRun | None:
    """Begin that of ``on_messages`` or its stream, which a team or the program itself calls."""
    agent, turn = args[0], otel_context.get_value(_TURN_KEY)
    if turn == id(agent):
        return None
    messages = wrappers.bind_names(("messages",), args, kwargs).get("messages")
    return _begin_agent(agent, messages, turn if isinstance(turn, str) else None)


def _begin_agent(agent: Any, task: object, agent_id: str | None = None) -> AutoGenRun:
    name = agent.name
    operation, context = _start(
        c.INVOKE_AGENT,
        name,
        {c.AGENT_DESCRIPTION: agent.description, c.AGENT_ID: agent_id},
        {c.INPUT_MESSAGES: messages.chat_messages(task, "user")},
    )
    # By identity alone: a context may outlive the agent, and must not keep it.
    return AutoGenRun(
        operation, otel_context.set_value(_TURN_KEY, id(agent), context), _keep_answer
    )


def _keep_answer(operation: operations.Operation, result: Any) -> None:
    fields = fields_of(result)
    answer, inner = fields.get("chat_message"), fields.get("messages")
    if isinstance(inner, list) and inner:
        answer = inner[-1]
    _keep_message(operation, answer)
    target = messages.text_field(answer, "target")
    if target is not None and fields_of(answer).get("type") == "HandoffMessage":
        operation.attributes[c.HANDOFF_TARGET] = target


def replace_turn(*_: Any, **__: Any) -> AbstractContextManager[Span] | None:
    """Return the replacement of AutoGen's own span of an agent's turn in a team."""
    return skip_span() if isinstance(otel_context.get_value(_TURN_KEY), str) else None


def replace_creation(agent_name: str, **kwargs: Any) -> AbstractContextManager[Span]:
    """Return the replacement of the span of an agent's creation, else a trace that says nothing."""
    parent = trace.get_current_span(operations.parent_context()).get_span_context()
    if not parent.is_valid and capture.current_frame() is None:
        return skip_span()
    described = {c.AGENT_DESCRIPTION: kwargs.get("agent_description")}
    return _end_creation(_start(c.CREATE_AGENT, agent_name, described, {})[0])


@contextmanager
def _end_creation(operation: operations.Operation) -> Iterator[Span]:
    try:
        yield operation.span
    except BaseException as exc:
        capture.guard_call(operation.fail, exc)
        raise
    capture.guard_call(operation.stop)


# --- teams ----------------------------------------------------------------------------------------


def begin_team(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> AutoGenRun:
    """Begin the run of ``BaseGroupChat.run_stream``, which ``run`` goes through too."""
    name, team_id = args[0].name, args[0]._team_id
    operation, context = _start(
        c.INVOKE_WORKFLOW,
        name,
        {},
        {c.INPUT_MESSAGES: messages.chat_messages(kwargs.get("task"), "user")},
    )
    run = AutoGenRun(operation, context, _keep_outcome)
    running = _teams.get(team_id)
    # A team that is running refuses to run again: what it does still belongs to its first run.
    if running is None or running.operation.is_over:
        _teams[team_id] = run
    return run


def _keep_outcome(operation: operations.Operation, result: Any) -> None:
    fields = fields_of(result)
    messages, reason = fields.get("messages"), fields.get("stop_reason")
    _keep_message(operation, messages[-1] if isinstance(messages, list) and messages else None)
    if isinstance(reason, str):
        operation.body[c.STOP_REASON] = reason


def begin_part(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> wrappers.ContextRun | None:
    """Deliver a message to a part of a running team in the context of the team's run."""
    part = args[0]
    run = _teams.get(part.id.key)
    if run is None or run.operation.is_over:
        return None
    # The run's own, not the current one: a span of AutoGen's messaging may be current there, which
    # belongs to whatever provider its runtime was built with.
    fields = fields_of(part)
    # Of another kind of agent AutoGen's own span stays: only where ours is, there is a turn.
    is_seen = hasattr(getattr(type(fields.get("_agent")), "on_messages_stream", None), MARK)
    turn = str(part.id) if is_seen else None
    context = otel_context.set_value(_TURN_KEY, turn, run.context)
    name, frame = fields.get("_name"), capture.current_frame(context)
    if isinstance(name, str) and frame is not None:
        # Only a manager has a name here: what it asks to lead the team, it asks as an agent.
        stamps = {**frame.stamps, c.AGENT_NAME: name}
        context = capture.set_frame(replace(frame, stamps=stamps), context)
    return wrappers.ContextRun(context)


# --- tools ----------------------------------------------------------------------------------------


def begin_tool(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], *, names: tuple[str, ...] = _TOOL_PARAMETERS
) -> ToolRun:
    """Begin the run of ``BaseTool.run_json`` or its stream, or of ``McpWorkbench.call_tool``."""
    tool, values = args[0], wrappers.bind_names(names, args, kwargs)
    name, call_id = values.get("name", messages.text_field(tool, "_name")), values.get("call_id")
    operation, context = _start(
        c.EXECUTE_TOOL,
        str(name),
        {
            c.TOOL_NAME: name if isinstance(name, str) else None,
            c.TOOL_DESCRIPTION: messages.text_field(tool, "_description"),
            c.TOOL_CALL_ID: call_id if isinstance(call_id, str) else None,
        },
        {c.TOOL_ARGUMENTS: text_of(values.get("arguments", values.get("args")))},
    )
    return ToolRun(operation, context, functools.partial(_keep_result, tool))


def _keep_result(tool: object, operation: operations.Operation, result: Any) -> None:
    """Keep a tool's result; a workbench gives what its tool raised as a result, too."""
    # Told to give so much of a whole conversation.
    is_last_only = fields_of(tool).get("_return_value_as_last_message") is True
    operation.body[c.TOOL_RESULT] = messages.tool_result(result, is_last_only=is_last_only)
    if fields_of(result).get("is_error") is True:
        operation.fail_with("tool_error", "")


# --- the runtime ----------------------------------------------------------------------------------


def replace_messaging(helper: Any, *_: Any, **__: Any) -> AbstractContextManager[Span] | None:
    """Return what replaces AutoGen's own spans of messages between agents, about thirty a chat.

    They would leave orphans behind. They are made where AutoGen's switch or a provider of the
    program's own asks for them.
    """
    provider = helper.tracer_provider
    is_global = provider is trace.get_tracer_provider()
    if config.read_environment("AUTOGEN_DISABLE_RUNTIME_TRACING"):
        return None
    return skip_span() if is_global or isinstance(provider, ProxyTracerProvider) else None


def carry_context(metadata: Any) -> None:
    """Put the current context, and that of the first sender, into a message's metadata."""
    sender = otel_context.get_current()
    setattr(metadata, _CARRIED, (sender, _entry_of(sender)))


def _entry_of(context: Context) -> Context:
    entry = otel_context.get_value(_ENTRY_KEY, context)
    return entry if isinstance(entry, Context) else context


def begin_delivery(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], *, is_published: bool
) -> wrappers.ContextRun | None:
    """Deliver a message in the context that its sender put into it."""
    envelope = wrappers.bind_names(("message_envelope",), args, kwargs).get("message_envelope")
    carried = getattr(getattr(envelope, "metadata", None), _CARRIED, None)
    if carried is None:
        return None
    sender, first_sender = carried
    return wrappers.ContextRun(first_sender if is_published else sender)


def begin_message(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> AutoGenRun | None:
    """Begin an agent's handling of a message, in ``RoutedAgent.on_message_impl``."""
    agent, message = args[0], wrappers.bind_names(("message",), args, kwargs).get("message")
    is_part = any(cls.__name__ in _WITHOUT_SPAN for cls in type(agent).__mro__)
    if is_part or type(message) not in agent._handlers:
        return None
    described = {
        c.AGENT_ID: str(agent.id),
        c.AGENT_DESCRIPTION: messages.text_field(agent, "_description"),
    }
    body = {c.INPUT_MESSAGES: messages.chat_messages(message, "user")}
    operation, context = _start(c.INVOKE_AGENT, agent.id.type, described, body)
    entry = _entry_of(otel_context.get_current())
    return AutoGenRun(operation, otel_context.set_value(_ENTRY_KEY, entry, context), _keep_message)
