"""Feedback that came before its span: no command takes rewards anywhere without it."""

import json
import time
from pathlib import Path

import pytest
from tests.cli.conftest import Cli

from lightning_otel import Store, auto_trace, emit_action
from lightning_otel.rewarding.feedback import Feedback
from lightning_otel.rewarding.pending import Pending
from lightning_otel.state import State


@pytest.fixture
def late(tmp_path: Path) -> Path:
    """A store with one rollout, recorded after what a person said of it."""
    store = Store(tmp_path / "traces.duckdb")
    store.writer()
    state = State.beside(store)
    assert (
        Pending(state).give(store, Feedback("rollout", "r1", 0.5, time.time_ns(), {}, "f1")) is None
    )
    with auto_trace(store=store, rollout_id="r1"):
        emit_action("say", "hi")
    store.writer().seal()
    state.close()
    return tmp_path / "traces.duckdb"


@pytest.mark.parametrize("command", ["export", "pack", "compact", "apply-rewards"])
def test_what_waits_is_given_first(cli: Cli, late: Path, command: str) -> None:
    """Once, and it is said; so it is among what goes out."""
    judge = late.with_name("judge.py")
    judge.write_text("def judge(task):\n    return None\n")
    out = late.with_name("out.jsonl" if command == "export" else "out.duckdb")
    words = {
        "export": ("export", "triplets", "-o", out),
        "pack": ("pack", out),
        "compact": ("compact",),
        "apply-rewards": ("apply-rewards", f"{judge}:judge"),
    }[command]

    done = cli(*words, "--store", late)

    assert done.returncode == 0, done.stderr
    assert "1 × feedback given that had waited for what it judges" in done.stderr
    assert [step.reward for step in Store(late).transitions()] == [0.5]
    assert not Pending(State(str(late))).waiting().count
    if command == "export":
        assert [json.loads(line)["reward"] for line in out.read_text().splitlines()] == [0.5]
        again = cli("export", "triplets", "-o", late.with_name("again.jsonl"), "--store", late)
        assert "feedback" not in again.stderr


@pytest.mark.parametrize("command", [("export", "triplets", "--dry-run"), ("compact", "--dry-run")])
def test_dry_run_gives_nothing(cli: Cli, late: Path, command: tuple[str, ...]) -> None:
    """It changes nothing at all."""
    done = cli(*command, "--store", late)

    assert done.returncode == 0, done.stderr
    assert Pending(State(str(late))).waiting().count == 1


def test_state_that_cannot_be_read_keeps_no_spans_back(cli: Cli, late: Path) -> None:
    """What is not given is said, and the rows are written."""
    (late.with_name(late.name + ".d") / "state.sqlite").write_bytes(b"no database" * 1000)

    done = cli("export", "triplets", "--store", late)

    assert done.returncode == 0, done.stderr
    assert "feedback that waits was not given" in done.stderr
    assert len(done.stdout.splitlines()) == 1
