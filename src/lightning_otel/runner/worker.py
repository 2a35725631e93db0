"""The runner: has the agent act on rollouts, of the queue or given here."""

import itertools
import logging
import os
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import wait
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

from lightning_otel.dataset import Store
from lightning_otel.errors import ConfigError, StateError, WorkerError
from lightning_otel.runner.agents import Agent, agent_of
from lightning_otel.runner.agents.agent import cancel_agent
from lightning_otel.runner.attempt import (
    AttemptThread,
    Hook,
    Job,
    Outcome,
    ResourceSource,
    call_hooks,
    run_attempt,
)
from lightning_otel.state import State
from lightning_otel.state.queue import FINAL, Lease, Queue
from lightning_otel.state.rollouts import choose_status, clean_reason, describe_timeout
from lightning_otel.tracing import RewardEvaluator
from lightning_otel.types import Mode, Rollout
from lightning_otel.types.values import check_seconds

log = logging.getLogger(__name__)

LEASE_S: Final = 30.0
_HEARTBEAT_S: Final = 2.0  # within which a worker learns that its rollout was cancelled
_GRACE_S: Final = 1.0  # for an async agent to clean up when it is cancelled
_MOST_HANGING: Final = 16
_SHORTEST_IDLE_S: Final = 0.02
_LONGEST_IDLE_S: Final = 0.5
_numbers: Final = itertools.count(1)


class Stop(Protocol):
    """A signal to stop, such as a ``threading.Event``."""

    def is_set(self) -> bool:
        """Return whether it is set."""

    def wait(self, timeout: float) -> bool:
        """Wait some seconds; return whether it is set."""


class Runner:
    """One worker: an agent that acts on rollouts of a queue, recorded in a store.

    The agent acts in a thread of the runner, while the caller's thread extends the lease. An
    overdue async agent is cancelled; a sync one continues in its thread, which cannot be ended from
    outside, and its result is ignored. ``run_workers(kind="processes")`` kills it.
    """

    def __init__(
        self,
        agent: object,
        *,
        store: Store | str | os.PathLike[str] | None = None,
        queue: Queue | None = None,
        resources: ResourceSource | None = None,
        hooks: Iterable[Hook] = (),
        reward_evaluator: RewardEvaluator | None = None,
        apply: bool | None = None,
        modes: Collection[Mode] | None = None,
        lease_s: float = LEASE_S,
        worker_id: str | None = None,
        is_process_own: bool = False,
    ) -> None:
        """Args:
            agent: Anything that :func:`agent_of` takes.
            store: The store of the attempts.
            queue: The queue of the rollouts; by default the one beside the store.
            resources: The source of the agent's resources; None gives it none.
            hooks: Called around each attempt.
            reward_evaluator: Returns the reward of a recording in the agent's place; its ``result``
                is what the agent returned.
            apply: Make the requests of an agent that does not take resources with them; by default
                as ``LIGHTNING_OTEL_APPLY`` says, which is off.
            modes: Modes of the rollouts that are taken; None takes all.
            lease_s: Seconds without a heartbeat after which the worker counts as dead.
            worker_id: Its unique name in the queue.
            is_process_own: Kill the process to end an attempt that hangs.

        Raises:
            ConfigError: The agent is none.
        """
        self.agent = agent_of(agent)
        self.store = store if isinstance(store, Store) else Store(store)
        self._queue = queue
        self.worker_id = worker_id or f"{socket.gethostname()}-{os.getpid()}-{next(_numbers)}"
        self.resources = resources
        self.hooks = tuple(hooks)
        self.reward_evaluator = reward_evaluator
        self.apply = apply
        self._modes = modes
        self._lease_s = check_seconds("lease_s", lease_s)
        self._is_process_own = is_process_own
        self._pid = os.getpid()
        self._thread: AttemptThread | None = None
        self._hanging: list[threading.Thread] = []

    def __reduce__(self) -> Any:
        # Another process opens a store, queue and resources of its own, and ends with what hangs.
        reopen = partial(
            Runner,
            store=store_path(self.store),
            queue=self.queue,
            resources=self.resources,
            hooks=self.hooks,
            reward_evaluator=self.reward_evaluator,
            apply=self.apply,
            modes=self._modes,
            lease_s=self._lease_s,
            worker_id=self.worker_id,
            is_process_own=True,
        )
        return reopen, (self.agent,)

    @property
    def queue(self) -> Queue:
        """The queue that :meth:`step` takes rollouts from."""
        if self._queue is None:
            self._queue = Queue(State.beside(self.store))
        return self._queue

    @property
    def hanging(self) -> int:
        """The number of abandoned attempts whose threads still run."""
        self._hanging = [thread for thread in self._hanging if thread.is_alive()]
        return len(self._hanging)

    def step(self) -> Rollout | None:
        """Make one attempt at the next rollout; return it as it stands then, None if none waits.

        Raises:
            StateError: The queue cannot be read or changed.
            WorkerError: Too many attempts hang in threads.
        """
        self._check_threads()
        lease = self.queue.lease(
            self.worker_id, agents=self.agent.names, modes=self._modes, lease_s=self._lease_s
        )
        if lease is None:
            return None
        agent, outcome = self._make_attempt(lease, self.queue)
        if outcome is not None and outcome.reason:
            self.queue.fail(lease, outcome.reason)
        elif outcome is not None:
            self.queue.succeed(lease, outcome.reward)
        rollout = self.queue.get(lease.rollout.rollout_id)
        self._end_attempt(agent, rollout, outcome)
        return rollout

    def run_rollout(self, rollout: Rollout) -> Rollout:
        """Run a rollout that no queue holds, as often as it may be tried; return it as it ended.

        Raises:
            WorkerError: Too many attempts hang in threads.
        """
        while rollout.status not in FINAL:
            self._check_threads()
            running = replace(rollout, status="running", attempts=rollout.attempts + 1)
            now_ns, limit_s = time.time_ns(), rollout.timeout_s
            deadline_ns = None if limit_s is None else now_ns + int(limit_s * 1e9)
            lease = Lease(
                running, str(running.attempts), self.worker_id, now_ns, self._lease_s, deadline_ns
            )
            agent, outcome = self._make_attempt(lease, None)
            reason = describe_timeout(limit_s) if outcome is None else clean_reason(outcome.reason)
            status = choose_status(
                "failed" if reason else "succeeded", running.attempts, running.max_attempts
            )
            rollout = replace(
                running,
                status=status,
                reason=reason if status == "failed" else "",
                reward=None if outcome is None else outcome.reward,
                ended_ns=time.time_ns(),
            )
            self._end_attempt(agent, rollout, outcome)
        return rollout

    def _check_threads(self) -> None:
        if self.hanging >= _MOST_HANGING:
            raise WorkerError(
                f"{self.hanging} attempts of {self.agent.name} took too long and hang in threads, "
                "which cannot be ended; run the workers as kind='processes', or make the agent "
                "give up by itself"
            )
        if self._pid != os.getpid():  # a forked child: what the parent holds is the parent's
            self._pid = os.getpid()
            self.worker_id = f"{self.worker_id}-fork-{self._pid}"
            self._thread, self._hanging = None, []

    def _end_attempt(self, agent: Agent, rollout: Rollout, outcome: Outcome | None) -> None:
        recording = None if outcome is None else outcome.recording
        call_hooks(self, "on_rollout_end", agent=agent, rollout=rollout, recording=recording)

    def run(self, *, until_empty: bool = True, stop: Stop | None = None) -> int:
        """Make attempts one after the other; return their number.

        Args:
            until_empty: Return when nothing waits or may be tried again, and the queue is not
                paused; otherwise run until ``stop``.
            stop: Once it is set, the running attempt is finished, and none begins.

        Raises:
            StateError: The queue cannot be read or changed.
            WorkerError: Too many attempts hang in threads.
        """
        signal_set = stop if stop is not None else threading.Event()
        count, idle_s = 0, _SHORTEST_IDLE_S
        try:
            while not signal_set.is_set():
                if self.step() is not None:
                    count, idle_s = count + 1, _SHORTEST_IDLE_S
                elif until_empty and self.queue.is_empty(
                    agents=self.agent.names, modes=self._modes
                ):
                    break
                else:
                    signal_set.wait(idle_s)
                    idle_s = min(2 * idle_s, _LONGEST_IDLE_S)
        finally:
            self.close()
        return count

    def close(self) -> None:
        """End the thread that the agent acts in."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.end()
            thread.thread.join(_GRACE_S)

    def _make_attempt(self, lease: Lease, queue: Queue | None) -> tuple[Agent, Outcome | None]:
        try:
            agent = self.agent.choose(lease.rollout)
        except Exception as exc:  # noqa: BLE001  # a rule is the user's own
            return self.agent, Outcome(reason=f"no agent: {exc}")
        call_hooks(self, "on_rollout_start", agent=agent, rollout=lease.rollout)
        if self._thread is None:
            self._thread = AttemptThread(f"attempts of {self.worker_id}")
            weakref.finalize(self, self._thread.end)
        thread = self._thread
        job = thread.start(lambda: run_attempt(self, agent, lease))
        try:
            is_held = self._attend_lease(lease, job, queue)
        except BaseException:
            if queue is not None:
                queue.fail(lease, "the worker was interrupted")
            self._give_up(thread, job, lease)
            raise
        if is_held:
            return agent, job.result()
        self._give_up(thread, job, lease)
        return agent, None

    def _attend_lease(self, lease: Lease, job: Job, queue: Queue | None) -> bool:
        """Prolong the lease until the end; False if it is lost or overdue."""
        now_ns = time.time_ns if queue is None else queue.state.now_ns
        while True:
            wait_s = min(self._lease_s / 3, _HEARTBEAT_S)
            if lease.deadline_ns is not None:
                left_s = (lease.deadline_ns - now_ns()) / 1e9
                wait_s = min(wait_s, max(left_s, 0.001))
            if wait([job], wait_s).done:
                return True
            if queue is None:
                if lease.deadline_ns is not None and now_ns() >= lease.deadline_ns:
                    return False
                continue
            try:
                if not queue.heartbeat(lease):
                    return False
            except StateError:  # it may answer again before the lease is over
                log.warning("no heartbeat for %s", lease.rollout.rollout_id, exc_info=True)

    def _give_up(self, thread: "AttemptThread", job: Job, lease: Lease) -> None:
        if cancel_agent(thread.thread):
            wait([job], _GRACE_S)
        if job.done():
            return
        rollout_id, attempt_id = lease.rollout.rollout_id, lease.attempt_id
        if self._is_process_own:
            log.warning("attempt %s at %s hangs: its process ends", attempt_id, rollout_id)
            # Its spans are written as they end; whatever hangs would hang an orderly end too.
            os.kill(os.getpid(), signal.SIGKILL)
        log.warning(
            "attempt %s at %s was given up, and goes on in a thread that cannot be ended",
            attempt_id,
            rollout_id,
        )
        self._thread = None
        self._hanging.append(thread.thread)
        thread.end()


def store_path(store: Store) -> str:
    """Return where workers record, which is on disk, or raise ConfigError."""
    layout = store.local.layout
    if layout is None:
        raise ConfigError(f"workers cannot record into {store.name}; name a store on disk")
    return str(layout.catalogue)


def run_rollouts(
    rollouts: Sequence[Rollout], runners: Sequence[Runner], stop: Stop
) -> list[Rollout]:
    """Run rollouts without a queue, one per runner; return them in order, begun or not."""
    store_path(runners[0].store)
    pending = iter(list(rollouts))  # whose next is one step to other threads
    ended: dict[str, Rollout] = {}

    def run_next(runner: Runner, stop: Stop) -> None:
        try:
            while not stop.is_set() and (rollout := next(pending, None)) is not None:
                ended[rollout.rollout_id] = runner.run_rollout(rollout)
        finally:
            runner.close()

    run_threads(runners, stop, run_next)
    return [ended.get(rollout.rollout_id, rollout) for rollout in rollouts]


def run_threads(
    runners: Sequence[Runner], stop: Stop, work: Callable[[Runner, Stop], object]
) -> None:
    """Run each runner in a thread; raise what the first of them raised."""
    over = threading.Event()
    failed: list[BaseException] = []

    def work_until_over(runner: Runner) -> None:
        try:
            work(runner, _AnyStop(stop, over))
        except BaseException as exc:  # noqa: BLE001  # raised where the workers were asked for
            failed.append(exc)
            over.set()

    threads = [
        threading.Thread(target=work_until_over, args=(runner,), daemon=True) for runner in runners
    ]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException:
        over.set()
        raise
    if failed:
        raise failed[0]


class _AnyStop(NamedTuple):
    first: Stop
    second: threading.Event

    def is_set(self) -> bool:
        return self.first.is_set() or self.second.is_set()

    def wait(self, timeout: float) -> bool:
        return self.first.wait(timeout) or self.second.is_set()
