"""ClickHouse's real engine: a Collector's own rows, loading, and what an address may say."""

import json
from dataclasses import replace
from typing import Any

import pytest
from tests.store.conftest import MakeSpan, Rollout

from lightning_otel import Store
from lightning_otel.errors import StoreError
from lightning_otel.store.engines.clickhouse import ClickHouse
from lightning_otel.store.engines.collector import quoted
from lightning_otel.types import Span
from lightning_otel.types import conventions as c


def source_of(store: Store) -> ClickHouse:
    assert isinstance(store.source, ClickHouse)
    return store.source


def collected(store: Store, spans: list[Span]) -> None:
    """Write spans as a Collector's ClickHouse exporter does: every value as text."""
    store.add([])
    rows = ", ".join(map(_row, spans))
    source_of(store).run(
        "INSERT INTO "
        f"{source_of(store)._table} (Timestamp, TraceId, SpanId, ParentSpanId, TraceState, "
        "SpanName, SpanKind, ServiceName, ResourceAttributes, ScopeName, ScopeVersion, "
        "SpanAttributes, Duration, StatusCode, StatusMessage, Events.Timestamp, Events.Name, "
        f"Events.Attributes, Links.TraceId, Links.SpanId, Links.TraceState, Links.Attributes) "
        f"VALUES {rows}"
    )


def _row(span: Span) -> str:
    assert span.end_ns is not None
    values = (
        f"fromUnixTimestamp64Nano({span.start_ns})",
        *map(quoted, (span.trace_id, span.span_id, span.parent_span_id or "", "", span.name)),
        quoted(span.kind.capitalize()),
        quoted(str(span.otel_resource.get("service.name", ""))),
        _map(span.otel_resource),
        *map(quoted, (span.scope, "1.0")),
        _map(span.attributes),
        str(span.end_ns - span.start_ns),
        *map(quoted, (span.status.capitalize(), span.status_message)),
        f"[{', '.join(f'fromUnixTimestamp64Nano({e.time_ns})' for e in span.events)}]",
        f"[{', '.join(quoted(event.name) for event in span.events)}]",
        f"[{', '.join(_map(event.attributes) for event in span.events)}]",
        *("[]",) * 4,
    )
    return f"({', '.join(values)})"


def _map(attributes: Any) -> str:
    pairs = [quoted(text) for key, value in attributes.items() for text in (key, as_text(value))]
    return f"map({', '.join(pairs)})"


def as_text(value: Any) -> str:
    """A value as the Collector's ``AsString`` writes it: 1.0 as 1, lists as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return json.dumps(value, separators=(",", ":"))


def test_a_collectors_rows_give_the_same_transitions(clickhouse_url: str, rollout: Rollout) -> None:
    """Numbers that its map holds as text are numbers again where a convention names the key."""
    spans = [
        # What OTLP does not carry.
        replace(span, process="", sequence=-1, end_sequence=-1)
        for number in range(3)
        for span in rollout(number)
    ]
    reference, store = Store(":memory:"), Store(clickhouse_url)
    reference.add(spans)

    collected(store, spans)

    assert list(store.transitions().dicts()) == list(reference.transitions().dicts())
    assert store.report() == reference.report()
    for query in (
        "SELECT * FROM rollouts ORDER BY rollout_id",
        "SELECT * FROM rewards ORDER BY span_id",
        "SELECT * FROM calls ORDER BY span_id",
    ):
        assert list(store.sql(query)) == list(reference.sql(query))


def test_a_collectors_row_sent_twice_counts_once(clickhouse_url: str, rollout: Rollout) -> None:
    """A Collector that retries writes a row again: its table does not mind, readers do not see."""
    store, spans = Store(clickhouse_url), rollout(1)

    collected(store, spans)
    collected(store, spans)

    assert len(store.spans().rows()) == len(spans)
    assert [row["spans"] for row in store.rollouts()] == [len(spans)]
    assert source_of(store).run(f"SELECT count() FROM {source_of(store)._table}") == str(
        2 * len(spans)
    )


def test_text_that_looks_like_a_number_stays_text_where_no_convention_names_its_key(
    clickhouse_url: str, make_span: MakeSpan
) -> None:
    """The map holds no types, and a postal code is no number."""
    store = Store(clickhouse_url)
    attributes = {"zip": "01234", "count": "7", c.INPUT_TOKENS: 12, c.REWARD_VALUE: 0.25}

    collected(store, [make_span(attributes=attributes)])

    assert [span.attributes for span in store.spans()] == [attributes]


def test_loading_takes_what_is_not_there_yet(
    clickhouse_url: str, store: Store, rollout: Rollout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often, in however many parts, and spans of any year."""
    monkeypatch.setattr("lightning_otel.store.engines.clickhouse.LOAD_SPANS", 7)
    year_ns = 365 * 86_400 * 10**9
    spans = [
        replace(span, start_ns=span.start_ns - year * year_ns, end_ns=span.start_ns)
        for year in range(6)
        for span in rollout(year, calls=1)
    ]
    store.add(spans)

    assert store.pack(clickhouse_url) == len(spans)
    store.add(rollout(100))
    assert store.pack(clickhouse_url) == len(rollout(100))
    assert store.pack(clickhouse_url) == 0

    assert {span.span_id: span for span in Store(clickhouse_url).spans()} == {
        span.span_id: span for span in store.spans()
    }


def test_more_days_than_a_block_may_have_partitions_are_loaded(
    clickhouse_url: str, make_span: MakeSpan
) -> None:
    """The table has a partition a day, and a server refuses more than 100 of them at once."""
    day_ns = 86_400 * 10**9
    store = Store(clickhouse_url)

    store.add(make_span(start_ns=day * day_ns, end_ns=day * day_ns + 1) for day in range(150))

    assert len(store.spans().rows()) == 150


def test_one_trace_is_found_with_and_without_the_table_of_times(
    clickhouse_url: str, rollout: Rollout
) -> None:
    """The table that knows when each trace took place is asked; without it the trace is found."""
    store = Store(f"{clickhouse_url}&table=it`s")
    store.add([*rollout(1), *rollout(2)])
    trace_id = rollout(1)[0].trace_id
    database = clickhouse_url.rpartition("/")[2].partition("?")[0]

    with_it = store.spans(trace_id=trace_id).rows()
    for name in ("it`s_trace_id_ts_mv", "it`s_trace_id_ts"):
        source_of(store).run(f"DROP TABLE {database}.`{name.replace('`', chr(92) + '`')}`")
    without = store.spans(trace_id=trace_id).rows()

    assert len(with_it) == len(without) == len(rollout(1))


def test_a_window_bounds_what_is_looked_at(clickhouse_url: str, rollout: Rollout) -> None:
    """Days of a busy table that nobody asks for are not read."""
    Store(clickhouse_url).add([*rollout(1), *rollout(10_000)])

    bounded = Store(f"{clickhouse_url}&until=2026-09-30")

    assert [row["rollout_id"] for row in bounded.rollouts()] == ["rollout-1"]
    assert len(bounded.spans().rows()) == len(rollout(1))
    assert "until" not in bounded.name


def test_a_table_that_is_not_there_is_said_to_be_missing(clickhouse_url: str) -> None:
    """With what to do about it; reading makes no table."""
    with pytest.raises(StoreError, match="load a store into it"):
        Store(clickhouse_url).spans().rows()


def test_a_wrong_password_is_an_error_that_does_not_repeat_it(clickhouse_url: str) -> None:
    """Neither do the store's name and its description."""
    store = Store(clickhouse_url.replace(":secret@", ":other@"))

    with pytest.raises(StoreError) as raised:
        store.spans().rows()

    assert "other" not in str(raised.value)
    assert "other" not in repr(store)
    assert "password" in raised.value.remedy


def test_a_server_that_is_not_there_is_an_error() -> None:
    with pytest.raises(StoreError, match=r"127\.0\.0\.1:1"):
        Store("clickhouse://127.0.0.1:1/x").spans().rows()
