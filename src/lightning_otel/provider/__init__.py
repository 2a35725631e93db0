"""The tracer provider and the instrumentors: what must be in place before anything is recorded.

Builds or joins the tracer provider, never replaces one; faults leave the program untraced, with
one warning.
"""

import functools
import logging
import os
import sys
import threading
from collections.abc import Iterable
from dataclasses import replace
from importlib import import_module
from secrets import randbits
from typing import Any, Final

from opentelemetry import trace

from lightning_otel import capture, config, debugging
from lightning_otel.capture.metrics import start_metrics
from lightning_otel.errors import ConfigError, warn_once
from lightning_otel.provider import startup
from lightning_otel.provider.libraries import ENTRIES, INSTRUMENTORS, PARTS
from lightning_otel.provider.sdk_settings import SAMPLER, sampler_fault, warn_of_exporters
from lightning_otel.types import conventions as c

log = logging.getLogger(__name__)

_RANDOM_IDS: Final = ("opentelemetry.sdk.trace.id_generator", "RandomIdGenerator")


class _Setup:
    def __init__(self) -> None:
        self.provider: Any = None
        self.own: Any = None
        self.sender: Any = None
        self.is_broken = False
        self.wanted: set[str] = set()
        self.awaited: set[str] = set()
        # Guards provider and the instrumentors: of several threads that begin at once one sets up.
        self.lock = threading.Lock()
        self.is_otlp_elsewhere = config.RUN.read()


_setup = _Setup()


class _Ids:
    """Ids of spans and traces from ``os.urandom``; ``random.seed()`` cannot repeat them.

    A training script that seeds would reuse the ids of its last run: spans count as repeated.

    Source: the methods of ``opentelemetry.sdk.trace.id_generator.IdGenerator``, which is not
    imported for them.
    """

    generate_span_id = staticmethod(functools.partial(randbits, 64))
    generate_trace_id = staticmethod(functools.partial(randbits, 128))

    def is_trace_id_random(self) -> bool:
        return True


def ensure_provider() -> None:
    """Put our processor into the global provider, or set one that serves OTLP, too."""
    try:
        if _is_set_up():
            return
        with _setup.lock:
            if _is_set_up():
                return
            provider: Any = trace.get_tracer_provider()
            if isinstance(provider, trace.ProxyTracerProvider):
                provider = _set_provider()
            if provider is not _setup.own:
                _join_provider(provider)
    except Exception:
        _setup.is_broken = True
        raise


def _is_set_up() -> bool:
    return _setup.own is not None or trace.get_tracer_provider() is _setup.provider


def is_broken() -> bool:
    """Return whether OpenTelemetry could not be set up: a bad number in its environment."""
    return _setup.is_broken


def _set_provider() -> Any:
    from lightning_otel.exporters.duckdb import FrameSpanProcessor
    from lightning_otel.provider.global_provider import GlobalProvider

    ids: Any = _Ids()
    provider = GlobalProvider(id_generator=ids)
    provider.add_span_processor(FrameSpanProcessor())
    if (fault := sampler_fault()) and not config.RUN.read():  # else run says it
        log.warning("%s; unset %s", fault, SAMPLER.name)
    current = provider.install(_join_provider, is_hidden=lambda: capture.process.frame is not None)
    if current is provider:
        if not _setup.is_otlp_elsewhere and config.wants_otlp():
            capture.guard_call(_send_out, provider)
        protocol = config.otlp_setting("PROTOCOL", "METRICS")
        capture.guard_call(start_metrics, config.exporters("METRICS"), protocol)
        _setup.provider = _setup.own = provider
        capture.process.tracer = provider.make_tracer(c.SCOPE)
    return current


def _send_out(provider: Any) -> None:
    from lightning_otel.exporters.forwarding.process import ForwardingProcessor

    _setup.sender = ForwardingProcessor()
    provider.add_span_processor(_setup.sender)


def _join_provider(provider: Any) -> None:
    from lightning_otel.exporters.duckdb import FrameSpanProcessor

    add = getattr(provider, "add_span_processor", None)
    if add is not None or _setup.own is None:
        tracer = provider.get_tracer(c.SCOPE)
        ids = type(getattr(tracer, "id_generator", None))
        if (ids.__module__, ids.__name__) == _RANDOM_IDS:  # else the user chose some
            tracer.id_generator = _Ids()
        if add is None:
            log.warning("cannot record: the tracer provider %r takes no processors", provider)
        else:
            if _setup.sender is not None:
                _setup.sender.shutdown()  # the program's exporters send now
            add(FrameSpanProcessor())
        capture.process.tracer = tracer
    _setup.provider = provider


@functools.cache
def _quiet_tracer() -> Any:
    from lightning_otel.provider import global_provider

    return global_provider.make_quiet_tracer(_Ids())


def _make_quiet_tracer() -> trace.Tracer:
    tracer, otel_resource = _quiet_tracer(), getattr(_setup.provider, "resource", None)
    if otel_resource is not None:  # it changes with a provider of the program's, and in a fork
        tracer.resource = otel_resource
    return tracer  # type: ignore[no-any-return]  # the SDK's


capture.process.make_quiet_tracer = _make_quiet_tracer


def leave_otlp_to_the_store() -> None:
    """Send nothing from this process: somebody else forwards what it stores."""
    _setup.is_otlp_elsewhere = True


def instrument(libraries: str | Iterable[str] | None = None) -> None:
    """Switch on the instrumentors of installed libraries.

    They capture what happens within recordings; and everything, where the program has a tracer
    provider of its own for it. Where it has neither, the first call that is not captured warns.

    Args:
        libraries: Names out of ``INSTRUMENTORS``; all of them by default.

    Raises:
        ConfigError: There is no instrumentor of that name.
    """
    switch_on(libraries)
    capture.process.is_wanted_outside = _is_wanted_outside
    capture.watch_starts()


def _is_wanted_outside() -> bool:
    provider = trace.get_tracer_provider()
    if not isinstance(provider, trace.ProxyTracerProvider):
        return provider is not _setup.own
    if _setup.provider is None and config.is_enabled():
        warn_once(
            "a call was not recorded: instrument() only switches the capture on; record with "
            "auto_trace() or lightning-otel run, or set a tracer provider with a "
            "LightningSpanProcessor()"
        )
    return False


def switch_on(libraries: str | Iterable[str] | None = None) -> None:
    """Switch on the instrumentors of installed libraries, within recordings only."""
    from lightning_otel.instrumentors import threads
    from lightning_otel.instrumentors.patches import when_imported

    names = [libraries] if isinstance(libraries, str) else libraries
    entries = {name: ENTRIES.get(name, name) for name in INSTRUMENTORS}
    disabled = config.DISABLED.read()  # by the names of pyproject.toml's entry points
    enabled = {name for name in entries if f"lightning-{entries[name]}" not in disabled}
    selected = enabled if names is None else set(names)
    for library in selected - INSTRUMENTORS.keys():
        raise ConfigError(
            f"no instrumentor for {library!r}; there is one for {', '.join(INSTRUMENTORS)}"
        )
    capture.guard_call(capture.refresh_settings)
    with _setup.lock:
        capture.guard_call(threads.carry_context)
        _setup.wanted |= selected
        for library in selected:
            if library in sys.modules:
                capture.guard_call(_switch_on, library)
            elif library not in _setup.awaited:
                _setup.awaited.add(library)
                when_imported(library, _switch_on)
                for part in PARTS.get(library, ()):
                    when_imported(part, functools.partial(_patch_part, library))


def _switch_on(library: str) -> None:
    if library in _setup.wanted:
        instrumentor = _instrumentor_of(library)
        if not instrumentor.is_instrumented_by_opentelemetry:
            parts = PARTS.get(library, ())
            instrumentor.instrument(skip_dep_check=True, only_in_recordings=True, parts=parts)
            if debugging.is_on:
                debugging.log(f"on      the instrumentor of {library}")


def _patch_part(library: str, part: str) -> None:
    if library in _setup.wanted:
        _instrumentor_of(library).patch_imported(part)


def log_instrumentors() -> None:
    """Tell which libraries are instrumented, and which will be once they are imported."""
    is_imported = {library: library in sys.modules for library in _setup.wanted}
    on = [library for library in sorted(is_imported) if is_imported[library]]
    pending = [library for library in sorted(is_imported) if not is_imported[library]]
    debugging.log(
        f"on      instrumentors of {', '.join(on) or 'nothing yet'}; "
        f"once imported: {', '.join(pending) or 'none'}"
    )


def uninstrument() -> None:
    """Switch every instrumentor off again and put the libraries' own methods back."""
    from lightning_otel.instrumentors import threads

    capture.process.is_wanted_outside = bool
    with _setup.lock:
        _setup.wanted.clear()
        threads.leave_context()
        for library, place in INSTRUMENTORS.items():
            if place.partition(":")[0] in sys.modules:
                instrumentor = _instrumentor_of(library)
                if instrumentor.is_instrumented_by_opentelemetry:
                    instrumentor.uninstrument()


@functools.cache
def _instrumentor_of(library: str) -> Any:
    module, _, name = INSTRUMENTORS[library].partition(":")
    return getattr(import_module(module), name)()


def pre_instrument() -> None:
    """The hook of ``opentelemetry-instrument``, for ``OTEL_TRACES_EXPORTER`` with ``duckdb`` in it.

    Under ``lightning-otel run`` it records in any case, in place of ``run``'s own start. The stock
    configurator puts any exporter behind a ``BatchSpanProcessor``, which loses spans; our own
    processor loses none, and our exporter stands back.
    """
    if not config.is_enabled():
        return
    is_asked = "duckdb" in config.exporters() or config.RUN.read()
    if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        # Else the SDK was set up with what is named.
        served = {"none", "duckdb", *(["otlp"] if is_asked else [])}
        capture.guard_call(warn_of_exporters, set(config.exporters()) - served)
    if is_asked:
        capture.guard_call(start_process)


def start_process() -> None:
    """Record everything this process does from here on, into the default store.

    It is a part of the environment's rollout, or a rollout in which the program may open others.
    """
    from lightning_otel.store import SpanStore

    program_id = startup.enter_process()
    if program_id is None:
        return
    if config.CHILDREN.read() == "none":
        os.register_at_fork(after_in_child=_leave_process)
    capture.refresh_settings()
    debugging.take_setting()
    store = SpanStore()
    assigner = capture.guard_call(assigner_of, store) if config.APPLY.read() else None
    writer = store.writer()
    if debugging.is_on:
        debugging.log(f"on      process {os.getpid()} keeps its spans in {store.name}")
    ensure_provider()
    inherited = config.inherited_rollout()
    stamps = dict(zip((c.ROLLOUT_ID, c.ATTEMPT_ID), inherited or (), strict=False))
    capture.process.frame = capture.Frame(
        writer,
        {**stamps, c.EXECUTED: program_id} if program_id else stamps,
        startup.inherited_parent(),
        asks_for_ids=config.RETOKENIZATION_FIX.read(),
        assigner=assigner,
        process_stamps={} if stamps else capture.begin_rollout(),
        has_tasks=config.RUN.read() and not config.RUN_IS_NAMED.read(),
    )


def _leave_process() -> None:
    capture.process.frame = None


def enable_retokenization_fix() -> None:
    """Have all requests from now on ask servers for the token ids and logprobs they work with."""
    config.set_retokenization_fix()
    capture.refresh_settings()


def assigner_of(store: Any, *, is_asked: bool = True) -> capture.ResourceAssigner | None:
    """Return the source of requests' resources; unasked, only from a file beside the store."""
    from lightning_otel.instrumentors.substitution.watcher import state_file, watch_of

    layout = store.local.layout
    place = config.STATE.read() or (str(layout.catalogue) if layout is not None else None)
    file = state_file(place)
    if not is_asked and (file is None or not file.has_published()):
        return None
    if place is None:
        log.warning(
            "resources are not applied: %s is not on this machine; set %s",
            store.name,
            config.STATE.name,
        )
        return None

    def open_reader() -> Any:
        if file is not None:
            return file
        # Imports SQLAlchemy: in the background, and only where something is to be applied.
        from lightning_otel.resources import Resources
        from lightning_otel.state import State

        return Resources(State(place))

    return watch_of(place, open_reader)


def start_run_child() -> None:
    """Start recording in a Python process under ``lightning-otel run``, by the agent it names."""
    if config.is_enabled():
        capture.guard_call(start_process)
        capture.guard_call(switch_on)
    agent, frame = config.RUN_AGENT.read(), capture.current_frame()
    if agent and frame is not None:
        capture.process.frame = replace(frame, stamps={c.AGENT_NAME: agent, **frame.stamps})
