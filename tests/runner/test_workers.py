"""Several workers at once: nothing twice, nothing lost, whatever kills or hangs them."""

import multiprocessing
import os
import random
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import pytest
from tests.runner import agents_of_tests as agents

from lightning_otel import Queue, Store, run_workers
from lightning_otel.errors import ConfigError, WorkerError

Kind = Literal["threads", "processes"]


@pytest.fixture(autouse=True)
def _tests_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker process finds the tests' agents, as it finds what lies beside a program."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))


def test_each_rollout_is_done_once(store: Store, queue: Queue) -> None:
    """By eight threads every rollout has one attempt, its own reward, and its spans once."""
    rollouts = queue.put(range(48))

    made = run_workers(8, agents.doubled, store=store, queue=queue)

    done = queue.wait([each.rollout_id for each in rollouts], 0)
    assert made == 48
    assert [(each.status, each.reward, each.attempts) for each in done] == [
        ("succeeded", 2.0 * task, 1) for task in range(48)
    ]
    spans = Counter(span.rollout_id for span in store.spans())
    assert spans == dict.fromkeys((each.rollout_id for each in rollouts), 3)


def test_processes_that_are_killed_or_hang_lose_nothing(
    store: Store, queue: Queue, tmp_path: Path
) -> None:
    """What a killed one held another tries again; one that hangs is killed with its attempt."""
    rollouts = queue.put(range(20))
    (killed,) = queue.put([str(tmp_path / "mark")], max_attempts=2)
    (hung,) = queue.put([60.0], timeout_s=1)

    made = run_workers(2, agents.dangerous, kind="processes", store=store, queue=queue, lease_s=300)

    done = queue.wait([each.rollout_id for each in rollouts], 0)
    assert made == 23
    assert {(each.status, each.reward, each.attempts) for each in done} == {("succeeded", 1.0, 1)}
    first, second = queue.attempts(killed.rollout_id)
    assert first.reason == "its process was ended by SIGKILL"
    assert second.status == "succeeded"
    assert first.worker_id != second.worker_id
    assert queue.get(hung.rollout_id).reason == "timed out: the attempt took longer than 1 s"
    stored = {(row["rollout_id"], row["attempt_id"]): row["status"] for row in store.rollouts()}
    assert stored.pop((hung.rollout_id, "1")) == "incomplete"
    assert stored.pop((killed.rollout_id, "1")) == "incomplete"
    assert stored.pop((killed.rollout_id, "2")) == "succeeded"
    assert stored == {(each.rollout_id, "1"): "succeeded" for each in rollouts}


KILLS = int(os.environ.get("LIGHTNING_TEST_KILLS", "0"))


@pytest.mark.skipif(not KILLS, reason="LIGHTNING_TEST_KILLS says how many workers are killed")
@pytest.mark.timeout(600)
def test_workers_killed_at_any_moment_lose_nothing(
    store: Store, queue: Queue, caplog: pytest.LogCaptureFixture
) -> None:
    """Each rollout succeeds once, whenever its workers are killed."""
    rollouts = queue.put([0.002] * 100 * KILLS, max_attempts=1000)
    over = threading.Event()

    def kill() -> None:
        left = KILLS
        while left and not over.wait(random.random()):
            for worker in multiprocessing.active_children()[:1]:
                if worker.pid is not None and queue.count_attempts([worker.name]):
                    os.kill(worker.pid, signal.SIGKILL)
                    left -= 1

    killer = threading.Thread(target=kill)
    killer.start()
    made = run_workers(2, agents.dangerous, kind="processes", store=store, queue=queue)
    over.set()
    killer.join()

    done = queue.wait([each.rollout_id for each in rollouts], 0)
    assert {(each.status, each.reward) for each in done} == {("succeeded", 1.0)}
    assert made == sum(each.attempts for each in done)
    assert sum(queue.reasons().values()) == made - len(done) <= KILLS
    assert caplog.text.count("ended by SIGKILL") == KILLS
    stored = Counter(row["rollout_id"] for row in store.rollouts() if row["status"] == "succeeded")
    # A worker may be killed between its last span and its success, and is then tried again.
    assert set(stored) == {each.rollout_id for each in done}
    assert sum(stored.values()) <= len(done) + KILLS


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_workers_stop_when_told(store: Store, queue: Queue, kind: Kind) -> None:
    """They finish what they are at, and come back though the queue is not empty."""
    stop = threading.Event()
    queue.put([0.05] * 500)

    def stop_soon() -> None:
        while not queue.counts()["succeeded"]:
            stop.wait(0.02)
        stop.set()

    watcher = threading.Thread(target=stop_soon)
    watcher.start()
    workers = 2 if kind == "threads" else 1
    made = run_workers(workers, agents.dangerous, kind=kind, store=store, queue=queue, stop=stop)
    watcher.join(10)

    counts = queue.counts()
    assert 0 < made < 500
    assert (counts["succeeded"], counts["running"]) == (made, 0)


def test_an_interrupt_ends_processes_that_do_not_stop(
    store: Store, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a time of grace they are killed, and what they held is given back with the reason."""
    monkeypatch.setattr("lightning_otel.runner.pool._GRACE_S", 0.2)
    (hung,) = queue.put([50.0])

    class Interrupted(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            if queue.counts()["running"]:
                raise KeyboardInterrupt
            return super().wait(timeout)

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_workers(
            1, agents.dangerous, kind="processes", store=store, queue=queue, stop=Interrupted()
        )

    assert time.monotonic() - began < 40
    (attempt,) = queue.attempts(hung.rollout_id)
    assert attempt.reason == "its process was ended by SIGKILL"


def test_agent_that_does_not_pickle_is_refused(store: Store, queue: Queue) -> None:
    """The error names it and says what to do; nothing was taken."""
    queue.put(["a"])

    with pytest.raises(ConfigError, match=r"'<lambda>'.*cannot be sent.*run threads"):
        run_workers(1, lambda task: 1.0, kind="processes", store=store, queue=queue)

    assert queue.counts()["queuing"] == 1


class Unloadable:
    """An agent that another process cannot load."""

    def __call__(self, task: object) -> float:
        return 1.0

    def __reduce__(self) -> Any:
        return agents.refuse_to_load, ()


def test_workers_that_die_at_once_are_given_up(
    store: Store, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever dies before it takes anything is not replaced for ever."""
    monkeypatch.setattr("lightning_otel.runner.pool._MOST_BARREN", 2)
    queue.put(["a"])

    with pytest.raises(WorkerError, match="died before they took anything"):
        run_workers(1, Unloadable(), kind="processes", store=store, queue=queue)

    assert queue.counts()["queuing"] == 1


def test_failing_thread_stops_the_others(store: Store, queue: Queue) -> None:
    """What one worker raises is raised where they were asked for."""
    rollouts = queue.put([0.01] * 200)
    broken = Queue(queue.state)

    def taken_from_nowhere(*args: object, **kwargs: object) -> None:
        raise WorkerError("the queue is gone")

    original = broken.get
    count = iter(range(10))

    def get(rollout_id: str) -> Any:
        if next(count, None) is None:
            taken_from_nowhere()
        return original(rollout_id)

    broken.get = get  # type: ignore[method-assign]  # a queue that fails in the midst

    with pytest.raises(WorkerError, match="the queue is gone"):
        run_workers(2, agents.dangerous, store=store, queue=broken)

    assert queue.counts()["queuing"] > len(rollouts) // 2
