"""The store as a user meets it: its name, its folders, and what is read of it."""

import json
import os
import re
import shutil
import stat
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pytest
from tests.command import invoke
from tests.manifests import seal_manifest
from tests.store.conftest import MakeSpan

from lightning_otel import Store
from lightning_otel.errors import (
    ConfigError,
    NotFoundError,
    StoreError,
    StoreMissingError,
    StoreVersionError,
)
from lightning_otel.exporters.duckdb import DuckDBSpanExporter
from lightning_otel.store import layout as layout_module
from lightning_otel.store.layout import Layout, now_us
from lightning_otel.store.manifest import DataFile, Manifest
from lightning_otel.types import conventions as c
from lightning_otel.views.doctor import examine


def test_store_is_named_by_path_environment_or_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path wins over the environment, and that over ``.lightning/``; a chdir changes nothing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIGHTNING_OTEL_STORE", str(tmp_path / "env.duckdb"))
    given, from_environment = Store(tmp_path / "given"), Store()
    monkeypatch.delenv("LIGHTNING_OTEL_STORE")
    default = Store()
    monkeypatch.setenv("HOME", str(tmp_path))
    from_home = Store("~/x.duckdb")
    monkeypatch.chdir("/")

    assert from_home.name == str(tmp_path / "x.duckdb")
    assert given.name == str(tmp_path / "given" / "traces.duckdb")
    assert from_environment.name == str(tmp_path / "env.duckdb")
    assert default.name == str(tmp_path / ".lightning" / "traces.duckdb")
    assert repr(given) == f"Store({given.name!r})"
    assert list(tmp_path.iterdir()) == []


def test_spans_come_in_order_of_their_start(store: Store, make_span: MakeSpan) -> None:
    """By time, then by the process's own count."""
    late = make_span(start_ns=9, sequence=3)
    first = make_span(start_ns=5, sequence=1, process="p")
    second = make_span(start_ns=5, sequence=2, process="p")
    store.add([late, second, first])

    assert store.spans().rows() == [first, second, late]


def test_sql_takes_parameters(store: Store, make_span: MakeSpan) -> None:
    """Values are bound, not pasted."""
    store.add(make_span(name=name) for name in ("a", "b", "'; DROP VIEW spans; --"))

    rows = store.sql("SELECT name FROM spans WHERE name > ? ORDER BY name", ["a"]).rows()
    odd = store.sql("SELECT count(*) AS n FROM spans WHERE name = ?", ["'; DROP VIEW spans; --"])

    assert rows == [{"name": "b"}]
    assert odd.rows() == [{"n": 1}]


@pytest.mark.parametrize(
    "use",
    [
        "con, table = store.connect(), store.sql('SELECT * FROM spans'); table.rows()",
        "half = iter(store.spans()); next(half); stream = store.spans().__arrow_c_stream__()",
        "frames = store.spans().pl(), store.spans().arrow(), store.spans().df()",
        "for span in store.spans(): raise SystemExit(0)",
        "import builtins; builtins.kept = store.spans(); list(builtins.kept); store.settle()",
    ],
)
def test_using_a_store_leaves_nothing_on_stderr_at_exit(
    tmp_path: Path, run_python: Callable[..., str], use: str
) -> None:
    """DuckDB 2 tells of what is alive when the interpreter ends: nothing of ours is."""
    script = f"""
from lightning_otel import Store
from lightning_otel.types import Span
import sys
store = Store(sys.argv[1])
store.add(Span(f"{{n:032x}}", f"{{n:016x}}", None, "s", n, n + 1) for n in range(1, 3000))
{use}
"""

    assert run_python(script, tmp_path / "traces.duckdb") == ""


def test_find_says_why_nothing_is_found(store: Store, make_span: MakeSpan, tmp_path: Path) -> None:
    """A prefix is taken by the letter; of several candidates a few are listed, in order."""
    store.add([make_span(attributes={c.ROLLOUT_ID: "run-1"})])
    store.add(make_span(attributes={c.ROLLOUT_ID: f"job-{number}"}) for number in range(20, 40))
    store.add([make_span(attributes={c.ROLLOUT_ID: "job-2"})])
    empty = Store(tmp_path / "empty.duckdb")
    empty.writer()

    assert store.find("job-2") == ("rollout", "job-2")
    for prefix in ("x", "RUN", "' OR 1=1 --", "%", "run-1x"):
        with pytest.raises(NotFoundError, match="no rollout, trace, span or response id begins"):
            store.find(prefix)
    with pytest.raises(NotFoundError, match=r"several rollout ids: job-2, job-20, .*more"):
        store.find("job")
    with pytest.raises(NotFoundError, match="no span yet"):
        empty.find("@last")


def test_last_of_rollouts_that_began_at_once_is_listed_first(
    store: Store, make_span: MakeSpan
) -> None:
    """``@last``, ``@last~1`` and so on are the rows of ``ls rollouts``, from the top."""
    store.add(make_span(start_ns=1, attributes={c.ROLLOUT_ID: f"r{n}"}) for n in (2, 1, 3))

    listed = invoke("ls", "rollouts", "--store", store.name, "--format", "jsonl")

    rows = [json.loads(line)["rollout_id"] for line in listed.stdout.splitlines()]
    assert rows == [store.find(name)[1] for name in ("@last", "@last~1", "@last~2")]


def test_reading_never_makes_a_store(store: Store, tmp_path: Path) -> None:
    """A missing store is said to be missing, and the disk stays as it was."""
    for read in (
        store.connect,
        lambda: store.spans().rows(),
        lambda: store.rollouts().rows(),
        lambda: store.sql("SELECT 1"),
        lambda: store.find("x"),
        lambda: store.pack(tmp_path / "out.duckdb"),
        lambda: store.report(),
        lambda: list(store.transitions()),
        lambda: list(store.transitions(bodies=False)),
        lambda: list(store.trajectories()),
        store.settle,
    ):
        with pytest.raises(StoreMissingError):
            read()

    assert list(tmp_path.rglob("*")) == []


def test_a_newer_store_is_refused(store: Store, layout: Layout) -> None:
    """By name, by every way to read, and nothing is written into it."""
    layout.create()
    newer = layout_module.SCHEMA_VERSION + 1
    layout.manifest_path.write_bytes(seal_manifest([], schema=newer))

    read = (store.connect, store.spans().rows, store.transitions().rows, store.report)
    for use in (*read, store.settle, store.writer):
        with pytest.raises(StoreVersionError, match="upgrade"):
            use()


def test_read_outlives_its_files(store: Store, layout: Layout, make_span: MakeSpan) -> None:
    """Who reads late, when they were packed anew and are gone, sees what is there then."""
    store.add([make_span(), make_span()])
    store.writer().seal()
    store.settle()
    time.sleep(0.6)
    late = store.sql("SELECT * FROM spans ORDER BY start_ns")
    store.compact()
    time.sleep(0.6)
    live = {file.name for file in layout.read_manifest().live_files}
    gone = [path for path in layout.data.glob("spans-*.parquet") if path.name not in live]
    for path in [*gone, *layout.segments()]:
        path.unlink()

    found = late.rows()

    assert gone
    assert found == store.sql("SELECT * FROM spans ORDER BY start_ns").rows()
    assert len(found) == 2


def test_store_whose_live_folder_was_emptied_is_read(
    layout: Layout, store: Store, make_span: MakeSpan
) -> None:
    """Whoever removes segments by hand loses what was in them, and no more than that."""
    store.add([make_span()])
    store.writer().seal()
    store.settle()
    (file,) = layout.read_manifest().live_files
    while now_us() <= file.added_us:  # until then readers take the segment
        time.sleep(0.01)
    shutil.rmtree(layout.live)

    assert len(store.spans().rows()) == 1
    assert not [each for each in examine(store) if each.level == "problem"]


def test_store_is_made_and_read_by_many_processes_at_once(
    tmp_path: Path, run_python: Callable[..., str]
) -> None:
    """Those that come first together do not get into each other's way."""
    script = """
    import os, sys, time
    import duckdb
    from lightning_otel import Store
    start = time.time() + 0.3
    children = []
    for _ in range(6):
        child = os.fork()
        if not child:
            while time.time() < start:
                pass
            store = Store(sys.argv[1])
            store.layout.create()
            os._exit(0 if store.spans().rows() == [] else 1)
        children.append(child)
    print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
    """

    printed = run_python(script, tmp_path / "deep" / "er" / "traces.duckdb")

    assert printed.strip() == str([0] * 6)


def test_connect_without_the_right_to_write_reads(
    store: Store,
    layout: Layout,
    make_span: MakeSpan,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A store whose catalogue cannot be brought up to date is read without it.

    The refusal is a patch, because permissions do not bind root.
    """
    store.add([make_span()])
    store.connect().close()
    layout.catalogue.unlink()

    def refuse(*arguments: object) -> None:
        raise PermissionError(13, "read-only")

    monkeypatch.setattr(os, "replace", refuse)

    assert len(store.spans().rows()) == 1
    assert not layout.catalogue.exists()


def test_connect_names_a_store_it_cannot_read(
    store: Store, layout: Layout, make_span: MakeSpan
) -> None:
    """Folders taken out of a store are an error of the store's, not of DuckDB's."""
    store.add([make_span()])
    store.connect().close()
    for path in layout.data.iterdir():
        path.unlink()
    layout.data.rmdir()

    with pytest.raises(StoreError, match=r"cannot read .*traces\.duckdb"):
        store.connect()


def test_store_in_memory_is_one_of_its_own(tmp_path: Path, make_span: MakeSpan) -> None:
    """Spans are kept and read like those in files, the first of two, and packed into a database."""
    store, other = Store(":memory:"), Store(":memory:")
    spans = [make_span(attributes={c.ROLLOUT_ID: "r"}), make_span()]
    store.add([*spans, replace(spans[0], name="second")])

    assert store.spans().rows() == spans
    assert store.spans(rollout_id="r").rows() == spans[:1]
    assert {row["rollout_id"] for row in store.rollouts()} == {"r", spans[1].trace_id}
    assert (store.settle().rows, store.name, other.spans().rows()) == (0, ":memory:", [])
    assert store.pack(tmp_path / "out.duckdb") == 2
    with duckdb.connect(str(tmp_path / "out.duckdb"), read_only=True) as con:
        assert con.execute("SELECT count(*) FROM rollouts").fetchone() == (2,)


@pytest.fixture
def fresh(tmp_path: Path) -> Layout:
    """A layout whose store does not exist yet."""
    return Layout(tmp_path / "traces.duckdb")


def test_create_keeps_the_store_out_of_git(tmp_path: Path) -> None:
    """A folder made for the store, and the store's own, ignore themselves; a user's stays as is."""
    fresh = Layout(tmp_path / ".lightning" / "traces.duckdb")
    mine = tmp_path / "mine"
    mine.mkdir(mode=0o755)

    fresh.create()
    Layout(mine / "traces.duckdb").create()

    assert (tmp_path / ".lightning" / ".gitignore").read_text() == "*\n"
    assert (fresh.root / ".gitignore").read_text() == "*\n"
    assert not (mine / ".gitignore").exists()
    assert stat.S_IMODE(mine.stat().st_mode) == 0o755


def test_create_never_replaces_a_manifest(fresh: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """A manifest that another process wrote meanwhile wins over the first, empty one."""
    fresh.create()
    manifest = Manifest((DataFile("spans-1-f.parquet", 1, 2, 3, 4, 5),))
    fresh.write_manifest(manifest)
    fresh.create()
    assert fresh.read_manifest() == manifest
    seen = iter([False])
    # A patch, because the other process must come between the look and the making.
    monkeypatch.setattr(Path, "exists", lambda self: next(seen, True))

    fresh.make_folders()

    monkeypatch.undo()
    assert fresh.read_manifest() == manifest
    assert list(fresh.new.iterdir()) == []


def test_create_refuses_a_database_that_is_no_catalogue(fresh: Layout) -> None:
    """Somebody's own DuckDB file is never replaced by a catalogue."""
    fresh.catalogue.write_bytes(b"somebody's work")

    with pytest.raises(StoreError, match=r"traces\.duckdb is a database of its own"):
        fresh.create()

    assert fresh.catalogue.read_bytes() == b"somebody's work"
    assert not fresh.root.exists()
    with pytest.raises(StoreError, match=r"cannot make the store .*--store"):
        Layout(fresh.catalogue / "traces.duckdb").create()


@pytest.mark.parametrize("path", ["clickhouse://host/db", "https://host/x.duckdb", ":memory:"])
def test_layout_is_a_place_on_a_disk(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A URL, or a store in memory, makes no folder of that name, by whatever way it comes."""
    monkeypatch.chdir(tmp_path)

    for make in (Layout, DuckDBSpanExporter):
        with pytest.raises(ConfigError, match=r"name a (local )?path"):
            make(path)

    assert list(tmp_path.iterdir()) == []


def test_require_names_a_missing_store(fresh: Layout) -> None:
    """Nothing there is said with the path, and the way to a store or to one that stands beside."""
    with pytest.raises(StoreMissingError, match=r"traces\.duckdb; record one with"):
        fresh.require()

    demo = Layout(fresh.catalogue.with_name("demo.duckdb"))
    demo.create()
    with pytest.raises(StoreMissingError, match=rf"there is {demo.catalogue}: name it with --sto"):
        fresh.require()


DOORS: dict[str, Callable[[Store, Any], object]] = {
    "rollout_id": lambda store, value: store.spans(rollout_id=value),
    "trace_id": lambda store, value: store.spans(trace_id=value),
    "whole_id": lambda store, value: store.rollout_of("span", value),
    "noun": lambda store, value: store.rollout_of(value, "x"),
    "query": lambda store, value: store.sql(value),
    "parameters": lambda store, value: store.sql("SELECT ? AS x", value),
    "name": lambda store, value: store.follow(value),
    "idle_s": lambda store, value: store.follow("reader", idle_s=value),
    "since_ns": lambda store, value: store.accounting_by_process(since_ns=value),
    "rollout_ids": lambda store, value: store.compact(rollout_ids=value, is_dry_run=True),
    "older_than_s": lambda store, value: store.compact(older_than_s=value, is_dry_run=True),
    "ids": lambda store, value: store.redact(ids=value, is_dry_run=True),
}
LISTS = ("parameters", "rollout_ids", "ids")


@pytest.mark.parametrize("option", DOORS)
def test_values_of_another_type_are_refused_by_name(
    store: Store, make_span: MakeSpan, option: str
) -> None:
    store.add([make_span()])
    lone = ("x", None) if option in LISTS else (["x"], ("x",), {}, object())
    numbers = () if option in ("idle_s", "since_ns", "older_than_s") else (5, 0.5, True)
    for value in (*lone, *numbers, b"x"):
        with pytest.raises(ConfigError, match=re.escape(f"{option} is {value!r}; it must be ")):
            DOORS[option](store, value)


def test_an_empty_id_names_nothing(store: Store, make_span: MakeSpan) -> None:
    store.add([make_span()])
    assert store.spans(rollout_id="").rows() == store.spans(trace_id="").rows() == []
    with pytest.raises(ConfigError, match="noun is 'process'; it must be one of rollout, trace"):
        store.rollout_of("process", "x")
