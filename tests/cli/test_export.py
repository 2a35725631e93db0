"""``export`` and ``pack``: data out of a store, whole, into lines, Parquet and a database."""

import json
import shlex
from collections.abc import Callable, Iterable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import duckdb
import pytest
from tests.adapter.forest import Forest

from lightning_otel import Span, Store, TripletAdapter
from lightning_otel import conventions as c
from lightning_otel.adapter import Adaptation, advantages
from lightning_otel.store.layout import Layout

Cli = Callable[..., CompletedProcess[str]]

TRIPLET_KEYS = {
    "rollout_id", "attempt_id", "agent", "branch", "step", "observation", "action", "reward",
    "next_observation", "done", "prompt_ids", "response_ids", "logprobs", "capture",
    "resource_version",
}  # fmt: skip


def lines(done: CompletedProcess[str]) -> list[dict[str, object]]:
    """The objects on stdout."""
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_spans_of_all_and_of_one_rollout(cli: Cli, kept: Path) -> None:
    """Without --rollout every span is printed; with it, by prefix or @last, only that one's."""
    every = cli("export", "spans", "--store", kept)
    one = cli("export", "spans", "--rollout", "exp-o", "--store", kept)
    last = cli("export", "spans", "--rollout", "@last", "--store", kept)

    assert len(lines(every)) == 18
    assert [span["name"] for span in lines(one)] == ["agentlightning.rollout", "chat toy"]
    assert len(lines(last)) == 4
    assert one.stderr == "2 spans → stdout\n"


def test_spans_file_is_what_stdout_gets(cli: Cli, kept: Path, tmp_path: Path) -> None:
    """-o FILE and -o - write the same, and talk stays on stderr."""
    path = tmp_path / "spans.jsonl"

    to_file = cli("export", "spans", "-o", path, "--store", kept)
    to_stdout = cli("export", "spans", "-o", "-", "--store", kept)

    assert to_file.stdout == ""
    assert to_file.stderr == f"18 spans → {path}\n"
    assert path.read_text() == to_stdout.stdout


@pytest.mark.parametrize(
    ("args", "rows"),
    [(("spans", "-o", "{}.parquet"), 18), (("triplets", "-o", "{}", "--format", "parquet"), 8)],
)
def test_parquet_by_ending_or_by_name(
    cli: Cli, kept: Path, tmp_path: Path, args: tuple[str, ...], rows: int
) -> None:
    """The file's ending or --format choose Parquet, which holds as many rows as the lines."""
    options = [arg.format(tmp_path / "out") for arg in args]

    done = cli("export", *options, "--store", kept)

    assert done.returncode == 0
    assert done.stdout == ""
    with duckdb.connect() as con:
        found = con.execute(f"FROM read_parquet('{options[2]}')")
        columns = {column[0] for column in found.description or ()}
        assert len(found.fetchall()) == rows
    assert {"trace_id", "span_id"} <= columns


def test_jsonl_may_have_any_ending(cli: Cli, kept: Path, tmp_path: Path) -> None:
    """--format wins over the ending."""
    done = cli(
        "export", "spans", "--format", "jsonl", "-o", tmp_path / "x.parquet", "--store", kept
    )

    assert done.returncode == 0
    assert len((tmp_path / "x.parquet").read_text().splitlines()) == 18


def test_triplets_are_transitions(cli: Cli, kept: Path) -> None:
    """Each line is one transition, its JSON columns values, with the server's token ids."""
    done = cli("export", "triplets", "--store", kept)

    found = lines(done)
    steps = Store(kept).transitions().rows()
    assert len(found) == len(steps) == 8
    for line, step in zip(found, steps, strict=True):
        assert set(line) >= TRIPLET_KEYS
        assert line["rollout_id"] == step.rollout_id
        assert line["observation"] == list(step.observation)
        assert line["action"] == list(step.action)
        assert line["reward"] == step.reward
        assert line["done"] == step.done
        assert line["prompt_ids"] == list(step.prompt_ids)
        assert line["logprobs"] == pytest.approx(list(step.logprobs))
    talk = done.stderr.splitlines()
    assert talk[:5] == [
        "rollouts   5",
        "calls      9: 8 are transitions, 1 left out",
        "tokens     6 of 8 transitions have exact token ids",
        "rewards    3: 3 placed; 3 of 8 transitions have one",
        "rows       8 of triplets → stdout",
    ]
    assert talk[5].startswith("  left out: 1 × ")
    assert "  not exact: 2 × no token ids: none were recorded" in talk


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

    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {(row["rollout_id"], row["reward"], row["advantage"]) for row in rows} == {
        ("a", 1.0, 1.0), ("b", 0.0, -1.0), ("c", None, None),
    }  # fmt: skip
    assert {(row["group_id"], row["weight"]) for row in rows} == {('"sum"', 0.5)}
    assert f"left out: 1 × {advantages.NO_REWARD}" in done.stderr


def test_triplets_by_agent_and_rollout(cli: Cli, kept: Path) -> None:
    """--agents takes a glob, --rollout a prefix."""
    by_agent = lines(cli("export", "triplets", "--agents", "p*", "--store", kept))
    by_rollout = lines(cli("export", "triplets", "--rollout", "exp-two", "--store", kept))

    assert [(line["agent"], line["rollout_id"]) for line in by_agent] == [("planner", "exp-one")]
    assert [(line["agent"], line["rollout_id"]) for line in by_rollout] == [("writer", "exp-two")]


@pytest.mark.parametrize("credit", ["last", "discounted"])
def test_triplets_credit_is_the_adapters(cli: Cli, kept: Path, credit: str) -> None:
    """--credit and --gamma reach the adapter: the rewards are those of the library's own call."""
    done = cli("export", "triplets", "--credit", credit, "--gamma", "0.5", "--store", kept)

    wanted = [step.reward for step in Store(kept).transitions(credit=credit, gamma=0.5)]  # type: ignore[arg-type]  # one of the literals
    assert [line["reward"] for line in lines(done)] == wanted


def test_triplets_discounted_differs_from_next(cli: Cli, copy: Path) -> None:
    """Under ``discounted`` the first step of a demo rollout gets the discounted share."""
    target = next(row["rollout_id"] for row in Store(copy).rollouts() if row["agents"] == "calc")
    cli("reward", target, "8", "--store", copy)

    half = lines(
        cli("export", "triplets", "--credit", "discounted", "--gamma", "0.5", "--rollout", target,
            "--store", copy)
    )  # fmt: skip
    plain = lines(cli("export", "triplets", "--rollout", target, "--store", copy))

    assert half[0]["reward"] == half[1]["reward"] * 0.5  # type: ignore[operator]  # numbers
    assert plain[0]["reward"] is None


@pytest.mark.parametrize(
    "args",
    [
        ("--format", "kto", "{}"),
        ("--format=kto", "{}"),
        ("kto", "{}"),
        ("kto", "-o", "{}"),
        ("--format", "kto", "-o", "{}", "--threshold", "0.5"),
    ],
)
def test_a_format_is_named_either_way(
    cli: Cli, kept: Path, tmp_path: Path, args: tuple[str, ...]
) -> None:
    """``export --format kto OUT`` is ``export kto OUT``, and both are the library's own call."""
    path = tmp_path / "kto.jsonl"
    wanted: list[dict[str, object]] = []
    Store(kept).export("kto", wanted.append)

    done = cli("export", *(arg.format(path) for arg in args), "--store", kept)

    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert [json.loads(line) for line in path.read_text().splitlines()] == wanted
    assert f"rows       3 of kto → {path}" in done.stderr


def test_options_of_a_format_are_options_of_its_command(cli: Cli, kept: Path) -> None:
    """A threshold that nothing reaches leaves no good answer; others have no such option."""
    labels = [
        row["label"] for row in lines(cli("export", "kto", "--threshold", "9", "--store", kept))
    ]

    other = cli("export", "--format", "triplets", "--threshold", "9", "--store", kept)

    assert labels == [False] * 3
    assert other.returncode == 2


def test_dry_run_prints_the_funnel_and_writes_nothing(cli: Cli, kept: Path, tmp_path: Path) -> None:
    """The funnel is what is asked for: it is on stdout, with every reason."""
    done = cli("export", "--format", "kto", tmp_path / "kto.jsonl", "--dry-run", "--store", kept)

    assert done.returncode == 0
    assert not (tmp_path / "kto.jsonl").exists()
    found = done.stdout.splitlines()
    assert found[0] == "rollouts   5"
    assert found[4] == "rows       3 of kto → nowhere (dry run)"
    assert any(line.startswith("  in no row: 5 steps: no reward; give one") for line in found)


def test_a_dry_run_names_the_command_that_writes_the_same_rows(cli: Cli, kept: Path) -> None:
    """With every option that chose them."""
    chosen = ("--agents", "calc*", "--threshold", "0.8", "--store", str(kept))

    done = cli("export", "--format", "kto", "--dry-run", *chosen)
    placed = cli("export", "kto", "rows.parquet", "--dry-run", *chosen)

    options = shlex.join(chosen)
    assert done.stderr == f"→ lightning-otel export --format kto {options} -o kto.jsonl\n"
    assert placed.stderr == f"→ lightning-otel export kto rows.parquet {options}\n"


def test_spans_are_no_folder_and_no_table_of_text(cli: Cli, kept: Path, tmp_path: Path) -> None:
    """A name that says another form is refused before anything is read."""
    for name in ("spans.csv", "spans/"):
        done = cli("export", "spans", "-o", tmp_path / name, "--store", kept)

        assert done.returncode == 2
    assert list(tmp_path.iterdir()) == []


def test_json_is_the_funnel_as_a_document(cli: Cli, kept: Path, tmp_path: Path) -> None:
    """Beside a file or a dry run it is on stdout; it never stands among rows."""
    dry = cli("export", "--format", "dpo", "--dry-run", "--json", "--store", kept)
    real = cli("export", "kto", tmp_path / "kto.jsonl", "--json", "--store", kept)
    both = cli("export", "kto", "--json", "--store", kept)

    found = json.loads(dry.stdout)
    assert (found["dry_run"], found["rows"], found["rollouts"]) == (True, 0, 5)
    assert found["why_empty"].startswith("it needs messages, and several rewarded answers")
    assert sum(found["left_out"].values()) == 9
    assert json.loads(real.stdout)["rows"] == 3
    assert both.returncode == 2


def test_what_is_left_out_can_be_had_one_by_one(cli: Cli, kept: Path, tmp_path: Path) -> None:
    """A line for each step, with where it is and why."""
    path = tmp_path / "left.jsonl"

    cli("export", "kto", "--dry-run", "--left-out", path, "--store", kept)

    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(found) == 5
    assert all(each["reason"].startswith("no reward") and each["span_id"] for each in found)
    assert not path.stat().st_mode & 0o077


def test_an_empty_export_says_why(cli: Cli, kept: Path, tmp_path: Path) -> None:
    """No rows is never silent: what is missing, and what to do."""
    Layout(tmp_path / "empty.duckdb").create()

    none = cli("export", "sft", "--store", tmp_path / "empty.duckdb")
    nobody = cli("export", "sft", "--agents", "nobody", "--store", kept)
    pairs = cli("export", "dpo", "--store", kept)

    assert "nothing to train on: the store has no spans" in none.stderr
    assert "nothing to train on: no step is of such an agent" in nobody.stderr
    assert "Most steps have no reward; give one with emit_reward()" in pairs.stderr


def test_a_folder_is_written_and_never_over_another(cli: Cli, kept: Path, tmp_path: Path) -> None:
    """Without an ending it is a dataset's folder; one that is there stays."""
    once = cli("export", "--format", "sft", tmp_path / "sft", "--store", kept)
    twice = cli("export", "--format", "sft", tmp_path / "sft", "--store", kept)

    assert once.returncode == 0
    assert (tmp_path / "sft" / "README.md").exists()
    assert twice.returncode == 2
    assert "exists already" in twice.stderr


def test_formats_are_listed_and_guessed(cli: Cli) -> None:
    """Help names every format and for whom it is; a misspelt one is guessed."""
    listed = cli("export", "--help")
    guessed = cli("export", "--format", "sftt")
    bare = cli("export", "--format")

    assert "For TRL KTOTrainer; needs messages and a reward." in listed.stdout
    assert "did you mean 'sft'?" in guessed.stderr
    assert (guessed.returncode, bare.returncode) == (2, 2)


def test_progress_is_for_terminals(
    terminal: Callable[..., str], kept: Path, tmp_path: Path
) -> None:
    """A terminal sees the funnel at the end, and the file is whole."""
    shown = terminal("export", "--format", "sft", tmp_path / "sft.jsonl", "--store", kept)

    assert "rollouts   5" in shown
    assert len((tmp_path / "sft.jsonl").read_text().splitlines()) == 8 - 3


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (("export", "spans", "--format", "parquet"), "stdout"),
        (("export", "triplets", "--format", "parquet", "-o", "-"), "stdout"),
        (("export", "spans", "-o", "/nowhere/at/all.jsonl"), "/nowhere/at/all.jsonl"),
        (("export", "spans", "-o", "/nowhere/at/all.parquet"), "/nowhere/at/all.parquet"),
        (("export", "triplets", "-o", "/nowhere/at/all.jsonl"), "/nowhere/at/all.jsonl"),
    ],
)
def test_unwritable_output_is_a_wrong_setting(
    cli: Cli, kept: Path, args: tuple[str, ...], word: str
) -> None:
    """What cannot be written exits with 2 and names the place."""
    done = cli(*args, "--store", kept)

    assert done.returncode == 2
    assert done.stdout == ""
    assert word in done.stderr.splitlines()[0]
    assert len(done.stderr.splitlines()) == 3


@pytest.mark.parametrize("args", [("export", "spans"), ("export", "triplets")], ids=" ".join)
def test_refused_export_leaves_the_file(
    cli: Cli, kept: Path, tmp_path: Path, args: tuple[str, ...]
) -> None:
    """An export that cannot begin neither makes a file nor empties the one that is there."""
    old = tmp_path / "old.jsonl"
    old.write_text("precious\n")

    missing = cli(*args, "-o", old, "--store", tmp_path / "none.duckdb")
    unknown = cli(*args, "-o", old, "--rollout", "nothing", "--store", kept)

    assert (missing.returncode, unknown.returncode) == (4, 3)
    assert old.read_text() == "precious\n"


def test_pack_is_one_whole_database(cli: Cli, kept: Path, tmp_path: Path) -> None:
    """The packed file opens by itself and holds every span as a table, with the views."""
    out = tmp_path / "all.duckdb"

    done = cli("pack", out, "--store", kept)

    assert done.returncode == 0
    assert done.stdout == ""
    assert done.stderr.splitlines()[0].startswith(f"18 spans → {out} (")
    with duckdb.connect(str(out), read_only=True) as con:
        assert con.execute("SELECT count(*) FROM spans").fetchone() == (18,)
        assert con.execute("SELECT count(*) FROM rollouts").fetchone() == (5,)


def test_pack_never_overwrites(cli: Cli, kept: Path, tmp_path: Path) -> None:
    """A file that is there stays as it is."""
    out = tmp_path / "all.duckdb"
    out.write_text("precious")

    done = cli("pack", out, "--store", kept)

    assert done.returncode == 4
    assert "exists already" in done.stderr.splitlines()[0]
    assert out.read_text() == "precious"


def test_pack_of_nothing_is_empty(cli: Cli, tmp_path: Path) -> None:
    """An empty store packs into a database without rows."""
    Layout(tmp_path / "empty.duckdb").create()

    done = cli("pack", tmp_path / "out.duckdb", "--store", tmp_path / "empty.duckdb")

    assert done.returncode == 0
    assert done.stderr.startswith("0 spans → ")
