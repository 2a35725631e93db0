"""A library's async generators inside ours, which go through them one step at a time.

Ours hold nothing across a yield: a context is attached for each step alone.
"""

import contextlib
import functools
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Protocol

from opentelemetry.context import Context

from lightning_otel import capture


class Walk(Protocol):
    """What runs while a generator is gone through, and is told how it went."""

    @property
    def context(self) -> Context:
        """The context of each step."""

    def saw(self, item: Any, /) -> None:
        """Take note of an item."""

    def interrupted(self, exc: BaseException, /) -> None:
        """Take note of what is thrown into the generator between two items."""

    def stop(self) -> None:
        """The generator came to its end."""

    def fail(self, exc: BaseException, /) -> None:
        """It raised; or, if this is a ``GeneratorExit``, it was left before its end."""


async def walked(
    begin: Callable[[], Walk | None], inner: AsyncGenerator[Any, Any]
) -> AsyncGenerator[Any, Any]:
    """The items of an async generator; whatever is sent to or thrown into ours reaches it.

    Args:
        begin: Begins what runs meanwhile, at the first step; None if nothing does.
        inner: The library's generator, which has not begun.
    """
    walk = capture.guarded(begin)
    step: Callable[[], Awaitable[Any]] = functools.partial(first_step, inner)
    try:
        while True:
            try:
                with _attached(walk):
                    item = await step()
            except StopAsyncIteration:
                if walk is not None:
                    capture.guarded(walk.stop)
                return
            except BaseException as exc:
                if walk is not None:
                    capture.guarded(walk.fail, exc)
                raise
            if walk is not None:
                capture.guarded(walk.saw, item)
            try:
                sent = yield item
            except GeneratorExit as exc:
                await _close(walk, inner, exc)
                raise
            except BaseException as exc:  # noqa: BLE001  # handed to the generator, not swallowed
                if walk is not None:
                    capture.guarded(walk.interrupted, exc)
                step = functools.partial(inner.athrow, exc)
            else:
                step = functools.partial(inner.asend, sent)
    finally:
        del step  # it may know an exception, whose traceback knows this frame


async def _close(walk: Walk | None, inner: AsyncGenerator[Any, Any], left: GeneratorExit) -> None:
    try:
        with _attached(walk):
            await inner.aclose()
    except BaseException as exc:
        if walk is not None:
            capture.guarded(walk.fail, exc)
        raise
    if walk is not None:
        capture.guarded(walk.fail, left)


def _attached(walk: Walk | None) -> "contextlib.AbstractContextManager[None]":
    return contextlib.nullcontext() if walk is None else capture.attached(walk.context)


def first_step(inner: AsyncGenerator[Any, Any]) -> Awaitable[Any]:
    """The first step of a generator that only the one around it will ever close.

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
    """Nothing: the generator around it is collected with it, and will close it."""
