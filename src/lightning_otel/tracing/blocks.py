"""Things that are open while a ``with`` block or a decorated function runs, and end once.

A decorated function stays what it was: coroutine function, generator function, its name, signature,
results and exceptions. The context is current only while the function's own code runs, never across
a ``yield``; so whoever goes on with a generator is in nobody else's context.
"""

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from opentelemetry import context as otel_context

F = TypeVar("F", bound=Callable[..., Any])


class Lifetime(Protocol):
    """Something that has begun and is ended once; later attempts do nothing."""

    def attached(self) -> AbstractContextManager[None]:
        """Makes its context current for a block."""

    def end(self, exc: BaseException | None = None, result: object = None) -> None:
        """End it, as failed by an exception or with a result."""

    async def end_async(self, exc: BaseException | None = None, result: object = None) -> None:
        """End it where there may be something to await."""


L = TypeVar("L", bound=Lifetime)
Begin = Callable[[tuple[Any, ...], dict[str, Any]], Lifetime]
"""Begins a lifetime for one call of a function with these arguments."""


def is_function(value: object) -> bool:
    """Whether something is to be decorated; the methods of a class that are not yet bound are."""
    return callable(value) or isinstance(value, (staticmethod, classmethod))


def is_clean(exc: BaseException | None) -> bool:
    """Whether an exception is none, or a way of leaving and not a failure."""
    if isinstance(exc, SystemExit):
        return not exc.code
    return exc is None or isinstance(exc, GeneratorExit)


class Block(ABC, Generic[L]):
    """A context manager, sync and async, and a decorator; entered any number of times at once."""

    def __init__(self) -> None:
        self._entered: list[tuple[object, L, AbstractContextManager[None]]] = []

    @abstractmethod
    def _begin(self) -> L:
        """Begin what the block is about."""

    @abstractmethod
    def _begin_call(self, function: Callable[..., Any]) -> Begin:
        """How to begin for each call of a decorated function."""

    def __call__(self, function: F) -> F:
        """The function, each call of it a block; generators are while they run."""
        wrapper: Any
        if isinstance(function, (staticmethod, classmethod)):
            wrapper = type(function)(self(function.__func__))
        else:
            begin = self._begin_call(function)
            wrapper = functools.wraps(function)(kind_of(function)(function, begin))
        return wrapper  # type: ignore[no-any-return]  # the same kind of function

    def _enter(self) -> L:
        entered = self._begin()
        manager = entered.attached()
        manager.__enter__()
        self._entered.append((otel_context.get_current(), entered, manager))
        return entered

    def _leave(self) -> L:
        """Of several threads' or tasks' entries the one made here, told by its context."""
        here = otel_context.get_current()
        entries = reversed(self._entered.copy())
        found = next((entry for entry in entries if entry[0] is here), self._entered[-1])
        self._entered.remove(found)
        _, entered, manager = found
        manager.__exit__(None, None, None)
        return entered

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End; the exception goes on its way."""
        self._leave().end(exc)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End; the exception goes on its way."""
        await _end_async(self._leave(), exc)


async def _end_async(
    lifetime: Lifetime, exc: BaseException | None = None, result: object = None
) -> None:
    if isinstance(exc, GeneratorExit):  # a coroutine that is being closed cannot await any more
        lifetime.end(exc)
    else:
        await lifetime.end_async(exc, result)


def kind_of(function: Callable[..., Any]) -> Callable[[Callable[..., Any], Begin], Any]:
    """What makes a function of the same kind, each call of which is a lifetime."""
    if inspect.isasyncgenfunction(function):
        return _async_generator
    if inspect.isgeneratorfunction(function):
        return _generator
    if inspect.iscoroutinefunction(function):
        return _coroutine
    return _plain


def _plain(function: Callable[..., Any], begin: Begin) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        lifetime = begin(args, kwargs)
        try:
            with lifetime.attached():
                result = function(*args, **kwargs)
        except BaseException as exc:
            lifetime.end(exc)
            del lifetime  # it knows the exception, whose traceback knows this frame
            raise
        if inspect.iscoroutine(result):  # a coroutine function in disguise, such as a partial one
            return _awaited(result, lifetime)
        lifetime.end(result=result)
        return result

    return call


def _coroutine(function: Callable[..., Any], begin: Begin) -> Callable[..., Any]:
    async def call(*args: Any, **kwargs: Any) -> Any:
        return await _awaited(function(*args, **kwargs), begin(args, kwargs))

    return call


async def _awaited(coroutine: Coroutine[Any, Any, Any], lifetime: Lifetime) -> Any:
    try:
        with lifetime.attached():
            result = await coroutine
    except BaseException as exc:
        await _end_async(lifetime, exc)
        del lifetime  # as above
        raise
    await _end_async(lifetime, result=result)
    return result


def _generator(function: Callable[..., Any], begin: Begin) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        inner = function(*args, **kwargs)
        lifetime = begin(args, kwargs)
        step, sent = inner.send, None
        try:
            while True:
                try:
                    with lifetime.attached():
                        item = step(sent)
                except StopIteration as stop:
                    lifetime.end(result=stop.value)
                    return stop.value
                try:
                    step, sent = inner.send, (yield item)
                except BaseException as exc:  # noqa: BLE001  # handed to the generator, not swallowed
                    step, sent = inner.throw, exc
        except BaseException as exc:
            lifetime.end(exc)
            del lifetime, sent  # as above
            raise

    return call


def _async_generator(function: Callable[..., Any], begin: Begin) -> Callable[..., Any]:
    async def call(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        inner = function(*args, **kwargs)
        lifetime = begin(args, kwargs)
        step, sent = inner.asend, None
        try:
            while True:
                try:
                    with lifetime.attached():
                        item = await step(sent)
                except StopAsyncIteration:
                    await lifetime.end_async()
                    return
                try:
                    step, sent = inner.asend, (yield item)
                except BaseException as exc:  # noqa: BLE001  # handed to the generator, not swallowed
                    step, sent = inner.athrow, exc
        except BaseException as exc:
            # Closed at a yield it may still await; closed while it awaits it may not.
            if exc is sent:
                await lifetime.end_async(exc)
            else:
                await _end_async(lifetime, exc)
            del lifetime, sent  # as above
            raise

    return call
