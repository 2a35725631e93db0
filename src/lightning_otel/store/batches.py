"""Spans in batches of whole rollouts, each reward with the rollout it judges, in bounded memory."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

from lightning_otel.store.schema import span_of
from lightning_otel.store.source import Selection, SpanSource
from lightning_otel.store.views import HOMES, ROLLOUT
from lightning_otel.types import Span

if TYPE_CHECKING:
    import duckdb

BATCH_SPANS: Final = 20_000


class _Moved(NamedTuple):
    """A reward that was recorded in another rollout than the one it judges."""

    name: tuple[str, str]
    own_rollout: str
    start_ns: int


def batches(source: SpanSource, rollout_id: str | None = None) -> Iterator[Iterator[Span]]:
    """Spans of whole rollouts, gathered until they are enough.

    A reward recorded elsewhere comes with the rollout it judges, and not with its own.

    Args:
        source: Where the spans are.
        rollout_id: Only this rollout's.
    """
    con = source.connect()
    con.execute(
        f"CREATE TEMP TABLE moved AS WITH {HOMES} "
        "SELECT * FROM homes WHERE home_rollout <> own_rollout"
    )
    for selection in _selections(con, rollout_id):
        left = _moved(con, "own_rollout", selection)
        arrived = _moved(con, "home_rollout", selection)
        yield _spans(source, selection, left, arrived)


def _spans(
    source: SpanSource, selection: Selection, left: list[_Moved], arrived: list[_Moved]
) -> Iterator[Span]:
    """The selection's spans, without rewards that left its rollouts, with those that arrived."""
    names = {reward.name for reward in left}
    for span in map(span_of, source.fetch(selection).dicts()):
        if not names or (span.trace_id, span.span_id) not in names:
            yield span
    if not arrived:
        return
    names = {reward.name for reward in arrived}
    times = [reward.start_ns for reward in arrived]
    apart = Selection(
        rollout_ids=sorted({reward.own_rollout for reward in arrived}),
        since_ns=min(times),
        until_ns=max(times),
    )
    for span in map(span_of, source.fetch(apart).dicts()):
        if (span.trace_id, span.span_id) in names:
            yield span


def _moved(con: "duckdb.DuckDBPyConnection", column: str, selection: Selection) -> list[_Moved]:
    rows = con.execute(
        "SELECT trace_id, span_id, own_rollout, given_ns FROM moved "
        f"WHERE {column} IN (SELECT unnest(?))",
        [selection.rollout_ids],
    ).fetchall()
    return [_Moved((trace_id, span_id), own, start_ns) for trace_id, span_id, own, start_ns in rows]


def _selections(con: "duckdb.DuckDBPyConnection", rollout_id: str | None) -> Iterator[Selection]:
    """Whole rollouts until they hold enough spans, with the time they lie in."""
    where = f"WHERE {ROLLOUT} = ?" if rollout_id else ""
    rows = con.execute(
        f"SELECT {ROLLOUT}, count(*), min(start_ns), max(start_ns) "
        f"FROM spans ANTI JOIN moved USING (trace_id, span_id) {where} GROUP BY 1 ORDER BY 3, 1",
        [rollout_id] if rollout_id else [],
    ).fetchall()
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
