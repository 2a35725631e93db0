"""Threads and executor workers go on in the context of whoever started them.

Without this a model call on a pool's thread belongs to no rollout. OpenTelemetry has a package for
it that pins one exact SDK, which we cannot ask of everyone.
"""

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

from opentelemetry.context import Context

from lightning_otel import capture
from lightning_otel.instrumentors.patches import replace, restore

# gevent puts a subclass that inherits the method in Thread's place.
_THREAD: Final = next(owner for owner in threading.Thread.__mro__ if "start" in vars(owner))
_REPLACED: Final = ((_THREAD, "start"), (ThreadPoolExecutor, "submit"))


def carry_context() -> None:
    """Wrap ``Thread.start`` and ``ThreadPoolExecutor.submit``; harmless if done before."""
    for (owner, name), make in zip(_REPLACED, (_patch_start, _patch_submit), strict=True):
        replace(owner, name, make)


def leave_context() -> None:
    """Put the two methods back, unless someone has wrapped them after us."""
    for owner, name in _REPLACED:
        restore(owner, name)


def _patch_start(original: Any) -> Any:
    def start(self: threading.Thread) -> None:
        context = capture.guard_call(capture.framed_context)
        if not context:
            return original(self)  # type: ignore[no-any-return]  # None
        capture.guard_call(_run_within, self, context)
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
        with capture.attach_context(context):
            run()

    thread.run = run_in_context  # type: ignore[method-assign]  # subclasses override run; this reaches them too


def _patch_submit(original: Any) -> Any:
    def submit(self: Any, fn: Any, /, *args: Any, **kwargs: Any) -> "Future[Any]":
        # Attached even if empty: a worker's own context is that of whoever made it start.
        context = capture.guard_call(capture.framed_context) or Context()
        return original(self, _call_within, context, fn, args, kwargs)  # type: ignore[no-any-return]  # a Future

    return submit


def _call_within(context: Context, fn: Any, args: Any, kwargs: Any) -> Any:
    with capture.attach_context(context):
        return fn(*args, **kwargs)
