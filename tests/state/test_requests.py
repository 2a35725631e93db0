"""Training that was asked for: once per key, one worker at a time, there again when that dies."""

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
