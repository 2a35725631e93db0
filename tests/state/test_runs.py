"""Training: runs begun, measured, kept, found again; requests asked once and done by one worker."""

import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.state.conftest import Clock

from lightning_otel import Store
from lightning_otel import state as state_module
from lightning_otel.errors import ConfigError, NotFoundError, StateError
from lightning_otel.resources import tables
from lightning_otel.rewards import pending
from lightning_otel.rewards.feedback import Feedback
from lightning_otel.rewards.pending import Pending
from lightning_otel.state import State, leases
from lightning_otel.state import requests as module
from lightning_otel.state.requests import Requests
from lightning_otel.state.runs import Metric, Runs


@pytest.fixture
def runs(state: State) -> Runs:
    return Runs(state)


def test_run_is_found_by_its_beginning(runs: Runs) -> None:
    """The newest is ``@last``; what is not there is told."""
    first = runs.start("SFT", {"epochs": 3})
    last = runs.start("GRPO", consumer="shared")

    assert runs.get(first.run_id).config == {"epochs": 3}
    assert runs.get(last.run_id[:9]).consumer == "shared"
    assert {run.run_id for run in runs.all()} == {first.run_id, last.run_id}
    assert runs.get("@last").run_id == runs.all()[0].run_id
    with pytest.raises(NotFoundError, match="no training run 'nosuch'"):
        runs.get("nosuch")
    with pytest.raises(NotFoundError, match="2 training runs begin with 'run-'"):
        runs.get("run-")


def test_metric_of_a_step_is_replaced(runs: Runs) -> None:
    """A step that is taken again after a kill counts once; what is no number is left out."""
    run = runs.start("SFT")
    runs.log(run.run_id, 1, {"loss": 2.0, "reward": 0.5})
    runs.log(run.run_id, 1, {"loss": 1.0, "lr": math.nan})
    runs.log(run.run_id, 2, {"loss": 0.5})

    found = [(each.step, each.name, each.value) for each in runs.metrics(run.run_id)]
    assert found == [(1, "loss", 1.0), (1, "reward", 0.5), (2, "loss", 0.5)]
    assert [each.step for each in runs.metrics(names=["loss"])] == [1, 2]
    assert all(isinstance(each, Metric) and each.time_ns for each in runs.metrics())


def test_who_keep_a_step_at_once_wait_for_each_other(runs: Runs) -> None:
    """One checkpoint, and one of each metric, is left; nobody is refused."""
    run, gate = runs.start("SFT"), threading.Barrier(4)

    def keep(place: str) -> None:
        for step in range(20):
            gate.wait(20)
            runs.log(run.run_id, step, {"loss": 1.0})
            runs.keep_checkpoint(run.run_id, step, place)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(keep, "abcd"))

    assert [each.step for each in reversed(runs.checkpoints(run.run_id))] == list(range(20))
    assert [each.step for each in runs.metrics(run.run_id)] == list(range(20))


def test_run_goes_back_to_a_step(runs: Runs) -> None:
    """What was measured and kept later is gone, and it runs again."""
    run = runs.start("SFT")
    for step in (1, 2, 3):
        runs.log(run.run_id, step, {"loss": 1 / step})
        made = [{"name": "prompt", "body": "x", "metrics": {}}]
        runs.keep_checkpoint(
            run.run_id, step, f"/{step}", unpublished=made, versions={"prompt": step}
        )
    runs.mark_published(run.run_id, 2, {"prompt": 7})
    runs.set_status(run.run_id, "failed", "it was killed")
    runs.rewind(run.run_id, 2)

    found = runs.get(run.run_id)
    kept = runs.checkpoints(run.run_id)
    assert (found.status, found.reason, found.step, found.ended_ns) == ("running", "", 2, None)
    assert [(each.step, list(each.unpublished), dict(each.versions)) for each in kept] == [
        (2, [], {"prompt": 7}),
        (1, [{"name": "prompt", "body": "x", "metrics": {}}], {"prompt": 1}),
    ]
    assert [each.step for each in runs.metrics(run.run_id)] == [1, 2]


@pytest.fixture
def requests(state: State) -> Requests:
    """Where nothing was asked for yet."""
    return Requests(state, lease_s=60)


def test_a_key_asks_once(requests: Requests) -> None:
    """However often it comes, and whatever became of it; other training under it is refused."""
    first, is_new = requests.put("apo", category="image", idempotency_key="k")
    claimed = requests.claim("w")
    assert claimed is not None
    assert requests.finish(claimed, run_id="run-1")

    again, is_again_new = requests.put("apo", category="image", idempotency_key="k")

    assert (is_new, is_again_new) == (True, False)
    assert (again.request_id, again.status, again.run_id) == (
        first.request_id, "succeeded", "run-1",
    )  # fmt: skip
    with pytest.raises(ConfigError, match="asked for other training before"):
        requests.put("baseline", category="image", idempotency_key="k")
    assert len(requests.all()) == 1


def test_many_who_ask_at_once_ask_once(requests: Requests, state: State, store: Store) -> None:
    """Threads with one key get the same request; one id is one piece of feedback that waits."""
    found: list[tuple[str, bool]] = []
    gate, pending = threading.Barrier(8), Pending(state)
    store.add([])

    def ask(number: int) -> None:
        feedback = Feedback("rollout", "not there yet", 0.5, time.time_ns(), {}, "f")
        gate.wait(20)
        made, is_new = requests.put(idempotency_key="k")
        found.append((made.request_id, is_new))
        gate.wait(20)
        assert pending.give(store, feedback) is None

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(8)))

    assert len({request_id for request_id, _ in found}) == 1
    assert sum(is_new for _, is_new in found) == 1
    assert pending.waiting().count == 1


def test_locks_of_different_things_are_different() -> None:
    """Who publishes a resource does not wait for who asks for training."""
    rooms = (state_module, module, leases, pending)

    assert len({*(room._LOCK for room in rooms), tables.LOCK}) == len(rooms) + 1


def test_workers_take_what_they_can_do(requests: Requests) -> None:
    """The oldest first, each once; what names another algorithm is left."""
    for algorithm in ("apo", "", "baseline"):
        requests.put(algorithm)

    taken = [requests.claim("w", ["baseline"]) for _ in range(3)]

    assert [each.algorithm if each else None for each in taken] == ["", "baseline", None]
    assert requests.counts() == {"waiting": 1, "running": 2, "succeeded": 0, "failed": 0}


def test_silent_workers_lose_their_request(requests: Requests, clock: Clock) -> None:
    """It is there again with its run; after three it failed. What is given back is no try."""
    made, _ = requests.put()
    for _ in range(5):
        stopped = requests.claim("w")
        assert stopped is not None
        assert requests.release(stopped, run_id="run-1")
    silent = None
    for tries in (1, 2, 3):
        found = requests.claim("w")
        assert found is not None
        assert (found.request_id, found.run_id, found.tries) == (made.request_id, "run-1", tries)
        assert silent is None or not requests.heartbeat(silent)
        assert silent is None or not requests.finish(silent, reason="late")
        assert silent is None or not requests.release(silent)
        clock.go_on(59)
        assert requests.heartbeat(found)
        clock.go_on(61)
        silent = found

    (failed,) = requests.all()
    assert (failed.status, failed.reason) == ("failed", "its worker died 3 times")
    assert requests.claim("w") is None


def test_requests_without_a_worker_are_refused_in_the_end(
    requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rather than the state filled; and an unknown one is not found."""
    monkeypatch.setattr(module, "MOST_WAITING", 2)
    requests.put()
    requests.put()

    with pytest.raises(StateError, match="is there a worker"):
        requests.put()
    with pytest.raises(NotFoundError):
        requests.get("training-0")
