"""``Store.export()`` and ``pack()``: rows or a whole store in files, private, nothing beside."""

import dataclasses
import json
import os
import shutil
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import duckdb
import pytest
from hypothesis import given, settings
from tests.adapter.forest import Forest, draw
from tests.adapter.forests import forests
from tests.store.conftest import MakeSpan

from lightning_otel import Span, Store, TripletAdapter
from lightning_otel.dataset.export import kind_of
from lightning_otel.dataset.formats.format import LeftOut
from lightning_otel.dataset.formats.transition_rows import transition
from lightning_otel.errors import ConfigError, StoreError, StoreMissingError
from lightning_otel.store.schema import COLUMNS
from lightning_otel.types import Transition
from lightning_otel.types import conventions as c
from lightning_otel.types.transitions import distinct


def rollout(number: int, reward: float | None = None) -> Forest:
    """A rollout of two calls."""
    given = "" if reward is None else f"!{reward}"
    ids = {"rollout_id": f"r{number}", "trace_id": f"{number:032x}", "process": f"p{number}"}
    text = f"calc[ one-{number}<same two-{number}<more {given} ]"
    return draw(text, **ids, tick=50 * number)


@pytest.fixture
def filled(store: Store) -> Store:
    """A store of three rollouts, the last one without a reward."""
    for number, reward in enumerate((1.0, 0.0, None)):
        store.add(rollout(number, reward).spans)
    return store


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a file or folder, by DuckDB."""
    if path.is_dir():
        path = path / "data" / "train-00000-of-00001.parquet"
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    with duckdb.connect() as con:
        found = con.execute(f"FROM read_parquet('{path}')")
        names = [column[0] for column in found.description or ()]
        return [dict(zip(names, row, strict=True)) for row in found.fetchall()]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "folder"])
def test_a_file_holds_the_rows_and_is_the_users_alone(
    filled: Store, tmp_path: Path, name: str
) -> None:
    """The name says what is written; nobody else can read it, and nothing else is left there."""
    before = set(tmp_path.iterdir())

    done = filled.export("kto", tmp_path / name)

    assert (done.rows, done.report.calls, done.report.rewards_placed) == (2, 6, 2)
    assert [row["label"] for row in read(tmp_path / name)] == [True, False]
    assert set(tmp_path.iterdir()) - before == {tmp_path / name}
    for path in [tmp_path / name, *(tmp_path / name).rglob("*")]:
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077


def test_a_function_is_given_each_row(filled: Store) -> None:
    """Rows can go anywhere, and nowhere."""
    rows: list[dict[str, Any]] = []
    left: list[LeftOut] = []

    done = filled.export("kto", rows.append, left_out=left.append, threshold=0.0)
    counted = filled.export("kto", None)

    assert [row["label"] for row in rows] == [True, True]
    assert done.left_out == counted.left_out
    assert sum(done.left_out.values()) == len(left) == 4
    assert counted.rows == 2


def test_kind_of_a_name() -> None:
    """By its ending, a folder where it has none; what was said counts more."""
    for name, kind in (
        ("a.parquet", "parquet"), ("A.PARQUET", "parquet"), ("a.jsonl", "jsonl"),
        ("a.json", "jsonl"), ("/dev/null", "jsonl"), ("out", "folder"), ("out/", "folder"),
        ("v1.0/", "folder"),
    ):  # fmt: skip
        assert kind_of(name) == kind
    assert kind_of("a.parquet", "jsonl") == kind_of("a.txt", "jsonl") == "jsonl"
    for name in ("rows.csv", "rows.jsonl.gz", "rows.txt"):  # its reader would find no such thing
        with pytest.raises(ConfigError, match=r"end it in \.jsonl or \.parquet"):
            kind_of(name)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "folder"])
def test_an_export_that_fails_leaves_things_as_they_were(
    filled: Store, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stood there stands there, and nothing half written lies beside it."""
    if name != "folder":
        (tmp_path / name).write_text("precious")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}

    def fail(*_: Any, **__: Any) -> Any:
        yield from ()
        raise RuntimeError("the disk is on fire")

    # Replaced because no real store fails in the middle when it is asked to.
    monkeypatch.setattr(Store, "_adapt", fail)
    with pytest.raises(RuntimeError, match="on fire"):
        filled.export("sft", tmp_path / name)

    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


def test_places_that_cannot_be_written_are_refused(filled: Store, tmp_path: Path) -> None:
    """Before anything is read, and with what to do."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("precious")

    for place, kind, words in [
        (tmp_path / "no" / "rows.jsonl", None, "no folder"),
        (tmp_path / "full", None, "exists already; name a new folder"),
        (tmp_path / "full", "jsonl", "it is a folder; name a file"),
        (tmp_path / "full" / "file", "folder", "exists already"),
        ("/dev/null", "parquet", "takes JSON lines alone"),
    ]:
        with pytest.raises(ConfigError, match=words):
            filled.export("sft", place, kind=kind)  # type: ignore[arg-type]  # one of the literals
    with pytest.raises(StoreMissingError):
        Store(tmp_path / "none.duckdb").export("sft", tmp_path / "rows.jsonl")
    assert not (tmp_path / "rows.jsonl").exists()


def test_a_pipe_is_written_into(filled: Store, tmp_path: Path) -> None:
    """Nothing takes the place of what is no file."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    found: list[str] = []
    reader = threading.Thread(target=lambda: found.append(pipe.read_text()))
    reader.start()

    filled.export("triplets", pipe)
    reader.join(10)

    assert len(found[0].splitlines()) == 6
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "folder"])
def test_no_rows_are_an_empty_file_of_the_right_columns(
    filled: Store, tmp_path: Path, name: str
) -> None:
    """A reader finds no rows, not no file."""
    done = filled.export("grpo", tmp_path / name)

    assert done.rows == 0
    assert read(tmp_path / name) == []
    (reason,) = done.left_out
    assert reason.startswith("no token ids: none were recorded; ask")


def test_agents_rollouts_and_progress(filled: Store) -> None:
    """Only who was asked for, and each rollout is told."""
    told: list[int] = []
    rows: list[dict[str, Any]] = []

    none = filled.export("triplets", None, agents="other*")
    one = filled.export("triplets", rows.append, rollout_id="r1", progress=told.append)

    assert (none.rows, none.report.rollouts) == (0, 0)  # not even read
    assert {row["rollout_id"] for row in rows} == {"r1"}
    assert one.report.rollouts == 1
    assert told[-1] == 1


# --- triplets can be read again ------------------------------------------------------------------


def plain(step: Transition) -> Transition:
    """A transition with tuples for arrays, and floats as JSON and Parquet have them."""
    arrays = {
        name: tuple(getattr(step, name)) for name in ("prompt_ids", "response_ids", "logprobs")
    }
    return dataclasses.replace(step, **arrays)


@pytest.mark.timeout(120)  # a store and two files for each example
@settings(max_examples=5, deadline=None)
@given(forests)
def test_triplets_read_again_are_the_transitions(spans: list[Span]) -> None:
    """Stored, exported to lines or Parquet and read back: what the adapter made of the spans."""
    steps = [plain(step) for step, _ in distinct(TripletAdapter().adapt(spans))]
    with TemporaryDirectory() as folder:
        store = Store(Path(folder) / "traces.duckdb")
        store.add(spans)
        store.writer().seal()
        for name in ("rows.jsonl", "rows.parquet"):
            store.export("triplets", Path(folder) / name, include_incomplete=True)

            found = [transition(row) for row in read(Path(folder) / name)]

            assert sorted(found, key=_key) == sorted(steps, key=_key)


def _key(step: Transition) -> tuple[Any, ...]:
    return step.rollout_id, step.attempt_id, step.start_ns, step.trace_id, step.span_id


def test_pack_is_self_contained(store: Store, tmp_path: Path, make_span: MakeSpan) -> None:
    """Tables and views are there with plain DuckDB when the store is gone."""
    store.add(
        [
            make_span(
                attributes={
                    c.OPERATION: "chat", c.ROLLOUT_ID: "r", c.INPUT_MESSAGES: "[]", "k": {"deep": 1}
                }
            ),
            make_span(attributes={c.REWARD_VALUE: 0.5, c.ROLLOUT_ID: "r"}),
        ]
    )  # fmt: skip
    store.writer().seal()
    store.settle()
    store.add([make_span()])
    with store.connect() as con:
        types = con.execute("SELECT column_name, column_type FROM (DESCRIBE spans)").fetchall()
        spans = con.execute("SELECT * FROM spans ORDER BY trace_id").fetchall()
    packed = tmp_path / "it's packed.duckdb"

    count = store.pack(packed)

    shutil.rmtree(Path(store.name).parent)
    assert count == 3
    with duckdb.connect(str(packed), read_only=True) as con:
        assert con.execute("SELECT * FROM spans ORDER BY trace_id").fetchall() == spans
        assert con.execute("DESCRIBE spans").fetchall()[0][:2] == ("trace_id", "VARCHAR")
        assert [row[:2] for row in con.execute("DESCRIBE spans").fetchall()] == types
        assert [name for name, _ in types] == list(COLUMNS)
        assert con.execute("SELECT count(*) FROM calls").fetchone() == (1,)
        assert con.execute("SELECT value FROM rewards").fetchall() == [(0.5,)]
        assert con.execute("SELECT spans FROM rollouts WHERE rollout_id = 'r'").fetchall() == [(2,)]
        assert con.execute(
            "SELECT attributes->>'$.k.deep' FROM calls JOIN spans USING (span_id)"
        ).fetchall() == [("1",)]


def test_pack_makes_one_private_file_and_replaces_nothing(
    store: Store, tmp_path: Path, make_span: MakeSpan
) -> None:
    """Nothing lies beside it; a file that is there, and a place that is not, are named."""
    store.add([make_span()])
    out = tmp_path / "out"
    out.mkdir()

    store.pack(out / "packed.duckdb")
    (path,) = out.iterdir()
    mode, content = stat.S_IMODE(path.stat().st_mode), path.read_bytes()
    with pytest.raises(StoreError, match=r"packed\.duckdb exists already; name another"):
        store.pack(path)
    with pytest.raises(StoreError, match=r"cannot write .*missing"):
        store.pack(tmp_path / "missing" / "out.duckdb")

    assert mode == 0o600
    assert path.read_bytes() == content
    assert not (tmp_path / "missing").exists()


def test_pack_without_room_leaves_nothing(tmp_path: Path, run_python: Callable[..., str]) -> None:
    """A disk that fills up half way does not leave half a database."""
    script = """
    import resource, sys
    from pathlib import Path
    from lightning_otel import Store
    from lightning_otel.errors import StoreError
    from lightning_otel.types import Span
    store = Store(sys.argv[1])
    store.add(Span(f"{n:032x}", f"{n:016x}", None, "s", n, n + 1) for n in range(1, 2000))
    store.connect().close()
    out = Path(sys.argv[2])
    out.mkdir()
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        store.pack(out / "packed.duckdb")
    except StoreError as exc:
        print(str(exc).startswith("cannot write"), list(out.iterdir()))
    """

    printed = run_python(script, tmp_path / "traces.duckdb", tmp_path / "out")

    assert printed.strip() == "True []"
