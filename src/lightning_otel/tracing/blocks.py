"""Blocks and decorated functions that begin something and end it once; ``operation`` is one.

A decorated function keeps its kind, name, signature, results and exceptions. The context is current
only while the function's own code runs, never across a ``yield``.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Generic, ParamSpec, TypeVar, overload

from opentelemetry import context as otel_context
from opentelemetry.trace import SpanKind

from lightning_otel import capture
from lightning_otel.capture import operations
from lightning_otel.instrumentors.wrappers import Begin, WrappedRun, wrap_call, wrap_generator
from lightning_otel.tracing.emitters import json_of, span_id_of
from lightning_otel.types import conventions as c

F = TypeVar("F", bound=Callable[..., Any])
G = TypeVar("G")
P = ParamSpec("P")
T = TypeVar("T")


class OpenBlock(WrappedRun, Generic[G]):
    """Something that has begun and is ended once; a ``with`` block gets ``opened``."""

    opened: G

    async def finish(
        self, exc: BaseException | None = None, result: object = None, *, is_async: bool = True
    ) -> None:
        """End it, as failed by an exception or with a result; without ``is_async`` never wait."""

    def end(self, exc: BaseException | None = None, result: object = None) -> None:
        """End it where nothing can be awaited."""
        with contextlib.suppress(StopIteration):
            self.finish(exc, result, is_async=False).send(None)

    def succeed(self, result: Any) -> None:
        """End it with the result of a call."""
        self.end(None, result)

    def stop_with(self, value: Any) -> None:
        """End it with what a generator gave back."""
        self.end(None, value)

    def fail(self, exc: BaseException) -> None:
        """End it with what was raised, or as left."""
        self.end(exc)

    async def end_async(self, name: str, *arguments: Any) -> None:
        """End it where there may be something to await."""
        await (self.finish(*arguments) if name == "fail" else self.finish(None, *arguments))


def is_function(value: object) -> bool:
    """Return whether to decorate a value: a function, or a class's method not yet bound."""
    return callable(value) or isinstance(value, (staticmethod, classmethod))


def is_clean(exc: BaseException | None) -> bool:
    """Return whether an exception is none, or a way of leaving and no failure."""
    if isinstance(exc, SystemExit):
        return not exc.code
    return exc is None or isinstance(exc, GeneratorExit)


class Block(Generic[G]):
    """A context manager, sync and async, and a decorator; entered any number of times at once."""

    def __init__(self, begin_for: Callable[[Callable[..., Any] | None], Begin]) -> None:
        self._begin_for = begin_for
        self._entered: list[tuple[object, OpenBlock[G], AbstractContextManager[None]]] = []

    def __call__(self, function: F) -> F:
        """Make each call of a function a block; generators while they run."""
        wrapper: Any
        if isinstance(function, (staticmethod, classmethod)):
            wrapper = type(function)(self(function.__func__))
        else:
            wrapper = functools.wraps(function)(wrap_function(function, self._begin_for(function)))
        return wrapper  # type: ignore[no-any-return]  # the same kind of function

    def __enter__(self) -> G:
        entered: Any = self._begin_for(None)((), {})
        manager = entered.active()
        manager.__enter__()
        self._entered.append((otel_context.get_current(), entered, manager))
        return entered.opened  # type: ignore[no-any-return]  # of a lifetime of G

    async def __aenter__(self) -> G:
        return self.__enter__()

    def _leave(self) -> OpenBlock[G]:
        context = otel_context.get_current()
        entries = reversed(self._entered.copy())
        match = next((entry for entry in entries if entry[0] is context), self._entered[-1])
        self._entered.remove(match)
        _, entered, manager = match
        manager.__exit__(None, None, None)
        return entered

    def __exit__(self, kind: object, exc: BaseException | None, trace: object) -> None:
        self._leave().end(exc)

    async def __aexit__(self, kind: object, exc: BaseException | None, trace: object) -> None:
        # A coroutine that is being closed cannot await any more.
        await self._leave().finish(exc, is_async=not isinstance(exc, GeneratorExit))


def wrap_function(function: Callable[..., Any], begin: Begin) -> Any:
    """Return a function of the same kind, each call or generator of which is a run."""
    is_generator = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
    return (wrap_generator if is_generator else wrap_call)(begin)(function)


class OperationBlock(OpenBlock["OperationBlock"]):
    """An operation under way; set its ``output`` inside a ``with`` block."""

    def __init__(self, name: str, inputs: Mapping[str, object]) -> None:
        self.output: object = None
        self._span: operations.Operation | None = None
        if capture.is_wanted():
            body = {c.OPERATION_INPUT: json_of(inputs)} if inputs else {}
            self._span = capture.guard_call(
                operations.Operation, c.SPAN_OPERATION, SpanKind.INTERNAL, {c.OPERATION_NAME: name},
                body,
            )  # fmt: skip
        if self._span is not None:
            self.context = self._span.context

    @property
    def opened(self) -> "OperationBlock":  # type: ignore[override]  # kept, it would be a circle
        """The operation."""
        return self

    @property
    def span_id(self) -> str | None:
        """Its span, to link rewards to; None outside a recording."""
        return span_id_of(self._span)

    async def finish(
        self, exc: BaseException | None = None, result: object = None, *, is_async: bool = True
    ) -> None:
        """End the span; later calls do nothing."""
        if self._span is None:
            return
        output = self.output if result is None else result
        if output is not None:
            self._span.body[c.OPERATION_OUTPUT] = json_of(output)
        end_span(self._span, exc)


def end_span(span: operations.Operation, exc: BaseException | None) -> None:
    """End an operation's span as failed by an exception, unless that is a way of leaving."""
    if exc is None or is_clean(exc):
        capture.guard_call(span.stop)
    else:
        capture.guard_call(span.fail, exc)


def _argument_reader(
    function: Callable[..., Any],
) -> Callable[[tuple[Any, ...], Mapping[str, Any]], dict[str, object]]:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in functions have none
        return lambda args, kwargs: {"args": args, **kwargs}
    owner = {"self", "cls"} & {next(iter(signature.parameters), "")}

    def read(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, object]:
        try:
            values = signature.bind(*args, **kwargs).arguments
        except TypeError:  # the call itself is about to say so
            return {"args": args, **kwargs}
        return {name: value for name, value in values.items() if name not in owner}

    return read


@overload
def operation(function: Callable[P, T], /) -> Callable[P, T]: ...


@overload
def operation(name: str | None = None, /, **inputs: object) -> Block[OperationBlock]: ...


def operation(name: Any = None, /, **inputs: object) -> Any:
    """Record a piece of work with a beginning and an end, as a context manager or a decorator.

    ``with operation("look-up", top_k=5) as found:`` or ``@operation`` or ``@operation("look-up")``,
    on functions of every kind. A decorated function's arguments and result are kept as content.

    Args:
        name: The work's name; or the function to record, where this is a bare decorator.
        **inputs: Its inputs.
    """
    if is_function(name):
        return operation(None, **inputs)(name)

    def begin_for(function: Callable[..., Any] | None) -> Begin:
        called = str(name or getattr(function, "__qualname__", "operation"))
        if function is None:
            return lambda args, kwargs: OperationBlock(called, inputs)
        read = _argument_reader(function)
        return lambda args, kwargs: OperationBlock(called, {**inputs, **read(args, kwargs)})

    return Block[OperationBlock](begin_for)
