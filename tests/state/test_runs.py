"""Training runs: begun, measured, kept, gone back on, and found again."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from lightning_otel.errors import NotFoundError
from lightning_otel.state import State
from lightning_otel.state.runs import Metric, Runs


@pytest.fixture
def runs(state: State) -> Runs:
    """Runs of an empty state."""
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
