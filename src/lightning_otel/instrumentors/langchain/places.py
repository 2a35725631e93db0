"""Places of runs: LangChain's own code around a run, entered and left by us.

LangChain tells a handler that a run starts, and not always that it ended: a cancelled tool, a
retriever that was interrupted. And it runs tools, retrievers and streams in the context they were
called in. A place is around that code; the handler puts the run into it once it starts.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any
from uuid import UUID

from opentelemetry import context as otel_context
from opentelemetry.context import Context

from lightning_otel.instrumentors.doors import Run
from lightning_otel.instrumentors.langchain import runs

_here: ContextVar["Place | None"] = ContextVar("lightning-otel-langchain-place", default=None)


def current_place() -> "Place | None":
    """The innermost place that the code at hand runs in."""
    return _here.get()


class Place(Run, AbstractContextManager[None]):
    """Code around one run, in one block or, around a generator, in a block for each step.

    Attributes:
        run_id: The run that takes place here; None before it started.
        tool_call_id: The call that a tool was given, which older LangChain tells no handler.
    """

    __slots__ = ("_context", "_mark", "_token", "run_id", "tool_call_id")

    def __init__(self, tool_call_id: object = None) -> None:
        self.run_id: UUID | None = None
        self.tool_call_id = tool_call_id
        self._context: Context | None = None

    def take(self, run_id: UUID, context: Context) -> None:
        """Let a run take place here: what follows, in this block and later ones, is within it."""
        self.run_id, self._context = run_id, context
        # Undone with the block, which puts back what was current before it.
        otel_context.attach(context)

    def __enter__(self) -> None:
        self._mark = _here.set(self)
        self._token = otel_context.attach(self._context or otel_context.get_current())

    def __exit__(self, *exc: object) -> None:
        try:
            _here.reset(self._mark)
        except ValueError:  # left in another context than it was entered in: nothing to undo there
            return
        otel_context.detach(self._token)

    def active(self) -> "Place":
        """Return itself: the block in which the run takes place."""
        return self

    def returned(self, result: Any) -> None:
        """End the run as the method has."""
        self.over()

    def fail(self, exc: BaseException) -> None:
        """End the run with what was raised."""
        self.over(exc)

    def stop(self) -> None:
        """End the run as the generator has."""
        self.over()

    def over(self, exc: BaseException | None = None) -> None:
        """End the run that took place here, if nobody has said so yet."""
        run = runs.take(self.run_id)
        if run is None:
            return
        if exc is None:
            run.stop()
        else:
            run.fail(exc)


def begin_place(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Place:
    """Begin the place of a tool or a retriever."""
    return Place(kwargs.get("tool_call_id"))
