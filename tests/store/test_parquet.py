"""A batch of segments becomes one sorted file, each span once, and what is left out is counted."""

import stat
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import orjson
import pyarrow.parquet as pq  # type: ignore[import-untyped]  # has no stubs
import pytest
from opentelemetry.trace import Tracer

from lightning_otel import Store
from lightning_otel import conventions as c
from lightning_otel.store import journal
from lightning_otel.store.gist import GIST
from lightning_otel.store.layout import Layout
from lightning_otel.store.lines import parsed
from lightning_otel.store.schema import COLUMNS
from lightning_otel.store.writer import SpanWriter
from lightning_otel.types import Span

MakeSpan = Callable[..., Span]
Write = Callable[[Iterable[Span]], Path]


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
    assert file.schema_arrow.names == [*COLUMNS, *GIST]
    rows = file.read(columns=["trace_id", "agent", "start_ns"]).to_pylist()
    began = {row["trace_id"]: row["start_ns"] for row in rows}
    for row in rows:
        began[row["trace_id"]] = min(row["start_ns"], began[row["trace_id"]])
    keys = [(began[row["trace_id"]], *row.values()) for row in rows]
    assert keys == sorted(keys)
    (listed,) = layout.read_manifest().files
    assert (listed.rows, listed.min_start_ns, listed.max_start_ns) == (21_000, 979_000, 999_999)
    assert listed.size_bytes == path.stat().st_size


@pytest.mark.parametrize(("name", "reason"), [("first", "duplicate"), ("other", "conflict")])
def test_of_spans_with_one_id_the_first_wins_and_the_others_are_counted(
    store: Store, write: Write, make_span: MakeSpan, name: str, reason: str
) -> None:
    """In one batch or in two, before and after settling; a different one is a conflict.

    Segments whose spans are all there already are done without a file.
    """
    first = make_span(name="first", start_ns=5, end_ns=6)
    second = replace(first, name=name)
    write([first, second])
    write([second])
    found = [store.spans().rows()]
    done = [store.settle()]
    write([second])
    found.append(store.spans().rows())
    done.append(store.settle())
    found.append(store.spans().rows())

    assert found == [[first]] * 3
    assert [(each.segments, each.rows, each.files) for each in done] == [(2, 1, 1), (1, 0, 0)]
    assert store.accounting().rejected == {reason: 3}


def test_lines_that_do_not_parse_are_stepped_over_and_counted(
    store: Store, layout: Layout, write: Write, make_span: MakeSpan
) -> None:
    """Torn, binary, foreign and mistyped lines cost themselves only, and can be looked at."""
    path = write([make_span(name="before")])
    record = parsed(path.read_bytes().splitlines()[1])
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


def test_a_span_that_never_ended_is_kept_when_its_process_is_dead(
    store: Store, layout: Layout, tracer_of: Callable[[SpanWriter], Tracer]
) -> None:
    """A killed rollout keeps its tree: spans without an end, once each."""
    writer = SpanWriter(layout)
    tracer = tracer_of(writer)
    open_span = tracer.start_span("open", attributes={"k": "v"})
    tracer.start_span("done").end()
    live = {span.name: span.is_incomplete for span in store.spans()}
    assert writer.segment is not None
    writer.segment.close()

    store.settle()

    spans = {span.name: span for span in store.spans()}
    assert live == {"open": True, "done": False}
    assert {name: span.is_incomplete for name, span in spans.items()} == live
    assert spans["open"].attributes == {"k": "v"}
    assert spans["open"].span_id == format(open_span.get_span_context().span_id, "016x")


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


def test_losses_noted_by_writers_are_added_up(
    store: Store, write: Write, make_span: MakeSpan
) -> None:
    """What a writer could not keep stays known when its segment is gone."""
    path = write([make_span()])
    _add_lines(path, b'{"record":"count","lost":3}\n{"record":"count","lost":4}\n')

    store.settle()

    assert store.accounting().dropped == {"disk": 7}


def test_large_records_are_settled_in_little_memory(
    store: Store, write: Write, make_span: MakeSpan
) -> None:
    """Lines of several megabytes go through the settler as any others do."""
    spans = [
        make_span(attributes={c.INPUT_MESSAGES: f"{number}" * (7 << 20)}) for number in range(3)
    ]
    write(spans)

    done = store.settle()

    assert done.rows == 3
    assert store.spans().rows() == spans
