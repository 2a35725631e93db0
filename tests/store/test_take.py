"""Spans that somebody else holds until we have them."""

import resource

import pytest

from lightning_otel import Store
from lightning_otel.types import Span


def span(number: int, text: str = "") -> Span:
    """A complete span."""
    start_ns = 10**18 + number
    ids = f"{number + 1:032x}", f"{number + 1:016x}", None
    return Span(*ids, f"s{number}", start_ns, start_ns + 1, attributes={"text": text})


def test_take_keeps_all_in_order(store: Store) -> None:
    """Any number of spans, with far fewer writes than spans."""
    store.writer().take(span(number, "x" * 1000) for number in range(3000))

    assert [each.name for each in store.spans()] == [f"s{number}" for number in range(3000)]


def test_take_raises_and_counts_nothing_where_the_disk_refuses(store: Store) -> None:
    """Nothing is held in memory, and what is taken again afterwards is stored once."""
    writer = store.writer()
    writer.take([span(0)])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        with pytest.raises(OSError, match=r"space|large"):
            writer.take([span(1, "x" * 10_000)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert writer.lost == 0
    assert [each.name for each in store.spans()] == ["s0"]
    writer.take([span(1, "x" * 10_000)])
    assert [each.name for each in store.spans()] == ["s0", "s1"]


def test_take_in_memory_keeps_a_line_a_span() -> None:
    """A store without a disk takes them as well."""
    store = Store(":memory:")

    store.writer().take(span(number) for number in range(5))

    assert len(store.spans().rows()) == 5
