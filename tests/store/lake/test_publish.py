"""Settled files go into a lake once each, whatever dies on the way."""

from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_otel import Store
from lightning_otel.errors import ConfigError, StoreError, StoreMissingError
from lightning_otel.store import publish as publishing
from lightning_otel.store.ducklake import attached
from lightning_otel.store.lake import LakeAddress, lake_address
from lightning_otel.store.publish import LEAST_ROWS
from lightning_otel.types import Span

Spans = Callable[..., list[Span]]


def recorded(path: Path, spans: list[Span]) -> Store:
    """A local store whose segment with these spans is closed."""
    store = Store(path)
    store.add(spans)
    store.writer().seal()
    return store


def count(store: Store) -> tuple[int, int]:
    """Spans, and how many different ones."""
    (row,) = store.sql("SELECT count(*) AS n, count(DISTINCT (trace_id, span_id)) AS d FROM spans")
    return row["n"], row["d"]


def files_of(address: LakeAddress) -> list[int]:
    """Rows of each file of the lake."""
    with attached(address, application="test", is_read_only=True) as con:
        rows = con.execute("SELECT spans FROM lake.published ORDER BY published_ns").fetchall()
    return [spans for (spans,) in rows]


def test_publish_puts_every_span_into_the_lake(
    lake: str, make_spans: Spans, tmp_path: Path
) -> None:
    """What a machine recorded is read from the lake, row for row and transition for transition."""
    spans = make_spans(300)
    local = recorded(tmp_path / "local", spans)

    done = local.publish(lake, is_rest_included=True)

    assert (done.spans, done.files, done.waiting) == (300, 1, 0)
    there = Store(lake)
    assert list(there.spans()) == list(local.spans())
    assert [*there.transitions()] == [*local.transitions()]
    assert len([*there.transitions()]) == 100
    assert [*there.rollouts()] == [*local.rollouts()]


def test_publish_to_object_storage(remote_lake: str, make_spans: Spans, tmp_path: Path) -> None:
    """With its files on S3 a lake reads the same."""
    local = recorded(tmp_path / "local", make_spans(300))

    local.publish(remote_lake, is_rest_included=True)

    there = Store(remote_lake)
    assert list(there.spans()) == list(local.spans())
    assert [*there.transitions()] == [*local.transitions()]


def test_publish_again_adds_nothing(lake: str, make_spans: Spans, tmp_path: Path) -> None:
    """A second publishing finds nothing to do, and later spans alone go in by a third."""
    local = recorded(tmp_path / "local", make_spans(30))
    local.publish(lake, is_rest_included=True)

    again = local.publish(lake, is_rest_included=True)
    local.add(make_spans(60, machine="b"))
    local.writer().seal()
    more = local.publish(lake, is_rest_included=True)

    assert (again.spans, more.spans) == (0, 60)
    assert count(Store(lake)) == (90, 90)


def test_publish_waits_until_there_are_enough_spans(
    lake: str, address: LakeAddress, make_spans: Spans, tmp_path: Path
) -> None:
    """Small settled files wait, and become one file when they are enough together."""
    local = recorded(tmp_path / "local", make_spans(LEAST_ROWS // 2))

    first = local.publish(lake)
    local = recorded(tmp_path / "local", make_spans(LEAST_ROWS // 2, machine="b"))
    second = local.publish(lake)

    assert (first.spans, first.waiting) == (0, LEAST_ROWS // 2)
    assert (second.spans, second.files, second.waiting) == (LEAST_ROWS, 1, 0)
    assert files_of(address) == [LEAST_ROWS]
    assert count(Store(lake)) == (LEAST_ROWS, LEAST_ROWS)
