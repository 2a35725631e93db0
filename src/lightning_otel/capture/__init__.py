"""Frames of recording, content beside spans, and the fence around all that is hooked in.

Faults in here are counted and logged once, and never reach the traced program. Content does not
ride on the span: it goes to our own processor beside it, so that no other exporter sees it unless
allowed, and the SDK's limits cannot cut it.
"""

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, ParamSpec, Protocol, TypeVar

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanContext
from opentelemetry.util.types import AttributeValue

from lightning_otel import config, debugging
from lightning_otel.capture.metrics import CallMeter, find_meter
from lightning_otel.redact.content import strip_content
from lightning_otel.redact.secrets import scrub_attributes
from lightning_otel.types import Span
from lightning_otel.types import conventions as c

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_FRAME_KEY = otel_context.create_key("lightning-otel-frame")
_SUPPRESS_KEY = "suppress_instrumentation"
"""OpenTelemetry's own key; instrumentors' keys are ignored: duplicates are joined later."""
NO_BODY: Final[Mapping[str, str]] = {}

_attached_here: ContextVar[Context | None] = ContextVar("lightning-otel-attached", default=None)


class SpanSink(Protocol):
    """A sink of recorded spans; both methods return at once and never raise."""

    def started(
        self,
        span: Any,
        stamps: Mapping[str, AttributeValue],
        transforms: Sequence[Any] = (),
        *,
        is_written: bool = True,
    ) -> None:
        """Note a started SDK span, so that it is known if its process dies.

        ``stamps`` are defaults of its record alone; ``transforms`` see it now and as it ends.
        Without ``is_written`` it is stored only once it has ended.
        """

    def ended(self, span: Any, body: Mapping[str, str]) -> None:
        """Keep an ended SDK span; ``body`` holds the content that is not on the span."""

    def stamps_of(self, trace_id: int, span_id: int) -> Mapping[str, AttributeValue] | None:
        """Return the stamps of a span that has not ended, as they were given; None of others."""

    def dismissed(self, span: Any) -> None:
        """Forget a started SDK span that is not to be kept."""


class ResourceAssigner(Protocol):
    """Gives what a request is to be made with; never raises, and never waits for long."""

    def assign(self, key: str, agent: str | None, pinned: Mapping[str, int]) -> Mapping[str, Any]:
        """By name the version of each resource that a key, an agent and what is pinned give."""

    def for_rollout(self, standings: Mapping[str, Any] | None = None) -> "ResourceAssigner":
        """Return the assigner of one rollout, pinned to what another process gave it."""


@dataclass(frozen=True, slots=True)
class Frame:
    """The recording in force; it travels in OpenTelemetry's context.

    Attributes:
        sink: None records nothing.
        stamps: Attributes of every record, such as rollout and attempt id.
        parent: Context that spans take as parent where the current one holds no span.
        recording: Whose frame it is; None for the frame of a whole process.
        process_stamps: As ``stamps``, for what belongs to no request that the process serves.
        has_tasks: Whether a block in it that names a task is a rollout of its own.
    """

    sink: SpanSink | None
    stamps: Mapping[str, AttributeValue] = field(default_factory=dict)
    parent: Context | None = None
    recording: object = None
    asks_for_ids: bool = False
    assigner: ResourceAssigner | None = None
    process_stamps: Mapping[str, AttributeValue] = field(default_factory=dict)
    transforms: Sequence[Any] = ()
    has_tasks: bool = False


class _ProcessState:
    """State of this process.

    Attributes:
        frame: The recording in force wherever the context names none.
        is_global: Whether calls outside any recording become spans, as OpenTelemetry users expect.
        is_wanted_outside: Overrides ``is_global``.
        exporters: The number of our exporters that wait for ended spans.
        content: Cached because a look-up costs 2 us a call.
        frameworks: Each returns its innermost open operation; called for every operation.
        meter: None where the program has no meter provider.
        make_quiet_tracer: Makes the tracer of spans that are for our sinks alone.
        watch_starts: Joins the program's provider for an exporter of ours, until that is done.
    """

    def __init__(self) -> None:
        self.frame: Frame | None = None
        self.is_global = False
        self.is_wanted_outside: Callable[[], bool] = bool
        self.exporters = 0
        self.faults = 0
        self.tracer: trace.Tracer | None = None
        self.content = config.content()
        self.asks_for_ids = config.RETOKENIZATION_FIX.read()
        self.frameworks: Mapping[Callable[[], Any], None] = {}
        self.meter: CallMeter | None = None
        self.make_quiet_tracer: Callable[[], trace.Tracer] | None = None
        self.watch_starts: Callable[[], None] | None = None


process: Final = _ProcessState()


def refresh_settings() -> None:
    """Read the settings anew that are kept."""
    process.content = config.content()
    process.asks_for_ids = config.RETOKENIZATION_FIX.read()
    process.meter = guard_call(find_meter, process.meter)
    if process.frame is not None:
        process.frame = replace(process.frame, asks_for_ids=process.asks_for_ids)


def watch_starts() -> None:
    """Let exporters of ours know of spans as they start, if there is a provider by now."""
    if process.watch_starts is not None:
        guard_call(process.watch_starts)


def storable_span(span: Span) -> Span:
    """Return a finished span without secrets, as the settings, read now, let it be stored."""
    span = replace(span, attributes=scrub_attributes({**span.attributes}))
    return span if config.content().is_kept else strip_content(span)


def asks_for_ids(frame: Frame | None) -> bool:
    """Return whether a request made in a frame asks its server for token ids."""
    return process.asks_for_ids if frame is None else frame.asks_for_ids


def begin_rollout() -> dict[str, AttributeValue]:
    """Stamps of a rollout that nobody named."""
    return {c.ROLLOUT_ID: f"rollout-{os.urandom(8).hex()}", c.ATTEMPT_ID: "1"}


def current_frame(context: Context | None = None) -> Frame | None:
    """The frame of a context (default: the current one), else of the recording it is within."""
    current = otel_context.get_current() if context is None else context
    frame = current.get(_FRAME_KEY)
    return frame if isinstance(frame, Frame) else _find_frame(current)


def set_frame(frame: Frame, context: Context | None = None) -> Context:
    """A context that carries the frame."""
    return otel_context.set_value(_FRAME_KEY, frame, context)


def framed_context(context: Context | None = None) -> Context:
    """Return a context with its recording's frame, which a library's own context may lack."""
    if context is None:
        context = otel_context.get_current()
    if context.get(_FRAME_KEY) is not None:
        return context
    frame, ours = _find_frame(context), _attached_here.get()
    if frame is None or frame is process.frame:
        return context
    if ours is not None and not trace.get_current_span(context).get_span_context().is_valid:
        context = trace.set_span_in_context(trace.get_current_span(ours), context)
    return set_frame(frame, context)


class _OpenFrame(NamedTuple):
    frame: Frame
    root: SpanContext
    owns_trace: bool


_open_frames: Final[dict[int, _OpenFrame]] = {}
"""By the frame's identity; a trace goes on where a context is lost."""


def open_frame(frame: Frame, outer: SpanContext, root: SpanContext) -> None:
    """Note that a block begins, with the span around it and its own; either may be invalid."""
    owns_trace = root.trace_id != outer.trace_id
    _open_frames[id(frame)] = _OpenFrame(frame, root, owns_trace)


def close_frame(frame: Frame) -> None:
    """Note that a block ends."""
    _open_frames.pop(id(frame), None)


def join_session(session_id: str) -> Context:
    """Return the context of the open block whose rollout or conversation has an id, else this."""
    context, frame = otel_context.get_current(), current_frame()
    for block in reversed([*_open_frames.values()]):
        stamps = block.frame.stamps
        if session_id in (stamps.get(c.ROLLOUT_ID), stamps.get(c.CONVERSATION_ID)):
            if frame is not None and frame.stamps == stamps:
                break
            span = trace.NonRecordingSpan(block.root)
            return set_frame(block.frame, trace.set_span_in_context(span, context))
    return context


def _find_frame(context: Context) -> Frame | None:
    """Return a context's frame by its span or trace, else the nearest block's or process's."""
    ours = _attached_here.get()
    if ours is None and not _open_frames:
        return process.frame
    frame = ours.get(_FRAME_KEY) if ours is not None else None
    nearest = frame if isinstance(frame, Frame) else None
    span = trace.get_current_span(context).get_span_context()
    return _frame_of_span(span, nearest) or process.frame


def _frame_of_span(span: SpanContext, nearest: Frame | None) -> Frame | None:
    blocks = list(_open_frames.values()) if span.is_valid else []
    for block in reversed(blocks):
        sink, stamps = block.frame.sink, block.frame.stamps
        if sink is not None and sink.stamps_of(span.trace_id, span.span_id) is stamps:
            return block.frame
    in_trace = [block for block in blocks if block.root.trace_id == span.trace_id]
    if not any(block.frame is nearest for block in in_trace):
        for block in reversed(in_trace):
            # In a trace that began outside the span may stand outside, too.
            if block.owns_trace or (nearest or process.frame) is None:
                return block.frame
    return nearest


class attach_context:  # noqa: N801  # used as a function; a generator would cost a call a microsecond more
    """Make a context current for a block, and leave quietly if the block ends in another one.

    To detach there, as of a generator that another task closes, would log "Failed to detach
    context" and restore a stranger's context.
    """

    __slots__ = ("_context", "_mark", "_token")

    def __init__(self, context: Context) -> None:
        self._context = context

    def __enter__(self) -> None:
        self._mark = _attached_here.set(self._context)
        self._token = otel_context.attach(self._context)

    def __exit__(self, *exc: object) -> None:
        if otel_context.get_current() is not self._context:
            if _attached_here.get() is self._context:  # another's context was left on top of it
                with contextlib.suppress(ValueError):
                    _attached_here.reset(self._mark)
            return
        try:
            _attached_here.reset(self._mark)
        except ValueError:  # a task that copied this context cannot take back what was set here
            return
        otel_context.detach(self._token)


def note_fault() -> None:
    """Count a fault of ours that is being handled; the first one is a warning, the rest debug."""
    process.faults += 1
    if debugging.is_on:
        debugging.log(f"fault   {type(sys.exception()).__name__}: {sys.exception()}")
    level = logging.WARNING if process.faults == 1 else logging.DEBUG
    with contextlib.suppress(Exception):  # the program's own log handlers may raise
        log.log(level, "a span could not be captured; the program goes on", exc_info=True)


def guard_call(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T | None:
    """Call it; count any exception instead of raising."""
    try:
        return function(*args, **kwargs)
    except Exception:  # noqa: BLE001  # capture never raises into the traced program
        note_fault()
        return None


def read_attribute(owner: object, name: str) -> Any:
    """Return an attribute of the program's; None without one, or where its property raises."""
    try:
        return getattr(owner, name, None)
    except Exception:  # noqa: BLE001  # the program's own business, and no fault of ours
        return None


def is_suppressed(context: Context) -> bool:
    """Return whether the program suppresses instrumentation in a context."""
    return bool(context.get(_SUPPRESS_KEY))


def is_wanted(context: Context | None = None) -> bool:
    """Return whether a call in a context should become a span; recordings ignore suppression."""
    if context is None:
        context = otel_context.get_current()
    if current_frame(context) is not None and process.make_quiet_tracer is not None:
        return True
    if not (process.is_global or guard_call(process.is_wanted_outside)):
        if debugging.is_on:
            debugging.log_missed(
                "no recording is open here; use auto_trace(), carried() or lightning-otel run"
            )
        return False
    if not is_suppressed(context):
        return True
    if debugging.is_on:
        debugging.log_missed("the program suppresses instrumentation here")
    return False


class SpanState:
    """State beside the ids of an ended span, which the SDK's queues hold as long as the span.

    Attributes:
        body: The span's content, while it ends, and until it is exported.
        sink: Where a processor keeps the span; of two processors the first one does.
        rollout: Stamps of its rollout, in a process that records all it does.
        stamps: Stamps of its record, where exporters of ours wait for it.
        is_doubtful: Whether it is kept only if it tells of models or agents as it ends.
    """

    body: Mapping[str, str] = NO_BODY
    sink: SpanSink | None = None
    is_kept = False
    rollout: Mapping[str, AttributeValue] | None = None
    stamps: Mapping[str, AttributeValue] | None = None
    is_doubtful = False

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # who unpickles a copy may have no lightning-otel


def state_of(span: SpanContext) -> SpanState:
    """Return what is kept with a span's ids."""
    fields = getattr(span, "__dict__", {})  # without one, as of another tracer's, nothing is kept
    state: SpanState | None = fields.get("lightning_otel")
    if state is None:  # not yet, or of a copy
        state = fields["lightning_otel"] = SpanState()
    return state
