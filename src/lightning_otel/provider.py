"""The tracer provider and the instrumentors: what must be in place before anything is recorded.

Builds or joins the tracer provider, never replaces one; whatever goes wrong here, the program runs
on untraced, with one warning.
"""

import logging
import os
import secrets
import sys
import threading
from collections.abc import Iterable, Mapping
from typing import Any, Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from lightning_otel import capture, config, debugging
from lightning_otel import conventions as c
from lightning_otel.errors import ConfigError

log = logging.getLogger(__name__)

INSTRUMENTORS: Mapping[str, str] = {
    "openai": "lightning_otel.instrumentors.openai:OpenAIInstrumentor",
    "langchain_core": "lightning_otel.instrumentors.langchain:LangChainInstrumentor",
    "autogen_core": "lightning_otel.instrumentors.autogen:AutoGenInstrumentor",
    "agents": "lightning_otel.instrumentors.openai_agents:OpenAIAgentsInstrumentor",
    "crewai": "lightning_otel.instrumentors.crewai:CrewAIInstrumentor",
    "litellm": "lightning_otel.instrumentors.openai.litellm:LiteLLMInstrumentor",
    "autogen": "lightning_otel.instrumentors.ag2:AG2Instrumentor",
    "ag2": "lightning_otel.instrumentors.ag2:AG2Instrumentor",
}
"""The library each instrumentor is for, and where it stands: imported when its library is."""


_RANDOM_IDS: Final = ("opentelemetry.sdk.trace.id_generator", "RandomIdGenerator")


class _Setup:
    """What was set up in this process: the provider joined, the libraries to be instrumented."""

    def __init__(self) -> None:
        self.provider: Any = None
        self.is_broken = False
        self.wanted: set[str] = set()
        self.awaited: set[str] = set()
        # Guards provider and the instrumentors: of several threads that begin at once one sets up.
        self.lock = threading.Lock()
        self.is_otlp_elsewhere = config.is_run_child()


_setup = _Setup()


class _Ids:
    """Ids of spans and traces from the system's chance, which no program can seed.

    OpenTelemetry's own come from Python's ``random``: a program that seeds it, as every training
    script does, would use the ids of its last run again, and its spans count as repeated.

    Source: the methods of ``opentelemetry.sdk.trace.id_generator.IdGenerator``, which is not
    imported for them: they are all that is asked of it.
    """

    def generate_span_id(self) -> int:
        """Any of 64 bits but nought, which stands for none."""
        return secrets.randbits(64) or self.generate_span_id()

    def generate_trace_id(self) -> int:
        """Any of 128 bits but nought."""
        return secrets.randbits(128) or self.generate_trace_id()

    def is_trace_id_random(self) -> bool:
        """Whether samplers may draw by them."""
        return True


def ensure_provider() -> None:
    """Put our processor into the global provider, or set one that has it.

    In a provider of ours the user's OTLP endpoint is served too; in a joined one that is the
    business of whoever built it.
    """
    try:
        if trace.get_tracer_provider() is not _setup.provider:
            with _setup.lock:
                _setup.provider = _joined_or_set(trace.get_tracer_provider())
    except Exception:
        _setup.is_broken = True
        raise


def is_broken() -> bool:
    """Whether OpenTelemetry could not be set up once: what it refuses it will refuse again.

    Its SDK cannot even be imported where a number in its environment is none.
    """
    return _setup.is_broken


def _joined_or_set(found: Any) -> Any:
    if isinstance(found, trace.ProxyTracerProvider):
        found = _set_provider()
    elif found is not _setup.provider:
        _join(found)
    capture.use_tracer(_tracer_of(found))
    return found


def _tracer_of(provider: Any) -> trace.Tracer:
    """Our tracer of a provider; of the user's it has ids of our own, unless they chose some."""
    tracer = provider.get_tracer(c.SCOPE)
    given = type(getattr(tracer, "id_generator", None))
    if (given.__module__, given.__name__) == _RANDOM_IDS:
        tracer.id_generator = _Ids()
    return tracer  # type: ignore[no-any-return]  # whatever the provider is, this is its tracer


def _set_provider() -> Any:
    from opentelemetry.sdk.trace import TracerProvider

    ids: Any = _Ids()
    provider = TracerProvider(id_generator=ids)
    _join(provider)
    if not _setup.is_otlp_elsewhere and wants_otlp():
        capture.guarded(_add_otlp, provider)
    trace.set_tracer_provider(provider)
    return provider


def _join(provider: Any) -> None:
    from lightning_otel.exporters.duckdb import LightningSpanProcessor

    add = getattr(provider, "add_span_processor", None)
    if add is None:
        log.warning("cannot record: the tracer provider %r takes no processors", provider)
    else:
        add(LightningSpanProcessor())


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


def instrument(libraries: str | Iterable[str] | None = None) -> None:
    """Switch on the instrumentors of installed libraries, within recordings only.

    Args:
        libraries: Names out of ``INSTRUMENTORS``; all of them by default.

    Raises:
        ConfigError: There is no instrumentor of that name.
    """
    from lightning_otel.instrumentors import threads
    from lightning_otel.instrumentors.library import when_imported

    named = [libraries] if isinstance(libraries, str) else libraries
    asked = set(INSTRUMENTORS if named is None else named)
    for library in asked - set(INSTRUMENTORS):
        raise ConfigError(
            f"no instrumentor for {library!r}; there is one for {', '.join(INSTRUMENTORS)}"
        )
    capture.refresh_settings()
    with _setup.lock:
        threads.carry_context()
        _setup.wanted |= asked
        for library in asked:
            if library in sys.modules:
                _switch_on(library)
            elif library not in _setup.awaited:
                _setup.awaited.add(library)
                when_imported(library, _switch_on)


def _switch_on(library: str) -> None:
    """Switch an instrumentor on, now that its library is there; unless that was taken back."""
    if library in _setup.wanted:
        instrumentor = _instrumentor_of(library)
        if not instrumentor.is_instrumented_by_opentelemetry:
            instrumentor.instrument(skip_dep_check=True, only_in_recordings=True)
            if debugging.is_on:
                debugging.tell(f"on      the instrumentor of {library}")


def tell_instrumentors() -> None:
    """Tell which libraries are instrumented, and which will be once they are imported."""
    found = {library: library in sys.modules for library in _setup.wanted}
    on = [library for library in sorted(found) if found[library]]
    later = [library for library in sorted(found) if not found[library]]
    debugging.tell(
        f"on      instrumentors of {', '.join(on) or 'nothing yet'}; "
        f"once imported: {', '.join(later) or 'none'}"
    )


def uninstrument() -> None:
    """Switch every instrumentor off again and put the libraries' own methods back."""
    from lightning_otel.instrumentors import threads

    with _setup.lock:
        _setup.wanted.clear()
        threads.leave_context()
        for library, place in INSTRUMENTORS.items():
            if place.partition(":")[0] in sys.modules:
                instrumentor = _instrumentor_of(library)
                if instrumentor.is_instrumented_by_opentelemetry:
                    instrumentor.uninstrument()


def _instrumentor_of(library: str) -> Any:
    from importlib import import_module

    module, _, name = INSTRUMENTORS[library].partition(":")
    return getattr(import_module(module), name)()


def pre_instrument() -> None:
    """The hook of ``opentelemetry-instrument``, for ``OTEL_TRACES_EXPORTER`` with ``duckdb`` in it.

    Under ``lightning-otel run`` it records in any case: what ``run`` put into the process's start
    has made way for ``opentelemetry-instrument``'s own.

    The stock configurator puts any exporter behind a ``BatchSpanProcessor``, which loses spans; a
    processor of our own loses none, and our exporter then stands back.
    """
    is_asked = "duckdb" in config.traces_exporters() or config.is_run_child()
    if is_asked and config.is_enabled():
        capture.guarded(start_process)


def start_process() -> None:
    """Record everything this process does from here on, into the default store."""
    from lightning_otel.store import Store

    capture.refresh_settings()
    debugging.take_setting()
    store = Store()
    applied = capture.guarded(applied_of, store) if config.is_apply_enabled() else None
    is_kept = config.is_collect_enabled()
    if not is_kept and applied is None:
        return
    writer = store.writer() if is_kept else None
    if debugging.is_on:
        where = store.name if is_kept else "nowhere, as LIGHTNING_OTEL_COLLECT asks"
        debugging.tell(f"on      process {os.getpid()} keeps its spans in {where}")
    ensure_provider()
    stamps: dict[str, AttributeValue] = {}
    inherited = config.inherited_rollout()
    if inherited is not None:
        stamps[c.ROLLOUT_ID], stamps[c.ATTEMPT_ID] = inherited
    asks_for_ids = config.is_retokenization_fix_enabled()
    capture.set_process_frame(
        capture.Frame(
            writer, stamps, _inherited_parent(), asks_for_ids=asks_for_ids, applied=applied
        )
    )


def applied_of(store: Any) -> capture.Applied | None:
    """What gives requests their resources, read beside a store in the background.

    Args:
        store: The store; ``LIGHTNING_OTEL_STATE`` goes before it.
    """
    from lightning_otel.substitution.watching import Reader, watch_of

    layout = store.local.layout
    place = config.named_state() or (str(layout.catalogue) if layout is not None else None)
    if place is None:
        log.warning(
            "resources are not applied: %s is not on this machine; set %s",
            store.name,
            config.STATE_ENV,
        )
        return None

    def open_reader() -> Reader:
        # Imports SQLAlchemy: in the background, and only where something is to be applied.
        from lightning_otel.resources import Resources
        from lightning_otel.state import State

        return Resources(State(place))

    return watch_of(place, open_reader)


def start_run_child() -> None:
    """What ``lightning-otel run`` does first in each Python process of its child."""
    if config.is_enabled():
        capture.guarded(start_process)
        capture.guarded(instrument)


def _inherited_parent() -> Context | None:
    """The parent process's span as a context, from the W3C ``traceparent`` in the environment."""
    carrier = {"traceparent": config.inherited_trace_parent() or ""}
    read = TraceContextTextMapPropagator().extract(carrier, Context())
    parent = trace.get_current_span(read).get_span_context()
    if not parent.is_valid:
        return None
    # Taken for sampled whatever it says: this process was told to record.
    sampled = SpanContext(
        parent.trace_id, parent.span_id, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED)
    )
    return trace.set_span_in_context(NonRecordingSpan(sampled), Context())
