"""``carried``: a function that continues its rollout in process pools, executors and callbacks."""

import asyncio
import contextvars
import functools
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any, TypeVar

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from lightning_otel import capture, config, provider
from lightning_otel.capture import operations
from lightning_otel.dataset import Store
from lightning_otel.errors import warn_once
from lightning_otel.instrumentors.wrappers import ContextRun
from lightning_otel.store.transforms import load_transform_lazily, name_transform
from lightning_otel.tracing.blocks import wrap_function

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

_prepared_pids: set[int] = set()


class _Carried:
    """A function with the context it is to run in, which pickles as for ``_unpack_context``."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._context: Context | None = capture.guard_call(operations.parent_context)
        self._pid = os.getpid()
        self._packed = None
        if self._context is not None:
            self._packed = capture.guard_call(_pack_context, self._context)
        functools.update_wrapper(self, function, updated=())

    def __getstate__(self) -> tuple[Callable[..., Any], dict[str, Any] | None]:
        return self._function, self._packed

    def __setstate__(self, state: tuple[Callable[..., Any], dict[str, Any] | None]) -> None:
        self._function, self._packed = state
        self._context, self._pid = None, 0
        functools.update_wrapper(self, self._function, updated=())

    def __repr__(self) -> str:
        return f"<carried {getattr(self._function, '__qualname__', type(self._function).__name__)}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return wrap_function(self._function, self._begin)(*args, **kwargs)

    def _begin(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ContextRun | None:
        context = self._context
        if self._pid != os.getpid():
            # A forked child holds its parent's context, whose writer and spans are the parent's.
            packed = self._packed
            context = None if packed is None else capture.guard_call(_unpack_context, **packed)
        return None if context is None else ContextRun(context)


def carried(function: F) -> F:
    """Return the function, to run in the rollout and under the span that are current here and now.

    Hand it to a process pool, a framework's executor or a callback. Model calls in there belong to
    the same rollout and tree, written by their own process into the same store::

        with ProcessPoolExecutor() as pool:
            pool.map(lightning_otel.carried(solve), tasks)

    Args:
        function: Any callable, also async or a generator; for another process one that pickles.
    """
    return _Carried(function)  # type: ignore[return-value]  # called as the function is


def _pack_context(context: Context) -> dict[str, Any]:
    parent: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(parent, operations.inner_context(context))
    frame = capture.current_frame(context)
    if frame is None or frame.sink is None:
        return {"parent": parent}
    layout = getattr(frame.sink, "layout", None)
    return {
        "parent": parent,
        "place": str(layout.catalogue) if layout is not None else Store(":memory:").name,
        "stamps": dict(frame.stamps),
        "transforms": tuple(map(name_transform, frame.transforms)),
        "asks_for_ids": frame.asks_for_ids,
        "applies": frame.assigner is not None,
        "standings": getattr(frame.assigner, "standings", None),
    }


def _unpack_context(
    parent: Mapping[str, str],
    place: str | None = None,
    stamps: Mapping[str, AttributeValue] = MappingProxyType({}),
    transforms: tuple[str, ...] = (),
    *,
    asks_for_ids: bool = False,
    applies: bool = False,
    standings: Mapping[str, Any] | None = None,
) -> Context:
    """Return a context of this process that continues the pickled one.

    ``parent`` is W3C trace context; ``place`` is the store's path, None if nothing is recorded
    there. A transform whose name cannot be found here fails, so that nothing is let out.
    """
    # From an empty one: what a forked worker's context holds is that of who happened to start it.
    context = TraceContextTextMapPropagator().extract(parent, Context())
    if place is None or not config.is_enabled() or provider.is_broken():
        return context
    store = Store(place)
    if store.layout is None:
        warn_once("nothing is recorded in other processes: the store is in memory; name a path")
        return context
    provider.ensure_provider()
    if os.getpid() not in _prepared_pids:
        _prepared_pids.add(os.getpid())
        capture.guard_call(provider.switch_on)
    above = context if trace.get_current_span(context).get_span_context().is_valid else None
    watch = capture.guard_call(provider.assigner_of, store) if applies else None
    assigner = watch.for_rollout(standings) if watch is not None else None
    frame = capture.Frame(
        store.writer(), stamps, above, asks_for_ids=asks_for_ids, assigner=assigner,
        transforms=tuple(map(load_transform_lazily, transforms)),
    )  # fmt: skip
    return capture.set_frame(frame, context)


def call_outside_loop(act: Callable[[], T]) -> T:
    """Call what runs an event loop; in a thread if one runs here already, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return act()
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(contextvars.copy_context().run, act).result()
