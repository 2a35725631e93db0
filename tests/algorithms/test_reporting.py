"""Metrics of training runs in TensorBoard, W&B and MLflow, read back from what these wrote."""

import json
import struct
import sys
from collections import defaultdict
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from lightning_otel import BaseAlgorithm, StepResult, Trainer
from lightning_otel.errors import ConfigError, NotInstalledError

Curves = dict[str, list[tuple[int, float]]]


class Polite(BaseAlgorithm):
    """Asks more politely in each version."""

    needs_steps = False
    words = 0

    def train_step(self, batch: Any) -> StepResult:
        """One word more, a name that not every tool takes, and no number."""
        self.words += 1
        metrics = {"loss": 1 / self.words, "odd; name": 1.0, "lost": float("nan")}
        return StepResult(metrics, {"prompt": "please " * self.words})

    def state_dict(self) -> dict[str, int]:
        return {"words": self.words}

    def load_state_dict(self, state: Any) -> None:
        self.words = state["words"]


def act(task: Any, resources: Any) -> float:
    """Earn a third a word."""
    return float(resources["prompt"].format().count("please") / 4)


def train(folder: Path, reporter: str, steps: int, *, again: bool = False) -> Path:
    """Train, or go on; the run's folder."""
    trainer = Trainer(
        act, Polite(), store=folder / "t.duckdb", resources={"prompt": "now"},
        max_iterations=steps, report_to=reporter,
    )  # fmt: skip
    if again:
        trainer.resume_from_checkpoint()
    fit = trainer.fit(["tea", "cake"])
    return folder / "t.duckdb.d" / "runs" / fit.run.run_id


def read_tensorboard(run: Path) -> Curves:
    """The scalars of all event files: records of a length, two checksums and a message."""
    proto = import_module("tensorboardX.proto.event_pb2")
    found: Curves = defaultdict(list)
    for path in sorted((run / "tensorboard").iterdir()):
        content, at = path.read_bytes(), 0
        while at < len(content):
            (size,) = struct.unpack_from("<Q", content, at)
            event = proto.Event.FromString(content[at + 12 : at + 12 + size])
            at += size + 16
            for value in event.summary.value:
                found[value.tag].append((event.step, value.simple_value))
    return found


def read_wandb(run: Path) -> Curves:
    """The history of offline runs: records of a checksum, a length, a kind and a message."""
    proto = import_module("wandb.proto.wandb_internal_pb2")
    found: Curves = defaultdict(list)
    for path in sorted(run.glob("wandb/offline-run-*/*.wandb")):
        content, at = path.read_bytes(), 7
        while at + 7 <= len(content):
            size, kind = struct.unpack_from("<HB", content, at + 4)
            assert kind == 1, "a record of more than one piece"
            record = proto.Record.FromString(content[at + 7 : at + 7 + size])
            at += size + 7
            for item in record.history.item if record.HasField("history") else ():
                name = item.key or "/".join(item.nested_key)
                found[name].append((record.history.step.num, float(json.loads(item.value_json))))
    return found


def read_mlflow(run: Path) -> Curves:
    """The history of the one run that its server holds."""
    client = import_module("mlflow.tracking").MlflowClient()
    place = client.get_experiment_by_name("lightning-otel").experiment_id
    (each,) = client.search_runs([place])
    assert (each.info.run_name, each.info.status) == (run.name, "FINISHED")
    return {
        name: [(one.step, one.value) for one in client.get_metric_history(each.info.run_id, name)]
        for name in each.data.metrics
    }


@pytest.fixture(autouse=True)
def _offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize(
    ("reporter", "package", "read", "odd"),
    [
        ("tensorboard", "tensorboardX", read_tensorboard, "odd__name"),
        ("wandb", "wandb", read_wandb, "odd; name"),
        ("mlflow", "mlflow", read_mlflow, "odd_ name"),
    ],
)
def test_curves_arrive(tmp_path: Path, reporter: str, package: str, read: Any, odd: str) -> None:
    """Rewards, losses and versions of each step stand there once, also after a resumed run."""
    pytest.importorskip(package, reason=f"{package} is not installed here")
    run = train(tmp_path, reporter, 2)
    assert train(tmp_path, reporter, 3, again=True) == run

    found = read(run)

    assert found["reward"] == [(1, 0.0), (2, 0.25), (3, 0.5)]
    assert found["loss"] == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3))]
    assert found["version/prompt"] == [(2, 2.0), (3, 3.0)]
    assert len(found[odd]) == 3
    assert "lost" not in found


def test_what_cannot_report_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown name is refused at once, a missing library before the first step."""
    with pytest.raises(ConfigError, match=r"'excel'; it takes tensorboard, wandb, mlflow"):
        train(tmp_path, "excel", 1)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(NotInstalledError, match="pip install wandb"):
        train(tmp_path, "wandb", 1)
    assert train(tmp_path, "none", 1).is_dir()


def test_a_reporter_that_fails_ends_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged once, and the run goes on."""
    writer = pytest.importorskip("tensorboardX").SummaryWriter

    def fail(*_: object) -> None:  # a disk that is full cannot be made here
        raise OSError("no room")

    monkeypatch.setattr(writer, "add_scalar", fail)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)

    assert train(tmp_path, "tensorboard", 3).is_dir()

    assert sum("no room" in record.getMessage() for record in caplog.records) == 1
