"""The one lifecycle of everything captured: it is started, then stopped or failed exactly once."""

import itertools
import traceback
from collections.abc import Mapping
from typing import Any

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.util.types import AttributeValue

from lightning_otel.capture import (
    NO_BODY,
    current_frame,
    framed_context,
    guard_call,
    is_suppressed,
    process,
    state_of,
)
from lightning_otel.redact import scrub, scrub_error
from lightning_otel.types import conventions as c
from lightning_otel.types.values import describe_exception

_CALL_KEY = otel_context.create_key("lightning-otel-call")
_OPERATION_KEY = otel_context.create_key("lightning-otel-operation")
(_SPAN_KEY,) = trace.set_span_in_context(trace.INVALID_SPAN, Context())
"""Where a context holds its span: to set several values at once costs what one does."""
_OUTSIDE_KEY = otel_context.create_key("lightning-otel-outside")
"""The span that the program sees within a hidden operation."""
_MESSAGE_LIMIT = 8192
_FRAMES = 100
"""Innermost frames of each exception in a stack trace."""
_NUMBERS = frozenset(
    {c.PROMPT_TOKEN_IDS, c.RESPONSE_TOKEN_IDS, c.RESPONSE_LOGPROBS, c.LOGPROB_TOKEN_IDS}
)
"""Content that holds no words: base64 can look like a secret by chance, and must not be changed."""
_BORDERS = (c.AGENT_NAME, c.TOOL_NAME, c.GUARDRAIL_NAME)
"""An operation given one of these, and not by its frame, asks models for itself."""


class Operation:
    """One captured operation: stopped or failed once, later attempts do nothing.

    Attributes:
        outer: The operation it stands in, of whichever library.
        request: State of the instrumentor that sends its request.
        is_claimed: Whether that instrumentor took it over from a framework.
        is_hidden: Whether its span is the store's alone: the program suppresses instrumentation.
        attributes: Set on the span at its end.
        body: Content, kept beside the span at its end.
        answer: The messages that the last call within it answered with; empty if none did.
        fault: The exception that failed an operation within it, whose stack trace is kept there.
        models: Provider and model of its calls, each pair once; None stands for unknown.
        first_input: The messages of its first call; empty if unknown.
        last_output: The messages that its last call answered with.
    """

    __slots__ = (
        "_count_end",
        "answer",
        "attributes",
        "body",
        "fault",
        "first_input",
        "is_border",
        "is_claimed",
        "is_hidden",
        "is_over",
        "last_output",
        "models",
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
        """Start the span, now or in the past; samplers see these ``attributes``.

        The context it stands in is by default what :func:`parent_context` finds.
        """
        if parent is None:
            parent = parent_context()
        frame = current_frame(parent)
        # On spans of ours, so that other exporters' readers can tell rollouts apart, too.
        start_attributes = {**frame.stamps, **attributes} if frame is not None else {**attributes}
        self.is_hidden = process.make_quiet_tracer is not None and is_suppressed(parent)
        self.span = _find_tracer(is_hidden=self.is_hidden).start_span(
            clean_text(name),
            inner_context(parent),
            kind=kind,
            attributes=_repair_texts(start_attributes),
            start_time=start_ns,
        )
        self.outer = operation_of(parent)
        self.parent = parent
        self.attributes: dict[str, AttributeValue] = {}
        self.body: dict[str, str] = body or {}
        self.answer = self.first_input = self.last_output = ""
        self.models: set[tuple[str | None, str | None]] = set()
        self.is_border = any(key in attributes for key in _BORDERS)
        self.fault: object = None
        self.request: object = None
        self.is_claimed = False
        self.is_over = False
        # Without a lock, which a thread may die holding as the interpreter ends: a stream may be
        # finished by its reader and by the garbage collector of another thread at once.
        self._count_end = itertools.count().__next__

    @property
    def context(self) -> Context:
        """Return the context of what happens within it: a cached one would be a cycle."""
        return self.within(self.parent)

    def within(self, context: Context) -> Context:
        """Return a context with this operation current, for a hidden one without its span."""
        if self.is_hidden:
            outside = context.get(_SPAN_KEY)
            return Context({**context, _OUTSIDE_KEY: outside, _OPERATION_KEY: self})
        return Context({**context, _SPAN_KEY: self.span, _OPERATION_KEY: self})

    def rename(self, name: str) -> None:
        """Give the span another name."""
        self.span.update_name(clean_text(name))

    def encloses(self, context: Context) -> bool:
        """Return whether the context is this operation's own, or one inside it."""
        operation = operation_of(context)
        while operation is not None and operation is not self:
            operation = operation.outer
        return operation is self

    def stop(self) -> None:
        """End the span with what was gathered in ``attributes`` and ``body``."""
        self._end("", "")

    def fail(self, exc: BaseException) -> None:
        """End the span as failed by an exception, which is the caller's to raise again."""
        message = message_of(exc)
        # Not the exception itself, which would hold all frames that it went through.
        fault = id(exc), type(exc), message
        if process.content.is_kept and fault != self.fault and not self.is_over:
            self.body[c.EXCEPTION_STACKTRACE] = stack_of(exc)
        if self.outer is not None:
            self.outer.fault = fault
        self._end(type_name(exc), message)

    def fail_with(self, error_type: str, message: str) -> None:
        """End the span as failed where there is no exception, such as an error inside a stream."""
        self._end(error_type, clean_text(message))

    def _end(self, error_type: str, message: str) -> None:
        self.is_over = True
        if self._count_end():
            return
        if error_type:
            self.attributes[c.ERROR_TYPE] = error_type
            self.span.set_status(Status(StatusCode.ERROR, message))
        if self.models and self._find_text(c.OPERATION) == c.INVOKE_AGENT:
            self._describe_agent()
        if process.content.is_exported and c.EXCEPTION_STACKTRACE in self.body:
            stack = self.body.pop(c.EXCEPTION_STACKTRACE)
            self.span.add_event(c.EVENT_EXCEPTION, describe_exception(error_type, message, stack))
        body = NO_BODY
        if process.content.is_kept:
            body = {k: v if k in _NUMBERS else scrub(v) for k, v in self.body.items()}
            answer = body.get(c.OUTPUT_MESSAGES) or self.answer
            if answer and self.outer is not None:
                self.outer.answer = answer
        if process.content.is_exported:
            self.attributes.update(body)
        self._tell_outer(body)
        self.span.set_attributes(_repair_texts(self.attributes))
        context = self.span.get_span_context()
        is_exported = process.exporters and context.trace_flags.sampled
        state = state_of(context)
        state.body = body
        try:
            self.span.end()
        finally:
            if not is_exported:
                state.body = NO_BODY
            if process.meter is not None and not self.is_hidden:
                guard_call(process.meter.note_end, self.span)

    def _find_text(self, key: str) -> str | None:
        """Return a text that is set at its end, else one it was started with."""
        known = getattr(self.span, "attributes", None) or {}
        value = self.attributes.get(key, known.get(key))
        return value if isinstance(value, str) else None

    def _describe_agent(self) -> None:
        """Say of an agent what its calls agree on, its first input and its last output."""
        for place, key in enumerate((c.PROVIDER, c.REQUEST_MODEL)):
            names = {pair[place] for pair in tuple(self.models)}
            if len(names) == 1 and (name := names.pop()):
                self.attributes[key] = name
        sides = {c.INPUT_MESSAGES: self.first_input, c.OUTPUT_MESSAGES: self.last_output}
        self.body = {key: text for key, text in sides.items() if text} | self.body

    def _tell_outer(self, body: Mapping[str, str]) -> None:
        """Tell the operation around it of its calls, unless it made them for itself."""
        is_own = self.is_border or c.AGENT_NAME in self.attributes
        if is_own or self.outer is None or self.is_hidden != self.outer.is_hidden:
            return
        if self._find_text(c.OPERATION) in c.GENERATIVE_OPERATIONS:
            self.models = {(self._find_text(c.PROVIDER), self._find_text(c.REQUEST_MODEL))}
            self.first_input = body.get(c.INPUT_MESSAGES, "")
            self.last_output = body.get(c.OUTPUT_MESSAGES, "")
        self.outer.models |= self.models
        self.outer.first_input = self.outer.first_input or self.first_input
        self.outer.last_output = self.last_output or self.outer.last_output


def _find_tracer(*, is_hidden: bool) -> trace.Tracer:
    if is_hidden and process.make_quiet_tracer is not None:
        return process.make_quiet_tracer()
    if process.tracer is None:
        process.tracer = trace.get_tracer(c.SCOPE)
    return process.tracer


def operation_of(context: Context | None = None) -> Operation | None:
    """The operation under way in a context (default: the current one), of whichever library."""
    current = otel_context.get_current() if context is None else context
    operation = current.get(_OPERATION_KEY)
    return operation if isinstance(operation, Operation) else None


def inner_context(context: Context) -> Context:
    """The context with the span that spans of ours stand in, be it hidden from the program."""
    operation = operation_of(context)
    if operation is None or not operation.is_hidden or not _is_nearest(operation, context):
        return context
    return trace.set_span_in_context(operation.span, context)


def _is_nearest(operation: Operation, context: Context) -> bool:
    """Return whether no span of the program's stands between an operation and what begins now."""
    nearest = context.get(_OUTSIDE_KEY) if operation.is_hidden else operation.span
    return context.get(_SPAN_KEY) is nearest


def clean_text(text: str) -> str:
    """Return text of bounded length; OTLP drops a whole batch for one lone surrogate."""
    return str(_valid_text(text[:_MESSAGE_LIMIT]))


def _repair_texts(attributes: dict[str, AttributeValue]) -> dict[str, AttributeValue]:
    for key, value in attributes.items():
        if type(value) is str:
            if not value.isascii():
                attributes[key] = _valid_text(value)
        elif type(value) is list:
            attributes[key] = [_valid_text(item) for item in value]
    return attributes


def _valid_text(value: Any) -> Any:
    return value.encode("utf-8", "replace").decode("utf-8") if isinstance(value, str) else value


def scrub_message(text: str) -> str:
    """Remove secrets from an error's text."""
    return clean_text(scrub_error(text))


def message_of(exc: BaseException) -> str:
    """Return an exception's message; its own ``__str__`` may raise, which is no fault of ours."""
    try:
        text = str(exc)
    except Exception:  # noqa: BLE001  # whatever it raises must not replace the exception itself
        return ""
    # Cut before and after: scrubbing a long text costs, and must not lose the end of a secret.
    return scrub_message(text[: 2 * _MESSAGE_LIMIT])


def stack_of(exc: BaseException) -> str:
    """Return the end of an exception's stack trace, without secrets: what failed stands there."""
    lines = guard_call(traceback.format_exception, exc, limit=-_FRAMES) or [type_name(exc)]
    # Cut before and after, as a message is.
    text = scrub_error("".join(lines)[-2 * _MESSAGE_LIMIT :])
    return clean_text(text[-_MESSAGE_LIMIT:])


def type_name(exc: BaseException) -> str:
    """The exception's qualified class name, without ``builtins``."""
    cls = type(exc)
    return (
        cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
    )


def parent_context(context: Context | None = None) -> Context:
    """Return the context new spans start in: a framework's operation or the frame's parent."""
    context = _outside_ended_call(framed_context(context))
    for innermost in process.frameworks:
        operation: Operation | None = guard_call(innermost)
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


def _outside_ended_call(context: Context) -> Context:
    """The context without a framework's call whose request is over: the next stands beside it."""
    call = operation_of(context)
    if call is None or not (call.is_claimed and call.is_over):
        return context
    if not _is_nearest(call, context):
        return context
    parent_span = trace.get_current_span(call.parent)
    return Context({**context, _SPAN_KEY: parent_span, _OPERATION_KEY: call.outer})


def _rollout_of(context: Context) -> object:
    frame = current_frame(context)
    return frame.stamps.get(c.ROLLOUT_ID) if frame is not None else None


# A framework knows which agent asks, and opens the call; the client knows what goes over the wire,
# takes the call over instead of starting a second span, and ends it. Neither knows the other: the
# call travels in the context in which the framework runs its model.


def offer_call(operation: Operation | None, context: Context | None = None) -> Context:
    """Return a context in which a framework's call can be claimed, again too; None offers none."""
    if operation is not None:
        operation.is_claimed = False
    return otel_context.set_value(_CALL_KEY, operation, context)


def context_within(operation: Operation) -> Context:
    """Return the context within a framework's step, in which no outer call can be claimed."""
    context = operation.context
    return context if context.get(_CALL_KEY) is None else offer_call(None, context)


def current_call(context: Context | None = None) -> Operation | None:
    """Return the framework's innermost call, claimed or not; None if there is none."""
    call = (otel_context.get_current() if context is None else context).get(_CALL_KEY)
    return call if isinstance(call, Operation) else None


def unclaimed_call(context: Context | None = None) -> Operation | None:
    """Return the framework's innermost call if it still waits for its client."""
    call = current_call(context)
    return None if call is None or call.is_claimed or call.is_over else call


def start_call(
    name: str,
    attributes: Mapping[str, AttributeValue],
    body: dict[str, str] | None = None,
    context: Context | None = None,
    start_ns: int | None = None,
) -> Operation:
    """Return the framework's call that waits for this request, in its place, or a new one."""
    operation = unclaimed_call(context)
    if operation is None:
        parent = parent_context(context)
        return Operation(name, SpanKind.CLIENT, attributes, body, start_ns, parent)
    operation.is_claimed = True
    operation.rename(name)
    operation.attributes.update(attributes)
    operation.body.update(body or {})
    return operation
