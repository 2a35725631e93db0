"""``export`` and ``pack``: data out of a store, whole, into lines, Parquet and a database."""

import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import duckdb
import pytest
from tests.adapter.forest import Forest
from tests.cli.conftest import Cli, lines_of_error

from lightning_otel import Span, Store, TripletAdapter
from lightning_otel.adapter import Adaptation
from lightning_otel.types import conventions as c


def lines(done: CompletedProcess[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("command", "rows", "talk"),
    [
        ("spans", 18, "18 spans → stdout\n"),
        ("spans -o -", 18, "18 spans → stdout\n"),
        ("spans --rollout exp-o", 2, "2 spans → stdout\n"),
        ("spans --rollout @last", 4, "4 spans → stdout\n"),
        ("triplets", 8, "rows       8 of triplets → stdout\n"),
        ("triplets --agents p*", 1, "rows       1 of "),
        ("triplets --rollout exp-two", 1, "calls      2: 1 are transitions, 1 left out"),
        ("--format kto", 3, "rows       3 of kto → stdout\n"),
        ("kto --threshold 9", 3, "in no row: 5 steps: no reward; give one"),
        ("dpo", 0, "Most steps have no reward; give one with emit_reward()"),
        ("sft --agents nobody", 0, "nothing to train on: no step matches this agent"),
    ],
)
def test_rows_are_on_stdout(cli: Cli, kept: Path, command: str, rows: int, talk: str) -> None:
    """One JSON object a line, of all or of what is selected; the funnel is on stderr."""
    done = cli("export", *command.split(), "--store", kept)

    assert done.returncode == (0 if rows else 3)
    assert len(lines(done)) == rows
    assert talk in done.stderr


@pytest.mark.parametrize(
    ("command", "code", "error"),
    [
        ("spans --format parquet", 2, "stdout"),
        ("triplets --format parquet -o -", 2, "stdout"),
        ("spans -o /nowhere/at/all.jsonl", 2, "/nowhere/at/all.jsonl"),
        ("spans -o /nowhere/at/all.parquet", 2, "/nowhere/at/all.parquet"),
        ("triplets -o /nowhere/at/all.jsonl", 2, "/nowhere/at/all.jsonl"),
        ("spans -o spans.csv", 2, "spans.csv"),
        ("spans -o spans/", 2, "spans/"),
        ("--format triplets --threshold 9", 2, "--threshold"),
        ("kto --json", 2, "among the rows"),
        ("kto one.jsonl -o other.jsonl", 2, "two places"),
        ("spans -o old.jsonl --rollout nothing", 3, "nothing"),
        ("triplets -o old.jsonl --rollout nothing", 3, "nothing"),
        ("triplets -o old.jsonl --store none.duckdb", 4, "no store"),
        ("--format sft folder", 2, "exists already"),
    ],
)
def test_what_cannot_be_exported_is_refused(
    cli: Cli, kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, code: int,
    error: str,
) -> None:  # fmt: skip
    """With a remedy, before any file is made, emptied or written over."""
    monkeypatch.chdir(tmp_path)
    Path("old.jsonl").write_text("precious\n")
    Path("folder").mkdir()
    Path("folder/mine").write_text("")
    words = command.split()

    done = cli("export", *words, *(() if "--store" in words else ("--store", kept)))

    assert (done.returncode, done.stdout) == (code, "")
    assert error in lines_of_error(done)[0]
    assert {each.name for each in tmp_path.iterdir()} == {"old.jsonl", "folder"}
    assert Path("old.jsonl").read_text() == "precious\n"


def test_an_empty_export_fails(cli: Cli, kept: Path, tmp_path: Path) -> None:
    """Exit code 3 stops a job that goes on to train; a dry run is an answer."""
    path = tmp_path / "rows.jsonl"

    done = cli("export", "dpo", path, "--store", kept)
    counted = cli("export", "dpo", path, "--json", "--store", kept)
    dry = cli("export", "dpo", path, "--dry-run", "--store", kept)

    assert (done.returncode, counted.returncode, dry.returncode) == (3, 3, 0)
    assert "nothing to train on" in done.stderr
    assert json.loads(counted.stdout)["rows"] == 0
    assert path.read_text() == ""


@pytest.mark.parametrize(
    ("command", "rows"),
    [
        ("spans -o {}.parquet", 18), ("triplets -o {} --format parquet", 8),
        ("spans --format jsonl -o {}.parquet", 18), ("spans -o {}.jsonl", 18),
        ("kto -o {}.jsonl", 3), ("--format kto {}.jsonl", 3), ("--format=kto {}.jsonl", 3),
        ("--format kto -o {}.jsonl --threshold 0.5", 3),
    ],
)  # fmt: skip
def test_a_file_has_the_rows(cli: Cli, kept: Path, tmp_path: Path, command: str, rows: int) -> None:
    """Its ending or --format choose the form; a format is named as a command or as an option."""
    done = cli("export", *command.format(tmp_path / "out").split(), "--store", kept)

    (path,) = tmp_path.iterdir()
    assert (done.returncode, done.stdout) == (0, "")
    assert f"→ {path}" in done.stderr
    if "jsonl" in command:
        assert len(path.read_text().splitlines()) == rows
        return
    with duckdb.connect() as con:
        found = con.execute(f"FROM read_parquet('{path}')")
        assert {"trace_id", "span_id"} <= {column[0] for column in found.description or ()}
        assert len(found.fetchall()) == rows


@pytest.mark.parametrize("kind", ["spans", "triplets"])
def test_an_export_that_fails_leaves_the_older_file(kept: Path, tmp_path: Path, kind: str) -> None:
    """The disk takes no more of it than a part."""
    path = tmp_path / "old.jsonl"
    path.write_text("precious\n")
    command = [sys.executable, "-m", "lightning_otel", "export", kind, path, "--store", kept]

    done = subprocess.run(["bash", "-c", 'ulimit -f 4; exec "$@"', "bash", *command], check=False)

    assert done.returncode != 0
    assert [(each, each.read_text()) for each in tmp_path.iterdir()] == [(path, "precious\n")]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_triplets_are_adapted_once(
    cli: Cli, kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The funnel told at the end is that of the rows, not of a second pass over the spans."""
    adapted = []
    explain = TripletAdapter.explain

    def counted(self: TripletAdapter, spans: Iterable[Span], **options: Any) -> Adaptation:
        adapted.append(found := explain(self, spans, **options))
        return found

    monkeypatch.setattr(TripletAdapter, "explain", counted)

    done = cli("export", "triplets", "-o", tmp_path / "out", "--format", kind, "--store", kept)

    assert done.returncode == 0
    assert len(adapted) == 1
    assert f"calls      {adapted[0].report.calls}:" in done.stderr


def test_triplets_with_advantages(cli: Cli, tmp_path: Path) -> None:
    """Each row tells its group, advantage and weight; the funnel tells who has none, and why."""
    store = Store(tmp_path / "traces.duckdb")
    for name, value in (("a", 1.0), ("b", 0.0), ("c", None)):
        forest = Forest(rollout_id=name, trace_id=name * 32, process=name)
        with forest.inside(c.SPAN_ROLLOUT, **{c.TASK: '"sum"'}):
            forest.call("first")
            forest.call("second")
            if value is not None:
                forest.reward(value)
        store.add(forest.spans)

    done = cli("export", "triplets", "--credit", "step", "--advantage", "rloo", "--store", tmp_path)

    rows = lines(done)
    assert {(row["rollout_id"], row["reward"], row["advantage"]) for row in rows} == {
        ("a", 1.0, 1.0), ("b", 0.0, -1.0), ("c", None, None),
    }  # fmt: skip
    assert {(row["group_id"], row["weight"]) for row in rows} == {('"sum"', 0.5)}
    assert "left out: 1 × no advantage: its rollout has no reward" in done.stderr


@pytest.mark.parametrize("credit", ["previous", "last", "discounted"])
def test_triplets_are_the_librarys_own(cli: Cli, copy: Path, credit: Any) -> None:
    """--credit and --gamma reach the adapter; JSON columns are values, with all token ids."""
    target = next(row["rollout_id"] for row in Store(copy).rollouts() if row["agents"] == "calc")
    cli("reward", target, "8", "--store", copy)

    done = cli("export", "triplets", "--credit", credit, "--gamma", "0.5", "--store", copy)

    steps = Store(copy).transitions(credit=credit, gamma=0.5).rows()
    for line, step in zip(lines(done), steps, strict=True):
        assert (line["rollout_id"], line["reward"]) == (step.rollout_id, step.reward)
        assert (line["observation"], line["action"]) == (list(step.observation), list(step.action))
        assert (line["done"], line["prompt_ids"]) == (step.done, list(step.prompt_ids))
        assert line["logprobs"] == pytest.approx(list(step.logprobs))


def test_a_dry_run_prints_the_funnel_and_names_the_command(cli: Cli, kept: Path) -> None:
    """Every reason on stdout, no file, and the options that choose the same rows on stderr."""
    chosen = ("--agents", "calc*", "--threshold", "0.8", "--store", str(kept))
    options = shlex.join(chosen)

    done = cli("export", "--format", "kto", "--dry-run", *chosen)
    placed = cli("export", "kto", "rows.parquet", "--dry-run", *chosen)

    assert "answers    6: 3 in rows, 3 left out" in done.stdout.splitlines()
    assert "rows       3 of kto → nowhere (dry run)" in done.stdout.splitlines()
    assert done.stderr == f"→ lightning-otel export --format kto {options} -o kto.jsonl\n"
    assert placed.stderr == f"→ lightning-otel export kto rows.parquet {options}\n"


def test_the_funnel_as_a_document_and_what_is_left_out(
    cli: Cli, kept: Path, tmp_path: Path
) -> None:
    """Beside a file or a dry run --json is on stdout; each step that is left out is a line."""
    left = tmp_path / "left.jsonl"

    dry = cli("export", "--format", "dpo", "--dry-run", "--json", "--store", kept)
    real = cli(
        "export", "kto", tmp_path / "kto.jsonl", "--json", "--left-out", left, "--store", kept
    )

    found = json.loads(dry.stdout)
    assert (found["dry_run"], found["rows"], found["rollouts"]) == (True, 0, 5)
    assert found["why_empty"].startswith("it needs messages, and several rewarded answers")
    assert sum(found["left_out"].values()) == 9
    told = json.loads(real.stdout)
    assert [told[name] for name in ("rows", "steps", "in_rows", "steps_left_out")] == [3, 8, 3, 5]
    steps = [json.loads(line) for line in left.read_text().splitlines()]
    assert len(steps) == 5
    assert all(each["reason"].startswith("no reward") and each["span_id"] for each in steps)
    assert not left.stat().st_mode & 0o077


def test_a_folder_is_a_dataset(terminal: Callable[..., str], kept: Path, tmp_path: Path) -> None:
    """Without an ending; a terminal sees the funnel at the end."""
    shown = terminal("export", "--format", "sft", tmp_path / "sft", "--store", kept)

    assert "rollouts   5" in shown
    assert (tmp_path / "sft" / "README.md").exists()


def test_formats_are_listed(cli: Cli) -> None:
    """Help names every format and for whom it is."""
    assert "For TRL KTOTrainer; needs messages and a reward." in cli("export", "--help").stdout


def test_pack_is_one_whole_database(cli: Cli, kept: Path, tmp_path: Path) -> None:
    """It opens by itself and holds every span as a table, with the views; none is written over."""
    out = tmp_path / "all.duckdb"

    done = cli("pack", out, "--store", kept)
    again = cli("pack", out, "--store", kept)

    assert (done.returncode, done.stdout, again.returncode) == (0, "", 4)
    assert done.stderr.startswith(f"18 spans → {out} (")
    assert "exists already" in again.stderr.splitlines()[0]
    with duckdb.connect(str(out), read_only=True) as con:
        assert con.execute("SELECT count(*) FROM spans").fetchone() == (18,)
        assert con.execute("SELECT count(*) FROM rollouts").fetchone() == (5,)
