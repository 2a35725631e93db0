"""The rollouts that a question is about: which they are, and their spans in batches."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from lightning_otel.adapter.selection import Selection as StepSelection
from lightning_otel.store.schema import build_span
from lightning_otel.store.selection import (
    INDEX_COLUMNS,
    Selection,
    adjust_selection,
    create_moved_table,
    make_selections,
)
from lightning_otel.store.source import SpanSource
from lightning_otel.store.sql import ROLLOUT
from lightning_otel.store.table import Query
from lightning_otel.store.views import ALIVE, ATTEMPTS
from lightning_otel.types import Span

if TYPE_CHECKING:
    import duckdb

_THREADS: Final = 2
_LOOKED_AT: Final = ("spans", ALIVE)
_ALL: Final = StepSelection()
_INCOMPLETE: Final = f"""
SELECT rollout_id, attempt_id FROM ({ATTEMPTS}) WHERE status = 'incomplete'"""


def read_batches(
    source: SpanSource, wanted: StepSelection = _ALL, con: "duckdb.DuckDBPyConnection | None" = None
) -> Iterator[Iterator[Span]]:
    """Spans of whole rollouts, gathered until they are enough.

    A reward recorded elsewhere comes with the rollout it judges, and not with its own. Of what is
    wanted, only rollouts, agents and times are looked at. The connection is one of
    :func:`connect_with_moved`.
    """
    con = con or connect_with_moved(source)
    if source.layout is not None:
        con.execute("SET enable_external_file_cache = false")
        con.execute(f"SET threads = {_THREADS}")  # each reads a row group at once
    for selection in make_selections(con, *make_clauses(con, wanted)):
        yield map(build_span, source.fetch(selection, con).dicts())


class Clauses(NamedTuple):
    """The wanted rollouts as SQL over ``spans`` grouped by rollout."""

    where: str
    having: str
    values: list[Any]


def make_clauses(
    con: "duckdb.DuckDBPyConnection", selection: StepSelection, rollout: str = ROLLOUT
) -> Clauses:
    """The part of a selection that tells of whole rollouts, as SQL; ``rollout`` is their id."""
    where, having, values = ["true"], ["true"], list[Any]()
    if selection.rollout_ids is not None:
        where.append(f"{rollout} IN (SELECT unnest(?::VARCHAR[]))")
        values.append(list(selection.rollout_ids))
    # A call outside any agent is nobody's, whose name is empty: then nothing can be left unread.
    if selection.agents and not selection.wants_agent(""):
        names = con.execute("SELECT DISTINCT agent FROM spans WHERE agent IS NOT NULL").fetchall()
        chosen = f"SELECT {ROLLOUT} FROM spans WHERE agent IN (SELECT unnest(?::VARCHAR[]))"
        where.append(f"{rollout} IN ({chosen})")
        values.append([name for (name,) in names if selection.wants_agent(name)])
    for sign, time_ns in ((">=", selection.since_ns), ("<", selection.until_ns)):
        if time_ns is not None:
            having.append(f"min(start_ns) {sign} ?")
            values.append(time_ns)
    return Clauses(" AND ".join(where), " AND ".join(having), values)


def list_incomplete(
    source: SpanSource, con: "duckdb.DuckDBPyConnection | None" = None
) -> frozenset[tuple[str, str]]:
    """Return rollout and attempt ids of what broke off, as its process died."""
    con = con or source.connect(_LOOKED_AT, INDEX_COLUMNS)
    # Few stores hold an open span, and to look at all attempts costs more.
    if not con.execute("SELECT 1 FROM spans WHERE end_ns IS NULL LIMIT 1").fetchall():
        return frozenset()
    return frozenset(con.execute(_INCOMPLETE).fetchall())


def read_rollouts(source: SpanSource, selection: Selection) -> Query:
    """The spans of whole rollouts, each reward with the rollout it judges."""
    con = connect_with_moved(source)
    return source.fetch(adjust_selection(con, selection), con)


def connect_with_moved(source: SpanSource) -> "duckdb.DuckDBPyConnection":
    """Return a connection whose table ``moved`` holds the rewards that go to another rollout."""
    con = source.connect(_LOOKED_AT, INDEX_COLUMNS)
    create_moved_table(con)
    return con
