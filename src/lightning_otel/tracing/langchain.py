"""One object of LangChain's, traced by itself."""

import copy
import os
import sys
from collections.abc import Callable, Collection
from types import MethodType
from typing import Any, Final, TypeVar

from lightning_otel import capture
from lightning_otel.dataset import Store
from lightning_otel.tracing.recording import Recording

T = TypeVar("T")

_RUNS: Final = (
    "invoke", "ainvoke", "stream", "astream", "transform", "atransform",
    "run", "arun", "generate", "agenerate", "generate_prompt", "agenerate_prompt",
)  # fmt: skip
"""Each run of a runnable begins in one of them, as far as it has them: other methods call these."""
_OTHERS: Final = (
    "batch", "abatch", "batch_as_completed", "abatch_as_completed", "astream_events", "astream_log",
)  # fmt: skip
"""Of these a chain has its own, which call others: as a plain runnable's, each input is a run."""


def wrap_langchain(agent: T, *, store: "Store | str | os.PathLike[str] | None" = None) -> T:
    """Return a copy of a runnable whose runs are captured, whatever else is.

    With a store each run is a rollout in it. Without one, runs are recorded where the program
    records at that time; where it does not record, the first run warns. Where all of LangChain is
    captured too, nothing is doubled.

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
        wrapped = _add_handler(agent)
    else:
        wrapped = _record_runs(agent, store if isinstance(store, Store) else Store(store))
    return wrapped  # type: ignore[no-any-return]  # of the given type, or LangChain's binding to it


def _record_runs(agent: Any, store: Store) -> Any:
    base, fields = sys.modules["langchain_core.runnables.base"], _fields_of(agent)
    if isinstance(agent, base.RunnableBinding):  # what is made of it keeps what it binds
        return agent.model_copy(update={"bound": _record_runs(agent.bound, store)})
    clone = copy.copy(agent)
    recorded = {
        name: _record_calls(getattr(clone, name), store) for name in _RUNS if hasattr(clone, name)
    }
    is_own_kind = "callbacks" in fields or isinstance(agent.with_config(), type(agent))
    if not is_own_kind:
        recorded |= {name: MethodType(getattr(base.Runnable, name), clone) for name in _OTHERS}
    elif "callbacks" not in fields:  # a graph, which is copied where it is configured
        recorded["copy"] = lambda update=None: _record_runs(agent.copy(update), store)
    for name, method in recorded.items():
        # Past the checks of pydantic, of which many runnables are models.
        object.__setattr__(clone, name, method)
    return clone if is_own_kind else clone.with_config()


def _record_calls(run: Callable[..., Any], store: Store) -> Callable[..., Any]:
    from lightning_otel.tracing import auto_trace

    traced = auto_trace(run, store=store)

    def begin(*args: Any, **kwargs: Any) -> Any:
        frame = capture.current_frame()
        recording = frame.recording if frame is not None else None
        is_part = isinstance(recording, Recording) and recording.store.name == store.name
        return (run if is_part else traced)(*args, **kwargs)

    return begin


def _add_handler(agent: Any) -> Any:
    from lightning_otel.instrumentors.langchain import LangChainInstrumentor

    handler = LangChainInstrumentor().handler_for_one()
    if "callbacks" not in _fields_of(agent):
        return agent.with_config(callbacks=[handler])
    callbacks = agent.callbacks
    if callbacks is None or isinstance(callbacks, list):
        return agent.model_copy(update={"callbacks": [*(callbacks or ()), handler]})
    manager = callbacks.copy()
    manager.add_handler(handler)
    return agent.model_copy(update={"callbacks": manager})


def _fields_of(agent: Any) -> Collection[str]:
    return getattr(type(agent), "model_fields", ())
