"""Agents: ``invoke_agent`` around each run of one, in place of AutoGen's own span."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from opentelemetry import context as otel_context
from opentelemetry.context import Context
from opentelemetry.trace import Span

from lightning_otel import capture
from lightning_otel import conventions as c
from lightning_otel.instrumentors.autogen import runs, said
from lightning_otel.instrumentors.doors import named
from lightning_otel.instrumentors.reading import fields_of

_AGENT_KEY = otel_context.create_key("lightning-otel-autogen-agent")

IsWanted = Callable[[], bool]
Spans = Callable[..., AbstractContextManager[Span]]


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


def begun(
    given: str | None, *, name: str, description: str | None, agent_id: str | None
) -> capture.Operation:
    """The operation of an agent's run, told these messages."""
    return runs.start(
        f"{c.INVOKE_AGENT} {name}",
        {
            c.OPERATION: c.INVOKE_AGENT,
            c.AGENT_NAME: name,
            c.AGENT_DESCRIPTION: description,
            c.AGENT_ID: agent_id,
        },
        {} if given is None else {c.INPUT_MESSAGES: given},
    )


def begin_run(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> AgentRun:
    """Begin the run of ``BaseChatAgent.run`` or ``run_stream``, which AutoGen has a span of."""
    return _begin_run(args[0], kwargs.get("task"), has_native_span=True)


def begin_messages(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> AgentRun | None:
    """Begin that of ``on_messages`` or its stream: a run, if the program calls it itself."""
    if otel_context.get_value(_AGENT_KEY) == id(args[0]):
        return None
    messages = named(("messages",), args, kwargs).get("messages")
    return _begin_run(args[0], messages, has_native_span=False)


def _begin_run(agent: Any, task: object, *, has_native_span: bool) -> AgentRun:
    given = said.given(task) if capture.content_policy().is_kept else None
    operation = begun(given, name=agent.name, description=agent.description, agent_id=None)
    context = working(runs.inside(operation), agent)
    if has_native_span:
        context = runs.NativeSpan(operation).within(context)
    return AgentRun(operation, context)


def working(context: Context, agent: object) -> Context:
    """A context in which an agent is at work."""
    # By identity alone: a context may outlive the agent, and must not keep it.
    return otel_context.set_value(_AGENT_KEY, id(agent), context)


def native_span(is_wanted: IsWanted) -> Callable[[Spans], Spans]:
    """Return the replacement of AutoGen's own span of a run: none, if ours is there."""

    def make(original: Spans) -> Spans:
        def trace_invoke_agent_span(*args: Any, **kwargs: Any) -> AbstractContextManager[Span]:
            found = capture.guarded(runs.take_native) if is_wanted() else None
            return original(*args, **kwargs) if found is None else found

        return trace_invoke_agent_span

    return make


def create_span(is_wanted: IsWanted) -> Callable[[Spans], Spans]:
    """Return the replacement of AutoGen's span of an agent's creation.

    Outside a run that would be a trace of its own, of a span that says nothing.
    """

    def make(original: Spans) -> Spans:
        def trace_create_agent_span(*args: Any, **kwargs: Any) -> AbstractContextManager[Span]:
            if not is_wanted():
                return original(*args, **kwargs)
            return capture.guarded(_Creation, *args, **kwargs) or runs.no_span()

        return trace_create_agent_span

    return make


class _Creation(AbstractContextManager[Span]):
    """The making of an agent, as an operation if something encloses it."""

    def __init__(self, agent_name: str, **kwargs: Any) -> None:
        self._name = agent_name
        self._description = kwargs.get("agent_description")
        self._operation: capture.Operation | None = None

    def __enter__(self) -> Span:
        capture.guarded(self._begin)
        return runs.no_span().__enter__() if self._operation is None else self._operation.span

    def _begin(self) -> None:
        parent = capture.parent_context()
        if not runs.has_span(parent):
            return
        self._operation = runs.start(
            f"{c.CREATE_AGENT} {self._name}",
            {
                c.OPERATION: c.CREATE_AGENT,
                c.AGENT_NAME: self._name,
                c.AGENT_DESCRIPTION: self._description,
            },
            parent=parent,
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._operation is None:
            return
        if exc is None:
            capture.guarded(self._operation.stop)
        else:
            capture.guarded(self._operation.fail, exc)
