"""Spans are fetched from local files, from files one may only read, and from memory."""

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import duckdb
import pytest

from lightning_otel import Store
from lightning_otel import conventions as c
from lightning_otel.doctor import examine
from lightning_otel.errors import StoreError, StoreMissingError, StoreVersionError
from lightning_otel.store import layout as layout_module
from lightning_otel.store.catalogue import ensure_catalogue
from lightning_otel.store.layout import EMPTY_DATA, Layout, now_us
from lightning_otel.types import Span


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
    layout.manifest_path.write_text(f'{{"kind":"store","schema":{newer}}}\n')

    read = (store.connect, store.spans().rows, store.transitions().rows, store.report)
    for use in (*read, store.settle, store.writer):
        with pytest.raises(StoreVersionError, match="upgrade"):
            use()


def test_read_outlives_its_files(
    store: Store, layout: Layout, make_span: Callable[..., Span]
) -> None:
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


def test_ensure_catalogue_writes_only_what_is_not_up_to_date(
    layout: Layout, store: Store, make_span: Callable[..., Span]
) -> None:
    """A catalogue is written once, and again when segments were settled or it was damaged."""
    store.add([make_span()])
    ensure_catalogue(layout)
    first = layout.catalogue.stat().st_ino
    ensure_catalogue(layout)
    second = layout.catalogue.stat().st_ino
    layout.catalogue.unlink()
    ensure_catalogue(layout)

    assert first == second
    assert layout.catalogue.exists()
    assert (layout.data / EMPTY_DATA).exists()
    assert list(layout.new.iterdir()) == []


def test_store_whose_live_folder_was_emptied_is_read(
    layout: Layout, store: Store, make_span: Callable[..., Span]
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
    make_span: Callable[..., Span],
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
    store: Store, layout: Layout, make_span: Callable[..., Span]
) -> None:
    """Folders taken out of a store are an error of the store's, not of DuckDB's."""
    store.add([make_span()])
    store.connect().close()
    for path in layout.data.iterdir():
        path.unlink()
    layout.data.rmdir()

    with pytest.raises(StoreError, match=r"cannot read .*traces\.duckdb"):
        store.connect()


def test_store_in_memory_is_one_of_its_own(tmp_path: Path, make_span: Callable[..., Span]) -> None:
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
