"""One run of an agent, a team, a tool or a model as an operation: begun, fed, ended once."""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

from opentelemetry import context as otel_context
from opentelemetry.context import Context
from opentelemetry.trace import INVALID_SPAN, Span, SpanKind
from opentelemetry.util.types import AttributeValue

from lightning_otel import call_slot, capture
from lightning_otel import conventions as c
from lightning_otel.instrumentors import doors

_NATIVE_KEY = otel_context.create_key("lightning-otel-autogen-native-span")

PROVIDER = "autogen"

IsWanted: TypeAlias = Callable[[], bool]
SpanBlock: TypeAlias = AbstractContextManager[Span]


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
    operation: str,
    name: str,
    attributes: Mapping[str, AttributeValue | None],
    read: Callable[[], Mapping[str, str | None]] = dict,
    parent: Context | None = None,
) -> capture.Operation:
    """The operation of a run; attributes and content that are None are left out.

    Args:
        operation: What is done, as the conventions name it.
        name: Who or what does it.
        attributes: Attributes of its span.
        read: Reads the content, where it is kept.
        parent: What it stands in, if that is not what is current.
    """
    known = {c.OPERATION: operation, c.PROVIDER: PROVIDER, **attributes}
    found = capture.guarded(read) if capture.content_policy().is_kept else None
    return capture.Operation(
        capture.clean(f"{operation} {name}"),
        SpanKind.INTERNAL,
        {key: value for key, value in known.items() if value is not None},
        {key: text for key, text in (found or {}).items() if text is not None},
        parent=parent,
    )


def inside(operation: capture.Operation) -> Context:
    """The context of what happens within an operation.

    A model call that is waiting outside to be claimed cannot be from in there.
    """
    context = operation.context
    return context if call_slot.open_slot() is None else call_slot.CallSlot().within(context)


def with_native(operation: capture.Operation, context: Context) -> Context:
    """A context in which an operation stands in, once, for the span AutoGen is about to make."""
    return otel_context.set_value(_NATIVE_KEY, [operation], context)


def take_native(*_: Any, **__: Any) -> SpanBlock | None:
    """Take the replacement of AutoGen's own span here, once; None if AutoGen makes it."""
    held = otel_context.get_value(_NATIVE_KEY)
    return nullcontext(held.pop().span) if isinstance(held, list) and held else None


def no_span() -> SpanBlock:
    """Return the replacement of a span of AutoGen's that is not wanted."""
    return nullcontext(INVALID_SPAN)


def instead(is_wanted: IsWanted, block_of: Callable[..., SpanBlock | None]) -> doors.Make:
    """Return what replaces a function that makes a span of AutoGen's.

    Args:
        is_wanted: Whether spans are wanted here.
        block_of: Makes ours of the function's arguments; None leaves AutoGen's.
    """

    def make(original: Any) -> Any:
        def block(*args: Any, **kwargs: Any) -> Any:
            found = capture.guarded(block_of, *args, **kwargs) if is_wanted() else None
            return original(*args, **kwargs) if found is None else found

        return block

    return make
