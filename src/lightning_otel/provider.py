"""The tracer provider and the instrumentors: what must be in place before anything is recorded.

Builds or joins the tracer provider, never replaces one; whatever goes wrong here, the program runs
on untraced, with one warning.
"""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags
from opentelemetry.util.types import AttributeValue

from lightning_otel import capture, config
from lightning_otel import conventions as c

log = logging.getLogger(__name__)

INSTRUMENTORS: Mapping[str, str] = {
    "openai": "lightning_otel.instrumentors.openai:OpenAIInstrumentor",
}
"""The library each instrumentor needs, and where it stands."""


class _Setup:
    """What was set up in this process: the provider joined, the instrumentors switched on."""

    def __init__(self) -> None:
        self.provider: Any = None
        self.is_otlp_elsewhere = config.is_run_child()


_setup = _Setup()


def ensure_provider() -> None:
    """Put our processor into the global provider, or set one that has it.

    In a provider of ours the user's OTLP endpoint is served too; in a joined one that is the
    business of whoever built it.
    """
    from opentelemetry.sdk.trace import TracerProvider

    from lightning_otel.exporters.duckdb import LightningSpanProcessor

    provider = trace.get_tracer_provider()
    if provider is _setup.provider:
        return
    is_own = isinstance(provider, trace.ProxyTracerProvider)
    if is_own:
        provider = TracerProvider()
    add = getattr(provider, "add_span_processor", None)
    if add is None:
        log.warning("cannot record: the tracer provider %r takes no processors", provider)
        return
    add(LightningSpanProcessor())
    if is_own:
        if not _setup.is_otlp_elsewhere and wants_otlp():
            capture.guarded(_add_otlp, provider)
        trace.set_tracer_provider(provider)
    _setup.provider = provider


def leave_otlp_to_the_store() -> None:
    """Attach no OTLP exporter in this process: its spans are forwarded from their segments."""
    _setup.is_otlp_elsewhere = True


def wants_otlp() -> bool:
    """Whether the user's environment asks for spans to be sent out by OTLP."""
    named = config.traces_exporters()
    return "none" not in named and ("otlp" in named or config.has_otlp_endpoint())


def _add_otlp(provider: Any) -> None:
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    from lightning_otel.exporters.otlp import otlp_exporter

    provider.add_span_processor(BatchSpanProcessor(otlp_exporter()))


def instrument(libraries: Iterable[str] | None = None) -> None:
    """Switch on the instrumentors of installed libraries, within recordings only.

    Args:
        libraries: Names out of ``INSTRUMENTORS``; all of them by default.
    """
    from importlib import import_module
    from importlib.util import find_spec

    from lightning_otel.instrumentors import threads

    capture.refresh_settings()
    threads.carry_context()
    for library in libraries if libraries is not None else INSTRUMENTORS:
        if find_spec(library) is None:
            continue
        module, _, name = INSTRUMENTORS[library].partition(":")
        instrumentor = getattr(import_module(module), name)()
        if not instrumentor.is_instrumented_by_opentelemetry:
            instrumentor.instrument(skip_dep_check=True, only_in_recordings=True)


def uninstrument() -> None:
    """Switch every instrumentor off again and put the libraries' own methods back."""
    from importlib import import_module

    from lightning_otel.instrumentors import threads

    threads.leave_context()
    for where in INSTRUMENTORS.values():
        module, _, name = where.partition(":")
        instrumentor = getattr(import_module(module), name)()
        if instrumentor.is_instrumented_by_opentelemetry:
            instrumentor.uninstrument()


def pre_instrument() -> None:
    """The hook of ``opentelemetry-instrument``, for ``OTEL_TRACES_EXPORTER`` with ``duckdb`` in it.

    The stock configurator puts any exporter behind a ``BatchSpanProcessor``, which loses spans; a
    processor of our own loses none, and our exporter then stands back.
    """
    if "duckdb" in config.traces_exporters() and config.is_enabled():
        capture.guarded(start_process)


def start_process() -> None:
    """Record everything this process does from here on, into the default store."""
    from lightning_otel.store.layout import Layout
    from lightning_otel.store.segment import writer_for

    capture.refresh_settings()
    writer = writer_for(Layout(config.store_path()))
    ensure_provider()
    stamps: dict[str, AttributeValue] = {}
    inherited = config.inherited_rollout()
    if inherited is not None:
        stamps[c.ROLLOUT_ID], stamps[c.ATTEMPT_ID] = inherited
    capture.set_process_frame(capture.Frame(writer, stamps, _inherited_parent()))


def start_run_child() -> None:
    """What ``lightning-otel run`` does first in each Python process of its child."""
    if config.is_enabled():
        capture.guarded(start_process)
        capture.guarded(instrument)


def _inherited_parent() -> Context | None:
    """The parent process's span as a context, from the W3C ``traceparent`` in the environment."""
    parts = (config.inherited_trace_parent() or "").split("-")
    if len(parts) < 4:
        return None
    try:
        context = SpanContext(
            int(parts[1], 16), int(parts[2], 16), is_remote=True, trace_flags=TraceFlags(1)
        )
    except ValueError:
        return None
    return trace.set_span_in_context(NonRecordingSpan(context), otel_context.Context())
