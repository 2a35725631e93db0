"""The agent protocol, and a runner of async agents."""

import asyncio
import contextvars
import inspect
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping
from typing import Any, Final, TypeAlias

from lightning_otel.tracing.propagation import call_outside_loop
from lightning_otel.types import Resource, Rollout

Answer: TypeAlias = Any
"""An agent's result: a number, named numbers (the first is primary), None, or anything to judge."""

Resources: TypeAlias = Mapping[str, Resource]
"""By name what an agent works with."""


class Agent(ABC):
    """An agent: it acts on a task.

    Attributes:
        track_only: The agents within whose calls become training data, as ``auto_trace`` takes
            them; None is all.
        takes_resources: Whether it works with what it is given; else only its requests can be.
    """

    track_only: str | None = None
    takes_resources: bool = True

    @property
    def name(self) -> str:
        """The name of its agent in spans and queue."""
        return type(self).__name__

    @property
    def names(self) -> tuple[str, ...]:
        """Every name under which the queue may ask for it."""
        return (self.name,)

    def choose(self, rollout: Rollout) -> "Agent":
        """Return the agent for a rollout: this one, or the one of several that is meant."""
        return self

    @abstractmethod
    def run(self, task: Any, resources: Resources, rollout: Rollout) -> Answer:
        """Act on a task, to the end, whether it is async or not."""


def await_result(answer: Any) -> Any:
    """Return an agent's answer; await it in this thread's loop if it is awaitable.

    One loop a thread persists, so that an async client keeps its connections; leftover tasks are
    cancelled.
    """
    if not inspect.isawaitable(answer):
        return answer
    return call_outside_loop(lambda: _thread_loop().run(answer))


def cancel_agent(thread: threading.Thread) -> bool:
    """Cancel what an async agent does in another thread; False if there is nothing async."""
    with _lock:
        task = _running.get(thread.ident or 0)
        if task is not None:
            task.get_loop().call_soon_threadsafe(task.cancel)
        return task is not None


async def _await_answer(answer: Awaitable[Any]) -> Any:
    return await answer


class _Loop:
    def __init__(self) -> None:
        self.pid = os.getpid()
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._runner.get_loop()

    def run(self, answer: Awaitable[Any]) -> Any:
        ident = threading.get_ident()
        # A runner keeps the context it was first used in: another rollout's.
        context = contextvars.copy_context()
        task = self._loop.create_task(_await_answer(answer), context=context)
        with _lock:
            _running[ident] = task
        try:
            return self._runner.run(_await_answer(task), context=context)
        finally:
            with _lock:
                del _running[ident]
            _cancel_rest(self._loop)

    def __del__(self) -> None:
        # Nothing is left to run, and where this comes to pass another loop may be running.
        if self.pid == os.getpid() and not self._loop.is_running():
            self._loop.close()


def _cancel_rest(loop: asyncio.AbstractEventLoop) -> None:
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))


_loops: Final = threading.local()
_inherited: Final[list[_Loop | None]] = []
_running: Final[dict[int, asyncio.Task[Any]]] = {}
_lock = threading.Lock()  # guards: the loop of a task in _running is not closed


def _thread_loop() -> _Loop:
    loop: _Loop | None = getattr(_loops, "loop", None)
    if loop is None or loop.pid != os.getpid():
        loop = _loops.loop = _Loop()
    return loop


def _forget_loop() -> None:
    # Another thread of the parent may have held the lock, and none of them runs here.
    global _lock
    _lock = threading.Lock()
    _running.clear()
    # To close it would take the parent's loop off what both of them wait on.
    _inherited.append(getattr(_loops, "loop", None))


os.register_at_fork(after_in_child=_forget_loop)
