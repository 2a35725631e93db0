"""Damage is put aside and counted, every reader goes on with the rest, a repair gets back more."""

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import pytest
from tests.store.conftest import MakeSpan, Settled, Write

from lightning_otel import Store
from lightning_otel.errors import QueryError, StoreDamagedError, StoreError, StoreVersionError
from lightning_otel.store import damage, quarantine, settle
from lightning_otel.store.damage import count_missing_spans
from lightning_otel.store.layout import EMPTY_DATA, Layout
from lightning_otel.store.manifest import Manifest
from lightning_otel.types import Span
from lightning_otel.types import conventions as c

Bytes = Callable[[bytes], bytes | None]

DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "emptied": lambda content: b"",
    "cut off": lambda content: content[: len(content) // 2],
    # DuckDB's own error names no file for these two.
    "beginning overwritten": lambda content: bytes(3000) + content[3000:],
    "footer overwritten": lambda content: content[:-300] + b"\xaa" * 200 + content[-100:],
    "another file's content": lambda content: b"no Parquet at all" * 99,
    "a value flipped": lambda content: content[:60] + b"\xff" * 40 + content[100:],
}
SPANS = 400


@pytest.fixture
def layout(store: Store, settled: Settled, make_span: MakeSpan) -> Layout:
    """The paths of a store of two data files with 400 spans each, and no segments."""
    for batch in range(2):
        settled(_spans(make_span, batch))
    return _drop_segments(store)


def _spans(make_span: MakeSpan, batch: int, count: int = SPANS) -> Iterator[Span]:
    for number in range(count):
        yield make_span(
            trace_id=f"{batch + 1:032x}",
            span_id=f"{batch + 1:08x}{number:08x}",
            attributes={c.ROLLOUT_ID: f"r{batch}", "text": f"{number * 7919:0300x}"},
        )


def _drop_segments(store: Store) -> Layout:
    """Take the segments away, as the settler does."""
    assert store.layout is not None
    layout, manifest = store.layout, store.layout.read_manifest()
    layout.write_manifest(Manifest(manifest.files))
    for path in layout.segments():
        path.unlink()
    return layout


def _damage(layout: Layout, how: str, *, is_unnoticed: bool = False) -> Path:
    """Damage the newest data file; unnoticed, as a disk does it, its time of change stays."""
    path = layout.data_files()[-1]
    before = path.stat()
    path.write_bytes(DAMAGES[how](path.read_bytes()))
    if is_unnoticed:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    return path


def _refuse(*args: object, **options: object) -> None:
    raise OSError(30, "Read-only file system")


def _is_put_aside(layout: Layout, path: Path) -> bool:
    return not path.exists() and (layout.quarantine / path.name).exists()


@pytest.mark.parametrize("how", DAMAGES)
def test_rest_is_read_without_the_damaged_file(
    store: Store, layout: Layout, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever is wrong with it, the file is put aside, and a warning says what is missing."""
    path = _damage(layout, how, is_unnoticed=True)

    with caplog.at_level(logging.WARNING):
        found = [len(store.spans().rows()), len(store.sql("SELECT * FROM spans").rows())]

    assert found == [SPANS] * 2
    assert _is_put_aside(layout, path)
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "400 spans cannot be read" in warning
    assert f"lightning-otel doctor --repair --store {layout.catalogue}" in warning
    (note,) = quarantine.read_notes(layout)
    assert (note.name, note.rows, note.missing, note.is_open) == (path.name, SPANS, SPANS, True)


@pytest.mark.parametrize(
    "read",
    [
        lambda store, folder: len(store.spans().df()),
        lambda store, folder: len(store.spans(rollout_id="r0").rows()),
        lambda store, folder: store.report().spans,
        lambda store, folder: len(list(store.trajectories())) + SPANS,
        lambda store, folder: SPANS if store.find("r") == ("rollout", "r0") else 0,
        lambda store, folder: SPANS if store.find("@last") == ("rollout", "r0") else 0,
        lambda store, folder: SPANS if store.rollout_of("trace", f"{1:032x}") == "r0" else 0,
        lambda store, folder: store.pack(folder / "packed.duckdb"),
        lambda store, folder: store.connect().sql("SELECT count(*) FROM spans").fetchall()[0][0],
        lambda store, folder: sum(row["spans"] for row in store.rollouts()),
        lambda store, folder: store.spans().to_parquet(folder / "s.parquet") or SPANS,
    ],
)
def test_every_reader_goes_on_without_the_damaged_file(
    store: Store, layout: Layout, tmp_path: Path, read: Callable[[Store, Path], Any]
) -> None:
    """What reads only a little, and what writes something of it, does so too."""
    path = _damage(layout, "beginning overwritten", is_unnoticed=True)

    assert read(store, tmp_path) == SPANS
    assert _is_put_aside(layout, path)


def test_damage_that_shows_in_a_query_is_put_aside_then(store: Store, layout: Layout) -> None:
    """Where the file was whole before, the query is asked again without it."""
    store.connect()
    path = _damage(layout, "beginning overwritten", is_unnoticed=True)

    for query in ("SELECT * FROM nowhere", "SELECT 'x'::INTEGER", "SELECT error('mine')"):
        with pytest.raises(QueryError):
            store.sql(query).rows()
    assert len(store.spans().rows()) == SPANS
    assert _is_put_aside(layout, path)


@pytest.mark.parametrize("is_gone", [False, True])
def test_what_segments_hold_is_read_and_settled_again(
    store: Store, layout: Layout, settled: Settled, make_span: MakeSpan, is_gone: bool
) -> None:
    """A file damaged or lost soon after it was made costs nothing: its segments are still there."""
    settled(_spans(make_span, 2))
    path = _damage(layout, "footer overwritten")
    if is_gone:
        path.unlink()

    before = len(store.spans().rows())
    again = store.settle()
    _drop_segments(store)

    assert before == (2 if is_gone else 3) * SPANS
    assert (again.rows, len(store.spans().rows())) == (SPANS, 3 * SPANS)
    assert count_missing_spans(layout) == {}
    assert not quarantine.read_notes(layout)[0].is_open


def test_missing_file_is_told_of_and_welcome_back(
    store: Store, layout: Layout, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is not given up: with its disk it comes back."""
    path = layout.data_files()[-1]
    path.rename(tmp_path / path.name)

    with caplog.at_level(logging.WARNING):
        without = len(store.spans().rows())
        store.settle()
    missing = count_missing_spans(layout)
    (tmp_path / path.name).rename(path)

    assert without == SPANS
    assert "400 spans cannot be read" in caplog.text
    assert missing == {path.name: SPANS}
    assert len(store.spans().rows()) == 2 * SPANS
    assert count_missing_spans(layout) == {}


def test_settling_beside_a_damaged_file_puts_it_aside(
    store: Store, layout: Layout, settled: Settled, make_span: MakeSpan
) -> None:
    """A settler that must look into it does without, and the segment's spans are settled."""
    path = _damage(layout, "cut off", is_unnoticed=True)

    settled([make_span(span_id="f" * 16, attributes={c.ROLLOUT_ID: "new"})])

    assert _is_put_aside(layout, path)
    assert len(store.spans().rows()) == SPANS + 1


def test_reader_that_may_not_change_the_store_reads_the_rest(
    store: Store, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a settler, or on a read-only disk; that one mocked, for root may write everywhere."""
    path = _damage(layout, "emptied")

    with damage.elect_settler(layout) as is_elected:
        found = [len(store.spans().rows())]
    with monkeypatch.context() as patched:
        patched.setattr(damage, "quarantine_damage", _refuse)
        found.append(len(store.spans().rows()))
    was_there, lacking = path.exists(), count_missing_spans(layout)
    found.append(len(store.spans().rows()))

    assert is_elected
    assert (was_there, lacking) == (True, {path.name: SPANS})
    assert found == [SPANS] * 3
    assert _is_put_aside(layout, path)


def test_too_many_open_files_put_no_file_aside(
    layout: Layout, run_python: Callable[..., str]
) -> None:
    """A process that ran out of file descriptors says so, and the store stays as it is."""
    script = """\
    import os, resource, sys
    from lightning_otel import Store
    from lightning_otel.errors import LightningOtelError
    store = Store(sys.argv[1])
    con = store.connect()
    resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
    held = []
    try:
        while True:
            held.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
    try:
        store.spans().rows()
        print("read")
    except (LightningOtelError, OSError) as exc:
        print("refused")
    for each in held:
        os.close(each)
    print(len(store.spans().rows()))
    """

    printed = run_python(script, layout.catalogue)

    assert printed.split() == ["refused", str(2 * SPANS)]
    assert not layout.quarantine.exists()


def test_catalogue_and_the_file_without_rows_are_written_anew(store: Store, layout: Layout) -> None:
    """They hold nothing to lose; whoever reads the store puts whole ones there."""
    store.connect()
    layout.catalogue.write_bytes(b"rubbish" * 1000)
    (layout.data / EMPTY_DATA).write_bytes(b"rubbish")

    assert len(store.spans().rows()) == 2 * SPANS

    con = duckdb.connect(str(layout.catalogue), read_only=True)
    assert con.sql("SELECT count(*) FROM spans").fetchall() == [(2 * SPANS,)]


@pytest.mark.parametrize("ending", [b"\n", b""])
def test_overlong_line_is_put_aside_and_the_rest_read(
    store: Store, layout: Layout, make_span: MakeSpan, ending: bytes
) -> None:
    """A line of 40 MB would abort every query; it is kept, counted and stepped over."""
    store.add(_spans(make_span, 2, 10))
    (segment,) = layout.segments()
    line = b'{"record":"span","name":"' + (b"y" if ending else b"\0") * (40 << 20) + ending
    with segment.open("ab") as file:
        file.write(line)
        file.write(b'{"record":"count","lost":3}\n' if ending else b"")

    found = [len(store.spans().rows())]
    if ending:
        store.add([make_span()])
        found.append(len(store.spans().rows()))
    store.writer().seal()
    settled = store.settle()
    entry = layout.read_manifest().segments[-1]

    assert found == [2 * SPANS + 10, 2 * SPANS + 11][: len(found)]
    assert settled.rows == 9 + len(found)
    assert (entry.damaged, entry.counts.get("dropped.disk", 0)) == (1, 3 if ending else 0)
    kept = next(layout.quarantine.glob("*.lines"))
    assert kept.read_bytes() == line.removesuffix(b"\n") + b"\n"


MANIFESTS: dict[str, Bytes] = {
    "gone": lambda content: None,
    "emptied": lambda content: b"",
    "cut off": lambda content: content[: len(content) // 2],
    "cut off between two lines": lambda text: b"".join(text.splitlines(keepends=True)[:-2]),
    "zeroed": lambda content: bytes(len(content)),
    "a digit changed": lambda content: content.replace(b'"rows":400', b'"rows":401'),
    "no rows": lambda content: b"{}\n[]\n",
    "its first line gone": lambda content: content.partition(b"\n")[2],
}


def _damage_manifest(layout: Layout, how: str = "gone", *, also_copy: bool = True) -> None:
    for path in (layout.manifest_path, layout.manifest_copy)[: 1 + also_copy]:
        content = MANIFESTS[how](path.read_bytes())
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content)


def _ids(store: Store) -> list[str]:
    return sorted(span.span_id for span in store.spans())


@pytest.mark.parametrize("how", MANIFESTS)
@pytest.mark.parametrize("also_copy", [False, True])
def test_manifest_is_written_anew(
    store: Store,
    layout: Layout,
    write: Write,
    make_span: MakeSpan,
    how: str,
    also_copy: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """From its copy, else from the data files; each span is there once, then and later."""
    write(_spans(make_span, 2, 10))
    before = _ids(store)
    _damage_manifest(layout, how, also_copy=also_copy)
    write([make_span(trace_id="f" * 32)])

    with caplog.at_level(logging.WARNING):
        found = _ids(store)
    store.settle()

    assert _ids(store) == found
    assert len(found) == len(before) + 1 == 2 * SPANS + 11
    assert sum(file.rows for file in layout.read_manifest().live_files) == len(found)
    assert "written anew from " + ("the data files" if also_copy else "its copy") in caplog.text
    assert [note.noun for note in quarantine.read_notes(layout)] == ["manifest"]


@pytest.mark.parametrize("how", ["settled", "dropped", "masked"])
def test_footers_tell_what_a_file_stands_for(
    store: Store, settled: Settled, make_span: MakeSpan, how: str
) -> None:
    """What was taken out of files does not come back with the old ones, nor are spans doubled."""
    for batch in range(3):
        some = make_span(attributes={c.ROLLOUT_ID: "some"})
        settled([some, *_spans(make_span, batch)])
    layout = store.layout
    assert layout is not None
    if how == "dropped":
        store.compact(rollout_ids=["some"])
    elif how == "masked":
        store.redact(patterns=["1eef"])
    before = sorted(map(str, store.spans()))
    old = len(layout.data_files())

    _damage_manifest(layout)

    assert sorted(map(str, store.spans())) == before
    assert len(before) == 3 * SPANS + (0 if how == "dropped" else 3)
    assert (old > len(layout.read_manifest().live_files)) == (how != "settled")
    assert store.settle() == settle.SettleResult()


def test_damaged_data_file_does_not_stop_the_rest(store: Store, layout: Layout) -> None:
    """What can be read is; the other is put aside as ever."""
    _damage_manifest(layout)
    path = _damage(layout, "another file's content")

    assert len(_ids(store)) == SPANS
    assert _is_put_aside(layout, path)


def test_newer_version_is_refused(store: Store, layout: Layout) -> None:
    """By name, with the command that helps; also where only a footer tells of it."""
    path = layout.data_files()[0]
    duckdb.sql(f"COPY (FROM '{path}') TO '{path}' (FORMAT parquet, KV_METADATA {{schema: '99'}})")
    _damage_manifest(layout)
    with pytest.raises(StoreVersionError, match=r"spans-.*has schema 99.*pip install --upgrade"):
        store.connect()
    assert path.exists()


@pytest.mark.parametrize("also_copy", [False, True])
def test_reader_that_may_not_write_reads_the_copy_of_the_manifest(
    store: Store, layout: Layout, monkeypatch: pytest.MonkeyPatch, also_copy: bool
) -> None:
    """Or says what is damaged if there is none; mocked, for root may write everywhere."""
    _damage_manifest(layout, "zeroed", also_copy=also_copy)
    before = layout.manifest_path.read_bytes()
    monkeypatch.setattr(quarantine, "keep_copy", _refuse)

    if also_copy:
        with pytest.raises(StoreDamagedError, match=r"manifest\.ndjson is damaged"):
            store.connect()
    else:
        assert len(_ids(store)) == 2 * SPANS
    assert layout.manifest_path.read_bytes() == before


def test_manifest_that_the_system_refuses_is_not_called_damaged(
    store: Store, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An I/O error is said as one and changes nothing; mocked, as disks do it."""
    layout.manifest_path.touch()
    real = Path.read_bytes

    def refuse(path: Path) -> bytes:
        if path == layout.manifest_path:
            raise OSError(5, "Input/output error")
        return real(path)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", refuse)
        with pytest.raises(StoreError, match="Input/output error") as caught:
            store.connect()

    assert not isinstance(caught.value, StoreDamagedError)
    assert count_missing_spans(layout) == {}


def test_whole_row_groups_come_back(store: Store, settled: Settled, make_span: MakeSpan) -> None:
    """Of thirteen row groups one is damaged: the spans of all others are there again, once."""
    path = settled(_spans(make_span, 0, 50_000))
    layout = _drop_segments(store)
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(before.st_size // 10)
        file.write(b"\xff" * 64)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    (note,) = store.repair()
    (found,) = store.sql("SELECT count(*) AS n, count(DISTINCT span_id) AS d FROM spans")

    assert note.why.startswith("the checksum of bytes")
    assert found == {"n": note.recovered, "d": note.recovered}
    assert (note.recovered + note.gone, note.missing) == (50_000, 0)
    assert 0 < note.gone <= 2 * 4096  # a checksum's block may hold an end and a beginning
    assert count_missing_spans(layout) == {}
    assert store.repair() == []
    assert (layout.quarantine / path.name).exists()


@pytest.mark.parametrize("is_note_damaged", [False, True])
def test_spans_that_stand_elsewhere_do_not_come_back_twice(
    store: Store, layout: Layout, make_span: MakeSpan, is_note_damaged: bool
) -> None:
    """A bit in a footer that DuckDB still reads costs no span; those given anew are left out."""
    path = layout.data_files()[1]
    path.write_bytes(path.read_bytes().replace(b"DuckDB version", b"duckDB version"))
    assert len(store.spans().rows()) == SPANS
    if is_note_damaged:
        (layout.quarantine / f"{path.name}.json").write_bytes(b"rubbish")
    spans = [make_span(trace_id=f"{2:032x}", span_id=f"{2:08x}{n:08x}") for n in range(40)]
    store.add(spans)
    store.writer().seal()

    (note,) = store.repair()

    assert note.recovered == SPANS - 40
    assert len(_ids(store)) == len(set(_ids(store))) == 2 * SPANS


@pytest.mark.parametrize("how", ["emptied", "cut off", "gone"])
def test_file_without_footer_is_given_up(store: Store, layout: Layout, how: str) -> None:
    """Nothing in it can be found any more, nor in one that is gone: its spans are counted."""
    whole, damaged = layout.read_manifest().files
    if how == "gone":
        (layout.data / damaged.name).unlink()
    else:
        _damage(layout, how)

    (note,) = store.repair()

    assert (note.recovered, note.gone) == (0, SPANS)
    assert len(store.spans().rows()) == SPANS
    assert count_missing_spans(layout) == {}
    assert layout.read_manifest().files == (whole,)
