"""The queue's contract: order, leases by the clock, retries, results that count once.

It holds in SQLite and in PostgreSQL. ``LIGHTNING_TEST_ROLLOUTS`` is how many eight workers share.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.state.conftest import Clock

from lightning_otel import Queue
from lightning_otel.agl import AttemptedRollout
from lightning_otel.errors import ConfigError, NotFoundError
from lightning_otel.state import State

ROLLOUTS = int(os.environ.get("LIGHTNING_TEST_ROLLOUTS", "100"))
LIMIT_S = 50 + ROLLOUTS / 20


@pytest.fixture
def opened(place: str) -> Iterator[Callable[..., Queue]]:
    """A function that opens the queue that lies there, as another process does."""
    states: list[State] = []

    def open_queue(**how: Any) -> Queue:
        states.append(State(place, **how))
        return Queue(states[-1])

    yield open_queue
    for state in states:
        state.close()


@pytest.fixture
def queue(opened: Callable[..., Queue], clock: Clock) -> Queue:
    return opened(now_ns=clock)


def taken(queue: Queue, worker_id: str = "w", **wanted: Any) -> AttemptedRollout:
    """A lease there must be."""
    lease = queue.lease(worker_id, **wanted)
    assert lease is not None
    return lease


def test_higher_priority_goes_first_then_the_older(queue: Queue) -> None:
    """Of those that wait the most urgent is taken, of those the first put in."""
    queue.put(["a", "b"])
    queue.put(["c"], priority=1)

    assert [taken(queue).rollout.task for _ in range(3)] == ["c", "a", "b"]
    assert queue.lease("w") is None


def test_samples_of_a_task_are_one_group(queue: Queue) -> None:
    """Several rollouts of a task can be compared; a group may be named too."""
    rollouts = queue.put(["a", "b"], samples=2)
    named = queue.put(["a"], group_ids=[rollouts[0].group_id])

    assert [each.task for each in rollouts] == ["a", "a", "b", "b"]
    assert rollouts[0].group_id == rollouts[1].group_id == named[0].group_id
    assert len({each.group_id for each in rollouts}) == 2
    assert queue.put(["a"])[0].group_id == ""
    assert queue.rollouts(ids=[each.rollout_id for each in rollouts]) == rollouts


def test_worker_takes_what_is_for_its_agents_and_modes(queue: Queue) -> None:
    """What is for another agent, or another mode, is left."""
    queue.put(["a"], agent="planner")
    queue.put(["b"], mode="val")
    queue.put(["c"], agent="solver")

    assert taken(queue, agents=["solver"], modes=["train"]).rollout.task == "c"
    assert taken(queue, agents=["solver"]).rollout.task == "b"
    assert queue.lease("w", agents=["solver"]) is None
    assert queue.is_empty(agents=["solver"])
    assert taken(queue).rollout.task == "a"


def test_result_ends_the_rollout(queue: Queue, clock: Clock) -> None:
    """Success with its reward, failure with its reason after the last attempt, with their time."""
    good, bad = queue.put(["a", "b"], max_attempts=2)
    clock.go_on(1)

    lease = taken(queue)
    with pytest.raises(ConfigError, match="finite"):
        queue.succeed(lease, float("nan"))
    assert queue.succeed(lease, 0.5)
    assert queue.fail(taken(queue), "once")
    assert queue.get(bad.rollout_id).status == "queuing"
    assert not queue.is_empty()
    assert [each.status for each in queue.wait([bad.rollout_id], 0.05)] == ["queuing"]
    assert queue.fail(taken(queue, "other"), "twice")

    first, second = queue.wait([good.rollout_id, bad.rollout_id], 5)
    assert (first.status, first.reward, first.reason) == ("succeeded", 0.5, "")
    assert (second.status, second.reward, second.reason) == ("failed", None, "twice")
    assert first.ended_ns == second.ended_ns == clock.ns
    assert queue.counts()["succeeded"] == queue.counts()["failed"] == 1
    assert queue.reasons() == {("failed", "once"): 1, ("failed", "twice"): 1}
    found = [(each.attempt_id, each.worker_id) for each in queue.attempts(bad.rollout_id)]
    assert found == [("1", "w"), ("2", "other")]
    assert queue.is_empty()
    with pytest.raises(NotFoundError):
        queue.wait([good.rollout_id, "r9"], 5)


def test_clock_alone_ends_a_lease(queue: Queue, clock: Clock) -> None:
    """A late result is refused, though nobody looked meanwhile; heartbeats stop no timeout."""
    (rollout,) = queue.put(["a"], max_attempts=3, timeout_s=15)
    dead = taken(queue, "dead", lease_s=10)
    clock.go_on(9)
    assert queue.heartbeat(dead)
    clock.go_on(5)
    assert queue.lease("other") is None
    clock.go_on(1)
    assert not queue.heartbeat(dead)
    assert not queue.succeed(dead, 1.0)
    assert not queue.fail(dead, "late")

    silent = taken(queue, "silent", lease_s=10)
    clock.go_on(10)
    assert not queue.succeed(silent, 1.0)
    gone = taken(queue, "gone")
    queue.put(["b"])
    mine = taken(queue, "mine")
    assert queue.fail_worker("gone", "its process was ended by SIGKILL") == 1  # at once
    assert not queue.heartbeat(gone)
    assert queue.heartbeat(mine)

    found = queue.get(rollout.rollout_id)
    assert (found.status, found.reward) == ("failed", None)
    assert [(each.status, each.reason) for each in queue.attempts(rollout.rollout_id)] == [
        ("timeout", "timed out: the attempt took longer than 15 s"),
        ("unresponsive", "worker silent was not heard of in time"),
        ("unresponsive", "its process was ended by SIGKILL"),
    ]


def test_cancelled_rollout_is_over(queue: Queue) -> None:
    """One that waits is not taken; one that runs is taken away from its worker."""
    waiting, running = queue.put(["a", "b"], max_attempts=3)
    assert queue.cancel(waiting.rollout_id, "not wanted")
    lease = taken(queue)

    assert queue.cancel(running.rollout_id)

    assert not queue.heartbeat(lease)
    assert not queue.succeed(lease, 1.0)
    assert not queue.cancel(running.rollout_id)
    found = queue.rollouts("cancelled")
    assert [each.reason for each in found] == ["not wanted", "cancelled"]
    assert queue.is_empty()
    with pytest.raises(NotFoundError, match="no rollout 'r9'"):
        queue.cancel("r9")


def test_pause_lets_nobody_take_anything(
    queue: Queue, opened: Callable[..., Queue], clock: Clock
) -> None:
    """It holds for everybody, until it is ended; what runs goes on."""
    queue.put(["a", "b"])
    lease = taken(queue)
    other = opened(now_ns=clock)
    other.pause()
    other.pause()

    assert queue.is_paused
    assert queue.lease("w") is None
    assert queue.heartbeat(lease)
    assert queue.succeed(lease)
    assert not queue.is_empty()
    queue.resume()
    assert taken(other).rollout.task == "b"


@pytest.mark.parametrize(
    ("put", "why"),
    [
        (lambda queue: queue.put("abc"), "one str; put a list"),
        (lambda queue: queue.put([{1, 2}]), "cannot be written as JSON"),
        (lambda queue: queue.put([float("nan")]), "cannot be written as JSON"),
        (lambda queue: queue.put(["a"], mode="training"), "train, val, test"),
        (lambda queue: queue.put(["a"], samples=0), "samples is 0"),
        (lambda queue: queue.put(["a"], timeout_s=0), "timeout_s is 0"),
        (lambda queue: queue.put(["a", "b"], group_ids=["g"]), "1 group_ids for 2 tasks"),
    ],
)
def test_nonsense_is_refused_and_nothing_is_put(
    queue: Queue, put: Callable[[Queue], object], why: str
) -> None:
    """The error says what and what to do."""
    with pytest.raises(ConfigError, match=why):
        put(queue)

    assert queue.is_empty()


def test_texts_of_any_kind_are_kept(queue: Queue) -> None:
    """Tasks and reasons come back as they were, whatever characters they hold."""
    task = {"text": "𝄞 \0 \ud800 'quoted' %s", "n": [1, 2.5, None, True]}
    (rollout,) = queue.put([task])

    lease = taken(queue)
    assert lease.rollout.task == task
    assert queue.fail(lease, "a\0b\ud800 key sk-" + "a1B2" * 12)
    reason = queue.get(rollout.rollout_id).reason
    assert reason.startswith("a�b? key ")
    assert "a1B2" not in reason


def worked_through(queue: Queue, worker_id: str) -> list[str]:
    """The rollouts a worker took until none was left."""
    found: list[str] = []
    while (lease := queue.lease(worker_id)) is not None:
        found.append(lease.rollout.rollout_id)
        assert queue.succeed(lease, 1.0)
    return found


@pytest.mark.timeout(LIMIT_S + 10)
def test_no_two_workers_hold_one_rollout(opened: Callable[..., Queue]) -> None:
    """Eight at once, threads and forks, each with a queue of its own: each rollout is done once."""
    queue = opened()
    rollouts = queue.put(range(ROLLOUTS))
    context = multiprocessing.get_context("fork")
    with context.Pool(4) as pool, ThreadPoolExecutor(4) as threads:
        forks = [pool.apply_async(worked_through, (queue, f"fork-{n}")) for n in range(4)]
        others = [threads.submit(worked_through, queue, f"thread-{n}") for n in range(4)]
        done = [each for found in forks for each in found.get(LIMIT_S)]
        done += [each for found in others for each in found.result(LIMIT_S)]

    assert sorted(done) == sorted(each.rollout_id for each in rollouts)
    assert queue.counts()["succeeded"] == ROLLOUTS


def test_killed_worker_loses_its_lease_alone(queue: Queue, place: str, clock: Clock) -> None:
    """A worker that is killed while it holds a rollout keeps it until its lease ends, no longer."""
    (rollout,) = queue.put(["a"], max_attempts=2)
    program = f"""
        import os, signal
        from lightning_otel.state.queue import Queue
        from lightning_otel.state import State
        queue = Queue(State({place!r}, now_ns=lambda: {clock.ns}))
        assert queue.lease("killed", lease_s=30)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], timeout=30)

    assert done.returncode == -signal.SIGKILL
    clock.go_on(29)
    assert queue.lease("next") is None
    clock.go_on(1)
    assert taken(queue, "next").attempt_id == "2"
    assert queue.attempts(rollout.rollout_id)[0].worker_id == "killed"
