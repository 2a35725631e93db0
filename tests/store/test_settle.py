"""Every span is settled exactly once, however often settling is cut off."""

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import duckdb
import pytest

from lightning_otel import Store
from lightning_otel.store import settle as settle_module
from lightning_otel.store.layout import Layout
from lightning_otel.store.segment import boot_id
from lightning_otel.store.settle import Settled, settle, settle_if_worthwhile, settler_elected
from lightning_otel.store.writer import SpanWriter
from lightning_otel.types import Span

MakeSpan = Callable[..., Span]
Write = Callable[[Iterable[Span]], Path]


def test_settle_moves_spans_from_segments_into_files(
    store: Store, layout: Layout, write: Write, make_span: MakeSpan
) -> None:
    """The same spans are there before and after, and the segments count no more."""
    spans = [make_span(name=f"s{number}", attributes={"n": number}) for number in range(50)]
    write(spans[:20])
    write(spans[20:])
    before = store.spans().rows()

    done = store.settle()

    assert done == Settled(segments=2, rows=50, files=1)
    assert store.spans().rows() == before == spans
    assert len(layout.read_manifest().segments) == 2
    assert store.settle() == Settled()


def test_settle_leaves_open_segments_alone(
    store: Store, layout: Layout, make_span: MakeSpan
) -> None:
    """What a live process writes to is not settled, be it this process or another."""
    writer = SpanWriter(layout)
    writer.add(make_span())

    while_open = store.settle()
    writer.seal()
    after = store.settle()

    assert while_open == Settled()
    assert after.rows == 1


def test_settle_is_not_fooled_by_a_span_that_looks_like_a_seal(
    store: Store, layout: Layout, make_span: MakeSpan
) -> None:
    """Only a whole line is a seal, whatever a span's attributes hold."""
    writer = SpanWriter(layout)
    for seal in ({"record": "seal", "rotated": False}, [{"record": "seal"}]):
        writer.add(make_span(attributes={"pad": "x" * 500, "value": seal}))

        assert store.settle() == Settled()
    writer.seal()


def test_settle_takes_the_segment_of_a_dead_process(
    store: Store, layout: Layout, make_span: MakeSpan
) -> None:
    """A free lock says that the writer is gone, with or without a seal."""
    writer = SpanWriter(layout)
    writer.add(make_span())
    assert writer.segment is not None
    writer.segment.close()

    assert store.settle().rows == 1


@pytest.mark.parametrize(("started_ns", "rows"), [(1, 1), (4_000_000_000_000_000_000, 0)])
def test_settle_takes_an_unsealed_segment_of_another_boot_only_if_it_is_older(
    store: Store, layout: Layout, write: Write, make_span: MakeSpan, started_ns: int, rows: int
) -> None:
    """A foreign boot is an earlier one of this machine, or another machine that may live."""
    path = write([make_span()])
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    path.rename(path.with_name(f"deadbeef-{started_ns:019d}-1-000000.ndjson"))

    assert store.settle().rows == rows


def test_settle_takes_a_sealed_segment_of_any_boot(
    store: Store, write: Write, make_span: MakeSpan
) -> None:
    """Who sealed a segment is done with it."""
    path = write([make_span()])
    path.rename(path.with_name(path.name.replace(boot_id(), "deadbeef")))

    assert store.settle().rows == 1


def test_settle_works_in_batches(
    store: Store, layout: Layout, write: Write, make_span: MakeSpan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backlog of any size is settled a few segments at a time."""
    for _ in range(6):
        write(make_span() for _ in range(10))
    monkeypatch.setattr(settle_module, "BATCH_BYTES", layout.segments()[0].stat().st_size * 5 // 2)

    done = store.settle()

    assert done == Settled(segments=6, rows=60, files=3)


def test_settlers_at_once_are_one(layout: Layout, write: Write, make_span: MakeSpan) -> None:
    """While one settles another stands back, or waits if it was told to."""
    write([make_span()])

    with settler_elected(layout) as is_elected:
        meanwhile = settle(layout)
        waited = settle(layout, wait_s=0.05)
    after = settle(layout, wait_s=5)

    assert is_elected
    assert meanwhile == waited == Settled()
    assert after.rows == 1


def test_settle_if_worthwhile_waits_for_enough(
    layout: Layout, write: Write, make_span: MakeSpan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few small segments are left; many, or large ones, are settled."""
    write([make_span()])
    write([make_span()])

    few = settle_if_worthwhile(layout)
    monkeypatch.setattr(settle_module, "WORTHWHILE_SEGMENTS", 2)
    many = settle_if_worthwhile(layout)
    write([make_span()])
    monkeypatch.setattr(settle_module, "WORTHWHILE_BYTES", 100)
    large = settle_if_worthwhile(layout)

    assert (few.rows, many.rows, large.rows) == (0, 2, 1)


@pytest.mark.parametrize("fault", [OSError("disk full"), duckdb.IOException("disk full")])
def test_settle_if_worthwhile_does_not_fail_a_reader(
    store: Store,
    layout: Layout,
    write: Write,
    make_span: MakeSpan,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fault: Exception,
) -> None:
    """What cannot be settled is read unsettled, with a warning.

    The fault is a patch, because a full disk would stop the test itself.
    """
    write([make_span()])
    monkeypatch.setattr(settle_module, "WORTHWHILE_SEGMENTS", 1)

    def refuse(*arguments: Any) -> None:
        raise fault

    monkeypatch.setattr(settle_module, "make_parquet", refuse)
    spans = store.report().spans

    assert spans == 1
    assert "could not be settled: disk full" in caplog.text


def test_settled_segments_stay_for_readers_and_are_gone_later(
    store: Store, layout: Layout, write: Write, make_span: MakeSpan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that listed a segment just before finds it; after a period of grace it is gone."""
    write([make_span()])
    store.settle()
    settle(layout)
    with_grace = layout.segments()
    monkeypatch.setattr(settle_module, "GRACE_US", -1_000_000)
    settle(layout)

    assert len(with_grace) == 1
    assert layout.segments() == []
    assert len(store.spans().rows()) == 1


def test_settled_spans_stay_when_the_clock_goes_back(
    store: Store, layout: Layout, write: Write, make_span: MakeSpan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the segments are gone, the file counts for every reader, whatever its clock says.

    The clock is a patch, because the machine's own must not be set.
    """
    write([make_span()])
    monkeypatch.setattr(settle_module, "now_us", lambda: 4_000_000_000_000_000)
    monkeypatch.setattr("lightning_otel.store.layout.now_us", lambda: 4_000_000_000_000_000)
    store.settle()
    ahead = store.spans().rows()
    monkeypatch.setattr(settle_module, "now_us", lambda: 4_000_000_900_000_000)
    settle(layout)
    monkeypatch.undo()

    assert len(ahead) == 1
    assert layout.segments() == []
    assert len(store.spans().rows()) == 1


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


def test_settle_of_nothing_makes_no_file(store: Store, layout: Layout) -> None:
    """An empty store stays empty."""
    assert store.settle() == Settled()
    assert list(layout.data.glob("spans-*")) == []


def test_settle_passes_over_a_segment_that_vanished(
    store: Store, layout: Layout, write: Write, make_span: MakeSpan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A segment that was listed and is gone is nobody's any more.

    The listing is a patch, because the file must vanish right after it.
    """
    path = write([make_span()])
    write([make_span()])
    gone = path.with_name(path.name.replace("000000", "000009"))
    shutil.copy(path, gone)
    listed = layout.segments()
    gone.unlink()
    monkeypatch.setattr(Layout, "segments", lambda self: listed)

    assert store.settle().rows == 2
