"""Threads and executor workers go on in the context of whoever started them.

Without this a model call on a pool's thread belongs to no rollout. OpenTelemetry has a package for
it that pins one exact SDK, which we cannot ask of everyone.
"""

import functools
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from opentelemetry import context as otel_context
from opentelemetry.context import Context

from lightning_otel import capture

_MARK = "__lightning_otel_wrapped__"


def carry_context() -> None:
    """Wrap ``Thread.start`` and ``ThreadPoolExecutor.submit``; harmless if done before."""
    _replace(threading.Thread, "start", _start)
    _replace(ThreadPoolExecutor, "submit", _submit)


def leave_context() -> None:
    """Put the two methods back, unless someone has wrapped them after us."""
    for owner, name in ((threading.Thread, "start"), (ThreadPoolExecutor, "submit")):
        found = owner.__dict__[name]
        original = getattr(found, _MARK, None)
        # A wrapper around ours shows our mark too, but what it wraps is ours.
        if original is not None and found.__wrapped__ is original:
            setattr(owner, name, original)


def _replace(owner: type, name: str, make: Callable[[Any], Any]) -> None:
    original = owner.__dict__[name]
    if not hasattr(original, _MARK):
        wrapper = functools.wraps(original)(make(original))
        setattr(wrapper, _MARK, original)
        setattr(owner, name, wrapper)


def _start(original: Any) -> Any:
    def start(self: threading.Thread) -> None:
        context = otel_context.get_current()
        if not context:
            return original(self)  # type: ignore[no-any-return]  # None
        capture.guarded(_run_within, self, context)
        try:
            return original(self)  # type: ignore[no-any-return]  # None
        except BaseException:
            self.__dict__.pop("run", None)
            raise

    return start


def _run_within(thread: threading.Thread, context: Context) -> None:
    run = thread.run

    def run_in_context() -> None:
        # Gone before it runs: the thread would keep itself alive through it.
        thread.__dict__.pop("run", None)
        with capture.attached(context):
            run()

    thread.run = run_in_context  # type: ignore[method-assign]  # subclasses override run; this reaches them too


def _submit(original: Any) -> Any:
    def submit(self: Any, fn: Any, /, *args: Any, **kwargs: Any) -> "Future[Any]":
        # Attached even if empty: a worker's own context is that of whoever made it start.
        context = otel_context.get_current()
        return original(self, _call, context, fn, args, kwargs)  # type: ignore[no-any-return]  # a Future

    return submit


def _call(context: Context, fn: Any, args: Any, kwargs: Any) -> Any:
    with capture.attached(context):
        return fn(*args, **kwargs)
