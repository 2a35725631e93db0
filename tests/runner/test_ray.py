"""Workers on a Ray of this machine: what holds for processes holds for actors."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lightning_otel as lo
from lightning_otel import Queue, Store, run_workers
from lightning_otel.errors import ConfigError

ray: Any = pytest.importorskip("ray")


@pytest.fixture(scope="module")
def _cluster() -> Iterator[None]:
    """A Ray of one machine, two workers wide, that reports to nobody."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
    )
    yield
    ray.shutdown()
    del os.environ["RAY_USAGE_STATS_ENABLED"]


@pytest.mark.usefixtures("_cluster")
def test_actors_do_each_rollout_once(store: Store, queue: Queue, tmp_path: Path) -> None:
    """Also where an actor is killed at work, and where one hangs; what they recorded is there."""
    mark = tmp_path / "mark"

    @lo.rollout(name="solver")
    def agent(task: str | int) -> float:
        if task == "die" and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if task == "hang":
            time.sleep(60)
        return 1.0

    good = queue.put(range(6))
    (dead,) = queue.put(["die"], max_attempts=2)
    (hung,) = queue.put(["hang"], timeout_s=1)
    made = run_workers(
        2, agent, kind="ray", store=store, queue=queue, lease_s=300, options={"num_cpus": 0.5}
    )

    done = queue.wait([each.rollout_id for each in (*good, dead)], 0)
    assert made == 9
    assert {(each.status, each.reward) for each in done} == {("succeeded", 1.0)}
    first, second = queue.attempts(dead.rollout_id)
    assert first.reason.startswith("its actor died")
    assert first.worker_id != second.worker_id
    assert queue.get(hung.rollout_id).reason.startswith("timed out")
    stored = {row["rollout_id"] for row in store.rollouts() if row["status"] == "succeeded"}
    assert stored == {each.rollout_id for each in done}


@pytest.mark.usefixtures("_cluster")
def test_machines_that_do_not_reach_the_queue_are_refused(
    store: Store, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file is of one machine; a second machine is made up, since there is none here."""
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True}, {"Alive": True}, {"Alive": False}])
    queue.put(["a"])

    with pytest.raises(ConfigError, match=r"2 machines.*postgresql\+psycopg"):
        run_workers(1, lambda task: 1.0, kind="ray", store=store, queue=queue)

    assert queue.counts()["queuing"] == 1
