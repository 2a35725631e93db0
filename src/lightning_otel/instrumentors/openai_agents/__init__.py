"""Agents, hand-offs, tools and guardrails of the OpenAI Agents SDK as spans, and its model calls.

The SDK's own span and trace objects are watched, not a trace processor: that is lost to
``set_trace_processors``, hears nothing where tracing is disabled, and adding one makes the exporter
that sends to OpenAI.
"""

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from opentelemetry import context as otel_context

from lightning_otel import capture
from lightning_otel.capture import operations
from lightning_otel.instrumentors.base import LibraryInstrumentor, Patch
from lightning_otel.instrumentors.openai_agents.model import AgentsModelCall
from lightning_otel.instrumentors.openai_agents.spans import SESSION_KEY, SdkSpans
from lightning_otel.instrumentors.wrappers import (
    ContextRun,
    Make,
    WrappedRun,
    bind_names,
    wrap_call,
    wrap_generator,
)


class OpenAIAgentsInstrumentor(LibraryInstrumentor):
    """Switches the capture of ``agents`` on and off; ``agents`` itself is never imported."""

    requires = ("openai-agents >= 0.20",)

    def patches(self) -> Mapping[str, Patch]:
        """The modules of its spans, traces, models, tools and runner."""
        return {
            "agents.tracing.spans": self._patch_spans,
            "agents.tracing.traces": self._patch_traces,
            "agents.tracing.provider": self._patch_provider,
            "agents.models.interface": self._patch_models,
            "agents.tool_context": self._patch_tools,
            "agents.run": self._patch_runner,
        }

    def innermost(self) -> operations.Operation | None:
        """Return the operation of the SDK's innermost span under way."""
        return _spans.innermost()

    # Any package may be called "agents": one that is not the SDK lacks these names, and is left.

    def _patch_spans(self, module: ModuleType) -> None:
        _spans.scope = getattr(module, "Scope", None)
        for name in ("SpanImpl", "NoOpSpan"):
            self._wrap_if_there(module, name, "start", wrap_call(self.if_wanted(self._start_span)))
            self._wrap_if_there(module, name, "finish", _told(_spans.finish))
        self._wrap_if_there(module, "NoOpSpan", "set_error", _told(_spans.note_error))

    def _patch_traces(self, module: ModuleType) -> None:
        for name in ("TraceImpl", "NoOpTrace", "ReattachedTrace"):
            self._wrap_if_there(module, name, "start", wrap_call(self.if_wanted(_start_trace)))
            self._wrap_if_there(module, name, "finish", _told(_spans.finish))

    def _patch_provider(self, module: ModuleType) -> None:
        wrapper = _made(_spans.note_names)
        self._wrap_if_there(module, "DefaultTraceProvider", "create_trace", wrapper)

    def _patch_models(self, module: ModuleType) -> None:
        base = getattr(module, "Model", None)
        if isinstance(base, type):
            begin = self.if_wanted(_begin_call)
            methods = {"get_response": wrap_call(begin), "stream_response": wrap_generator(begin)}
            self.wrap_family(base, methods)

    def _patch_tools(self, module: ModuleType) -> None:
        self._wrap_if_there(module, "ToolContext", "__init__", _made(_spans.note_tool_call))

    def _patch_runner(self, module: ModuleType) -> None:
        for name in ("run", "run_streamed"):
            # The task that a streamed run starts copies the context.
            self._wrap_if_there(module, "AgentRunner", name, wrap_call(self.if_active(_in_session)))

    def _start_span(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        arguments = bind_names(("mark_as_current",), args, kwargs)
        _spans.start(args[0], is_current=bool(arguments.get("mark_as_current")))

    def _wrap_if_there(self, module: ModuleType, owner: str, name: str, make: Any) -> None:
        cls = getattr(module, owner, None)
        if isinstance(cls, type) and name in cls.__dict__:
            self.wrap(cls, name, make)


_spans = SdkSpans()


def _start_trace(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    _spans.start_trace(args[0])


def _told(note: Callable[..., None]) -> Make:
    return wrap_call(lambda args, kwargs: note(*args, **kwargs))


def _made(note: Callable[..., None]) -> Make:
    def make(original: Any) -> Any:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            capture.guard_call(note, self if result is None else result, *args, **kwargs)
            return result

        return method

    return make


def _in_session(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> WrappedRun | None:
    if not kwargs.get("session"):
        return None
    session_id = capture.read_attribute(kwargs["session"], "session_id")
    conversation_id = session_id if isinstance(session_id, str) else None
    return ContextRun(otel_context.set_value(SESSION_KEY, conversation_id))


def _begin_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> AgentsModelCall | None:
    """Begin a call; None where a model only hands on what was asked of it."""
    if operations.unclaimed_call() is not None:
        return None
    outer = operations.current_call()
    # A model that asks several others makes calls beside each other.
    parent = None if outer is None else outer.parent
    return AgentsModelCall(args[0], args[1:], kwargs, _spans.conversation(), parent)
