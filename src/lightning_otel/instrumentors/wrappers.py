"""Functions as captured runs: the one door for plain and coroutine functions and generators.

Results, exceptions and contexts are exactly as without us; nothing of ours is held across a
``yield``: a generator's context is attached for each step alone.
"""

import functools
import inspect
import sys
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Generator,
    Mapping,
    Sequence,
)
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, TypeAlias

from opentelemetry.context import Context

from lightning_otel import capture

_UNCHANGED: Final = nullcontext()


class WrappedRun:
    """Code under way; the members that a run does not need do nothing.

    Attributes:
        context: The context that the code runs in; None leaves the current one.
        arguments: Replacement of the caller's arguments: a tuple and a dictionary.
    """

    context: Context | None = None
    arguments: tuple[Any, Any] | None = None

    def active(self) -> AbstractContextManager[None]:
        """Return the block in which the code runs, or one step of a generator does."""
        return _UNCHANGED if self.context is None else capture.attach_context(self.context)

    def retries(self, exc: BaseException) -> bool:
        """Return whether to call a function again, instead of ending with what it raised."""
        return False

    def repeats(self, result: Any) -> Callable[[], Any] | None:
        """Return what drops a result, to call a function again; None to end with it."""
        return None

    def succeed(self, result: Any) -> None:
        """End it with the result of a call."""

    def fail(self, exc: BaseException) -> None:
        """End it with what was raised; a ``GeneratorExit`` leaves a generator before its end."""

    def note_item(self, item: Any) -> None:
        """Take note of an item of a generator."""

    def note_throw(self, exc: BaseException) -> None:
        """Take note of what is thrown into a generator between two items."""

    def stop(self) -> None:
        """End it at the end of a generator."""

    def stop_with(self, value: Any) -> None:
        """End it at the end of a generator that gave back a value."""
        self.stop()

    async def end_async(self, name: str, *arguments: Any) -> None:
        """Call a member that ends it, where there may be something to await."""
        getattr(self, name)(*arguments)


class ContextRun(WrappedRun):
    """Code that runs in a context and is no operation."""

    def __init__(self, context: Context) -> None:
        self.context = context


Begin: TypeAlias = Callable[[tuple[Any, ...], Mapping[str, Any]], WrappedRun | None]
"""Starts the run of a method, given its arguments; None leaves the method alone."""
Make: TypeAlias = Callable[[Any], Any]
"""Gives the function that is to stand in a method's place, of the one that stands there."""


def bind_names(
    names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return arguments by name, those without their owner being called ``names``."""
    return {**dict(zip(names, args[1:], strict=False)), **kwargs}


def wrap_call(begin: Begin) -> Make:
    """Make each call of a function a run; it may be a coroutine function, also in disguise."""

    def make(original: Any) -> Any:
        if inspect.iscoroutinefunction(original):
            return _wrap_async(begin, original)

        def function(*args: Any, **kwargs: Any) -> Any:
            run = capture.guard_call(begin, args, kwargs)
            if run is None:
                return original(*args, **kwargs)
            while True:
                positional, keywords = run.arguments or (args, kwargs)
                try:
                    with run.active():
                        result = original(*positional, **keywords)
                    if (drop := capture.guard_call(run.repeats, result)) is None:
                        break
                    capture.guard_call(drop)
                except BaseException as exc:
                    if not capture.guard_call(run.retries, exc):
                        capture.guard_call(run.fail, exc)
                        del run  # it may know the exception, whose traceback knows this frame
                        raise
            if inspect.iscoroutine(result):  # of a coroutine function in disguise
                first_runs = [run]
                return _wrap_async(lambda *_: first_runs.pop(), original, result)(*args, **kwargs)
            capture.guard_call(run.succeed, result)
            return result

        return function

    return make


def _wrap_async(begin: Begin, original: Any, first_runs: Any = None) -> Any:
    async def function(*args: Any, **kwargs: Any) -> Any:
        run = capture.guard_call(begin, args, kwargs)
        if run is None:
            return await original(*args, **kwargs)
        pending = first_runs
        while True:
            positional, keywords = run.arguments or (args, kwargs)
            try:
                with run.active():
                    result = await (pending or original(*positional, **keywords))
                if (drop := capture.guard_call(run.repeats, result)) is None:
                    break
                pending = None
                await _call_async(drop)
            except BaseException as exc:
                pending = None
                if not capture.guard_call(run.retries, exc):
                    if isinstance(exc, GeneratorExit):  # a coroutine that is closed cannot await
                        capture.guard_call(run.fail, exc)
                    else:
                        await _call_async(run.end_async, "fail", exc)
                    del run  # as above
                    raise
        await _call_async(run.end_async, "succeed", result)
        return result

    return function


async def _call_async(function: Callable[..., Any], *arguments: Any) -> None:
    """Call one of our functions within the fence, and await what it gives if that is to be."""
    try:
        if inspect.isawaitable(pending := function(*arguments)):
            await pending
    except Exception:  # noqa: BLE001  # capture never raises into the traced program
        capture.note_fault()


def wrap_generator(begin: Begin) -> Make:
    """Make each generator of a function a run, begun at its first step; it may be an async one."""

    def make(original: Any) -> Any:
        if inspect.isgeneratorfunction(original):
            return _walk_generator(begin, original)
        if inspect.isasyncgenfunction(original):
            return _walk_async_generator(begin, original)

        def function(*args: Any, **kwargs: Any) -> Any:
            inner = original(*args, **kwargs)
            if not hasattr(inner, "athrow"):
                return inner
            return _walk_async_generator(lambda *_: begin(args, kwargs), lambda: inner)()

        return function

    return make


def _walk_generator(begin: Begin, original: Any) -> Callable[..., Generator[Any, Any, Any]]:
    """Walk another's generator step by step; send and throw reach it."""

    def function(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        inner = original(*args, **kwargs)
        run = capture.guard_call(begin, args, kwargs) or WrappedRun()
        step: Callable[[], Any] = functools.partial(next, inner)
        exit_error: GeneratorExit | None = None
        try:
            while True:
                try:
                    with run.active():
                        item = step()
                except StopIteration as end:
                    if exit_error is None:
                        capture.guard_call(run.stop_with, end.value)
                    else:
                        capture.guard_call(run.fail, exit_error)
                    return end.value
                except BaseException as exc:
                    capture.guard_call(run.fail, exc)
                    raise
                capture.guard_call(run.note_item, item)
                try:
                    sent = yield item
                except BaseException as exc:  # noqa: BLE001  # handed on, not swallowed
                    capture.guard_call(run.note_throw, exc)
                    exit_error = exc if isinstance(exc, GeneratorExit) else None
                    step = functools.partial(inner.throw, exc)
                else:
                    step = functools.partial(inner.send, sent)
        finally:
            del step, exit_error, run  # as above

    return function


def _walk_async_generator(begin: Begin, original: Any) -> Callable[..., AsyncGenerator[Any, Any]]:
    async def function(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        inner = original(*args, **kwargs)
        run = capture.guard_call(begin, args, kwargs) or WrappedRun()
        step: Callable[[], Awaitable[Any]] = functools.partial(_first_step, inner)
        exit_error: GeneratorExit | None = None
        try:
            while True:
                try:
                    with run.active():
                        item = await step()
                except StopAsyncIteration:
                    if exit_error is None:
                        await _call_async(run.end_async, "stop_with", None)
                    else:
                        await _call_async(run.end_async, "fail", exit_error)
                    return
                except BaseException as exc:
                    # Closed at a yield it may still await; closed while it awaits it may not.
                    if isinstance(exc, GeneratorExit) and exc is not exit_error:
                        capture.guard_call(run.fail, exc)
                    else:
                        await _call_async(run.end_async, "fail", exc)
                    raise
                capture.guard_call(run.note_item, item)
                try:
                    sent = yield item
                except BaseException as exc:  # noqa: BLE001  # handed on, not swallowed
                    capture.guard_call(run.note_throw, exc)
                    exit_error = exc if isinstance(exc, GeneratorExit) else None
                    step = functools.partial(inner.athrow, exc)
                else:
                    step = functools.partial(inner.asend, sent)
        finally:
            del step, exit_error, run

    return function


def _first_step(inner: AsyncGenerator[Any, Any]) -> Awaitable[Any]:
    """Take a first step hidden from the event loop, which would close the inner generator too."""
    hooks = sys.get_asyncgen_hooks()
    sys.set_asyncgen_hooks(firstiter=None, finalizer=_leave_open)
    try:
        return inner.__anext__()
    finally:
        sys.set_asyncgen_hooks(*hooks)


def _leave_open(inner: AsyncGenerator[Any, Any]) -> None:
    """No-op: the outer generator closes it."""
