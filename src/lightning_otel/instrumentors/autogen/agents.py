"""Agents: ``invoke_agent`` around each run of one, in place of AutoGen's own span."""

import functools
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from opentelemetry import context as otel_context
from opentelemetry.context import Context
from opentelemetry.trace import Span

from lightning_otel import capture
from lightning_otel import conventions as c
from lightning_otel.instrumentors.autogen import runs, said
from lightning_otel.instrumentors.generators import walked

_AGENT_KEY = otel_context.create_key("lightning-otel-autogen-agent")

IsWanted = Callable[[], bool]
Spans = Callable[..., AbstractContextManager[Span]]


class AgentRun(runs.Run):
    """A run of an agent; its last message is its answer."""

    def saw(self, item: Any) -> None:
        """Keep an agent's answer, which stands in its response or in its result."""
        held = said.fields_of(item)
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


def _begin(
    is_wanted: IsWanted, agent: Any, task: object, *, has_native_span: bool
) -> AgentRun | None:
    if not is_wanted():
        return None
    given = said.given(task) if capture.content_policy().is_kept else None
    name, description = agent.name, agent.description
    operation = begun(given, name=name, description=description, agent_id=None)
    context = working(runs.inside(operation), agent)
    if has_native_span:
        context = runs.NativeSpan(operation).within(context)
    return AgentRun(operation, context)


def working(context: Context, agent: object) -> Context:
    """A context in which an agent is at work."""
    # By identity alone: a context may outlive the agent, and must not keep it.
    return otel_context.set_value(_AGENT_KEY, id(agent), context)


def _is_at_work(agent: object) -> bool:
    """Whether what happens here is a part of a run of the agent that has its span."""
    return otel_context.get_value(_AGENT_KEY) == id(agent)


def run(is_wanted: IsWanted) -> Callable[[Any], Any]:
    """What stands in for ``BaseChatAgent.run``."""

    def make(original: Any) -> Any:
        async def run(self: Any, **kwargs: Any) -> Any:
            task = kwargs.get("task")
            begin = functools.partial(_begin, is_wanted, self, task, has_native_span=True)
            return await runs.call(begin, original, self, **kwargs)

        return run

    return make


def run_stream(is_wanted: IsWanted) -> Callable[[Any], Any]:
    """What stands in for ``BaseChatAgent.run_stream``."""

    def make(original: Any) -> Any:
        def run_stream(self: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
            task = kwargs.get("task")
            begin = functools.partial(_begin, is_wanted, self, task, has_native_span=True)
            return walked(begin, original(self, **kwargs))

        return run_stream

    return make


def on_messages(is_wanted: IsWanted) -> Callable[[Any], Any]:
    """What stands in for an agent's ``on_messages``: a run, if the program calls it itself."""

    def make(original: Any) -> Any:
        async def on_messages(self: Any, messages: Any, *args: Any, **kwargs: Any) -> Any:
            if _is_at_work(self):
                return await original(self, messages, *args, **kwargs)
            begin = functools.partial(_begin, is_wanted, self, messages, has_native_span=False)
            return await runs.call(begin, original, self, messages, *args, **kwargs)

        return on_messages

    return make


def on_messages_stream(is_wanted: IsWanted) -> Callable[[Any], Any]:
    """What stands in for an agent's ``on_messages_stream``, likewise."""

    def make(original: Any) -> Any:
        def on_messages_stream(self: Any, messages: Any, *args: Any, **kwargs: Any) -> Any:
            inner = original(self, messages, *args, **kwargs)
            if _is_at_work(self) or not hasattr(inner, "athrow"):
                return inner
            begin = functools.partial(_begin, is_wanted, self, messages, has_native_span=False)
            return walked(begin, inner)

        return on_messages_stream

    return make


def native_span(is_wanted: IsWanted) -> Callable[[Spans], Spans]:
    """What stands in for AutoGen's own span of a run: nothing, where ours is there."""

    def make(original: Spans) -> Spans:
        def trace_invoke_agent_span(*args: Any, **kwargs: Any) -> AbstractContextManager[Span]:
            found = capture.guarded(runs.take_native) if is_wanted() else None
            return original(*args, **kwargs) if found is None else found

        return trace_invoke_agent_span

    return make


def create_span(is_wanted: IsWanted) -> Callable[[Spans], Spans]:
    """What stands in for AutoGen's span of an agent's making.

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
