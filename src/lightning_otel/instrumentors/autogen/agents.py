"""Agents: ``invoke_agent`` around each run of one, in place of AutoGen's own span."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span

from lightning_otel import capture
from lightning_otel import conventions as c
from lightning_otel.instrumentors.autogen import runs, said
from lightning_otel.instrumentors.doors import named
from lightning_otel.instrumentors.reading import fields_of

_AGENT_KEY = otel_context.create_key("lightning-otel-autogen-agent")


class AgentRun(runs.Run):
    """A run of an agent; its last message is its answer."""

    def saw(self, item: Any) -> None:
        """Keep an agent's answer, which stands in its response or in its result."""
        held = fields_of(item)
        messages = held.get("messages")
        if "chat_message" in held:
            self.answered(held["chat_message"])
        elif isinstance(messages, list) and messages:
            self.answered(messages[-1])

    def answered(self, message: object) -> None:
        """Keep the answer, and to whom it hands the conversation."""
        self.is_complete = True
        target = said.handoff_target(message)
        if target is not None:
            self.operation.attributes[c.HANDOFF_TARGET] = target
        if capture.content_policy().is_kept:
            self.operation.body[c.OUTPUT_MESSAGES] = said.answered(message)


def start_agent(
    name: str, messages: object, description: str | None, agent_id: str | None = None
) -> capture.Operation:
    """The operation of an agent's run, told these messages."""
    attributes = {c.AGENT_NAME: name, c.AGENT_DESCRIPTION: description, c.AGENT_ID: agent_id}
    return runs.start(
        c.INVOKE_AGENT, name, attributes, lambda: {c.INPUT_MESSAGES: said.given(messages)}
    )


def begin_run(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> AgentRun:
    """Begin the run of ``BaseChatAgent.run`` or ``run_stream``, which AutoGen has a span of."""
    agent = args[0]
    operation = start_agent(agent.name, kwargs.get("task"), agent.description)
    context = working(runs.inside(operation), agent)
    return AgentRun(operation, runs.with_native(operation, context))


def begin_messages(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> AgentRun | None:
    """Begin that of ``on_messages`` or its stream: a run, if the program calls it itself."""
    agent = args[0]
    if otel_context.get_value(_AGENT_KEY) == id(agent):
        return None
    messages = named(("messages",), args, kwargs).get("messages")
    operation = start_agent(agent.name, messages, agent.description)
    return AgentRun(operation, working(runs.inside(operation), agent))


def working(context: Context, agent: object) -> Context:
    """A context in which an agent is at work."""
    # By identity alone: a context may outlive the agent, and must not keep it.
    return otel_context.set_value(_AGENT_KEY, id(agent), context)


def make_creation(agent_name: str, **kwargs: Any) -> runs.SpanBlock:
    """Return the replacement of AutoGen's span of an agent's creation.

    Outside a run that would be a trace of its own, of a span that says nothing.
    """
    parent = capture.parent_context()
    if not trace.get_current_span(parent).get_span_context().is_valid:
        return runs.no_span()
    attributes = {c.AGENT_NAME: agent_name, c.AGENT_DESCRIPTION: kwargs.get("agent_description")}
    return Creation(runs.start(c.CREATE_AGENT, agent_name, attributes, parent=parent))


class Creation(AbstractContextManager[Span]):
    """The making of an agent, as an operation."""

    def __init__(self, operation: capture.Operation) -> None:
        self._operation = operation

    def __enter__(self) -> Span:
        return self._operation.span

    def __exit__(self, kind: object, exc: BaseException | None, traceback: object) -> None:
        if exc is None:
            capture.guarded(self._operation.stop)
        else:
            capture.guarded(self._operation.fail, exc)
