"""Things that are open while a ``with`` block or a decorated function runs, and end once.

A decorated function stays what it was: coroutine function, generator function, its name, signature,
results and exceptions. The context is current only while the function's own code runs, never across
a ``yield``; so whoever goes on with a generator is in nobody else's context.
"""

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

from opentelemetry import context as otel_context

from lightning_otel.instrumentors.doors import Begin, Run, around, around_steps

F = TypeVar("F", bound=Callable[..., Any])
G = TypeVar("G")


class Lifetime(Run, Generic[G]):
    """Something that has begun and is ended once; later attempts do nothing."""

    @property
    def opened(self) -> G:
        """What a ``with`` block is given."""
        raise NotImplementedError

    def end(self, exc: BaseException | None = None, result: object = None) -> None:
        """End it, as failed by an exception or with a result."""

    async def finish(self, exc: BaseException | None = None, result: object = None) -> None:
        """End it where there may be something to await."""
        self.end(exc, result)

    def returned(self, result: Any) -> None:
        """End it with the result of a call."""
        self.end(None, result)

    def stop_with(self, value: Any) -> None:
        """End it with what a generator gave back."""
        self.end(None, value)

    def fail(self, exc: BaseException) -> None:
        """End it with what was raised, or as left."""
        self.end(exc)

    async def end_async(self, name: str, *given: Any) -> None:
        """End it where there may be something to await."""
        await (self.finish(*given) if name == "fail" else self.finish(None, *given))


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
        """Take what begins a lifetime for each call of a function, or for a ``with`` block."""
        self._begin_for = begin_for
        self._entered: list[tuple[object, Lifetime[G], AbstractContextManager[None]]] = []

    def __call__(self, function: F) -> F:
        """The function, each call of it a block; generators are while they run."""
        wrapper: Any
        if isinstance(function, (staticmethod, classmethod)):
            wrapper = type(function)(self(function.__func__))
        else:
            wrapper = functools.wraps(function)(each_call(function, self._begin_for(function)))
        return wrapper  # type: ignore[no-any-return]  # the same kind of function

    def __enter__(self) -> G:
        """Begin; gives what the block is about."""
        entered: Any = self._begin_for(None)((), {})
        manager = entered.active()
        manager.__enter__()
        self._entered.append((otel_context.get_current(), entered, manager))
        return entered.opened  # type: ignore[no-any-return]  # of a lifetime of G

    async def __aenter__(self) -> G:
        """Begin; gives what the block is about."""
        return self.__enter__()

    def _leave(self) -> Lifetime[G]:
        """Take the entry made here, of several threads' or tasks', by its context."""
        here = otel_context.get_current()
        entries = reversed(self._entered.copy())
        found = next((entry for entry in entries if entry[0] is here), self._entered[-1])
        self._entered.remove(found)
        _, entered, manager = found
        manager.__exit__(None, None, None)
        return entered

    def __exit__(self, kind: object, exc: BaseException | None, trace: object) -> None:
        """End; the exception goes on its way."""
        self._leave().end(exc)

    async def __aexit__(self, kind: object, exc: BaseException | None, trace: object) -> None:
        """End; the exception goes on its way."""
        entered = self._leave()
        if isinstance(exc, GeneratorExit):  # a coroutine that is being closed cannot await any more
            entered.end(exc)
        else:
            await entered.finish(exc)


def each_call(function: Callable[..., Any], begin: Begin) -> Any:
    """Return a function of the same kind, each call or generator of which is a run."""
    is_generator = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
    return (around_steps if is_generator else around)(begin)(function)
