"""``lightning-otel queue``: what a person sees of rollouts, and can do about them."""

import json
from pathlib import Path

import pytest
from tests.cli.conftest import Cli, read_ns

from lightning_otel import Queue
from lightning_otel.state import State


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A store beside which one rollout succeeded, one failed, one runs and two wait."""
    path = tmp_path / "traces.duckdb"
    queue = Queue(State(path))
    queue.put(["a", "b", "c"])
    queue.put(["d", "e"], mode="val", max_attempts=2)
    for end in ("good", "bad", ""):
        lease = queue.lease("w")
        assert lease is not None
        if end == "good":
            queue.succeed(lease, 0.5)
        elif end == "bad":
            queue.fail(lease, "ValueError: \x1b[31mno")
    return path


def test_queue_counts_by_mode_and_reason(cli: Cli, place: Path) -> None:
    """Where rollouts stand, and why attempts failed, safe for a terminal."""
    done = cli("queue", "--store", place)

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "mode\tqueuing\trunning\tsucceeded\tfailed\tcancelled",
        "train\t0\t1\t1\t1\t0",
        "val\t2\t0\t0\t0\t0",
    ]
    assert done.stderr.startswith("1 attempt failed: ValueError: �[31mno\n→ ")
    document = json.loads(cli("queue", "--json", "--store", place).stdout)
    assert document["modes"]["val"]["queuing"] == 2
    assert document["reasons"][0]["attempts"] == 1
    assert document["is_paused"] is False


def test_queue_lists_rollouts(cli: Cli, place: Path) -> None:
    """The newest first, by status and mode, no more than asked for."""
    rows = [
        json.loads(line)
        for line in cli("queue", "--store", place, "ls", "--jsonl").stdout.splitlines()
    ]
    some = cli("queue", "--store", place, "ls", "--mode", "val", "--limit", "1")

    assert [row["task"] for row in rows] == ["e", "d", "c", "b", "a"]
    assert rows[-1]["reward"] == 0.5
    header, line = (each.split("\t") for each in some.stdout.splitlines())
    assert read_ns(line[header.index("created")]) == rows[0]["created_ns"]
    assert "1 more" in some.stderr


def test_queue_is_paused_resumed_and_cancelled(cli: Cli, place: Path) -> None:
    """What is done holds for every worker."""
    queue = Queue(State(place))
    waiting, _ = queue.rollouts("queuing")

    paused = cli("queue", "--store", place, "pause")
    assert queue.is_paused
    shown = cli("queue", "--store", place)
    resumed = cli("queue", "resume", "--store", place)  # as every command takes it
    done = cli("queue", "cancel", waiting.rollout_id, "--reason", "enough", "--store", place)
    again = cli("queue", "--store", place, "cancel", waiting.rollout_id)

    assert "paused: 2 wait, 1 still run" in paused.stderr
    assert "no rollout is started" in shown.stderr
    assert not queue.is_paused
    assert resumed.returncode == done.returncode == again.returncode == 0
    assert queue.get(waiting.rollout_id).reason == "enough"
    assert "was over: cancelled" in again.stderr


def test_looking_at_no_queue_makes_none(cli: Cli, tmp_path: Path) -> None:
    """The error says what to do; an id that nobody knows has the code of what is not found."""
    missing = cli("queue", "--store", tmp_path / "none.duckdb")
    Queue(State(tmp_path / "some.duckdb"))
    unknown = cli("queue", "--store", tmp_path / "some.duckdb", "cancel", "r9")

    assert missing.returncode == 4
    assert "nothing was ever queued" in missing.stderr
    assert not list(tmp_path.glob("none.duckdb*"))
    assert unknown.returncode == 3
