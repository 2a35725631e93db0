"""A global tracer provider that gives way to the one the program sets.

OpenTelemetry lets a process set its provider once. When the program sets one, that takes over, also
for every tracer made before.
"""

import functools
import inspect
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.propagators.textmap import Setter, TextMapPropagator, default_setter
from opentelemetry.sdk.trace import TracerProvider

from lightning_otel import config
from lightning_otel.types import conventions as c

Join = Callable[[trace.TracerProvider], None]


class GlobalProvider(TracerProvider):
    """Ours, until the program sets its ``successor``."""

    successor: trace.TracerProvider | None = None

    def get_tracer(self, *args: Any, **options: Any) -> trace.Tracer:
        """Make a tracer that follows whichever provider is at work."""
        return _RecordingTracer(self, args, options)

    def make_tracer(self, *args: Any, **options: Any) -> trace.Tracer:
        """Make a tracer of whichever provider is at work now."""
        if self.successor is not None:
            return self.successor.get_tracer(*args, **options)
        return super().get_tracer(*args, **options)

    def _handle_fork(self) -> None:
        """Take a new lock and the child's instance id; the SDK's own method starts threads."""
        from opentelemetry.sdk.resources import ServiceInstanceIdResourceDetector

        self._tracers_lock = threading.Lock()
        self._update_resource(ServiceInstanceIdResourceDetector().detect())

    def install(self, join: Join, *, is_hidden: Callable[[], bool]) -> trace.TracerProvider:
        """Become the global provider unless one is set; return it. ``join`` the program's."""
        proxy, find, set_once = trace.get_tracer_provider(), *_api_functions()
        set_once(self)
        if find() is not self:
            return find()

        @functools.wraps(find)
        def get_tracer_provider() -> trace.TracerProvider:
            return self.successor or (proxy if is_hidden() else self)

        @functools.wraps(set_once)
        def set_tracer_provider(tracer_provider: trace.TracerProvider) -> None:
            if self.successor is not None:
                set_once(tracer_provider)  # which says that there is one
                return
            join(tracer_provider)
            self.successor = tracer_provider

        trace.get_tracer_provider = get_tracer_provider
        trace.set_tracer_provider = set_tracer_provider
        if not config.is_set("OTEL_PROPAGATORS"):
            propagate.set_global_textmap(_Propagator(propagate.get_global_textmap(), self))
        return self


def _api_functions() -> tuple[Callable[[], trace.TracerProvider], Callable[[Any], None]]:
    return trace.get_tracer_provider, trace.set_tracer_provider


class _RecordingTracer(trace.Tracer):
    def __init__(self, provider: GlobalProvider, args: Any, options: Any) -> None:
        self._provider = provider
        self._args = args
        self._options = options
        self._found: tuple[Any, trace.Tracer] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._current_tracer(), name)

    def start_span(self, *args: Any, **options: Any) -> trace.Span:
        return self._current_tracer().start_span(*args, **options)

    def start_as_current_span(self, *args: Any, **options: Any) -> Any:
        return _CurrentSpan(lambda: self._current_tracer().start_as_current_span(*args, **options))

    def _current_tracer(self) -> trace.Tracer:
        successor, cache = self._provider.successor, self._found
        if cache is None or cache[0] is not successor:
            tracer = self._provider.make_tracer(*self._args, **self._options)
            cache = self._found = successor, tracer
        return cache[1]


class _CurrentSpan(AbstractContextManager[trace.Span]):
    def __init__(self, start: Callable[[], Any]) -> None:
        self._start = start

    def __enter__(self) -> trace.Span:
        self._block = self._start()
        return self._block.__enter__()  # type: ignore[no-any-return]  # a tracer's block gives its span

    def __exit__(self, *exc: Any) -> Any:
        return self._block.__exit__(*exc)

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            return self._start()(function)(*args, **options)

        @functools.wraps(function)
        async def call_async(*args: Any, **options: Any) -> Any:
            return await call(*args, **options)

        return call_async if inspect.iscoroutinefunction(function) else call


class _Propagator(TextMapPropagator):
    """Keeps the ids of our spans from others, while the program has no provider that makes some."""

    def __init__(self, inner: TextMapPropagator, provider: GlobalProvider) -> None:
        self._inner = inner
        self._provider = provider

    def extract(self, *args: Any, **options: Any) -> Context:
        return self._inner.extract(*args, **options)

    def inject(
        self, carrier: Any, context: Context | None = None, setter: Setter[Any] = default_setter
    ) -> None:
        span = trace.get_current_span(context).get_span_context()
        if self._provider.successor is None and not span.is_remote:
            context = trace.set_span_in_context(trace.INVALID_SPAN, context)
        self._inner.inject(carrier, context, setter)

    @property
    def fields(self) -> set[str]:
        return self._inner.fields


def make_quiet_tracer(ids: Any) -> trace.Tracer:
    """Make a tracer whose spans the store takes, and nobody else."""
    from lightning_otel.exporters.duckdb import FrameSpanProcessor

    quiet = GlobalProvider(id_generator=ids, shutdown_on_exit=False)
    quiet.add_span_processor(FrameSpanProcessor({c.SUPPRESSED: True}))
    return quiet.make_tracer(c.SCOPE)
