"""One object of LangChain's, traced by itself."""

import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from lightning_otel import capture
from lightning_otel.dataset import Store
from lightning_otel.tracing.recording import Recording

T = TypeVar("T")

_RUNS = ("invoke", "ainvoke", "stream", "astream")
"""Each run of a runnable begins in one of them: the others, such as batches, call these."""


def wrap_langchain(agent: T, *, store: "Store | str | os.PathLike[str] | None" = None) -> T:
    """Return a copy of a runnable whose runs are captured, whatever else is.

    With a store each run is a rollout in it. Without one, runs are recorded where the program
    records at that time: in the recording around them, by the process, or by the program's own
    tracer provider; where it does not record, the first run warns. Where all of LangChain is
    captured too, nothing is doubled. The given object stays as it is.

    Args:
        agent: A graph or agent, a model, a tool, a retriever, a chain: any runnable.
        store: The store, or its path.

    Returns:
        A copy of it. Of a runnable that has no callbacks of its own, such as a chain of several, it
        is what the runnable's ``with_config`` gives.

    Raises:
        TypeError: It is no runnable of LangChain's.
        ConfigError: The store cannot be written to from a recording.
    """
    base = sys.modules.get("langchain_core.runnables.base")
    if base is None or not isinstance(agent, base.Runnable):
        raise TypeError(
            f"wrap_langchain() takes a runnable of LangChain's, not {type(agent).__name__}"
        )
    if store is None:
        found = _add_handler(agent)
    else:
        found = _record_runs(agent, store if isinstance(store, Store) else Store(store))
    return found  # type: ignore[no-any-return]  # of the given type, or LangChain's binding to it


def _record_runs(agent: Any, store: Store) -> Any:
    has_copy = "callbacks" in getattr(type(agent), "model_fields", ())
    found = agent.model_copy() if has_copy else agent.with_config()
    for name in _RUNS:
        # Past the checks of pydantic, of which many runnables are models.
        object.__setattr__(found, name, _record_calls(getattr(found, name), store))
    return found


def _record_calls(run: Callable[..., Any], store: Store) -> Callable[..., Any]:
    """Return the method, each call of which is a rollout unless it is a part of one there."""
    from lightning_otel.tracing import auto_trace

    traced = auto_trace(run, store=store)

    def begin(*args: Any, **kwargs: Any) -> Any:
        frame = capture.current_frame()
        around = frame.recording if frame is not None else None
        is_part = isinstance(around, Recording) and around.store.name == store.name
        return (run if is_part else traced)(*args, **kwargs)

    return begin


def _add_handler(agent: Any) -> Any:
    from lightning_otel.instrumentors.langchain import LangChainInstrumentor

    handler = LangChainInstrumentor().handler_for_one()
    if "callbacks" not in getattr(type(agent), "model_fields", ()):
        return agent.with_config(callbacks=[handler])
    held = agent.callbacks
    if held is None or isinstance(held, list):
        return agent.model_copy(update={"callbacks": [*(held or ()), handler]})
    manager = held.copy()
    manager.add_handler(handler)
    return agent.model_copy(update={"callbacks": manager})
