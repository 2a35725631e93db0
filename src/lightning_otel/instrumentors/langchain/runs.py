"""LangChain's open runs: which span each has, if any, and the context of what happens within it.

Parentage comes from LangChain's run ids alone; the current context only decides whether a span of
the program's own stands between two runs. LangChain does not always report an end, as of a
cancelled tool; so a :class:`RunPlace` is around the code of a run.
"""

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, Final
from uuid import UUID

from opentelemetry import context as otel_context
from opentelemetry.context import Context

from lightning_otel import capture
from lightning_otel.capture import operations
from lightning_otel.instrumentors import steps, wrappers

OPEN_LIMIT: Final = 10_000
"""Limit of open runs; some are never reported to end, and the oldest are given up."""


class LangChainRun:
    """One open run of LangChain's.

    Attributes:
        operation: Its own span; None if its parent's counts.
        graph: The operation it is as a graph, such as ``invoke_agent``; None if it is no graph.
        agent: The agent's name that LangChain gives to everything within this run.
        call: The streamed call of a model, whose end LangChain reports by its run.
        is_first: Whether no node of it has begun.
        is_guessed: Whether it was taken for an agent by the name of its first node.
    """

    def __init__(
        self, name: str, context: Context, operation: operations.Operation | None = None
    ) -> None:
        self.name = name
        self.context = context
        self.operation = operation
        self.graph: str | None = None
        self.agent: Any = None
        self.integration: Any = None
        self.call: steps.ModelCall | None = None
        self.is_first = True
        self.is_guessed = False

    def end(self, exc: BaseException | None = None) -> None:
        """End its span, if it has one; a call that nobody has ended before was left."""
        exc = exc and read_cause(exc)
        if self.call is not None:
            self.call.end(None, exc or GeneratorExit())
        elif self.operation is None:
            return
        elif exc is None or is_control_flow(exc):
            self.operation.stop()
        else:
            self.operation.fail(exc)


_open: dict[UUID, LangChainRun] = {}


def find(run_id: Any) -> LangChainRun | None:
    """The open run of an id, if it is known."""
    return _open.get(run_id) if run_id is not None else None


def add(run_id: UUID, run: LangChainRun) -> None:
    """Keep a run until it is taken."""
    _open[run_id] = run
    if (events := _events.get()) is not None:
        events.run_ids.append(run_id)
    if len(_open) > OPEN_LIMIT:
        end(next(iter(_open)))


def take(run_id: Any) -> LangChainRun | None:
    """The open run of an id, which is open no more."""
    return _open.pop(run_id, None)


def end(run_id: Any, exc: BaseException | None = None) -> None:
    """End the open run of an id, if there is one."""
    run = take(run_id)
    if run is not None:
        capture.guard_call(run.end, exc)


def open_count() -> int:
    """Count the open runs."""
    return len(_open)


def context_in(parent: LangChainRun | None) -> Context:
    """The context of a new run: its parent's, or a span's that the program opened within that."""
    if parent is None:
        return operations.parent_context()
    current = otel_context.get_current()
    if current is parent.context:
        return current
    owner = operations.operation_of(parent.context)
    return current if owner is None or owner.encloses(current) else parent.context


def is_control_flow(exc: BaseException) -> bool:
    """Return whether a run was left or interrupted on purpose, which is no error."""
    return isinstance(exc, GeneratorExit) or any(
        cls.__name__ == "GraphBubbleUp" for cls in type(exc).__mro__
    )


_events: ContextVar["Events | None"] = ContextVar("lightning-otel-langchain-events", default=None)


class Events(wrappers.WrappedRun, AbstractContextManager[None]):
    """A stream of a run's events: LangChain cancels the run where the program leaves the stream."""

    is_left = False

    def __init__(self) -> None:
        self.run_ids: list[UUID] = []

    def __enter__(self) -> None:
        self._mark = _events.set(self)

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(ValueError):  # left in another context than it was entered in
            _events.reset(self._mark)

    def active(self) -> "Events":
        """Return itself: the task of the run is begun in it."""
        return self

    def note_throw(self, exc: BaseException) -> None:
        """Note that the program leaves the stream."""
        self.is_left = isinstance(exc, GeneratorExit)

    def fail(self, exc: BaseException) -> None:
        """End what LangChain tells no handler of, such as a node that was cancelled as it began."""
        for run_id in reversed(self.run_ids if self.is_left else ()):
            end(run_id, exc)


def begin_events(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Events:
    """Begin a stream of events."""
    return Events()


def read_cause(exc: BaseException) -> BaseException:
    """Return what ended a run; that the program left it, where it was cancelled for that."""
    events = _events.get()
    is_left = events is not None and events.is_left and type(exc).__name__ == "CancelledError"
    return GeneratorExit() if is_left else exc


_here: ContextVar["RunPlace | None"] = ContextVar("lightning-otel-langchain-place", default=None)


def current_place() -> "RunPlace | None":
    """The innermost place that the code at hand runs in, if no run takes place there yet."""
    place = _here.get()
    return place if place is not None and place.run_id is None else None


class RunPlace(wrappers.WrappedRun, AbstractContextManager[None]):
    """Code around one run, in one block or, around a generator, in a block for each step."""

    begin_stream: Any = None

    def __init__(self, tool_call_id: object = None) -> None:
        self.run_id: UUID | None = None
        self.tool_call_id = tool_call_id
        self._context: Context | None = None

    def take(self, run_id: UUID, context: Context) -> None:
        """Let a run take place here: what follows, in this block and later ones, is within it."""
        self.run_id, self._context = run_id, context
        if _here.get() is self:
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

    def active(self) -> "RunPlace":
        """Return itself: the block in which the run takes place."""
        return self

    def succeed(self, result: Any) -> None:
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
        end(self.run_id, exc)


def begin_place(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> RunPlace:
    """Begin the place of a tool or a retriever."""
    return RunPlace(kwargs.get("tool_call_id"))
