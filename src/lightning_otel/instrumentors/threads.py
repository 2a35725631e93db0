"""Threads, executor workers and greenlets go on in the context of whoever started them.

OpenTelemetry's package for it pins one exact SDK, which we cannot ask of everyone.
"""

import contextvars
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

from opentelemetry import context as otel_context
from opentelemetry.context import Context

from lightning_otel import capture
from lightning_otel.instrumentors.patches import replace, restore, when_imported

# gevent puts a subclass that inherits the method in Thread's place.
_THREAD: Final = next(owner for owner in threading.Thread.__mro__ if "start" in vars(owner))
_SPAWNS: Final = (
    ("gevent", "", "spawn_raw"),
    ("gevent.hub", "", "spawn_raw"),
    ("gevent.threadpool", "ThreadPool", "spawn"),
)
"""Module, class and name of what starts work of gevent's that is no ``Greenlet``."""
_GREENLET: Final = "gevent.greenlet"
"""The module of ``Greenlet``, which takes no attributes, but callbacks."""


def carry_context() -> None:
    """Wrap what starts threads, work of executors and greenlets; harmless if done before."""
    capture.guard_call(replace, _THREAD, "start", _patch_start)
    capture.guard_call(replace, ThreadPoolExecutor, "submit", _patch_submit)
    for module in (_GREENLET, *(module for module, *_ in _SPAWNS)):
        if module in sys.modules:
            capture.guard_call(_carry_to_greenlets, module)
        else:
            when_imported(module, _carry_to_greenlets)


def leave_context() -> None:
    """Put the originals back, unless someone has wrapped them after us."""
    restore(_THREAD, "start")
    restore(ThreadPoolExecutor, "submit")
    for module, owner, name in _SPAWNS:
        if module in sys.modules:
            restore(_find_owner(module, owner), name)
    if _GREENLET in sys.modules:
        sys.modules[_GREENLET].Greenlet.remove_spawn_callback(_carry_to)


def _find_owner(module: str, owner: str) -> Any:
    return getattr(sys.modules[module], owner) if owner else sys.modules[module]


def _carry_to_greenlets(imported: str) -> None:
    if imported == _GREENLET:
        sys.modules[_GREENLET].Greenlet.add_spawn_callback(_carry_to)
    for module, owner, name in _SPAWNS:
        if module == imported:
            replace(_find_owner(module, owner), name, _patch_submit if owner else _patch_spawn)


def _patch_spawn(original: Any) -> Any:
    def spawn(*args: Any, **kwargs: Any) -> Any:
        greenlet = original(*args, **kwargs)  # it begins with the next turn of gevent's loop
        _carry_to(greenlet)
        return greenlet

    return spawn


def _carry_to(greenlet: Any) -> None:
    capture.guard_call(_give_context, greenlet)


def _give_context(greenlet: Any) -> None:
    context = capture.framed_context()
    if context and greenlet.gr_context is None:
        greenlet.gr_context = contextvars.Context()  # nothing of the program's own goes along
        greenlet.gr_context.run(otel_context.attach, context)


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
