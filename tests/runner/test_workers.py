"""Several workers at once: nothing twice, nothing lost, whatever kills or hangs them."""

import threading
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import pytest
from tests.runner import agents_of_tests as agents

from lightning_otel import Store
from lightning_otel.errors import ConfigError, WorkerError
from lightning_otel.queue import Queue
from lightning_otel.runner import run_workers
from lightning_otel.state import State

Kind = Literal["threads", "processes"]


@pytest.fixture(autouse=True)
def _tests_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker process finds the tests' agents, as it finds what lies beside a program."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))


@pytest.fixture
def queue(store: Store) -> Queue:
    """The queue beside the store."""
    assert store.layout is not None
    return Queue(State(store.layout.catalogue))


@pytest.mark.parametrize(("kind", "workers"), [("threads", 8), ("processes", 2)])
def test_each_rollout_is_done_once(store: Store, queue: Queue, kind: Kind, workers: int) -> None:
    """Every rollout has one attempt, its own reward, and its spans once."""
    rollouts = queue.put(range(48))

    made = run_workers(workers, agents.doubled, kind=kind, store=store, queue=queue)

    done = queue.wait([each.rollout_id for each in rollouts], 0)
    assert made == 48
    assert [(each.status, each.reward, each.attempts) for each in done] == [
        ("succeeded", 2.0 * task, 1) for task in range(48)
    ]
    spans = Counter(span.rollout_id for span in store.spans())
    assert spans == dict.fromkeys((each.rollout_id for each in rollouts), 3)


def test_killed_workers_lose_nothing(store: Store, queue: Queue, tmp_path: Path) -> None:
    """The rollout is tried again by another worker; what the killed one recorded stays to be seen.

    Nobody waits for the lease to end, which would take longer than the test may.
    """
    tasks = [{"mark": str(tmp_path / f"mark{n}")} for n in range(3)]
    rollouts = queue.put(tasks, max_attempts=2)

    run_workers(2, agents.deadly, kind="processes", store=store, queue=queue, lease_s=300)

    done = queue.wait([each.rollout_id for each in rollouts], 0)
    assert [(each.status, each.reward, each.attempts) for each in done] == [
        ("succeeded", 1.0, 2)
    ] * 3
    for each in done:
        first, second = queue.attempts(each.rollout_id)
        assert first.reason == "its process was ended by SIGKILL"
        assert first.worker_id != second.worker_id
    stored = {(row["rollout_id"], row["attempt_id"]): row["status"] for row in store.rollouts()}
    assert stored == {
        (each.rollout_id, attempt): status
        for each in rollouts
        for attempt, status in (("1", "incomplete"), ("2", "succeeded"))
    }


def test_process_that_hangs_is_ended(store: Store, queue: Queue) -> None:
    """With its attempt, and another one takes its place."""
    rollouts = queue.put([60, 0], timeout_s=1)

    run_workers(1, agents.hanging, kind="processes", store=store, queue=queue)

    slow, quick = queue.wait([each.rollout_id for each in rollouts], 0)
    assert (slow.status, slow.reason) == ("failed", "timed out: the attempt took longer than 1 s")
    assert quick.status == "succeeded"
    workers = [queue.attempts(each.rollout_id)[0].worker_id for each in rollouts]
    assert workers[0] != workers[1]


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
    made = run_workers(2, agents.hanging, kind=kind, store=store, queue=queue, stop=stop)
    watcher.join(10)

    counts = queue.counts()
    assert 0 < made < 500
    assert (counts["succeeded"], counts["running"]) == (made, 0)


def test_agent_that_does_not_pickle_is_refused(store: Store, queue: Queue) -> None:
    """The error names it and says what to do; nothing was taken."""
    queue.put(["a"])

    with pytest.raises(ConfigError, match=r"'<lambda>'.*cannot be sent.*run threads"):
        run_workers(1, lambda task: 1.0, kind="processes", store=store, queue=queue)

    assert queue.counts()["queuing"] == 1


class Unloadable:
    """An agent that another process cannot load."""

    def __call__(self, task: object) -> float:
        """Never called."""
        return 1.0

    def __reduce__(self) -> Any:
        return agents.refuse_to_load, ()


def test_workers_that_die_at_once_are_given_up(store: Store, queue: Queue) -> None:
    """Whoever dies before it takes anything is not replaced for ever."""
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
        run_workers(2, agents.hanging, store=store, queue=broken)

    assert queue.counts()["queuing"] > len(rollouts) // 2
