"""Agents, hand-offs, tools and guardrails of the OpenAI Agents SDK as spans, and its model calls.

The SDK's own span and trace objects say what begins and ends. They are watched where they start and
finish, not through a trace processor: a processor is lost to ``set_trace_processors``, hears
nothing where tracing is disabled, and adding one makes the exporter that sends to OpenAI. So the
program's processors stay as they are, and nothing is sent that was not sent before.
"""

import inspect
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from opentelemetry import context as otel_context

from lightning_otel import capture
from lightning_otel.instrumentors.generators import walked
from lightning_otel.instrumentors.library import LibraryInstrumentor, Patch
from lightning_otel.instrumentors.openai_agents import model
from lightning_otel.instrumentors.openai_agents.spans import SESSION_KEY, SdkSpans


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

    def _instrument(self, **kwargs: Any) -> None:
        capture.add_framework(_spans.innermost)
        super()._instrument(**kwargs)

    def _uninstrument(self, **kwargs: Any) -> None:
        super()._uninstrument(**kwargs)
        capture.remove_framework(_spans.innermost)

    # Any package may be called "agents": one that is not the SDK lacks these names, and is left.

    def _patch_spans(self, module: ModuleType) -> None:
        _spans.scope = getattr(module, "Scope", None)
        for name in ("SpanImpl", "NoOpSpan"):
            self._wrap_if_there(module, name, "start", _start_span)
            self._wrap_if_there(module, name, "finish", _finish)
        self._wrap_if_there(module, "NoOpSpan", "set_error", _set_error)

    def _patch_traces(self, module: ModuleType) -> None:
        for name in ("TraceImpl", "NoOpTrace", "ReattachedTrace"):
            self._wrap_if_there(module, name, "start", _start_trace)
            self._wrap_if_there(module, name, "finish", _finish)

    def _patch_provider(self, module: ModuleType) -> None:
        self._wrap_if_there(module, "DefaultTraceProvider", "create_trace", _create_trace)

    def _patch_models(self, module: ModuleType) -> None:
        self._model = getattr(module, "Model", None)
        self.cover_models()

    def _patch_tools(self, module: ModuleType) -> None:
        self._wrap_if_there(module, "ToolContext", "__init__", _make_tool_context)

    def _patch_runner(self, module: ModuleType) -> None:
        self._wrap_if_there(module, "AgentRunner", "run", _run)
        self._wrap_if_there(module, "AgentRunner", "run_streamed", _run_streamed)

    def _wrap_if_there(self, module: ModuleType, owner: str, name: str, make: Any) -> None:
        found = getattr(module, owner, None)
        if isinstance(found, type) and name in found.__dict__:
            self.wrap(found, name, make)

    def cover_models(self) -> None:
        """Wrap each class of models there is by now: the program's own come after the import."""
        base = getattr(self, "_model", None)
        waiting: list[Any] = list(base.__subclasses__()) if isinstance(base, type) else []
        while waiting:
            found = waiting.pop()
            waiting += found.__subclasses__()
            own = found.__dict__
            if inspect.iscoroutinefunction(own.get("get_response")):
                self.wrap(found, "get_response", _get_response)
            if inspect.isfunction(own.get("stream_response")):
                self.wrap(found, "stream_response", _stream_response)


_instrumentor = OpenAIAgentsInstrumentor()
_spans = SdkSpans()


def _start_span(original: Any) -> Any:
    def start(self: Any, *args: Any, **kwargs: Any) -> Any:
        capture.guarded(_span_starts, self, *args, **kwargs)
        return original(self, *args, **kwargs)

    return start


def _span_starts(span: Any, mark_as_current: object = False) -> None:
    if _instrumentor.is_wanted():
        _spans.start(span, is_current=bool(mark_as_current))
        if span.span_data.type == "agent":
            _instrumentor.cover_models()


def _start_trace(original: Any) -> Any:
    def start(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _instrumentor.is_wanted():
            capture.guarded(_spans.start_trace, self)
        return original(self, *args, **kwargs)

    return start


def _finish(original: Any) -> Any:
    def finish(self: Any, *args: Any, **kwargs: Any) -> Any:
        capture.guarded(_spans.finish, self)
        return original(self, *args, **kwargs)

    return finish


def _set_error(original: Any) -> Any:
    def set_error(self: Any, error: Any) -> Any:
        capture.guarded(_spans.note_error, self, error)
        return original(self, error)

    return set_error


def _create_trace(original: Any) -> Any:
    def create_trace(self: Any, *args: Any, **kwargs: Any) -> Any:
        trace = original(self, *args, **kwargs)
        capture.guarded(_spans.note_names, trace, *args, **kwargs)
        return trace

    return create_trace


def _make_tool_context(original: Any) -> Any:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807  # the method's name
        original(self, *args, **kwargs)
        capture.guarded(_spans.note_tool_call, self)

    return __init__


def _session_context(kwargs: Mapping[str, Any]) -> otel_context.Context:
    """The context of a run, which knows the session whose conversation it goes on with."""
    session_id = getattr(kwargs.get("session"), "session_id", None)
    known = session_id if isinstance(session_id, str) else None
    return otel_context.set_value(SESSION_KEY, known)


def _run(original: Any) -> Any:
    async def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        context = capture.guarded(_session_context, kwargs) if kwargs.get("session") else None
        if context is None or not _instrumentor.is_active:
            return await original(self, *args, **kwargs)
        with capture.attached(context):
            return await original(self, *args, **kwargs)

    return run


def _run_streamed(original: Any) -> Any:
    def run_streamed(self: Any, *args: Any, **kwargs: Any) -> Any:
        context = capture.guarded(_session_context, kwargs) if kwargs.get("session") else None
        if context is None or not _instrumentor.is_active:
            return original(self, *args, **kwargs)
        # The task it starts copies the context.
        with capture.attached(context):
            return original(self, *args, **kwargs)

    return run_streamed


def _begin(of: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> model.ModelCall | None:
    if not _instrumentor.is_wanted():
        return None
    return model.ModelCall.begin(of, args, kwargs, _spans.conversation())


def _get_response(original: Any) -> Any:
    async def get_response(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = capture.guarded(_begin, self, args, kwargs)
        if call is None:
            return await original(self, *args, **kwargs)
        try:
            with capture.attached(call.context):
                response = await original(self, *args, **kwargs)
        except BaseException as exc:
            capture.guarded(call.fail, exc)
            raise
        capture.guarded(call.answered, response)
        return response

    return get_response


def _stream_response(original: Any) -> Any:
    def stream_response(self: Any, *args: Any, **kwargs: Any) -> Any:
        stream = original(self, *args, **kwargs)
        if not inspect.isasyncgen(stream) or not capture.guarded(_instrumentor.is_wanted):
            return stream
        return walked(lambda: _begin(self, args, kwargs), stream)

    return stream_response
