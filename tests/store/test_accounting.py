"""Every span that ended is accounted for: when written, when settled, and ever after."""

import pytest
from tests.store.conftest import MakeSpan, Write, refuse_segments

from lightning_otel import Store
from lightning_otel.store.counts import CONFLICT, DISK, ENDED, PENDING, Accounting, make_accounting
from lightning_otel.store.layout import Layout
from lightning_otel.store.writer import SpanWriter

pytestmark = pytest.mark.usefixtures("at_once")


def test_accounting_is_the_same_at_every_stage(
    store: Store, layout: Layout, make_span: MakeSpan, write: Write
) -> None:
    """In an open segment, a sealed one, a data file, and when the segment is forgotten."""
    spans = [make_span() for _ in range(5)]
    writer = SpanWriter(layout)
    for span in [*spans, spans[0], make_span(trace_id=spans[1].trace_id, span_id=spans[1].span_id)]:
        writer.add(span)
    writer.add(make_span(trace_id="0" * 1000))
    stages = [store.accounting()]
    writer.seal()
    stages.append(store.accounting())
    store.settle()
    stages.append(store.accounting())
    write([spans[2]])
    again = store.accounting()
    for _ in range(3):
        store.settle()

    rejected = {"conflict": 1, "duplicate": 1, "invalid_id": 1}
    assert stages == [Accounting(8, 5, rejected=rejected)] * 3
    assert again == store.accounting() == Accounting(9, 5, rejected={**rejected, "duplicate": 2})
    assert all(each.is_balanced for each in store.accounting_by_process().values())


def test_accounting_outlives_its_segments(
    store: Store, layout: Layout, make_span: MakeSpan, write: Write
) -> None:
    """The manifest keeps the sums of segments it does not list any more."""
    for _ in range(5):
        write([make_span()])
        store.settle()

    manifest = layout.read_manifest()

    listed = len(manifest.segments)
    assert listed < 5
    assert manifest.counts == {"ended": 5 - listed, "stored": 5 - listed}
    assert store.accounting() == Accounting(5, 5)


def test_accounting_finds_what_was_taken_out(
    store: Store, layout: Layout, make_span: MakeSpan, write: Write
) -> None:
    """Spans of a file are missing, and lines of a sealed segment, which says how many it had."""
    path = write(make_span() for _ in range(4))
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[2:]))
    found = [store.accounting()]
    store.settle()
    found.append(store.accounting())
    next(layout.data.glob("spans-*.parquet")).unlink()
    found.append(store.accounting())

    counts = [(each.ended, each.stored, each.missing) for each in found]
    assert counts == [(4, 3, 1), (4, 3, 1), (4, 0, 4)]


def test_accounting_knows_what_this_process_holds(
    store: Store, layout: Layout, make_span: MakeSpan
) -> None:
    """Spans that wait for the disk are pending, then stored."""
    store.writer()
    with refuse_segments(layout):
        store.add(make_span() for _ in range(3))
    waiting = store.accounting()
    store.add([make_span()])

    assert waiting == Accounting(3, 0, pending=3)
    assert store.accounting() == Accounting(4, 4)
    assert store.writer().accounting() == Accounting(4, 4)


def test_accounting_in_memory(make_span: MakeSpan) -> None:
    """A store without a place counts too."""
    store = Store(":memory:")
    store.add([make_span(), make_span(span_id="")])
    store.writer().add_all([make_span()])

    assert store.accounting() == Accounting(3, 2, rejected={"invalid_id": 1})
    assert list(store.accounting_by_process().values()) == [store.accounting()]


def test_accounting_of_spans_taken_over(store: Store, layout: Layout, make_span: MakeSpan) -> None:
    """What the disk refuses was never ours, so that its sender may send it again."""
    writer = store.writer()
    writer.add_all([make_span(attributes={"text": "x" * 700_000}) for _ in range(4)])
    layout.segments()[0].unlink()
    with refuse_segments(layout), pytest.raises(OSError, match="directory"):
        writer.add_all([make_span()])
    refused = writer.accounting()
    writer.add_all(make_span() for _ in range(3))

    assert refused == Accounting(4, 4)
    assert writer.accounting() == store.accounting()
    assert store.accounting() == Accounting(7, 3, dropped={"removed": 4})


def test_account_says_why() -> None:
    """Each reason in words, with its number; one of a newer version by its name."""
    found = make_accounting(
        {ENDED: 9, PENDING: 1, CONFLICT: 2, DISK: 1, "dropped.novel": 1}, stored=4
    )

    assert found.is_balanced
    assert (found.rejected, found.dropped) == ({"conflict": 2}, {"disk": 1, "novel": 1})
    assert found.reasons() == [
        ("their id was taken by a different span", 2),
        ("the disk refused them", 1),
        ("novel", 1),
    ]
    assert found.sentence() == "9 ended = 4 stored + 1 pending + 2 rejected + 2 dropped"
