"""Library methods as captured runs: begun before them, ended by what they give or raise.

One door for plain and coroutine methods, and one walk for generators of either kind. The result,
the exception and the context left behind are exactly as without us; nothing of ours is held across
a ``yield``: a generator's context is attached for each step alone.
"""

import functools
import inspect
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

from opentelemetry.context import Context

from lightning_otel import capture


class Run:
    """Code of a library under way; the members that a run does not need do nothing.

    Attributes:
        context: The context that the code runs in.
    """

    __slots__ = ()

    context: Context

    def active(self) -> AbstractContextManager[None]:
        """Return the block in which the code runs, or one step of a generator does."""
        return capture.attached(self.context)

    def returned(self, result: Any) -> None:
        """End it with the result of a call."""

    def fail(self, exc: BaseException) -> None:
        """End it with what was raised; a ``GeneratorExit`` leaves a generator before its end."""

    def saw(self, item: Any) -> None:
        """Take note of an item of a generator."""

    def interrupted(self, exc: BaseException) -> None:
        """Take note of what is thrown into a generator between two items."""

    def stop(self) -> None:
        """End it at the end of a generator."""


class Within(Run):
    """Code that runs in a context and is no operation."""

    def __init__(self, context: Context) -> None:
        self.context = context


Begin: TypeAlias = Callable[[tuple[Any, ...], Mapping[str, Any]], Run | None]
"""Starts the run of a method, given its arguments; None leaves the method alone."""
Make: TypeAlias = Callable[[Any], Any]
"""Gives the function that is to stand in a method's place, of the one that stands there."""


def named(
    names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return arguments by name, those without their owner being called ``names``."""
    return {**dict(zip(names, args[1:], strict=False)), **kwargs}


def around(begin: Begin) -> Make:
    """Make each call of a method a run; the method may be a coroutine function."""

    def make(original: Any) -> Any:
        if inspect.iscoroutinefunction(inspect.unwrap(original)):
            return _around_async(begin, original)

        def method(*args: Any, **kwargs: Any) -> Any:
            run = capture.guarded(begin, args, kwargs) if args else None
            if run is None:
                return original(*args, **kwargs)
            try:
                with run.active():
                    result = original(*args, **kwargs)
            except BaseException as exc:
                capture.guarded(run.fail, exc)
                raise
            capture.guarded(run.returned, result)
            return result

        return method

    return make


def _around_async(begin: Begin, original: Any) -> Any:
    async def method(*args: Any, **kwargs: Any) -> Any:
        run = capture.guarded(begin, args, kwargs) if args else None
        if run is None:
            return await original(*args, **kwargs)
        try:
            with run.active():
                result = await original(*args, **kwargs)
        except BaseException as exc:
            capture.guarded(run.fail, exc)
            raise
        capture.guarded(run.returned, result)
        return result

    return method


def around_steps(begin: Begin) -> Make:
    """Make each generator of a method a run, begun at its first step; it may be an async one."""

    def make(original: Any) -> Any:
        bare = inspect.unwrap(original)
        if inspect.isgeneratorfunction(bare):
            return _walked(begin, original)
        if inspect.isasyncgenfunction(bare):
            return _walked_async(begin, original)

        def method(*args: Any, **kwargs: Any) -> Any:
            inner = original(*args, **kwargs)
            if not hasattr(inner, "athrow"):
                return inner
            return _walked_async(lambda *_: begin(args, kwargs), lambda: inner)()

        return method

    return make


def _active(run: Run | None) -> AbstractContextManager[None]:
    return nullcontext() if run is None else run.active()


def _tell(run: Run | None, name: str, *given: Any) -> None:
    if run is not None:
        capture.guarded(getattr(run, name), *given)


def _walked(begin: Begin, original: Any) -> Callable[..., Generator[Any, Any, Any]]:
    """Return a generator function that goes through a library's generator step by step.

    What is sent or thrown into ours reaches the library's.
    """

    def method(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        inner = original(*args, **kwargs)
        run = capture.guarded(begin, args, kwargs)
        step: Callable[[], Any] = functools.partial(next, inner)
        try:
            while True:
                try:
                    with _active(run):
                        item = step()
                except StopIteration as end:
                    _tell(run, "stop")
                    return end.value
                except BaseException as exc:
                    _tell(run, "fail", exc)
                    raise
                _tell(run, "saw", item)
                try:
                    sent = yield item
                except GeneratorExit as exc:
                    _close(run, inner, exc)
                    raise
                except BaseException as exc:  # noqa: BLE001  # handed on, not swallowed
                    _tell(run, "interrupted", exc)
                    step = functools.partial(inner.throw, exc)
                else:
                    step = functools.partial(inner.send, sent)
        finally:
            del step  # it may know an exception, whose traceback knows this frame

    return method


def _close(run: Run | None, inner: Generator[Any, Any, Any], left: GeneratorExit) -> None:
    try:
        with _active(run):
            inner.close()
    except BaseException as exc:
        _tell(run, "fail", exc)
        raise
    _tell(run, "fail", left)


def _walked_async(begin: Begin, original: Any) -> Callable[..., AsyncGenerator[Any, Any]]:
    async def method(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        inner = original(*args, **kwargs)
        run = capture.guarded(begin, args, kwargs)
        step: Callable[[], Awaitable[Any]] = functools.partial(_first_step, inner)
        try:
            while True:
                try:
                    with _active(run):
                        item = await step()
                except StopAsyncIteration:
                    _tell(run, "stop")
                    return
                except BaseException as exc:
                    _tell(run, "fail", exc)
                    raise
                _tell(run, "saw", item)
                try:
                    sent = yield item
                except GeneratorExit as exc:
                    await _aclose(run, inner, exc)
                    raise
                except BaseException as exc:  # noqa: BLE001  # handed on, not swallowed
                    _tell(run, "interrupted", exc)
                    step = functools.partial(inner.athrow, exc)
                else:
                    step = functools.partial(inner.asend, sent)
        finally:
            del step

    return method


async def _aclose(run: Run | None, inner: AsyncGenerator[Any, Any], left: GeneratorExit) -> None:
    try:
        with _active(run):
            await inner.aclose()
    except BaseException as exc:
        _tell(run, "fail", exc)
        raise
    _tell(run, "fail", left)


def _first_step(inner: AsyncGenerator[Any, Any]) -> Awaitable[Any]:
    """Take the first step of a generator that only the one around it will ever close.

    An event loop closes each generator it knows of; were it told of both, it would close the inner
    one while the outer one does, which is an error.
    """
    hooks = sys.get_asyncgen_hooks()
    sys.set_asyncgen_hooks(firstiter=None, finalizer=_leave_open)
    try:
        return inner.__anext__()
    finally:
        sys.set_asyncgen_hooks(*hooks)


def _leave_open(inner: AsyncGenerator[Any, Any]) -> None:
    """Do nothing: the generator around it is collected with it, and will close it."""
