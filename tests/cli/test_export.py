"""``export`` and ``pack``: data out of a store, whole, into lines, Parquet and a database."""

import json
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
    assert talk[0] == "8 transitions → stdout"
    assert talk[1] == "from 9 calls in 5 rollouts: 3 rewarded, 6 with exact token ids"
    assert talk[2].startswith("  left out: 1 × ")
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
    assert f"from {adapted[0].report.calls} calls" in done.stderr


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
