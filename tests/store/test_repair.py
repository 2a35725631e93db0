"""A repair gets back what can be got back, once, and counts what is gone."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_otel import Store
from lightning_otel.errors import StoreError
from lightning_otel.store import parquet, quarantine, settle
from lightning_otel.store.damage import lacks
from lightning_otel.store.layout import Layout, Manifest
from lightning_otel.store.repair import repair
from lightning_otel.store.settle import settler_elected
from lightning_otel.store.writer import SpanWriter
from lightning_otel.types import Span

MakeSpan = Callable[..., Span]

SPANS = 50_000
"""In thirteen row groups."""


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Manifests take effect when they are written."""
    monkeypatch.setattr(settle, "COMMIT_AHEAD_US", 2_000)


def _fill(store: Store, make_span: MakeSpan, count: int) -> Layout:
    layout = store.layout
    assert layout is not None
    layout.create()
    writer = SpanWriter(layout)
    for _ in range(count):
        writer.add(make_span())
    writer.seal()
    store.settle()
    for path in layout.segments():
        path.unlink()
    layout.write_manifest(Manifest(layout.read_manifest().files))
    return layout


def _overwrite(path: Path, at: float, content: bytes = b"\xff" * 64) -> None:
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(int(size * at) if at >= 0 else size + int(at))
        file.write(content)


def test_whole_row_groups_come_back(store: Store, make_span: MakeSpan) -> None:
    """Of thirteen row groups one is damaged: the spans of all others are there again, once."""
    layout = _fill(store, make_span, SPANS)
    (path,) = layout.data.glob("spans-*.parquet")
    _overwrite(path, 0.1)

    without = next(iter(store.sql("SELECT count(*) AS n FROM spans")))["n"]
    (note,) = store.repair()
    found = next(iter(store.sql("SELECT count(*) AS n, count(DISTINCT span_id) AS d FROM spans")))

    assert without == 0
    assert found == {"n": note.recovered, "d": note.recovered}
    assert (note.recovered + note.gone, note.missing) == (SPANS, 0)
    assert 0 < note.gone <= 2 * 4096  # a checksum's block may hold an end and a beginning
    assert lacks(layout) == {}
    assert store.repair() == []
    assert (layout.quarantine / path.name).exists()


def test_file_whose_footer_says_little_less_comes_back_whole(
    store: Store, make_span: MakeSpan
) -> None:
    """A bit in a footer that DuckDB still reads costs no span."""
    layout = _fill(store, make_span, 300)
    (path,) = layout.data.glob("spans-*.parquet")
    content = path.read_bytes()
    _overwrite(path, content.index(b"DuckDB version") / len(content) + 1e-9, b"d")
    before = 300

    without = len(store.spans().rows())
    (note,) = store.repair()

    assert without == 0
    assert (note.recovered, note.gone) == (before, 0)
    assert len(store.spans().rows()) == before


@pytest.mark.parametrize("size", [0, 100])
def test_file_without_footer_is_given_up(store: Store, make_span: MakeSpan, size: int) -> None:
    """Nothing in it can be found any more: its spans are counted as gone."""
    layout = _fill(store, make_span, 300)
    (path,) = layout.data.glob("spans-*.parquet")
    os.truncate(path, size)

    (note,) = store.repair()

    assert (note.recovered, note.gone) == (0, 300)
    assert store.spans().rows() == []


def test_missing_file_is_given_up(store: Store, make_span: MakeSpan) -> None:
    """Whoever repairs says that it will not come back."""
    layout = _fill(store, make_span, 300)
    (path,) = layout.data.glob("spans-*.parquet")
    path.unlink()

    (note,) = store.repair()

    assert (note.recovered, note.gone) == (0, 300)
    assert lacks(layout) == {}
    assert layout.read_manifest().live_files == ()


def test_spans_that_stand_elsewhere_do_not_come_back_twice(
    store: Store, make_span: MakeSpan
) -> None:
    """What was read from segments again, or given anew, is left out of what is got back."""
    spans = [make_span() for _ in range(100)]
    store.add(spans)
    store.writer().seal()
    store.settle()
    layout = store.layout
    assert layout is not None
    for path in layout.segments():
        path.unlink()
    layout.write_manifest(Manifest(layout.read_manifest().files))
    (path,) = layout.data.glob("spans-*.parquet")
    content = path.read_bytes()
    _overwrite(path, content.index(b"DuckDB version") / len(content) + 1e-9, b"d")
    assert store.spans().rows() == []
    store.add(spans[:40])
    store.writer().seal()

    (note,) = store.repair()

    assert note.recovered == 60
    assert store.spans().rows() == spans


def test_every_damage_is_looked_for(store: Store, make_span: MakeSpan) -> None:
    """Also one that no reader noticed, as nothing but its bytes tells of it."""
    layout = _fill(store, make_span, 300)
    (path,) = layout.data.glob("spans-*.parquet")
    before = path.stat()
    middle = path.read_bytes()[before.st_size // 2]
    _overwrite(path, 0.5, bytes([middle ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    (note,) = store.repair()

    assert note.why.startswith("the checksum of bytes")
    assert note.gone == 300


def test_copied_store_is_verified_once(store: Store, make_span: MakeSpan) -> None:
    """Copies have other times of change: a repair notes them, and takes checksums not yet taken."""
    layout = _fill(store, make_span, 30)
    manifest = layout.read_manifest()
    (path,) = layout.data.glob("spans-*.parquet")
    os.utime(path)
    whole = parquet.described(path, 30, 1, 2)
    old = Manifest(tuple(type(f)(f.name, 0, 30, f.size_bytes, 1, 2) for f in manifest.files))
    layout.write_manifest(old)

    assert store.repair() == []

    (file,) = layout.read_manifest().live_files
    assert (file.checksum, file.mtime_ns) == (whole.checksum, whole.mtime_ns)


def test_repair_waits_for_no_settler_for_ever(
    store: Store, make_span: MakeSpan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says so, and changes nothing."""
    layout = _fill(store, make_span, 3)
    monkeypatch.setattr("lightning_otel.store.repair._WAIT_S", 0.05)

    with settler_elected(layout), pytest.raises(StoreError, match="settled just now; try again"):
        repair(layout)

    assert quarantine.notes(layout) == []


def test_note_that_is_damaged_itself_stands_in_nobodys_way(
    store: Store, make_span: MakeSpan
) -> None:
    """What it told of is asked of its file."""
    layout = _fill(store, make_span, 300)
    (path,) = layout.data.glob("spans-*.parquet")
    content = path.read_bytes()
    _overwrite(path, content.index(b"DuckDB version") / len(content) + 1e-9, b"d")
    store.connect()
    (layout.quarantine / f"{path.name}.json").write_bytes(b"rubbish")

    (note,) = store.repair()

    assert note.recovered == 300
    assert len(store.spans().rows()) == 300
