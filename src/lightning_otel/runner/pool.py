"""Several workers at once: started, looked after, stopped, and those that die replaced."""

import contextlib
import logging
import math
import multiprocessing
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Final

from lightning_otel.dataset import Store
from lightning_otel.errors import ConfigError, WorkerError
from lightning_otel.runner.attempt import Hook, ResourceSource
from lightning_otel.runner.worker import LEASE_S, Runner, Stop, run_threads, store_path
from lightning_otel.state.queue import Queue
from lightning_otel.tracing import RewardEvaluator
from lightning_otel.types import Mode
from lightning_otel.types.rollouts import WorkerKind
from lightning_otel.types.values import check_whole

log = logging.getLogger(__name__)

_LOOK_S: Final = 0.05
_GRACE_S: Final = 10.0  # for attempts to come to an end when somebody interrupts their worker
_MOST_BARREN: Final = 3


def run_workers(
    n: int,
    agent: object,
    *,
    kind: WorkerKind = "threads",
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
    """Run rollouts with several workers until none is left; return the number of attempts.

    A dead worker process is replaced, and its rollout is tried again if it may be. What is not
    said here is as for :class:`Runner` and :meth:`Runner.run`.

    ``kind`` is ``threads`` of this process; ``processes`` of this machine, each of which is killed
    with an attempt that hangs; or ``ray`` actors on however many machines, with ``options`` by
    Ray's names, such as ``{"num_cpus": 0.5}``, and on each machine its own store of this name. For
    processes agent, hooks and evaluator must pickle.

    Raises:
        ConfigError: The agent cannot be sent to another process, or an extra is missing.
        WorkerError: Workers die as soon as they are started; or threads hang.
        StateError: The queue cannot be read or changed.
    """
    check_whole("n", n, 1)
    if options and kind != "ray":
        raise ConfigError(f"options are Ray's, and the workers are {kind}; leave them out")
    prefix = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"

    def make(number: int) -> Runner:
        return Runner(
            agent,
            store=store,
            queue=queue,
            resources=resources,
            hooks=hooks,
            reward_evaluator=reward_evaluator,
            apply=apply,
            modes=modes,
            lease_s=lease_s,
            worker_id=f"{prefix}-{number}",
        )

    first = make(1)
    store_path(first.store)
    store, queue = first.store, first.queue
    stop = stop if stop is not None else threading.Event()
    if kind == "threads":
        runners = [first, *(make(number) for number in range(2, n + 1))]
        try:
            run_threads(
                runners, stop, lambda runner, ends: runner.run(until_empty=until_empty, stop=ends)
            )
        except BaseException:  # an interrupted program waits for no attempt
            for runner in runners:
                queue.fail_worker(runner.worker_id, "the worker was interrupted")
            raise
        return queue.count_attempts(runner.worker_id for runner in runners)
    if kind == "processes":
        start: Callable[..., Any] = _WorkerProcess
    elif kind == "ray":
        from lightning_otel.runner.ray import make_starter

        start = make_starter(queue.state, options or {})
    else:
        raise ConfigError(f"workers are of kind {kind!r}; it must be threads, processes or ray")

    return _run_others(
        n, make, partial(start, until_empty=until_empty), queue, stop,
        lambda: until_empty and queue.is_empty(agents=first.agent.names, modes=modes),
    )  # fmt: skip


def _run_others(
    n: int, make: Callable[[int], Runner], start: Callable[[Runner], Any], queue: Queue, stop: Stop,
    is_done: Callable[[], bool],
) -> int:  # fmt: skip
    """Supervise processes until the queue is empty; count their attempts."""
    worker_ids: list[str] = []
    members: dict[str, Any] = {}

    def add_worker() -> None:
        runner = make(len(worker_ids) + 1)
        members[runner.worker_id] = start(runner)
        worker_ids.append(runner.worker_id)

    def reap_workers() -> list[tuple[str, str]]:
        ended = [key for key, member in members.items() if not member.is_alive()]
        dead = [(key, reason) for key in ended if (reason := members.pop(key).describe_end())]
        for worker_id, reason in dead:
            queue.fail_worker(worker_id, reason)
        return dead

    def end_workers(until_s: float) -> None:
        for member in members.values():
            member.stop()
        while members:
            if time.monotonic() > until_s:
                for member in members.values():
                    member.kill()
            reap_workers()
            time.sleep(_LOOK_S if members else 0)

    barren = 0
    try:
        for _ in range(n):
            add_worker()
        while members and not stop.wait(_LOOK_S):
            for worker_id, reason in reap_workers():
                log.warning("worker %s died: %s", worker_id, reason)
                barren = 0 if queue.count_attempts([worker_id]) else barren + 1
                if barren >= _MOST_BARREN:
                    raise WorkerError(
                        f"{barren} workers died before they took anything ({reason}); what they "
                        "say on stderr tells why"
                    )
                if not is_done():
                    add_worker()
        end_workers(math.inf)
    finally:
        end_workers(time.monotonic() + _GRACE_S)
    return queue.count_attempts(worker_ids)


class _WorkerProcess:
    """A worker in a process of its own, which ends after its attempt when this one dies."""

    def __init__(self, runner: Runner, *, until_empty: bool) -> None:
        # A fresh interpreter: a fork would take along the threads' locks of this one. The end of a
        # pipe says stop; a shared event's lock would stay locked by a worker killed in it.
        context = multiprocessing.get_context("spawn")
        inbox, self._tell = context.Pipe(duplex=False)
        self._process = context.Process(
            target=_run_worker,
            args=(runner, inbox),
            kwargs={"until_empty": until_empty},
            name=runner.worker_id,
        )
        try:
            self._process.start()
        except Exception as exc:  # whatever an object raises that cannot be sent
            raise ConfigError(
                f"the agent {runner.agent.name!r} (or a hook or evaluator) cannot be sent to "
                f"another process ({exc}); define it at the top of a module, or run threads"
            ) from exc
        finally:
            inbox.close()

    def is_alive(self) -> bool:
        return self._process.is_alive()

    def describe_end(self) -> str:
        self._tell.close()
        code = self._process.exitcode
        self._process.close()
        if not code:
            return ""
        if code > 0:
            return f"its process ended with code {code}"
        with contextlib.suppress(ValueError):
            return f"its process was ended by {signal.Signals(-code).name}"
        return f"its process was ended by signal {-code}"

    def stop(self) -> None:
        self._tell.close()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


def _run_worker(runner: Runner, inbox: "Connection[object, object]", *, until_empty: bool) -> None:
    # An interrupt of the terminal reaches everybody; whoever started this says what is to be done.
    # A handler, since what is ignored would be ignored by the agent's own children too.
    signal.signal(signal.SIGINT, lambda number, frame: None)
    stop = threading.Event()

    def listen() -> None:
        # Readable once the other end is closed: by whoever started this process, or its death.
        inbox.poll(None)
        stop.set()

    threading.Thread(target=listen, daemon=True).start()
    runner.run(until_empty=until_empty, stop=stop)
