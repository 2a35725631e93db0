"""Segments become one sorted file, each span once, however often settling is cut off."""

import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import orjson
import pyarrow.parquet as pq  # type: ignore[import-untyped]  # has no stubs
import pytest
from opentelemetry.trace import Tracer
from tests.store.conftest import MakeSpan, Write

from lightning_otel import Store
from lightning_otel.store import journal
from lightning_otel.store import layout as layout_module
from lightning_otel.store import settle as settle_module
from lightning_otel.store.layout import Layout
from lightning_otel.store.lines import parse_line
from lightning_otel.store.schema import COLUMNS
from lightning_otel.store.settle import SettleResult, settle
from lightning_otel.store.writer import SpanWriter
from lightning_otel.types import Span
from lightning_otel.types import conventions as c


def test_settle_leaves_open_segments_alone(
    store: Store, layout: Layout, make_span: MakeSpan
) -> None:
    """A live process writes to them: only a whole line is a seal, whatever a span holds."""
    writer = SpanWriter(layout)
    for seal in ("", {"record": "seal", "rotated": False}, [{"record": "seal"}]):
        writer.add(make_span(attributes={"pad": "x" * 500, "value": seal}))
        assert store.settle() == SettleResult()

    writer.seal()

    assert store.settle().rows == 3


@pytest.mark.parametrize(
    ("is_sealed", "boot", "rows"),
    [
        pytest.param(False, "", 1, id="its process is dead"),
        pytest.param(True, f"deadbeef-{9 * 10**18}", 1, id="sealed on any machine"),
        pytest.param(False, "deadbeef-1", 1, id="of an earlier boot"),
        pytest.param(False, f"deadbeef-{9 * 10**18}", 0, id="of another machine, which may live"),
    ],
)
def test_settle_takes_segments_that_nobody_writes_to(
    store: Store, write: Write, make_span: MakeSpan, is_sealed: bool, boot: str, rows: int
) -> None:
    """A seal says so, else a free lock of this boot, else the time of the writer's start."""
    path = write([make_span()])
    if not is_sealed:
        path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    if boot:
        path.rename(path.with_name(f"{boot}-1-000000.ndjson"))

    assert store.settle().rows == rows


def test_a_reader_settles_where_enough_waits(
    store: Store, write: Write, make_span: MakeSpan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few small segments are left; many, or large ones, are settled."""

    def read() -> int:
        write([make_span()])
        assert store.report().spans
        return len(store.layout.list_unsettled(store.layout.read_manifest()))

    few = read()
    monkeypatch.setattr(layout_module, "WORTHWHILE_SEGMENTS", 2)
    many = read()
    monkeypatch.setattr(layout_module, "WORTHWHILE_BYTES", 100)

    assert (few, many, read()) == (1, 0, 0)


@pytest.mark.parametrize("fault", [OSError("disk full"), duckdb.IOException("disk full")])
def test_settling_does_not_fail_a_reader(
    store: Store, write: Write, make_span: MakeSpan, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture, fault: Exception,
) -> None:  # fmt: skip
    """What cannot be settled is read unsettled; a patch, as a full disk would stop the test."""
    write([make_span()])
    monkeypatch.setattr(layout_module, "WORTHWHILE_SEGMENTS", 1)

    def refuse(*arguments: Any) -> None:
        raise fault

    monkeypatch.setattr(settle_module, "make_parquet", refuse)

    assert store.report().spans == 1
    assert "could not be settled: disk full" in caplog.text


def test_settled_segments_stay_for_readers_and_are_gone_later(
    store: Store, layout: Layout, write: Write, make_span: MakeSpan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that listed a segment just before finds it; after a period of grace it is gone.

    Then the file counts for every reader, whatever its clock says. The clock is a patch, because
    the machine's own must not be set.
    """
    write([make_span()])
    monkeypatch.setattr(settle_module, "now_us", lambda: 4_000_000_000_000_000)
    monkeypatch.setattr("lightning_otel.store.layout.now_us", lambda: 4_000_000_000_000_000)
    store.settle()
    settle(layout)
    with_grace, ahead = layout.segments(), store.spans().rows()
    monkeypatch.setattr(settle_module, "now_us", lambda: 4_000_000_900_000_000)
    settle(layout)
    monkeypatch.undo()

    assert len(with_grace) == len(ahead) == len(store.spans().rows()) == 1
    assert layout.segments() == []


def test_settle_waits_longer_on_a_slow_disk(
    layout: Layout, write: Write, make_span: MakeSpan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A manifest that came too late for its own time is written anew, with a later one.

    The clock is a patch, because it must pass the time of the first attempt.
    """
    write([make_span()])
    ticks = iter(range(0, 100_000_000, 200_000))
    monkeypatch.setattr(settle_module, "now_us", lambda: next(ticks))
    monkeypatch.setattr("lightning_otel.store.layout.now_us", lambda: next(ticks) + 200_000)

    done = settle(layout)

    monkeypatch.undo()
    assert done.rows == 1
    assert len(layout.read_manifest().files) == 1


def test_settle_of_a_full_disk_can_be_repeated(
    tmp_path: Path, run_python: Callable[..., str]
) -> None:
    """Settling that finds no room leaves all as it was, and works when there is room."""
    script = """
    import resource, sys
    from lightning_otel import Store
    from lightning_otel.errors import StoreError
    from lightning_otel.types import Span
    store = Store(sys.argv[1])
    store.add(Span(f"{n:032x}", f"{n:016x}", None, "s", n, n + 1, attributes={"a": f"{n * n}" * 9})
              for n in range(1, 500))
    store.writer().seal()
    print(len(store.spans().rows()))
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, unlimited[1]))
    try:
        store.settle()
    except StoreError as exc:
        print(exc.what.partition(" ")[0], exc.what.split(" ")[1])
    resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    print(len(store.spans().rows()))
    print(store.settle().rows, len(store.spans().rows()))
    """

    printed = run_python(script, tmp_path / "traces.duckdb")

    assert printed.splitlines() == ["499", "cannot settle", "499", "499 499"]


def _add_lines(path: Path, lines: bytes) -> None:
    """Put lines before a segment's seal."""
    *spans, seal = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*spans, lines, seal]))


def test_file_is_private_sorted_and_in_small_row_groups(
    store: Store, layout: Layout, write: Write
) -> None:
    """Traces lie as they began, each by agent and start: a window of time is a range of rows."""
    write(
        Span(
            f"{number % 7 + 1:032x}",
            f"{number:016x}",
            None,
            "s",
            start_ns=1_000_000 - number,
            end_ns=2_000_000,
            attributes={c.AGENT_NAME: f"a{number % 3}"},
        )
        for number in range(1, 21_001)
    )

    store.settle()

    (path,) = layout.data.glob("spans-*.parquet")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    file = pq.ParquetFile(path)
    assert file.metadata.num_rows == 21_000
    assert file.metadata.row_group(0).num_rows == 4096
    assert file.metadata.row_group(0).column(0).compression == "ZSTD"
    assert file.metadata.metadata[b"schema"] == b"1"
    assert file.schema_arrow.names == [*COLUMNS, "settled_ns"]
    rows = file.read(columns=["trace_id", "agent", "start_ns"]).to_pylist()
    began = {row["trace_id"]: row["start_ns"] for row in rows}
    for row in rows:
        began[row["trace_id"]] = min(row["start_ns"], began[row["trace_id"]])
    keys = [(began[row["trace_id"]], *row.values()) for row in rows]
    assert keys == sorted(keys)
    (listed,) = layout.read_manifest().files
    assert (listed.rows, listed.min_start_ns, listed.max_start_ns) == (21_000, 979_000, 999_999)
    assert listed.size_bytes == path.stat().st_size


def test_lines_that_do_not_parse_are_stepped_over_and_counted(
    store: Store, layout: Layout, write: Write, make_span: MakeSpan
) -> None:
    """Torn, binary, foreign and mistyped lines cost themselves only, and can be looked at."""
    path = write([make_span(name="before")])
    record = parse_line(path.read_bytes().splitlines()[1])
    without_start = {**record, "span_id": "e" * 16, "start_ns": "noon"}
    without_id = {**record, "span_id": None}
    damage = [
        b'{"record":"span","trace_id":"torn',
        b"\x00\x00\x00",
        b"\xff\xfe not utf-8",
        b"[1, 2]",
        b'{"foreign": "object"}',
        orjson.dumps(without_start),
        orjson.dumps(without_id),
    ]
    flipped = path.read_bytes().splitlines()[1].replace(b'"trace_id":', b'"trace_id"\x01', 1)
    damage.append(flipped)
    _add_lines(path, b"\n".join(damage) + b"\n")
    unsealed = path.read_bytes().rpartition(b'{"record":"seal"')[0]
    path.write_bytes(unsealed + b'{"record":"span","tr')  # as a killed process leaves it
    other = write([make_span(name="after")])
    live = [span.name for span in store.spans()]

    store.settle()

    assert live == [span.name for span in store.spans()] == ["before", "after"]
    told = {each.name: each.damaged for each in layout.read_manifest().segments}
    assert told == {path.name: len(damage) + 1, other.name: 0}
    kept = b"".join(path.read_bytes() for path in layout.quarantine.glob("*.lines"))
    assert sorted(kept.splitlines()) == sorted([*damage, b'{"record":"span","tr'])


def test_a_span_open_across_segments_is_one_span(
    store: Store,
    layout: Layout,
    tracer_of: Callable[[SpanWriter], Tracer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A start in a rotated segment means nothing, whenever that one is settled."""
    monkeypatch.setattr(journal, "ROTATE_BYTES", 3_000)
    writer = SpanWriter(layout)
    tracer = tracer_of(writer)
    root = tracer.start_span("root")
    for number in range(10):
        tracer.start_span(f"step {number}").end()
    first = store.settle()
    open_roots = [span for span in store.spans() if span.name == "root"]
    root.end()
    tracer.start_span("last").end()
    writer.seal()
    second = store.settle()

    assert first.rows > 0
    assert second.rows > 0
    assert [span.is_incomplete for span in open_roots] == [True]
    names = sorted(span.name for span in store.spans())
    assert names == sorted(["root", "last", *(f"step {number}" for number in range(10))])
    assert not any(span.is_incomplete for span in store.spans())
    assert store.accounting().rejected == {}
