"""``demo`` and ``train``: from the shell, offline, on what is recorded and on tasks."""

import json
import signal
from pathlib import Path

import pytest
from tests.cli.conftest import Cli, Start
from tests.trainer.made import record
from tests.waiting import wait_until

from lightning_otel import Span, Store, Trainer

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
        (["baseline", "-o", "epochs=3"], 2, "Baseline has no option 'epochs'"),
        (["baseline", "--agent", "nosuch:x"], 2, "cannot load 'nosuch:x'"),
        (["baseline", "--tasks", "bad.jsonl"], 2, "bad.jsonl, line 2"),
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
    Store(tmp_path / "store").add([Span("a" * 32, "b" * 16, None, "work", 1, 2)])

    done = cli("train", *given, "--store", tmp_path / "store")

    assert done.returncode == code, done.stderr
    assert message in done.stderr


def test_signal_ends_training_after_its_step(store: Store, start: Start) -> None:
    """What was learnt is kept, and the run says that it was stopped."""
    record(store, {"a": [1.0]})
    trainer = Trainer(store=store)
    running = start("train", "baseline", "--follow", "--store", store.name)
    wait_until(lambda: trainer.runs.all() and trainer.runs.all()[0].step)
    running.send_signal(signal.SIGTERM)
    _, said = running.communicate(timeout=20)

    assert running.returncode == 0, said
    assert (trainer.runs.get("@last").status, trainer.runs.get("@last").step) == ("stopped", 1)
    assert "stopped after 1 step" in said


def test_demo_shows_the_whole_way(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spans, transitions with token ids, rewards as a picture, and three lines for one's agent."""
    path = tmp_path / "demo.duckdb"
    monkeypatch.setenv("LIGHTNING_OTEL_STORE", str(path))

    done = cli("demo", "--rollouts", 5)

    text = done.stdout
    assert done.returncode == 0
    assert f"20 spans, 10 calls, 5 traces → {path}" in text
    assert "10 transitions, 10 with the server's own token ids" in text
    assert "STEP  OBSERVATION" in text
    assert text.count("yes") >= 2
    assert "The policy learnt 1 time from such transitions, read back from DuckDB" in text
    assert "reward  5 values  mean of 5: " in text
    assert "rollout, in the order they began" in text
    assert "lightning-otel run -- python your_agent.py" in text
    assert "lightning-otel reward @last 1.0" in text
    assert "lightning-otel export triplets -o triplets.jsonl" in text
    assert done.stderr == "→ lightning-otel plot --by version\n"
    assert len(Store(path).rollouts().rows()) == 5


def test_demo_counts_its_own_run_only(cli: Cli, tmp_path: Path) -> None:
    """The same seed gives the same rewards; a second demo in the same store tells of itself."""
    path = tmp_path / "demo.duckdb"

    first, second = (cli("demo", "--rollouts", 3, "--store", path) for _ in range(2))

    pictures = [
        done.stdout.partition("5. The policy")[2].rpartition(" s, no key")[0]
        for done in (first, second)
    ]
    assert pictures[0].rpartition("\n")[0] == pictures[1].rpartition("\n")[0] != ""
    assert "12 spans, 6 calls, 3 traces →" in second.stdout
    assert "6 transitions, 6 with" in second.stdout
    assert second.stderr == f"→ lightning-otel plot --by version --store {path}\n"
    assert len(Store(path).rollouts().rows()) == 6


def test_demo_keeps_its_curve_and_has_a_control(cli: Cli, tmp_path: Path) -> None:
    """The picture is a file; shuffled rewards are told, and those in the store stay as they are."""
    options = ("--rollouts", 4, "--shuffle", "--store", tmp_path / "demo.duckdb")

    done = cli("demo", *options, "--plot", tmp_path / "curve.svg")
    refused = cli("demo", *options, "--plot", tmp_path / "curve.gif")

    assert "what 4 answers earned, dealt out at random:" in done.stdout
    assert f"   curve → {tmp_path / 'curve.svg'}\n" in done.stdout
    assert (tmp_path / "curve.svg").read_text().startswith("<svg")
    assert refused.returncode == 2
    assert refused.stdout == ""
    assert len(Store(tmp_path / "demo.duckdb").rollouts().rows()) == 4


@pytest.mark.parametrize(
    ("name", "value"), [("LIGHTNING_OTEL", "0"), ("OTEL_SDK_DISABLED", "true")]
)
def test_demo_needs_recording(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    """With recording switched off there is nothing to show, which is said before anything runs."""
    monkeypatch.setenv(name, value)

    done = cli("demo", "--store", tmp_path / "demo.duckdb")

    assert done.returncode == 2
    assert name in done.stderr
    assert not (tmp_path / "demo.duckdb.d").exists()


def test_demo_needs_a_place_for_its_store(cli: Cli, tmp_path: Path) -> None:
    """A store that cannot be made is a store error, not an empty table."""
    (tmp_path / "file").write_text("")

    done = cli("demo", "--store", tmp_path / "file" / "demo.duckdb")

    assert done.returncode == 4
    assert "cannot make the store" in done.stderr
