"""One object of LangChain's, traced by itself."""

import sys
from typing import Any, TypeVar

from lightning_otel.instrumentors.langchain import LangChainInstrumentor

T = TypeVar("T")


def wrap_langchain(agent: T) -> T:
    """The same kind of object with its runs captured, whatever else is.

    What it does is recorded where the program records at that time: in the recording around it, by
    the process, or by OpenTelemetry's own provider. Where all of LangChain is captured too, nothing
    is doubled. The object that was given stays as it is.

    Args:
        agent: A graph or agent, a model, a tool, a retriever, a chain: any runnable.

    Returns:
        A copy of it. Of a runnable that has no callbacks of its own, such as a chain of several, it
        is what the runnable's ``with_config`` gives.

    Raises:
        TypeError: It is no runnable of LangChain's.
    """
    base = sys.modules.get("langchain_core.runnables.base")
    if base is None or not isinstance(agent, base.Runnable):
        raise TypeError(
            f"wrap_langchain() takes a runnable of LangChain's, not {type(agent).__name__}"
        )
    handler = LangChainInstrumentor().handler_for_one()
    runnable: Any = agent
    if "callbacks" in getattr(type(runnable), "model_fields", ()):
        held = runnable.callbacks
        found = runnable.model_copy(update={"callbacks": _with(held, handler)})
    else:
        found = runnable.with_config(callbacks=[handler])
    return found  # type: ignore[no-any-return]  # of the given type, or LangChain's binding to it


def _with(held: Any, handler: Any) -> Any:
    """An object's callbacks and one more: a list of handlers, or a manager of them."""
    if held is None or isinstance(held, list):
        return [*(held or ()), handler]
    manager = held.copy()
    manager.add_handler(handler)
    return manager
