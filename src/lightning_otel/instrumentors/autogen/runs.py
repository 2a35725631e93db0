"""One run of an agent, a team, a tool or a model as an operation: begun, fed, ended once."""

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import INVALID_SPAN, Span, SpanKind
from opentelemetry.util.types import AttributeValue

from lightning_otel import call_slot, capture
from lightning_otel import conventions as c
from lightning_otel.instrumentors import doors

_NATIVE_KEY = otel_context.create_key("lightning-otel-autogen-native-span")

PROVIDER = "autogen"


class Run(doors.Run):
    """One operation, and what is read of its results.

    Attributes:
        operation: Its span.
        context: The context of each of its steps.
        is_complete: Whether its last result was seen: a stream left after that was not abandoned.
    """

    def __init__(self, operation: capture.Operation, context: Context) -> None:
        self.operation = operation
        self.context = context
        self.is_complete = False
        self._is_left = False

    def __del__(self) -> None:
        """A run whose generator or coroutine was dropped, never to go on, was abandoned."""
        # At the interpreter's end the module may be gone before the last runs are.
        if not self.operation.is_over and capture is not None:
            capture.guarded(self.abandon)

    def returned(self, result: Any) -> None:
        """End it with the result of a call; a stream has none but its items."""
        if result is not None:
            capture.guarded(self.saw, result)
        self.stop()

    def stop(self) -> None:
        """End it."""
        self.operation.stop()

    def interrupted(self, exc: BaseException) -> None:
        """Take note of what is thrown into a stream between two items.

        A loop that is going away closes its streams in tasks, and cancels these: nobody reads on.
        """
        self._is_left = isinstance(exc, asyncio.CancelledError)

    def fail(self, exc: BaseException) -> None:
        """End it with what was raised; a generator or coroutine that is closed was abandoned."""
        if isinstance(exc, GeneratorExit) or self._is_left:
            self.abandon()
        else:
            self.operation.fail(exc)

    def abandon(self) -> None:
        """End it as left by the program before its end."""
        if not self.is_complete:
            self.operation.attributes[c.ABANDONED] = True
        self.stop()


def start(
    name: str,
    attributes: Mapping[str, AttributeValue | None],
    body: Mapping[str, str] | None = None,
    parent: Context | None = None,
) -> capture.Operation:
    """The operation of a run; attributes that are None are left out."""
    known = {key: value for key, value in attributes.items() if value is not None}
    known[c.PROVIDER] = PROVIDER
    content = dict(body) if body and capture.content_policy().is_kept else None
    return capture.Operation(capture.clean(name), SpanKind.INTERNAL, known, content, parent=parent)


def inside(operation: capture.Operation) -> Context:
    """The context of what happens within an operation.

    A model call that is waiting outside to be claimed cannot be from in there.
    """
    context = operation.context
    return context if call_slot.open_slot() is None else call_slot.CallSlot().within(context)


def has_span(context: Context) -> bool:
    """Return whether a context has a span to start below."""
    return trace.get_current_span(context).get_span_context().is_valid


class NativeSpan:
    """The span AutoGen is about to make for a run that has its operation already.

    Attributes:
        operation: Stands in for the span; None once it was taken.
    """

    __slots__ = ("operation",)

    def __init__(self, operation: capture.Operation) -> None:
        self.operation: capture.Operation | None = operation

    def within(self, context: Context) -> Context:
        """A context in which it is taken."""
        return otel_context.set_value(_NATIVE_KEY, self, context)


def take_native() -> "contextlib.AbstractContextManager[Span] | None":
    """Take the replacement of AutoGen's own span here, once; None if AutoGen makes it."""
    held = otel_context.get_value(_NATIVE_KEY)
    if not isinstance(held, NativeSpan) or held.operation is None:
        return None
    operation, held.operation = held.operation, None
    return contextlib.nullcontext(operation.span)


def no_span() -> "contextlib.AbstractContextManager[Span]":
    """Return the replacement of a span of AutoGen's that is not wanted."""
    return contextlib.nullcontext(INVALID_SPAN)
