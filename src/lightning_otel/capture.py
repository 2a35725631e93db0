"""The one lifecycle of everything captured, and the fence around it.

An operation is started, then stopped or failed exactly once; whatever goes wrong in here is counted
and logged once, and never reaches the traced program. Message content does not ride on the span:
it is handed to our own processor beside it, so that no other exporter sees it unless the user
allows that, and the SDK's attribute limits cannot cut it.
"""

import contextlib
import itertools
import logging
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Final, ParamSpec, Protocol, TypeVar

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode
from opentelemetry.util.types import AttributeValue

from lightning_otel import config, debugging
from lightning_otel import conventions as c
from lightning_otel.errors import warn_once
from lightning_otel.redact import scrub, scrub_error

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_FRAME_KEY = otel_context.create_key("lightning-otel-frame")
_OPERATION_KEY = otel_context.create_key("lightning-otel-operation")
(_SPAN_KEY,) = trace.set_span_in_context(trace.INVALID_SPAN, Context())
"""Where a context holds its span: to set several values at once costs what one does."""
_SUPPRESS_KEY = "suppress_instrumentation"
"""Set by OpenTelemetry's own ``suppress_instrumentation()``. Others have keys by which one of their
instrumentors silences another, and these are not for us: what is recorded twice is joined later."""
_MESSAGE_LIMIT = 8192
_NO_BODY: Mapping[str, str] = {}
_NUMBERS = frozenset(
    {c.PROMPT_TOKEN_IDS, c.RESPONSE_TOKEN_IDS, c.RESPONSE_LOGPROBS, c.LOGPROB_TOKEN_IDS}
)
"""Content that holds no words: base64 can look like a secret by chance, and must not be changed."""

_attached_here: ContextVar[Context | None] = ContextVar("lightning-otel-attached", default=None)


class SpanSink(Protocol):
    """A sink of recorded spans; both methods return at once and never raise."""

    def started(
        self, span: Any, stamps: Mapping[str, AttributeValue], transforms: Sequence[Any] = ()
    ) -> None:
        """Note a started SDK span, so that it is known if its process dies.

        Args:
            span: The span.
            stamps: Attributes for its record, where it has none of that name; not for the span.
            transforms: Functions that it passes through before it is kept, now and as it ends.
        """

    def ended(self, span: Any, body: Mapping[str, str]) -> None:
        """Keep an ended SDK span; ``body`` holds the content that is not on the span."""


class Applied(Protocol):
    """Gives what a request is to be made with; never raises, and never waits for long."""

    def given(self, key: str, agent: str | None, pinned: Mapping[str, int]) -> Mapping[str, Any]:
        """By name the version of each resource that a key, an agent and what is pinned give."""

    def held(self, standings: Mapping[str, Any] | None = None) -> "Applied":
        """The same for one rollout, which ends with what its first request was given.

        Args:
            standings: What that was, if it was made in another process.
        """


@dataclass(frozen=True, slots=True)
class Frame:
    """The recording in force; it travels in OpenTelemetry's context.

    Attributes:
        sink: Receives the spans; None records nothing.
        stamps: Attributes of every record, such as rollout and attempt id.
        parent: Context that spans take as parent where the current one holds no span.
        recording: Whose frame it is; None for the frame of a whole process.
        asks_for_ids: Whether requests ask their server for the token ids it works with.
        applied: Gives what requests are made with instead of what the agent wrote; None if nothing.
        process_stamps: As ``stamps``, in traces alone that no span of the program's own opened.
        transforms: Functions that spans pass through before they are kept.
    """

    sink: SpanSink | None
    stamps: Mapping[str, AttributeValue] = field(default_factory=dict)
    parent: Context | None = None
    recording: object = None
    asks_for_ids: bool = False
    applied: Applied | None = None
    process_stamps: Mapping[str, AttributeValue] = field(default_factory=dict)
    transforms: Sequence[Any] = ()


class _Process:
    """State of this process.

    Attributes:
        frame: The recording in force wherever the context names none.
        is_global: Whether calls outside any recording become spans, as OpenTelemetry users expect.
        is_wanted_outside: Decides otherwise about calls outside any recording.
        tracer: The tracer of all our spans, of whatever provider is or will be set.
        exporters: How many exporters of ours wait for ended spans.
        faults: Faults of ours that were kept from the program.
        content: Where content may go; kept because a look-up costs 2 us a call.
        frameworks: Each gives its innermost open operation by what the framework itself carries,
            such as its own context variable; asked for every operation, in order, so they must be
            quick.
    """

    def __init__(self) -> None:
        self.frame: Frame | None = None
        self.is_global = False
        self.is_wanted_outside: Callable[[], bool] = bool
        self.exporters = 0
        self.faults = 0
        self.tracer: trace.Tracer | None = None
        self.content = config.content()
        self.asks_for_ids = config.is_retokenization_fix_enabled()
        self.frameworks: Mapping[Callable[[], Operation | None], None] = {}


process: Final = _Process()


def refresh_settings() -> None:
    """Read the settings anew that are kept."""
    process.content = config.content()
    process.asks_for_ids = config.is_retokenization_fix_enabled()
    if process.frame is not None:
        process.frame = replace(process.frame, asks_for_ids=process.asks_for_ids)


def content_policy() -> config.Content:
    """Return the policy for message content, as last read."""
    return process.content


def asks_for_ids() -> bool:
    """Return whether a request asks its server for token ids."""
    frame = current_frame()
    return process.asks_for_ids if frame is None else frame.asks_for_ids


def applied() -> Applied | None:
    """Return the source of a request's resources; None if nothing is to be substituted."""
    frame = current_frame()
    return None if frame is None else frame.applied


def begin_rollout() -> dict[str, AttributeValue]:
    """Stamps of a rollout that nobody named."""
    return {c.ROLLOUT_ID: f"rollout-{secrets.token_hex(8)}", c.ATTEMPT_ID: "1"}


def current_frame(context: Context | None = None) -> Frame | None:
    """The frame of a context (default: the current one), else the process's own."""
    held = otel_context.get_current() if context is None else context
    frame = held.get(_FRAME_KEY)
    return frame if isinstance(frame, Frame) else process.frame


def in_frame(frame: Frame, context: Context | None = None) -> Context:
    """A context that carries the frame."""
    return otel_context.set_value(_FRAME_KEY, frame, context)


def parent_context() -> Context:
    """The context new spans start in: the current one, put under what encloses it.

    That is a framework's innermost operation, where the framework calls us in a context that knows
    nothing of it; and the frame's parent span, where the context holds no span of its own.
    """
    context = _beside_a_call(otel_context.get_current())
    for innermost in process.frameworks:
        operation = guarded(innermost)
        if operation is None or operation.encloses(context):
            continue
        if _rollout_of(operation.context) == _rollout_of(context):
            return operation.within(context)
    frame = current_frame(context)
    if frame is None or frame.parent is None:
        return context
    if trace.get_current_span(context).get_span_context().is_valid:
        return context
    # Only the span: whatever else the program put into its context is still there.
    return trace.set_span_in_context(trace.get_current_span(frame.parent), context)


def _beside_a_call(context: Context) -> Context:
    """The context without a framework's call whose request is over: the next stands beside it."""
    call = operation_of(context)
    if call is None or not (call.is_claimed and call.is_over):
        return context
    if context.get(_SPAN_KEY) is not call.span:  # a span of the program's is nearer
        return context
    around = trace.get_current_span(call.parent)
    return Context({**context, _SPAN_KEY: around, _OPERATION_KEY: call.outer})


def _rollout_of(context: Context) -> object:
    frame = current_frame(context)
    return frame.stamps.get(c.ROLLOUT_ID) if frame is not None else None


class attached:  # noqa: N801  # used as a function; a generator would cost a call a microsecond more
    """Make a context current for a block, and leave quietly if the block ends in another one.

    A block left in another context (a generator closed by another task) must not detach: that would
    log "Failed to detach context" and put a stranger's context back.
    """

    __slots__ = ("_context", "_mark", "_token")

    def __init__(self, context: Context) -> None:
        self._context = context

    def __enter__(self) -> None:
        self._mark = _attached_here.set(self._context)
        self._token = otel_context.attach(self._context)

    def __exit__(self, *exc: object) -> None:
        if otel_context.get_current() is self._context and self._is_here():
            otel_context.detach(self._token)

    def _is_here(self) -> bool:
        # A task that copied this context looks the same, but cannot take back what was set here.
        try:
            _attached_here.reset(self._mark)
        except ValueError:
            return False
        return True


def note_fault() -> None:
    """Count a fault of ours that is being handled; the first one is a warning, the rest debug."""
    process.faults += 1
    if debugging.is_on:
        debugging.tell(f"fault   {type(sys.exception()).__name__}: {sys.exception()}")
    level = logging.WARNING if process.faults == 1 else logging.DEBUG
    with contextlib.suppress(Exception):  # the program's own log handlers may raise
        log.log(level, "a span could not be captured; the program goes on", exc_info=True)


def guarded(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T | None:
    """The function's result, or None with the fault counted: the fence of everything we hook in."""
    try:
        return function(*args, **kwargs)
    except Exception:  # noqa: BLE001  # capture never raises into the traced program
        note_fault()
        return None


def is_wanted() -> bool:
    """Return whether a call made here and now should become a span."""
    context = otel_context.get_current()
    if current_frame(context) is None and not (
        process.is_global or guarded(process.is_wanted_outside)
    ):
        if debugging.is_on:
            debugging.tell_missed(
                "no recording is open here; use auto_trace(), carried() or lightning-otel run"
            )
        return False
    if not context.get(_SUPPRESS_KEY):
        return True
    if debugging.is_on:
        debugging.tell_missed("the program suppresses instrumentation here")
    return False


def is_wanted_of_one() -> bool:
    """Return True, as an object traced by itself always makes spans; warn where none is kept."""
    is_kept = current_frame() is not None or not isinstance(
        trace.get_tracer_provider(), trace.ProxyTracerProvider
    )
    if not is_kept and config.is_enabled():
        warn_once(
            "a run of a wrapped object was not recorded; name a store: "
            "wrap_langchain(agent, store=…), or record with auto_trace()"
        )
    return True


_LIBRARIES: Final = ("autogen", "litellm", "openinference.", "opentelemetry.instrumentation.")
"""Beginnings of the names under which libraries make spans of models and agents."""
_MODEL_KEYS: Final = ("gen_ai.", "llm.", "openinference.", "traceloop.")


def is_of_program(span: Any) -> bool:
    """Return whether a span tells of a request or a task of the program, which is a rollout then.

    Not one of a model, an agent or a recording, whichever library made it.
    """
    scope = getattr(getattr(span, "instrumentation_scope", None), "name", "")
    kind = getattr(span, "kind", None)
    if kind in (SpanKind.SERVER, SpanKind.CONSUMER):
        return not scope.startswith("autogen")  # messages between agents
    return (
        kind is SpanKind.INTERNAL
        and scope != c.SCOPE
        and not scope.startswith(_LIBRARIES)
        and not any(key.startswith(_MODEL_KEYS) for key in span.attributes or ())
    )


class Beside:
    """What is kept with the ids of an ended span, and goes into no copy of them.

    The SDK's queues hold the ids as long as the span and no longer.

    Attributes:
        body: The span's content, while it ends, and until it is exported.
        sink: Where a processor keeps the span; of two processors in a process the first one does.
        is_kept: Whether its end was kept.
    """

    __slots__ = ("body", "is_kept", "sink")

    def __init__(self) -> None:
        self.body: Mapping[str, str] = _NO_BODY
        self.sink: SpanSink | None = None
        self.is_kept = False

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # who unpickles a copy may have no lightning-otel


_EXPORTED_ROLLOUT: Final[Mapping[str, Any]] = begin_rollout()
"""Stamps, for exporters, of what the process does in none of the program's own traces."""


def beside(span: SpanContext) -> Beside:
    """Return what is kept with a span's ids."""
    held = getattr(span, "__dict__", {})  # without one, as of another tracer's, nothing is kept
    found: Beside | None = held.get("lightning_otel")
    if found is None:  # not yet, or of a copy
        found = held["lightning_otel"] = Beside()
    return found


class Operation:
    """One captured operation: stopped or failed once, later attempts do nothing.

    Attributes:
        span: Its span.
        outer: The operation it stands in, of whichever library.
        parent: The context it stands in.
        request: What the instrumentor that sends its request keeps with it.
        is_claimed: Whether that instrumentor took it over from a framework.
        is_over: Whether it was stopped or failed.
        attributes: Set on the span at its end.
        body: Content, kept beside the span at its end.
    """

    __slots__ = (
        "_count_end",
        "attributes",
        "body",
        "is_claimed",
        "is_over",
        "outer",
        "parent",
        "request",
        "span",
    )

    def __init__(
        self,
        name: str,
        kind: SpanKind,
        attributes: Mapping[str, AttributeValue],
        body: dict[str, str] | None = None,
        start_ns: int | None = None,
        parent: Context | None = None,
    ) -> None:
        """Start the span.

        Args:
            name: Span name.
            kind: Span kind.
            attributes: Set at the start, where samplers see them.
            body: Content known at the start, kept beside the span.
            start_ns: Start time, if it lies in the past.
            parent: The context it stands in; by default what :func:`parent_context` finds.
        """
        if parent is None:
            parent = parent_context()
        frame = current_frame(parent)
        # On spans of ours, so that other exporters' readers can tell rollouts apart, too.
        given = {**frame.stamps, **attributes} if frame is not None else {**attributes}
        if process.tracer is None:
            process.tracer = trace.get_tracer(c.SCOPE)
        self.span = process.tracer.start_span(
            name, parent, kind=kind, attributes=_repair_texts(given), start_time=start_ns
        )
        self.outer = operation_of(parent)
        self.parent = parent
        self.attributes: dict[str, AttributeValue] = {}
        self.body: dict[str, str] = body or {}
        self.request: object = None
        self.is_claimed = False
        self.is_over = False
        # Without a lock, which a thread may die holding as the interpreter ends: a stream may be
        # finished by its reader and by the garbage collector of another thread at once.
        self._count_end = itertools.count().__next__

    @property
    def context(self) -> Context:
        """The context of what happens within it.

        Made anew each time: kept here, it would hold what holds it, and the span and all its
        content would wait for the garbage collector.
        """
        return self.within(self.parent)

    def within(self, context: Context) -> Context:
        """A context with this operation as what is under way, and all else as it was."""
        return Context({**context, _SPAN_KEY: self.span, _OPERATION_KEY: self})

    def encloses(self, context: Context) -> bool:
        """Return whether the context is this operation's own, or one inside it."""
        found = operation_of(context)
        while found is not None and found is not self:
            found = found.outer
        return found is self

    def stop(self) -> None:
        """End the span with what was gathered in ``attributes`` and ``body``."""
        self._end("", "")

    def fail(self, exc: BaseException) -> None:
        """End the span as failed by an exception, which is the caller's to raise again."""
        self._end(type_name(exc), message_of(exc))

    def fail_with(self, error_type: str, message: str) -> None:
        """End the span as failed where there is no exception, such as an error inside a stream."""
        self._end(error_type, clean(message))

    def _end(self, error_type: str, message: str) -> None:
        self.is_over = True
        if self._count_end():
            return
        if error_type:
            self.attributes[c.ERROR_TYPE] = error_type
            self.span.set_status(Status(StatusCode.ERROR, message))
        body = _NO_BODY
        if process.content.is_kept:
            body = {k: v if k in _NUMBERS else scrub(v) for k, v in self.body.items()}
        if process.content.is_exported:
            self.attributes.update(body)
        self.span.set_attributes(_repair_texts(self.attributes))
        context = self.span.get_span_context()
        is_exported = process.exporters and context.trace_flags.sampled
        kept = beside(context)
        kept.body = {**self._process_stamps(), **body} if is_exported else body
        try:
            self.span.end()
        finally:
            if not is_exported:
                kept.body = _NO_BODY

    def _process_stamps(self) -> Mapping[str, str]:
        """Return the stamps for an exporter alone, where no frame gave the span any."""
        if current_frame(self.parent) is not None:
            return _NO_BODY
        top = self
        while top.outer is not None:
            top = top.outer
        around = trace.get_current_span(top.parent)
        return _NO_BODY if is_of_program(around) else _EXPORTED_ROLLOUT


def operation_of(context: Context | None = None) -> Operation | None:
    """The operation under way in a context (default: the current one), of whichever library."""
    held = otel_context.get_current() if context is None else context
    found = held.get(_OPERATION_KEY)
    return found if isinstance(found, Operation) else None


def clean(text: str) -> str:
    """Text that every exporter can carry: valid UTF-8 and of bounded length.

    One lone surrogate in a status message makes OTLP drop the whole batch.
    """
    return str(_valid_text(text[:_MESSAGE_LIMIT]))


def _repair_texts(attributes: dict[str, AttributeValue]) -> dict[str, AttributeValue]:
    """Return the attributes, now without the lone surrogates that text may hold."""
    for key, value in attributes.items():
        if type(value) is str:
            if not value.isascii():
                attributes[key] = _valid_text(value)
        elif type(value) is list:
            attributes[key] = [_valid_text(item) for item in value]
    return attributes


def _valid_text(value: Any) -> Any:
    return value.encode("utf-8", "replace").decode("utf-8") if isinstance(value, str) else value


def scrubbed(text: str) -> str:
    """Remove secrets from an error's text."""
    return clean(scrub_error(text))


def message_of(exc: BaseException) -> str:
    """Return an exception's message; its own ``__str__`` may raise, which is no fault of ours."""
    try:
        text = str(exc)
    except Exception:  # noqa: BLE001  # whatever it raises must not replace the exception itself
        return ""
    # Cut before and after: scrubbing a long text costs, and must not lose the end of a secret.
    return scrubbed(text[: 2 * _MESSAGE_LIMIT])


def type_name(exc: BaseException) -> str:
    """The exception's qualified class name, without ``builtins``."""
    cls = type(exc)
    return (
        cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
    )
