"""The store's folders are private, and its manifest is whole at every moment."""

import stat
from pathlib import Path

import pytest

from lightning_otel.errors import (
    ConfigError,
    StoreError,
    StoreMissingError,
)
from lightning_otel.exporters.duckdb import DuckDBSpanExporter
from lightning_otel.store.layout import (
    DataFile,
    Layout,
    Manifest,
    SettledSegment,
)


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    """A layout whose store does not exist yet."""
    return Layout(tmp_path / "traces.duckdb")


@pytest.mark.parametrize(
    ("given", "catalogue"),
    [
        ("x.duckdb", "x.duckdb"),
        ("folder", "folder/traces.duckdb"),
        ("a/b.duckdb", "a/b.duckdb"),
        ("~/x.duckdb", "x.duckdb"),
    ],
)
def test_layout_names_a_catalogue(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: str, catalogue: str
) -> None:
    """A path names the catalogue, or a folder that holds one; a later chdir changes nothing."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)

    layout = Layout(given)
    monkeypatch.chdir("/")

    assert layout.catalogue == tmp_path / catalogue
    assert layout.root == tmp_path / f"{catalogue}.d"


def test_create_keeps_the_store_out_of_git(tmp_path: Path) -> None:
    """A folder made for the store, and the store's own, ignore themselves; a user's stays as is."""
    layout = Layout(tmp_path / ".lightning" / "traces.duckdb")
    mine = tmp_path / "mine"
    mine.mkdir(mode=0o755)

    layout.create()
    Layout(mine / "traces.duckdb").create()

    assert (tmp_path / ".lightning" / ".gitignore").read_text() == "*\n"
    assert (layout.root / ".gitignore").read_text() == "*\n"
    assert not (mine / ".gitignore").exists()
    assert stat.S_IMODE(mine.stat().st_mode) == 0o755


def test_create_never_replaces_a_manifest(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """A manifest that another process wrote meanwhile wins over the first, empty one."""
    layout.create()
    manifest = Manifest((DataFile("f", 1, 2, 3, 4, 5),))
    layout.write_manifest(manifest)
    layout.create()
    assert layout.read_manifest() == manifest
    seen = iter([False])
    # A patch, because the other process must come between the look and the making.
    monkeypatch.setattr(Path, "exists", lambda self: next(seen, True))

    layout.make_folders()

    monkeypatch.undo()
    assert layout.read_manifest() == manifest
    assert list(layout.new.iterdir()) == []


def test_create_refuses_a_database_that_is_no_catalogue(layout: Layout) -> None:
    """Somebody's own DuckDB file is never replaced by a catalogue."""
    layout.catalogue.write_bytes(b"somebody's work")

    with pytest.raises(StoreError, match=r"traces\.duckdb is a database of its own"):
        layout.create()

    assert layout.catalogue.read_bytes() == b"somebody's work"
    assert not layout.root.exists()
    with pytest.raises(StoreError, match=r"cannot make the store .*--store"):
        Layout(layout.catalogue / "traces.duckdb").create()


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


def test_require_names_a_missing_store(layout: Layout) -> None:
    """Nothing there is said with the path, and the way to a store or to one that stands beside."""
    with pytest.raises(StoreMissingError, match=r"traces\.duckdb; record one with"):
        layout.require()

    demo = Layout(layout.catalogue.with_name("demo.duckdb"))
    demo.create()
    with pytest.raises(StoreMissingError, match=rf"there is {demo.catalogue}: name it with --sto"):
        layout.require()


def test_manifest_comes_back(layout: Layout) -> None:
    """Files and segments are read as they were written; unknown fields are passed over."""
    layout.create()
    manifest = Manifest(
        (DataFile("a", 1, 2, 3, 4, 5), DataFile("b", 1, 2, 3, 4, 5, dropped_us=6)),
        (SettledSegment("s", 7, damaged=1), SettledSegment("t", 8, counts={"dropped.disk": 3})),
    )

    layout.write_manifest(manifest)

    assert layout.read_manifest() == manifest
    assert [file.name for file in layout.read_manifest().live_files] == ["a"]
    layout.manifest_path.write_text(
        '{"kind":"store","schema":1,"by":"x"}\n{"kind":"segment","name":"s","settled_us":1,"new":2}\n'
    )
    assert layout.read_manifest() == Manifest((), (SettledSegment("s", 1),))


def test_manifest_is_left_alone_when_its_time_has_passed(layout: Layout) -> None:
    """A manifest that would count too early is not written, and nothing of it stays."""
    layout.create()

    is_written = layout.write_manifest(Manifest((DataFile("f", 1, 2, 3, 4, 5),)), before_us=1)

    assert not is_written
    assert layout.read_manifest() == Manifest()
    assert list(layout.new.iterdir()) == []


def test_segments_are_those_with_a_segments_name(layout: Layout) -> None:
    """Oldest first, and whatever else lies there is none."""
    layout.create()
    names = ["b-2-9-000000.ndjson", "a-3-1-000000.ndjson", "a-1-9-000001.ndjson"]
    for name in [*names, "stray.ndjson", "note.txt"]:
        (layout.live / name).touch()

    assert [path.name for path in layout.segments()] == [names[2], names[0], names[1]]
