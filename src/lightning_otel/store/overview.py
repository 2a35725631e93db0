"""Questions about every rollout of a store at once, in a fraction of what the view costs.

The view ``spans`` asks of each file and segment anew whether it counts, as it must where a
connection stays open; and what builds on it looks at the spans eight times. Here what counts is
decided once, before the query: a million spans then take a third of the time, and an eighth of the
memory. The derived views are the same ones, and so are their rows.
"""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Final

from lightning_otel.store import views
from lightning_otel.store.damage import answered, tell
from lightning_otel.store.earnings import LAST_REWARD
from lightning_otel.store.layout import Layout
from lightning_otel.store.live import living
from lightning_otel.store.moment import Moment, moment_of
from lightning_otel.store.schema import COLUMNS, NARROW_COLUMNS
from lightning_otel.store.source import SpanSource, are_small, new_connection, prepare
from lightning_otel.store.spans import SAME_SPAN_NS, live_query, rows_of, same_span
from lightning_otel.store.table import columns_of, views_of

if TYPE_CHECKING:
    import duckdb

_COLUMNS: Final = (*NARROW_COLUMNS, "attributes")
_VIEWS: Final = frozenset({"rewards", "rollouts"})
_TRIES: Final = 3
_NO_ROWS: Final = ", ".join(f"NULL::{COLUMNS[name]} AS {name}" for name in _COLUMNS)


def overview(
    source: SpanSource, query: str, parameters: Sequence[object] = ()
) -> list[dict[str, Any]]:
    """The rows of a query over ``spans`` without their bodies, ``rewards`` and ``rollouts``.

    Args:
        source: Where the spans are.
        query: One SELECT.
        parameters: What stands for its question marks.

    Raises:
        StoreMissingError: There is no store.
        StoreError: It cannot be read.
    """
    import duckdb

    layout, given = source.layout, list(parameters)
    if layout is None:
        con = source.connect(
            lambda empty: views_of(empty, query), lambda empty: columns_of(empty, query, given)
        )
        return answered(con, None, lambda: _rows(con, query, given))
    prepare(layout)
    with new_connection() as con:
        names = _VIEWS & set(views_of(con, query))

        def ask() -> list[dict[str, Any]]:
            for left in reversed(range(_TRIES)):
                try:
                    define(con, layout, names)
                    return _rows(con, query, given)
                except duckdb.IOException:  # a file ceased to count, and its grace is over
                    if not left:
                        raise
            raise AssertionError("the last time returns or raises")

        found = answered(con, layout, ask)
    tell(layout)
    return found


def rollout_rewards(source: SpanSource) -> dict[str, float]:
    """The reward of each rollout that has one, its last attempt's, as every door tells it.

    Args:
        source: Where the spans are.

    Raises:
        StoreMissingError: There is no store.
        StoreError: It cannot be read.
    """
    query = f"SELECT rollout_id, {LAST_REWARD} AS reward FROM rollouts GROUP BY 1"
    rows = overview(source, query)
    return {row["rollout_id"]: row["reward"] for row in rows if row["reward"] is not None}


def define(con: "duckdb.DuckDBPyConnection", layout: Layout, names: Collection[str]) -> None:
    """Have the view ``spans``, without bodies and as of now, and the views named on top of it.

    Args:
        con: A connection of nobody else.
        layout: The store's paths.
        names: ``rewards`` or ``rollouts``, or both.
    """
    now = moment_of(layout)
    _load(con, layout, now)
    spans = "FROM loose"
    if now.files:
        spans += f" UNION ALL SELECT {', '.join(_COLUMNS)} FROM {rows_of(layout, now.files)}"
    con.execute(f"CREATE OR REPLACE VIEW spans AS {spans}")
    alive = living(layout) if "rollouts" in names else ()
    for statement in views.derived_view_statements(names, alive):
        con.execute(statement)


def _load(con: "duckdb.DuckDBPyConnection", layout: Layout, now: Moment) -> None:
    """Make the table ``loose`` of what only segments hold."""
    if not now.segments:
        con.execute(f"CREATE OR REPLACE TABLE loose AS SELECT {_NO_ROWS} LIMIT 0")
        return
    query = live_query(now.segments, are_small=are_small(now.segments))
    con.execute(f"CREATE OR REPLACE TABLE loose AS SELECT {', '.join(_COLUMNS)} FROM ({query})")
    ((low, high),) = con.execute("SELECT min(start_ns), max(start_ns) FROM loose").fetchall()
    near = [
        file
        for file in now.files
        if low is not None
        and file.min_start_ns <= high + SAME_SPAN_NS
        and file.max_start_ns >= low - SAME_SPAN_NS
    ]
    if near:  # as a sender does that heard no answer, some may have come once more
        con.execute(
            "DELETE FROM loose WHERE rowid IN (SELECT loose.rowid FROM loose "
            f"SEMI JOIN {rows_of(layout, near)} AS settled ON settled.trace_id = loose.trace_id "
            f"AND settled.span_id = loose.span_id AND {same_span('settled', 'loose')})"
        )


def _rows(
    con: "duckdb.DuckDBPyConnection", query: str, given: Sequence[object]
) -> list[dict[str, Any]]:
    cursor = con.execute(query, given)
    names = [column[0] for column in cursor.description or ()]
    return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
