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
from lightning_otel.store.settle import Settled, settle, settle_if_worthwhile
from lightning_otel.store.writer import SpanWriter
from lightning_otel.types import Span

MakeSpan = Callable[..., Span]
Write = Callable[[Iterable[Span]], Path]


def test_settle_moves_spans_from_segments_into_files(
    store: Store, layout: Layout, write: Write, make_span: MakeSpan
) -> None:
    """The same spans are there before and after, and the segments count no more."""
    assert store.settle() == Settled()
    spans = [make_span(name=f"s{number}", attributes={"n": number}) for number in range(50)]
    write(spans[:20])
    write(spans[20:])
    before = store.spans().rows()

    done = store.settle()

    assert done == Settled(segments=2, rows=50, files=1)
    assert store.spans().rows() == before == spans
    assert len(layout.read_manifest().segments) == 2
    assert store.settle() == Settled()
    assert len(list(layout.data.glob("spans-*"))) == 1


def test_settle_leaves_open_segments_alone(
    store: Store, layout: Layout, make_span: MakeSpan
) -> None:
    """A live process writes to them: only a whole line is a seal, whatever a span holds."""
    writer = SpanWriter(layout)
    for seal in ("", {"record": "seal", "rotated": False}, [{"record": "seal"}]):
        writer.add(make_span(attributes={"pad": "x" * 500, "value": seal}))
        assert store.settle() == Settled()

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
    store: Store, write: Write, make_span: MakeSpan, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture, fault: Exception,
) -> None:  # fmt: skip
    """What cannot be settled is read unsettled; a patch, as a full disk would stop the test."""
    write([make_span()])
    monkeypatch.setattr(settle_module, "WORTHWHILE_SEGMENTS", 1)

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
