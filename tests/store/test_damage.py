"""What is damaged is put aside and counted; every reader goes on with all the rest."""

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pytest

from lightning_otel import Store
from lightning_otel import conventions as c
from lightning_otel.errors import QueryError, StoreDamagedError
from lightning_otel.store import damage, quarantine, settle
from lightning_otel.store.damage import damage_of, lacks
from lightning_otel.store.layout import EMPTY_DATA, Layout, Manifest
from lightning_otel.types import Span

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


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Manifests take effect when they are written."""
    monkeypatch.setattr(settle, "COMMIT_AHEAD_US", 2_000)


@pytest.fixture
def layout(store: Store, make_span: Callable[..., Span]) -> Layout:
    """The paths of a store of two data files with 400 spans each."""
    layout = store.layout
    assert layout is not None
    for batch in range(2):
        _write(store, make_span, batch)
        store.settle()
    _let_commits_count(layout)
    return layout


def _write(store: Store, make_span: Callable[..., Span], batch: int) -> None:
    store.add(
        make_span(
            trace_id=f"{batch + 1:032x}",
            span_id=f"{batch + 1:08x}{number:08x}",
            attributes={c.ROLLOUT_ID: f"r{batch}", "text": f"{number * 7919:0300x}"},
        )
        for number in range(SPANS)
    )
    store.writer().seal()


def _let_commits_count(layout: Layout) -> None:
    """Wait until readers take the data files, no longer the segments, and take those away."""
    manifest = layout.read_manifest()
    last_us = max(file.added_us for file in manifest.files)
    time.sleep(max(0.0, last_us / 1e6 - time.time()) + 0.01)
    layout.write_manifest(Manifest(manifest.files))
    for path in layout.segments():
        path.unlink()


def _damage(layout: Layout, how: str, *, is_unnoticed: bool = False) -> Path:
    """Damage the newest data file; unnoticed, as a disk does it, its time of change stays."""
    path = sorted(layout.data.glob("spans-*.parquet"))[-1]
    before = path.stat()
    path.write_bytes(DAMAGES[how](path.read_bytes()))
    if is_unnoticed:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    return path


def _is_put_aside(layout: Layout, path: Path) -> bool:
    return not path.exists() and (layout.quarantine / path.name).exists()


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("is_unnoticed", [False, True])
def test_rest_is_read_without_the_damaged_file(
    store: Store,
    layout: Layout,
    how: str,
    is_unnoticed: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whatever is wrong with it, the file is put aside, and a warning says what is missing."""
    path = _damage(layout, how, is_unnoticed=is_unnoticed)

    with caplog.at_level(logging.WARNING):
        found = [
            len(store.spans().rows()),
            len(store.spans().df()),
            len(store.sql("SELECT * FROM spans").rows()),
        ]

    assert found == [SPANS] * 3
    assert _is_put_aside(layout, path)
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "400 spans cannot be read" in warning
    assert f"lightning-otel doctor --repair --store {layout.catalogue}" in warning
    (note,) = quarantine.notes(layout)
    assert (note.name, note.rows, note.missing, note.is_open) == (path.name, SPANS, SPANS, True)


@pytest.mark.parametrize(
    "read",
    [
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
    _damage(layout, "emptied")

    assert read(store, tmp_path) == SPANS


@pytest.mark.parametrize(
    "read",
    [
        lambda store, folder: store.report().spans,
        lambda store, folder: SPANS if store.find("r") == ("rollout", "r0") else 0,
        lambda store, folder: store.pack(folder / "packed.duckdb"),
        lambda store, folder: sum(row["spans"] for row in store.rollouts()),
    ],
)
def test_damage_that_shows_in_a_query_is_put_aside_then(
    store: Store, layout: Layout, tmp_path: Path, read: Callable[[Store, Path], Any]
) -> None:
    """Where nothing told of it before, the query is asked again without the damaged file."""
    path = _damage(layout, "beginning overwritten", is_unnoticed=True)

    assert read(store, tmp_path) == SPANS
    assert _is_put_aside(layout, path)


def test_zeroed_bytes_that_duckdb_reads_are_noticed(store: Store, layout: Layout) -> None:
    """DuckDB gives garbled texts without an error; the checksum does not match."""
    path = sorted(layout.data.glob("spans-*.parquet"))[-1]
    content = bytearray(path.read_bytes())
    silent = next(
        at for at in range(len(content) - 3000, 0, -7) if _reads(_zeroed(content, at), path)
    )
    path.write_bytes(_zeroed(content, silent))

    assert len(store.spans().rows()) == SPANS
    assert _is_put_aside(layout, path)
    assert "checksum" in quarantine.notes(layout)[0].why


def _zeroed(content: bytearray, at: int) -> bytes:
    return bytes(content[:at]) + bytes(16) + bytes(content[at + 16 :])


def _reads(content: bytes, beside: Path) -> bool:
    made = beside.with_name("tried.parquet")
    made.write_bytes(content)
    try:
        duckdb.connect().execute(f"SELECT bit_xor(hash(COLUMNS(*))) FROM '{made}'").fetchall()
    except duckdb.Error:
        return False
    finally:
        made.unlink()
    return content != beside.read_bytes()


def test_what_segments_hold_is_read_and_settled_again(
    store: Store, make_span: Callable[..., Span]
) -> None:
    """A file damaged soon after it was made costs nothing: its segments are still there."""
    _write(store, make_span, 0)
    store.settle()
    layout = store.layout
    assert layout is not None
    path = _damage(layout, "footer overwritten")

    before = store.spans().rows()
    again = store.settle()
    after = store.spans().rows()

    assert _is_put_aside(layout, path)
    assert again.rows == len(before) == len(after) == SPANS
    assert lacks(layout) == {}
    assert not quarantine.notes(layout)[0].is_open


def test_missing_file_is_told_of_and_welcome_back(
    store: Store, layout: Layout, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is not given up: with its disk it comes back."""
    path = sorted(layout.data.glob("spans-*.parquet"))[-1]
    path.rename(tmp_path / path.name)

    with caplog.at_level(logging.WARNING):
        without = len(store.spans().rows())
        store.settle()
    missing = lacks(layout)
    (tmp_path / path.name).rename(path)

    assert without == SPANS
    assert "400 spans cannot be read" in caplog.text
    assert missing == {path.name: SPANS}
    assert len(store.spans().rows()) == 2 * SPANS
    assert lacks(layout) == {}


def test_missing_file_whose_segments_are_there_is_settled_again(
    store: Store, make_span: Callable[..., Span]
) -> None:
    """What was lost with it is read from its segments, once."""
    _write(store, make_span, 0)
    store.settle()
    layout = store.layout
    assert layout is not None
    next(layout.data.glob("spans-*.parquet")).unlink()

    again = store.settle()
    _let_commits_count(layout)

    assert again.rows == SPANS
    assert len(store.spans().rows()) == SPANS
    assert lacks(layout) == {}


def test_settling_beside_a_damaged_file_puts_it_aside(
    store: Store, layout: Layout, make_span: Callable[..., Span]
) -> None:
    """A settler that must look into it does without, and the segment's spans are settled."""
    path = _damage(layout, "cut off", is_unnoticed=True)
    store.add([make_span(span_id="f" * 16, attributes={c.ROLLOUT_ID: "new"})])
    store.writer().seal()

    done = store.settle()

    assert done.rows == 1
    assert _is_put_aside(layout, path)
    assert len(store.spans().rows()) == SPANS + 1


def test_reader_that_may_not_write_leaves_the_file_and_reads_the_rest(
    store: Store, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a read-only disk; mocked, for root may write everywhere."""
    path = _damage(layout, "emptied")

    def refuse(*args: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(damage, "remove", refuse)

    assert len(store.spans().rows()) == SPANS
    assert path.exists()
    assert lacks(layout) == {path.name: SPANS}


def test_reader_beside_a_settler_leaves_the_file_and_reads_the_rest(
    store: Store, layout: Layout
) -> None:
    """Who is not elected changes nothing; the next one puts it aside."""
    path = _damage(layout, "emptied")

    with damage.settler_elected(layout) as is_elected:
        beside = len(store.spans().rows())
        was_there = path.exists()
    after = len(store.spans().rows())

    assert is_elected
    assert was_there
    assert (beside, after) == (SPANS, SPANS)
    assert _is_put_aside(layout, path)


@pytest.mark.parametrize("words", ["Cannot open file", "Could not read from file"])
def test_what_the_system_refuses_puts_no_file_aside(
    store: Store, layout: Layout, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An I/O error, or too many open files, says nothing about a file; mocked, as disks do it."""
    path = sorted(layout.data.glob("spans-*.parquet"))[-1]
    os.utime(path)

    def refuse(*args: object, **options: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(damage, "wounds_of", refuse)
        found = damage_of(duckdb.IOException(f'{words} "{path}": Input/output error'), layout)
        read = len(store.spans().rows())

    assert found is None
    assert path.exists()
    assert read == 2 * SPANS


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


def test_error_that_names_no_file_leads_to_the_damaged_one(layout: Layout) -> None:
    """DuckDB says so of texts that are no JSON, or not UTF-8, any more."""
    path = _damage(layout, "a value flipped", is_unnoticed=True)

    found = damage.find_damage(
        duckdb.InvalidInputException("Invalid JSON found in Parquet file: x"), layout
    )

    assert list(found) == [path.name]


def test_damaged_file_without_rows_is_written_anew(store: Store, layout: Layout) -> None:
    """The file that only keeps a glob from being empty holds nothing to lose."""
    (layout.data / EMPTY_DATA).write_bytes(b"rubbish")

    assert len(store.spans().rows()) == 2 * SPANS


def test_damaged_catalogue_is_written_anew(store: Store, layout: Layout) -> None:
    """It holds views only; whoever reads the store puts a whole one there."""
    store.connect()
    layout.catalogue.write_bytes(b"rubbish" * 1000)

    store.connect()

    con = duckdb.connect(str(layout.catalogue), read_only=True)
    assert con.sql("SELECT count(*) FROM spans").fetchall() == [(2 * SPANS,)]


def test_a_wrong_query_is_not_blamed_on_a_damaged_file(store: Store, layout: Layout) -> None:
    """A user's own mistake stays one, though a file is damaged too."""
    _damage(layout, "a value flipped")

    for query in ("SELECT * FROM nowhere", "SELECT 'x'::INTEGER", "SELECT error('mine')"):
        with pytest.raises(QueryError):
            store.sql(query).rows()


def test_error_without_a_damaged_file_is_not_explained(layout: Layout) -> None:
    """Where every file can be read, no file is blamed, even if DuckDB names one."""
    path = next(layout.data.glob("spans-*.parquet"))

    assert damage_of(duckdb.IOException(f"cannot open {path}"), layout) is None
    assert damage_of(duckdb.IOException("no memory"), layout) is None
    assert damage_of(duckdb.IOException(f"{layout.data}/gone.parquet"), layout) is None
    assert not layout.quarantine.exists()


def test_damage_met_amid_the_rows_is_named(store: Store, layout: Layout) -> None:
    """Rows already given out cannot be taken back: the error says to read again."""
    rows = store.sql("SELECT * FROM spans").dicts()
    next(rows)
    path = _damage(layout, "cut off")

    error = damage_of(duckdb.InvalidInputException(f"damaged: {path}"), layout)

    assert isinstance(error, StoreDamagedError)
    assert error.remedy.startswith("read again for all other spans")
    assert len(store.spans().rows()) == SPANS


@pytest.mark.parametrize(("filler", "ending"), [(b"y", b"\n"), (b"\0", b"")])
def test_overlong_line_is_put_aside_and_the_rest_read(
    store: Store, layout: Layout, make_span: Callable[..., Span], filler: bytes, ending: bytes
) -> None:
    """A line of 40 MB would abort every query; it is kept, counted and stepped over."""
    _write(store, make_span, 2)
    (segment,) = layout.segments()
    line = b'{"record":"span","name":"' + filler * (40 << 20) + ending
    with segment.open("ab") as file:
        file.write(line)
        file.write(b'{"record":"count","lost":3}\n' if ending else b"")

    before = len(store.spans().rows())
    settled = store.settle()
    (entry,) = layout.read_manifest().segments

    assert (before, settled.rows) == (3 * SPANS, SPANS)
    assert (entry.damaged, entry.lost) == (1, 3 if ending else 0)
    kept = next(layout.quarantine.glob("*.line"))
    assert kept.read_bytes() == line.removesuffix(b"\n")


def test_overlong_line_in_a_segment_that_grows_does_not_stop_its_writer(
    store: Store, make_span: Callable[..., Span]
) -> None:
    """The line is overwritten where it stands: what is appended after it is read."""
    store.add([make_span()])
    layout = store.layout
    assert layout is not None
    (segment,) = layout.segments()
    with segment.open("ab") as file:
        file.write(b"x" * (40 << 20) + b"\n")

    first = len(store.spans().rows())
    store.add([make_span()])

    assert first == 1
    assert len(store.spans().rows()) == 2


def test_damaged_lines_are_kept_when_they_are_settled(
    store: Store, make_span: Callable[..., Span]
) -> None:
    """A torn line, garbage, and a span without its id: each is counted and can be looked at."""
    store.add(make_span(name=f"s{number}") for number in range(5))
    store.writer().seal()
    layout = store.layout
    assert layout is not None
    (segment,) = layout.segments()
    lines = segment.read_bytes().splitlines(keepends=True)
    lines[2] = lines[2].replace(b'"trace_id"', b'"trace_iD"')
    lines[4] = lines[4][:40] + b"\n"
    segment.write_bytes(b"".join(lines) + b"\xff\xfe\x00garbage")

    names = sorted(span.name for span in store.spans())
    done = store.settle()
    (entry,) = layout.read_manifest().segments

    assert names == ["s0", "s2", "s4"]
    assert (done.rows, entry.damaged) == (3, 3)
    corrupt = next(layout.quarantine.glob("*.line")).read_bytes()
    torn = next(layout.quarantine.glob("*.lines")).read_bytes()
    assert [corrupt, torn.split(b"\n")[0]] == [lines[2].strip(), lines[4].strip()]
