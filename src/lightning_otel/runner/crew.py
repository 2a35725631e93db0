"""Several workers at once: started, looked after, stopped, and those that die replaced."""

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, Protocol

from lightning_otel.agents import Agent, agent_of
from lightning_otel.dataset import Store
from lightning_otel.errors import ConfigError, WorkerError
from lightning_otel.runner.attempt import ResourceSource
from lightning_otel.runner.hooks import Hook
from lightning_otel.runner.worker import LEASE_S, Runner, Stop
from lightning_otel.state import State
from lightning_otel.state.queue import Queue
from lightning_otel.tracing import RewardEvaluator
from lightning_otel.types import Mode

log = logging.getLogger(__name__)

Kind = Literal["threads", "processes", "ray"]
_LOOK_S: Final = 0.05
_GRACE_S: Final = 10.0  # for attempts to come to an end when somebody interrupts their worker
_MOST_BARREN: Final = 3


@dataclass(frozen=True, slots=True)
class Duty:
    """A worker's duty, sent to the process or machine that does it."""

    agent: Agent
    store: str | os.PathLike[str]
    state: State
    worker_id: str
    resources: "Callable[[State], ResourceSource] | None"
    hooks: Sequence[Hook]
    reward_evaluator: RewardEvaluator | None
    apply: bool | None
    modes: Collection[Mode] | None
    lease_s: float
    until_empty: bool

    def run(self, stop: Stop) -> None:
        """Do it, in a process that is the worker's own."""
        runner = self.runner(
            store=self.store,
            queue=Queue(self.state),
            resources=None if self.resources is None else self.resources(self.state),
            is_process_own=True,
        )
        runner.run(until_empty=self.until_empty, stop=stop)

    def runner(
        self,
        *,
        store: Store | str | os.PathLike[str],
        queue: Queue,
        resources: ResourceSource | None,
        is_process_own: bool = False,
    ) -> Runner:
        """Make the runner, with the store, queue and resources of its own process."""
        return Runner(
            self.agent,
            store=store,
            queue=queue,
            resources=resources,
            hooks=self.hooks,
            reward_evaluator=self.reward_evaluator,
            apply=self.apply,
            modes=self.modes,
            lease_s=self.lease_s,
            worker_id=self.worker_id,
            is_process_own=is_process_own,
        )


class Member(Protocol):
    """A worker that was started elsewhere."""

    def is_alive(self) -> bool:
        """Return whether it works; answer at once."""

    def ended(self) -> str:
        """Return why it died; empty if it ended in order."""

    def stop(self) -> None:
        """Have it end after its present attempt."""

    def kill(self) -> None:
        """End it now."""


def run_workers(
    n: int,
    agent: object,
    *,
    kind: Kind = "threads",
    store: Store | str | os.PathLike[str] | None = None,
    queue: Queue | None = None,
    resources: ResourceSource | None = None,
    hooks: Sequence[Hook] = (),
    reward_evaluator: RewardEvaluator | None = None,
    apply: bool | None = None,
    modes: Collection[Mode] | None = None,
    lease_s: float = LEASE_S,
    until_empty: bool = True,
    stop: Stop | None = None,
    options: Mapping[str, Any] | None = None,
) -> int:
    """Run rollouts with several workers until none is left; gives how many attempts they made.

    A worker process that dies, by whatever, loses nothing: what it held is tried again if it may
    be, and another worker takes its place.

    Args:
        n: How many work at the same time.
        agent: Whatever :func:`agent_of` takes; for processes something that pickles, such as a
            function at the top of a module.
        kind: ``threads`` of this process; ``processes`` of this machine, each of which is killed
            with an attempt that hangs; or ``ray`` actors on however many machines.
        store: Where attempts are recorded; on each machine, its own under this name.
        queue: As for :class:`Runner`.
        resources: As for :class:`Runner`.
        hooks: As for :class:`Runner`; for processes they are to pickle.
        reward_evaluator: As for :class:`Runner`.
        apply: As for :class:`Runner`.
        modes: As for :class:`Runner`.
        lease_s: As for :class:`Runner`.
        until_empty: As for :meth:`Runner.run`.
        stop: As for :meth:`Runner.run`.
        options: Of Ray's actors, by Ray's names, such as ``{"num_cpus": 0.5}``.

    Raises:
        ConfigError: The agent cannot be sent to another process, or an extra is missing.
        WorkerError: Workers die as soon as they are started; or threads hang.
        StateError: The queue cannot be read or changed.
    """
    if n < 1:
        raise ConfigError(f"there are to be {n} workers; give 1 or more")
    if options and kind != "ray":
        raise ConfigError(f"options are Ray's, and the workers are {kind}; leave them out")
    first = Runner(agent, store=store, queue=queue, resources=resources, modes=modes)
    duty = Duty(
        agent=agent_of(agent),
        store=_working_folder(first.store),
        state=first.queue.state,
        worker_id=f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}",
        resources=None if resources is None else type(resources),
        hooks=tuple(hooks),
        reward_evaluator=reward_evaluator,
        apply=apply,
        modes=modes,
        lease_s=lease_s,
        until_empty=until_empty,
    )
    told = stop if stop is not None else threading.Event()
    if kind == "threads":
        return _count_threads(n, duty, first.store, first.queue, resources, told)
    if kind == "processes":
        from lightning_otel.runner.processes import start

        return Crew(duty, first.queue, start).run(n, told)
    if kind == "ray":
        from lightning_otel.runner.ray import starter

        return Crew(duty, first.queue, starter(duty, options or {})).run(n, told)
    raise ConfigError(f"workers are of kind {kind!r}; it must be threads, processes or ray")


def _working_folder(store: Store) -> Path:
    layout = store.local.layout
    if layout is None:
        raise ConfigError(f"workers cannot record into {store.name}; name a store on disk")
    return layout.catalogue


def _count_threads(
    n: int,
    duty: Duty,
    store: Store,
    queue: Queue,
    resources: ResourceSource | None,
    told: Stop,
) -> int:
    runners = [
        replace(duty, worker_id=f"{duty.worker_id}-{number}").runner(
            store=store, queue=queue, resources=resources
        )
        for number in range(1, n + 1)
    ]
    over = threading.Event()
    failed: list[BaseException] = []
    stop = _Either(told, over)

    def work(runner: Runner) -> None:
        try:
            runner.run(until_empty=duty.until_empty, stop=stop)
        except BaseException as exc:  # noqa: BLE001  # raised where the workers were asked for
            failed.append(exc)
            over.set()

    threads = [threading.Thread(target=work, args=(each,), daemon=True) for each in runners]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException:  # an interrupted program waits for no attempt
        over.set()
        for runner in runners:
            queue.lost(runner.worker_id, "the worker was interrupted")
        raise
    if failed:
        raise failed[0]
    return queue.taken(runner.worker_id for runner in runners)


class _Either:
    """Set as soon as one of two is."""

    def __init__(self, told: Stop, over: threading.Event) -> None:
        self._told, self._over = told, over

    def is_set(self) -> bool:
        return self._told.is_set() or self._over.is_set()

    def wait(self, timeout: float) -> bool:
        return self._told.wait(timeout) or self._over.is_set()


class Crew:
    """Workers in other processes, looked after from here."""

    def __init__(self, duty: Duty, queue: Queue, start: Callable[[Duty], Member]) -> None:
        """Name who is to work.

        Args:
            duty: What each is to do; its worker id is what theirs begin with.
            queue: The queue, as this process sees it.
            start: Starts a worker.
        """
        self._duty = duty
        self._queue = queue
        self._start = start
        self._members: dict[str, Member] = {}
        self._ids: list[str] = []
        self._barren = 0

    def run(self, n: int, told: Stop) -> int:
        """Have so many work until none has anything left; gives how many attempts they made."""
        try:
            for _ in range(n):
                self._add_worker()
            while self._members and not told.wait(_LOOK_S):
                for worker_id, member in list(self._members.items()):
                    if not member.is_alive():
                        self._see_off(worker_id, member)
            self._end_workers(None)
        finally:
            self._end_workers(_GRACE_S)
        return self._queue.taken(self._ids)

    def _add_worker(self) -> None:
        worker_id = f"{self._duty.worker_id}-{len(self._ids) + 1}"
        self._ids.append(worker_id)
        self._members[worker_id] = self._start(replace(self._duty, worker_id=worker_id))

    def _see_off(self, worker_id: str, member: Member) -> None:
        """Give back what a worker held that is no more, and put another in its place."""
        del self._members[worker_id]
        why = member.ended()
        if not why:
            return
        self._queue.lost(worker_id, why)
        log.warning("worker %s died: %s", worker_id, why)
        self._barren = 0 if self._queue.taken([worker_id]) else self._barren + 1
        if self._barren >= _MOST_BARREN:
            raise WorkerError(
                f"{self._barren} workers died before they took anything ({why}); what they say on "
                "stderr tells why"
            )
        names = self._duty.agent.names
        if not self._duty.until_empty or not self._queue.is_empty(
            agents=names, modes=self._duty.modes
        ):
            self._add_worker()

    def _end_workers(self, grace_s: float | None) -> None:
        """Stop all that work; kill those that go on longer than that, None is never."""
        for member in self._members.values():
            member.stop()
        until_s = None if grace_s is None else time.monotonic() + grace_s
        while self._members:
            for worker_id, member in list(self._members.items()):
                if until_s is not None and time.monotonic() > until_s:
                    member.kill()
                if not member.is_alive():
                    del self._members[worker_id]
                    if why := member.ended():
                        self._queue.lost(worker_id, why)
            time.sleep(_LOOK_S if self._members else 0)
