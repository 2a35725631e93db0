"""Spans in batches of whole rollouts, each reward with the rollout it judges, in bounded memory."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from lightning_otel.store.damage import answered
from lightning_otel.store.schema import span_of
from lightning_otel.store.source import INDEX_COLUMNS, Selection, SpanName, SpanSource
from lightning_otel.store.sql import ROLLOUT
from lightning_otel.store.table import Query
from lightning_otel.store.views import HOMES, UNENDED
from lightning_otel.types import Span

if TYPE_CHECKING:
    import duckdb

BATCH_SPANS: Final = 20_000


class _Moved(NamedTuple):
    """A reward that was recorded in another rollout than the one it judges."""

    name: SpanName
    own_rollout: str
    start_ns: int


def batches(source: SpanSource, rollout_id: str | None = None) -> Iterator[Iterator[Span]]:
    """Spans of whole rollouts, gathered until they are enough.

    A reward recorded elsewhere comes with the rollout it judges, and not with its own.

    Args:
        source: Where the spans are.
        rollout_id: Only this rollout's.
    """
    con = _with_moved(source)
    for selection in _selections(source, con, rollout_id):
        yield map(span_of, source.fetch(_complete(con, selection), con).dicts())


def incomplete(source: SpanSource) -> frozenset[tuple[str, str]]:
    """Rollout and attempt ids of what broke off, as its process died.

    Args:
        source: Where the spans are.
    """
    con = source.connect(("rollouts",), INDEX_COLUMNS)

    def ask() -> list[tuple[str, str]]:
        # Most stores have none, and the view costs more than a look at one narrow column.
        if not con.execute(UNENDED).fetchall():
            return []
        return con.execute(
            "SELECT rollout_id, attempt_id FROM rollouts WHERE status = 'incomplete'"
        ).fetchall()

    return frozenset(answered(con, source.layout, ask))


def whole(source: SpanSource, selection: Selection) -> Query:
    """The spans of whole rollouts, each reward with the rollout it judges.

    Args:
        source: Where the spans are.
        selection: Names the rollouts.
    """
    con = _with_moved(source)
    return source.fetch(_complete(con, selection), con)


def _with_moved(source: SpanSource) -> "duckdb.DuckDBPyConnection":
    """A connection whose table ``moved`` holds the rewards that go to another rollout."""
    con = source.connect(("spans",), INDEX_COLUMNS)
    text = (
        f"CREATE OR REPLACE TEMP TABLE moved AS WITH {HOMES} "
        "SELECT * FROM homes WHERE home_rollout <> own_rollout"
    )
    answered(con, source.layout, lambda: con.execute(text))
    return con


def _complete(con: "duckdb.DuckDBPyConnection", selection: Selection) -> Selection:
    """The selection without rewards that left its rollouts, and with those that arrived."""
    left = _moved(con, "own_rollout", selection)
    arrived = _moved(con, "home_rollout", selection)
    if not arrived:
        return replace(selection, without=[reward.name for reward in left])
    times = [reward.start_ns for reward in arrived]
    also = Selection(
        rollout_ids=sorted({reward.own_rollout for reward in arrived}),
        trace_ids=selection.trace_ids,
        since_ns=min(times),
        until_ns=max(times),
        only=[reward.name for reward in arrived],
    )
    return replace(selection, without=[reward.name for reward in left], also=also)


def _moved(con: "duckdb.DuckDBPyConnection", column: str, selection: Selection) -> list[_Moved]:
    rows = con.execute(
        "SELECT trace_id, span_id, own_rollout, given_ns FROM moved "
        f"WHERE {column} IN (SELECT unnest(?))",
        [selection.rollout_ids],
    ).fetchall()
    return [_Moved((trace_id, span_id), own, start_ns) for trace_id, span_id, own, start_ns in rows]


def _selections(
    source: SpanSource, con: "duckdb.DuckDBPyConnection", rollout_id: str | None
) -> Iterator[Selection]:
    """Whole rollouts until they hold enough spans, with the time they lie in."""
    where = f"WHERE {ROLLOUT} = ?" if rollout_id else ""
    text = (
        f"SELECT {ROLLOUT}, count(*), min(start_ns), max(start_ns) FROM spans "
        f"ANTI JOIN moved USING (trace_id, span_id) {where} GROUP BY 1 ORDER BY 3, 1"
    )
    values = [rollout_id] if rollout_id else []
    rows = answered(con, source.layout, lambda: con.execute(text, values).fetchall())
    ids: list[str] = []
    spans, low, high = 0, 0, 0
    for name, count, first, last in rows:
        if ids and spans + count > BATCH_SPANS:
            yield Selection(rollout_ids=ids, since_ns=low, until_ns=high)
            ids, spans = [], 0
        low = min(low, first) if ids else first
        high = max(high, last) if ids else last
        ids.append(name)
        spans += count
    if ids:
        yield Selection(rollout_ids=ids, since_ns=low, until_ns=high)
