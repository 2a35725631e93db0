"""Workers as Ray actors on a cluster; each records into its own machine's store."""

import threading
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

from lightning_otel.errors import ConfigError, NotInstalledError, install_command
from lightning_otel.runner.agents.functions import by_value
from lightning_otel.runner.worker import Runner
from lightning_otel.state import State


def make_starter(state: State, options: Mapping[str, Any]) -> "Callable[..., Actor]":
    """Return a starter of workers on Ray; start Ray here without a cluster."""
    try:
        ray = import_module("ray")
    except ModuleNotFoundError as exc:
        raise NotInstalledError(
            f"workers on Ray need the extra ray; {install_command('ray')}"
        ) from exc
    if not ray.is_initialized():
        ray.init()
    machines = sum(1 for node in ray.nodes() if node["Alive"])
    if machines > 1 and not state.is_shared:
        raise ConfigError(
            f"Ray has {machines} machines, and the queue {state.name} is a file of this one; "
            "name a database that all reach: State('postgresql+psycopg://user@host/database')"
        )
    # A second thread of the actor hears that it is to stop.
    cls = ray.remote(max_concurrency=2, max_restarts=0)(Worker)
    actor_class = cls.options(**options) if options else cls
    return partial(Actor, actor_class)


class Worker:
    """The worker of an actor."""

    def __init__(self) -> None:
        self._stop = threading.Event()

    def work(self, runner: Runner, *, until_empty: bool) -> None:
        """Run rollouts until none is left."""
        runner.run(until_empty=until_empty, stop=self._stop)

    def stop(self) -> None:
        """End after the present attempt."""
        self._stop.set()


class Actor:
    """A worker on Ray, as its starter sees it."""

    def __init__(self, cls: Any, runner: Runner, *, until_empty: bool) -> None:
        self._ray = import_module("ray")
        with by_value():
            sent = self._ray.put(runner)
        self._actor = cls.remote()
        self._result = self._actor.work.remote(sent, until_empty=until_empty)

    def is_alive(self) -> bool:
        """Return whether it works."""
        ready, _ = self._ray.wait([self._result], timeout=0)
        return not ready

    def describe_end(self) -> str:
        """Return why it died; empty if it ended in order."""
        try:
            self._ray.get(self._result)
        except self._ray.exceptions.RayActorError as exc:
            return f"its actor died: {exc}"
        except self._ray.exceptions.RayTaskError as exc:
            return f"its actor failed: {exc.cause}"
        return ""

    def stop(self) -> None:
        """Have it end after its present attempt."""
        self._actor.stop.remote()

    def kill(self) -> None:
        """End it now."""
        self._ray.kill(self._actor)
