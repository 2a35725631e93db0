"""``train``: from the shell, on what is recorded and on tasks; ended by a signal after a step."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.cli.conftest import Cli
from tests.trainer.made import record

from lightning_otel import Store, Trainer

AGENT = """
import lightning_otel as lo

def act(task, resources):
    lo.emit_action("say", task)
    return float(task["worth"])
"""


def test_train_learns_from_what_is_recorded(cli: Cli, store: Store, tmp_path: Path) -> None:
    """It says what was measured, and where the checkpoint is; the run is listed."""
    record(store, {"a": [1.0, 0.0], "b": [0.5]})
    saved = tmp_path / "saved"

    done = cli("train", "baseline", "--store", store.name, "--json", "--save", saved)
    runs = cli("train", "--list", "--store", store.name, "--jsonl")

    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["status"], told["step"], told["metrics"]["reward"]) == ("succeeded", 1, 0.5)
    assert "reward" in done.stderr  # how it went on
    (run,) = map(json.loads, runs.stdout.splitlines())
    assert (run["run_id"], run["algorithm"], run["step"]) == (told["run_id"], "baseline", 1)
    assert (saved / "checkpoint.json").exists()
    again = cli(
        "train", "baseline", "--resume", saved, "--max-iterations", 1, "--store", store.name
    )
    assert f"{told['run_id']} succeeded after 1 step" in again.stderr


def test_train_runs_an_agent_on_tasks(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent's module stands in the working directory."""
    monkeypatch.chdir(tmp_path)
    Path("agent_of_train.py").write_text(AGENT)
    Path("tasks.jsonl").write_text('{"worth": 1}\n\n{"worth": 0.5}\n')

    done = cli(
        "train", "baseline", "--agent", "agent_of_train:act", "--tasks", "tasks.jsonl",
        "--store", "here.duckdb", "--jsonl",
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["metrics"]["mean_reward"] == 0.75


@pytest.mark.parametrize(
    ("given", "code", "message"),
    [
        ([], 2, "there are apo, baseline"),
        (["nosuch"], 2, "no algorithm 'nosuch'"),
        (["baseline"], 1, "needs 1 rewarded rollouts"),
        (["baseline", "-o", "epochs"], 2, "write it as name=value"),
        (["baseline", "-o", "epochs=3"], 2, "Baseline cannot be made of {'epochs': 3}"),
        (["baseline", "--agent", "nosuch:x"], 2, "cannot load 'nosuch:x'"),
        (["baseline", "--tasks", "bad.jsonl"], 2, "bad.jsonl, line 2"),
        (["baseline", "--tasks", "none.jsonl"], 2, "'none.jsonl' does not exist"),
        (["baseline", "--resume", "nosuch"], 3, "no training run 'nosuch'"),
    ],
)
def test_what_cannot_be_trained_is_told(
    cli: Cli,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    given: list[str],
    code: int,
    message: str,
) -> None:
    """With what to do, and the exit code of its kind."""
    monkeypatch.chdir(tmp_path)
    Path("bad.jsonl").write_text('"a"\n{oops\n')

    done = cli("train", *given, "--store", tmp_path / "store")

    assert done.returncode == code, done.stderr
    assert message in done.stderr


def test_signal_ends_training_after_its_step(store: Store) -> None:
    """What was learnt is kept, and the run says that it was stopped."""
    record(store, {"a": [1.0]})
    program = [
        sys.executable, "-m", "lightning_otel", "train", "baseline", "--follow",
        "--store", store.name,
    ]  # fmt: skip
    trainer = Trainer(store=store)
    with subprocess.Popen(program, stderr=subprocess.PIPE, text=True) as running:
        until = time.monotonic() + 40
        while not (trainer.runs.all() and trainer.runs.all()[0].step):
            assert time.monotonic() < until
            time.sleep(0.05)
        running.send_signal(signal.SIGTERM)
        _, said = running.communicate(timeout=20)

    assert running.returncode == 0, said
    assert (trainer.runs.get("@last").status, trainer.runs.get("@last").step) == ("stopped", 1)
    assert "stopped after 1 step" in said
