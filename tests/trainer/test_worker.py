"""A worker that is killed anywhere leaves a request that the next one finishes, once."""

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.command import examine
from tests.trainer.kills import try_kills
from tests.trainer.made import Ledger, record
from tests.trainer.workers import STEPS, WHERE

from lightning_otel import Store
from lightning_otel.algorithms import Batch, Run, StepResult
from lightning_otel.state import State
from lightning_otel.state.requests import Requests, TrainingRequest
from lightning_otel.trainer import Fit, Trainer
from lightning_otel.trainer.worker import TrainingWorker

FEW = ("after the step", "before the end is written down")


def test_kill_of_a_worker_loses_and_repeats_nothing(tmp_path: Path) -> None:
    """The request is done once; its run goes on where it was, each row is trained on once."""
    command = ["-m", "tests.trainer.workers", tmp_path]

    told = try_kills(command, WHERE, FEW, limit_s=58)

    for each in told:
        where = each["boundary"]
        assert (each["status"], each["reason"]) == ("succeeded", ""), where
        assert (each["run"], each["step"]) == ("succeeded", STEPS), where
        assert len(each["rows"]) == len(set(each["rows"])) == 12, where


class Gated(Ledger):
    """Is within its first step until it is told to stop, the first time."""

    def __init__(self, begun: threading.Event) -> None:
        super().__init__(2)
        self.begun = begun

    def run(self, context: Run) -> None:
        self.context = context
        super().run(context)

    def train_step(self, batch: Batch) -> StepResult:
        """Say that it began, and wait."""
        is_first = not self.begun.is_set()
        self.begun.set()
        until_s = time.monotonic() + 20
        while is_first and not self.context.should_stop() and time.monotonic() < until_s:
            time.sleep(0.01)
        return super().train_step(batch)


def test_a_worker_that_is_stopped_gives_its_request_back(store: Store) -> None:
    """After the step under way, which is kept; the next one goes on from it."""
    record(store, {f"task {n}": [1.0, 0.0] for n in range(4)})
    requests = Requests(State.beside(store))
    made, _ = requests.put("ledger", settings={"max_iterations": 2})
    begun, stop = threading.Event(), threading.Event()
    ended: list[tuple[Fit | None, str]] = []

    def make(name: str, asked: Mapping[str, Any]) -> Trainer:
        algorithm = Gated(begun)
        return Trainer(store=store, algorithm=algorithm, min_batch_size=4, **asked)

    def told(request: TrainingRequest, fit: Fit | None, reason: str) -> None:
        ended.append((fit, reason))
        stop.set()

    first = threading.Thread(target=lambda: TrainingWorker(requests, make).work(stop, told))
    first.start()
    assert begun.wait(20)
    stop.set()
    first.join(20)
    given_back = requests.get(made.request_id)
    stop.clear()
    count = TrainingWorker(requests, make).work(stop, told)

    assert (given_back.status, given_back.tries) == ("waiting", 0)
    assert given_back.run_id
    assert count == 1
    ((fit, reason),) = ended
    assert fit is not None
    assert (fit.run.run_id, fit.run.step, reason) == (given_back.run_id, 2, "")


@pytest.mark.parametrize(
    ("category", "tasks", "reason"),
    [
        ("", [], "names an algorithm"),
        ("video", [{"category": "image"}], "no task of the worker has the category 'video'"),
    ],
)
def test_what_cannot_be_done_says_why(
    store: Store, category: str, tasks: list[Any], reason: str
) -> None:
    """And the worker goes on with the next request."""
    requests = Requests(State.beside(store))
    made, _ = requests.put("ledger" if category else "", category=category)
    stop = threading.Event()
    worker = TrainingWorker(
        requests, lambda name, asked: Trainer(store=store, algorithm=Ledger()), train=tasks
    )

    count = worker.work(stop, lambda *_: stop.set())

    assert count == 1
    found = requests.get(made.request_id)
    assert found.status == "failed"
    assert reason in found.reason


def test_doctor_names_a_request_without_a_worker(store: Store) -> None:
    """Not while a worker is there, nor once it is gone for a minute."""
    record(store, {"task": [1.0, 0.0]})
    requests = Requests(State.beside(store))
    requests.put("apo")
    requests.announce("w", "baseline")

    before = examine(store)
    requests.announce("w", "apo")
    after = examine(store)
    requests.dismiss("w")

    assert "training-waits" in [finding.code for finding in before]
    assert "training-waits" not in [finding.code for finding in after]
    assert not requests.has_worker()
