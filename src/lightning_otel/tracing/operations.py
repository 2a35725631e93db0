"""``operation``: a piece of work inside a rollout, as a span with its inputs and its output."""

import contextlib
import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar, overload

from opentelemetry.trace import SpanKind

from lightning_otel import capture
from lightning_otel import conventions as c
from lightning_otel.emitters import json_of, span_id_of
from lightning_otel.instrumentors.doors import Begin
from lightning_otel.tracing.blocks import Block, Lifetime, is_clean, is_function

P = ParamSpec("P")
T = TypeVar("T")


class Operation(Lifetime["Operation"]):
    """An operation under way.

    Attributes:
        output: What came of it: set it inside a ``with`` block; of a decorated function it is the
            result.
    """

    def __init__(self, name: str, inputs: Mapping[str, object]) -> None:
        self.output: object = None
        self._span: capture.Operation | None = None
        if capture.is_wanted():
            self._span = capture.guarded(_start_operation, name, inputs)

    @property
    def opened(self) -> "Operation":
        """The operation."""
        return self

    @property
    def span_id(self) -> str | None:
        """Its span, to link rewards to; None outside a recording."""
        return span_id_of(self._span)

    def active(self) -> AbstractContextManager[None]:
        """Makes it the parent of what happens in a block."""
        if self._span is None:
            return contextlib.nullcontext()
        return capture.attached(self._span.context)

    def end(self, exc: BaseException | None = None, result: object = None) -> None:
        """End the span; later calls do nothing."""
        if self._span is not None:
            output = self.output if result is None else result
            capture.guarded(_end_operation, self._span, exc, output)


def _start_operation(name: str, inputs: Mapping[str, object]) -> capture.Operation:
    body = {c.OPERATION_INPUT: json_of(inputs)} if inputs else {}
    return capture.Operation(c.SPAN_OPERATION, SpanKind.INTERNAL, {c.OPERATION_NAME: name}, body)


def _end_operation(span: capture.Operation, exc: BaseException | None, output: object) -> None:
    if output is not None:
        span.body[c.OPERATION_OUTPUT] = json_of(output)
    if exc is None or is_clean(exc):
        span.stop()
    else:
        span.fail(exc)


def _argument_reader(
    function: Callable[..., Any],
) -> Callable[[tuple[Any, ...], Mapping[str, Any]], dict[str, object]]:
    """Return what names the arguments of a call; ``self`` and ``cls`` are no inputs."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in functions have none
        return lambda args, kwargs: {"args": args, **kwargs}
    owner = {"self", "cls"} & {next(iter(signature.parameters), "")}

    def read(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, object]:
        try:
            found = signature.bind(*args, **kwargs).arguments
        except TypeError:  # the call itself is about to say so
            return {"args": args, **kwargs}
        return {name: value for name, value in found.items() if name not in owner}

    return read


@overload
def operation(function: Callable[P, T], /) -> Callable[P, T]: ...


@overload
def operation(name: str | None = None, /, **inputs: object) -> Block[Operation]: ...


def operation(name: Any = None, /, **inputs: object) -> Any:
    """Record a piece of work with a beginning and an end, as a context manager or a decorator.

    ``with operation("look-up", top_k=5) as found:`` or ``@operation`` or ``@operation("look-up")``,
    on functions of every kind. A decorated function's arguments and result are kept as content.

    Args:
        name: What the work is called; or the function to record, where this is a bare decorator.
        **inputs: What it works on.

    Returns:
        A context manager, sync and async, and decorator; or the decorated function.
    """
    if is_function(name):
        return operation(None, **inputs)(name)

    def begin_for(function: Callable[..., Any] | None) -> Begin:
        called = str(name or getattr(function, "__qualname__", "operation"))
        if function is None:
            return lambda args, kwargs: Operation(called, inputs)
        read = _argument_reader(function)
        return lambda args, kwargs: Operation(called, {**inputs, **read(args, kwargs)})

    return Block[Operation](begin_for)
