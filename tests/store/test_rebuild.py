"""A manifest that is damaged or gone is written anew: nothing is lost, nothing doubled."""

import logging
from collections.abc import Callable

import orjson
import pytest

from lightning_otel import Store
from lightning_otel.errors import StoreDamagedError, StoreError, StoreVersionError
from lightning_otel.store import damage, quarantine, settle
from lightning_otel.store.layout import Layout, Manifest
from lightning_otel.store.writer import SpanWriter
from lightning_otel.types import Span

MakeSpan = Callable[..., Span]


def _cut_at_a_line(content: bytes) -> bytes:
    return b"".join(content.splitlines(keepends=True)[:-2])


DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "gone": lambda content: None,
    "emptied": lambda content: b"",
    "cut off": lambda content: content[: len(content) // 2],
    "cut off between two lines": _cut_at_a_line,
    "garbage": lambda content: b"\x00\xff" * 500,
    "zeroed": lambda content: bytes(len(content)),
    "a digit changed": lambda content: content.replace(b'"rows":30', b'"rows":31'),
    "no rows": lambda content: b"{}\n[]\n",
    "its first line gone": lambda content: content.partition(b"\n")[2],
}


@pytest.fixture
def layout(store: Store, make_span: MakeSpan, monkeypatch: pytest.MonkeyPatch) -> Layout:
    """The paths of a store of three data files, whose segments are gone, and one live segment."""
    monkeypatch.setattr(settle, "COMMIT_AHEAD_US", 2_000)
    layout = store.layout
    assert layout is not None
    for _ in range(3):
        _write(store, make_span, 30)
        store.settle()
    manifest = layout.read_manifest()
    for path in layout.segments():
        path.unlink()
    layout.write_manifest(Manifest(manifest.files))
    _write(store, make_span, 10)
    return layout


def _write(store: Store, make_span: MakeSpan, count: int) -> None:
    assert store.layout is not None
    store.layout.create()
    writer = SpanWriter(store.layout)
    for _ in range(count):
        writer.add(make_span())
    writer.seal()


def _ids(store: Store) -> list[str]:
    return sorted(span.span_id for span in store.spans())


def _change(layout: Layout, how: str, *, also_copy: bool) -> None:
    for path in (layout.manifest_path, layout.manifest_copy)[: 1 + also_copy]:
        content = DAMAGES[how](path.read_bytes())
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content)


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("also_copy", [False, True])
def test_manifest_is_written_anew(
    store: Store, layout: Layout, how: str, also_copy: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """From its copy, else from the data files; each span is there once, then and later."""
    before = _ids(store)
    _change(layout, how, also_copy=also_copy)

    with caplog.at_level(logging.WARNING):
        found = _ids(store)
    store.settle()

    assert found == before == _ids(store)
    assert len(before) == 100
    assert sum(file.rows for file in layout.read_manifest().live_files) == 100
    assert "written anew from " + ("the data files" if also_copy else "its copy") in caplog.text
    assert [note.noun for note in quarantine.notes(layout)] == ["manifest"]


def test_process_that_writes_does_not_disown_settled_spans(
    store: Store, layout: Layout, make_span: MakeSpan
) -> None:
    """It comes before any reader, and makes no empty manifest in place of one that is gone."""
    _change(layout, "gone", also_copy=True)

    _write(store, make_span, 5)

    assert not layout.manifest_path.exists()
    assert len(_ids(store)) == 105


def test_files_merged_into_another_are_not_counted_twice(store: Store, layout: Layout) -> None:
    """An older file whose spans all stand in a newer one is left out; of others, what does not."""
    from lightning_otel.store.parquet import new_name
    from lightning_otel.store.sql import quoted

    before = _ids(store)
    first, second, third = layout.read_manifest().live_files
    paths = [layout.data / file.name for file in (first, second, third)]
    with store.connect() as con:
        con.execute(
            f"COPY (FROM read_parquet({quoted(str(paths[0]))}) UNION ALL BY NAME "
            f"(FROM read_parquet({quoted(str(paths[1]))}) ORDER BY start_ns LIMIT 10)) "
            f"TO {quoted(str(layout.data / new_name()))} (FORMAT parquet)"
        )
    _change(layout, "gone", also_copy=True)

    assert _ids(store) == before
    assert sorted(file.rows for file in layout.read_manifest().live_files) == [20, 30, 40]


@pytest.mark.parametrize("how", ["dropped", "masked"])
def test_footers_tell_what_a_file_stands_for(store: Store, layout: Layout, how: str) -> None:
    """What was taken out of files does not come back with the old ones, nor are spans doubled."""
    first = store.spans().rows()[0]
    if how == "dropped":
        store.compact(rollout_ids=[first.trace_id])
    else:
        store.redact(patterns=[f"^{first.name}$"])
    before = sorted(map(str, store.spans()))
    old = len(list(layout.data.glob("spans-*.parquet")))

    _change(layout, "gone", also_copy=True)

    assert sorted(map(str, store.spans())) == before
    assert len(before) == (99 if how == "dropped" else 100)
    assert old > len(layout.read_manifest().live_files)
    assert store.settle().rows == 0


def test_damaged_data_file_does_not_stop_the_rest(store: Store, layout: Layout) -> None:
    """What can be read is; the other is put aside as ever."""
    _change(layout, "gone", also_copy=True)
    path = sorted(layout.data.glob("spans-*.parquet"))[0]
    path.write_bytes(b"rubbish")

    assert len(_ids(store)) == 70
    assert (layout.quarantine / path.name).exists()


def test_data_file_of_a_newer_version_is_refused(store: Store, layout: Layout) -> None:
    """By name, with the command that helps: it is not read half."""
    path = sorted(layout.data.glob("spans-*.parquet"))[0]
    with store.connect() as con:
        con.execute(
            f"COPY (FROM '{path}') TO '{path}' (FORMAT parquet, KV_METADATA {{schema: '99'}})"
        )
    _change(layout, "gone", also_copy=True)

    with pytest.raises(StoreVersionError, match=r"spans-.*has schema 99.*pip install --upgrade"):
        store.connect()
    assert path.exists()


def test_manifest_that_lists_a_newer_file_is_refused(store: Store, layout: Layout) -> None:
    """Also where only one file of a store is newer."""
    rows = [orjson.loads(line) for line in layout.manifest_path.read_bytes().splitlines()]
    rows[0].pop("ends")
    rows[1]["schema"] = 99
    layout.manifest_path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows[:-1]))

    with pytest.raises(StoreVersionError, match=r"traces\.duckdb has schema 99"):
        store.connect()


def test_manifest_without_an_end_is_read_as_ever(store: Store, layout: Layout) -> None:
    """As written before manifests had an end, and files a checksum."""
    before = _ids(store)
    rows = [orjson.loads(line) for line in layout.manifest_path.read_bytes().splitlines()]
    rows = [{"kind": "store", "schema": 1}, *rows[1:-1]]
    for row in rows:
        for name in ("checksum", "mtime_ns", "schema") if row["kind"] == "file" else ():
            row.pop(name)
    layout.manifest_path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    layout.manifest_copy.unlink()

    assert _ids(store) == before
    assert not layout.quarantine.exists()


def test_reader_that_may_not_write_reads_the_copy(
    store: Store, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a read-only disk; mocked, for root may write everywhere."""
    before = _ids(store)
    _change(layout, "garbage", also_copy=False)

    def refuse(*args: object, **options: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(quarantine, "keep_manifest", refuse)

    assert _ids(store) == before
    assert layout.manifest_path.read_bytes().startswith(b"\x00\xff")


def test_reader_that_may_not_write_says_what_is_damaged(
    store: Store, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the copy gone too, nothing can be told on a read-only disk; mocked as above."""
    _change(layout, "garbage", also_copy=True)

    def refuse(*args: object, **options: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(quarantine, "keep_manifest", refuse)

    with pytest.raises(StoreDamagedError, match=r"manifest\.ndjson is damaged"):
        store.connect()


def test_manifest_that_the_system_refuses_is_not_called_damaged(
    store: Store, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An I/O error is said as one and changes nothing; mocked, as disks do it."""
    from pathlib import Path

    content = layout.manifest_path.read_bytes()
    real = Path.read_bytes
    layout.manifest_path.touch()

    def refuse(path: Path) -> bytes:
        if path == layout.manifest_path:
            raise OSError(5, "Input/output error")
        return real(path)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", refuse)
        with pytest.raises(StoreError, match="Input/output error") as caught:
            store.connect()

    assert not isinstance(caught.value, StoreDamagedError)
    assert layout.manifest_path.read_bytes() == content
    assert damage.lacks(layout) == {}
