"""Spans in batches of whole rollouts, each reward with the rollout it judges, in bounded memory."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from lightning_otel.adapter.continuations import Reference, find_references, is_source
from lightning_otel.adapter.selection import Selection as StepSelection
from lightning_otel.store.schema import build_span
from lightning_otel.store.source import INDEX_COLUMNS, Selection, SpanSource
from lightning_otel.store.sql import ROLLOUT, attribute_sql
from lightning_otel.store.table import Query
from lightning_otel.store.views import ALIVE, MAY_MOVE, REWARD_TARGETS
from lightning_otel.types import Span
from lightning_otel.types import conventions as c

if TYPE_CHECKING:
    import duckdb

BATCH_SPANS: Final = 2_000
"""Spans that are in memory at once, unless a rollout has more."""
TOKENS_A_SPAN: Final = 500
"""A call weighs a span more for so many tokens: that many are 2 KB of text."""
_THREADS: Final = 2
_LOOKED_AT: Final = ("spans", ALIVE)
_BATCHES: Final = f"""
SELECT list(rollout ORDER BY low, rollout), min(low), max(high)
FROM (
  SELECT *, (sum(weight) OVER (ORDER BY low, rollout) - 1) // {{size}} AS batch
  FROM (
    SELECT {ROLLOUT} AS rollout, min(start_ns) AS low, max(start_ns) AS high,
      count(*) + coalesce(sum(greatest(input_tokens, 0)), 0) // {TOKENS_A_SPAN}
        + coalesce(sum(greatest(output_tokens, 0)), 0) // {TOKENS_A_SPAN} AS weight
    FROM spans ANTI JOIN moved USING (trace_id, span_id) WHERE {{where}}
    GROUP BY 1 HAVING {{having}}
  )
) GROUP BY batch ORDER BY batch"""
_ALL: Final = StepSelection()
_NONE_MOVED: Final = """
CREATE OR REPLACE TEMP TABLE moved (trace_id VARCHAR, span_id VARCHAR, own_rollout VARCHAR,
  reward_ns BIGINT, target_rollout VARCHAR, target_attempt VARCHAR)"""


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
    for selection in _make_selections(source, con, wanted):
        yield map(build_span, source.fetch(adjust_selection(con, selection), con).dicts())


def read_origins(
    source: SpanSource, con: "duckdb.DuckDBPyConnection", spans: Sequence[Span]
) -> list[Span]:
    """Return the spans of other rollouts that some of these refer to, by ids of the server's."""
    origins: list[Span] = []
    seen: set[str] = set()
    asked, known = find_references(spans)
    while missing := asked - known:
        known |= missing
        # With all of their traces: a conversation is not looked up answer by answer.
        traces = _find_traces(source, con, missing) - seen
        if not traces:
            break
        seen |= traces
        selection = Selection(trace_ids=sorted(traces))
        calls = [*filter(is_source, map(build_span, source.fetch(selection, con).dicts()))]
        origins += calls
        asked, others = find_references(calls)
        known |= others
    return origins


def _find_traces(
    source: SpanSource, con: "duckdb.DuckDBPyConnection", wanted: Iterable[Reference]
) -> set[str]:
    """Return the traces in which something of the server's is recorded."""
    ids: dict[str, list[str]] = {}
    for key, server_id in wanted:
        ids.setdefault(key, []).append(server_id)
    if ids.keys() - {c.RESPONSE_ID}:
        con = source.connect(_LOOKED_AT, (*INDEX_COLUMNS, "attributes"))
    columns = ["response_id" if key == c.RESPONSE_ID else attribute_sql(key) for key in ids]
    where = " OR ".join(f"{column} IN (SELECT unnest(?))" for column in columns)
    rows = con.execute(f"SELECT DISTINCT trace_id FROM spans WHERE {where}", [*ids.values()])
    return {trace_id for (trace_id,) in rows.fetchall()}


class Clauses(NamedTuple):
    """The wanted rollouts as SQL over ``spans`` grouped by rollout."""

    where: str
    having: str
    values: list[Any]


def make_clauses(con: "duckdb.DuckDBPyConnection", wanted: StepSelection) -> Clauses:
    """The part of a selection that tells of whole rollouts, as SQL."""
    where, having, values = ["true"], ["true"], list[Any]()
    if wanted.rollout_ids is not None:
        where.append(f"{ROLLOUT} IN (SELECT unnest(?::VARCHAR[]))")
        values.append(list(wanted.rollout_ids))
    # A call outside any agent is nobody's, whose name is empty: then nothing can be left unread.
    if wanted.agents and not wanted.wants_agent(""):
        names = con.execute("SELECT DISTINCT agent FROM spans WHERE agent IS NOT NULL").fetchall()
        chosen = f"SELECT {ROLLOUT} FROM spans WHERE agent IN (SELECT unnest(?::VARCHAR[]))"
        where.append(f"{ROLLOUT} IN ({chosen})")
        values.append([name for (name,) in names if wanted.wants_agent(name)])
    for sign, time_ns in ((">=", wanted.since_ns), ("<", wanted.until_ns)):
        if time_ns is not None:
            having.append(f"min(start_ns) {sign} ?")
            values.append(time_ns)
    return Clauses(" AND ".join(where), " AND ".join(having), values)


def list_incomplete(
    source: SpanSource, con: "duckdb.DuckDBPyConnection | None" = None
) -> frozenset[tuple[str, str]]:
    """Return rollout and attempt ids of what broke off, as its process died."""
    if not _has_open_span(source, con, "is_alive(process) IS NOT true"):
        return frozenset()
    rows = _list_unfinished(source)
    return frozenset((rollout, attempt) for rollout, attempt, status in rows if status != "running")


def list_unfinished(source: SpanSource) -> list[tuple[str, str, str]]:
    """Return rollout and attempt ids of what did not end, with ``running`` or ``incomplete``."""
    return _list_unfinished(source) if _has_open_span(source) else []


def _has_open_span(
    source: SpanSource, con: "duckdb.DuckDBPyConnection | None" = None, where: str = "true"
) -> bool:
    """Return whether there is an open span; few stores hold any, and the view costs more."""
    con = con or source.connect(_LOOKED_AT, INDEX_COLUMNS)
    look = f"SELECT 1 FROM spans WHERE end_ns IS NULL AND {where} LIMIT 1"
    return bool(con.execute(look).fetchall())


def _list_unfinished(source: SpanSource) -> list[tuple[str, str, str]]:
    con = source.connect(("rollouts",), INDEX_COLUMNS)
    columns = "rollout_id, attempt_id, status"
    where = "status IN ('running', 'incomplete')"
    return con.execute(f"SELECT {columns} FROM rollouts WHERE {where}").fetchall()


def read_rollouts(source: SpanSource, selection: Selection) -> Query:
    """The spans of whole rollouts, each reward with the rollout it judges."""
    con = connect_with_moved(source)
    return source.fetch(adjust_selection(con, selection), con)


def connect_with_moved(source: SpanSource) -> "duckdb.DuckDBPyConnection":
    """A connection whose table ``moved`` holds the rewards that go to another rollout."""
    con = source.connect(_LOOKED_AT, INDEX_COLUMNS)
    look = f"SELECT 1 FROM spans WHERE {MAY_MOVE} LIMIT 1"
    create_moved_table(con, is_likely=bool(con.execute(look).fetchall()))
    return con


def create_moved_table(con: "duckdb.DuckDBPyConnection", *, is_likely: bool) -> None:
    """Make the table ``moved``, empty where no reward is likely to go elsewhere.

    Few stores have one, and to look where they all belong takes four times as long.
    """
    con.execute(
        f"CREATE OR REPLACE TEMP TABLE moved AS WITH {REWARD_TARGETS} "
        "SELECT * FROM placements WHERE target_rollout <> own_rollout"
        if is_likely
        else _NONE_MOVED
    )


def adjust_selection(con: "duckdb.DuckDBPyConnection", selection: Selection) -> Selection:
    """The selection without rewards that left its rollouts, and with those that arrived."""

    def find_moved(column: str) -> list[Any]:
        query = f"FROM moved SELECT trace_id, span_id, own_rollout, reward_ns WHERE {column} IN "
        return con.execute(f"{query} (SELECT unnest(?))", [selection.rollout_ids]).fetchall()

    selection = replace(selection, without=[row[:2] for row in find_moved("own_rollout")])
    arrived = find_moved("target_rollout")
    if not arrived:
        return selection
    times = [reward_ns for *_, reward_ns in arrived]
    also = Selection(
        rollout_ids=sorted({own for _, _, own, _ in arrived}),
        trace_ids=selection.trace_ids,
        since_ns=min(times),
        until_ns=max(times),
        only=[row[:2] for row in arrived],
    )
    return replace(selection, also=also)


def _make_selections(
    source: SpanSource, con: "duckdb.DuckDBPyConnection", wanted: StepSelection
) -> Iterator[Selection]:
    """Whole rollouts until they hold enough spans, with the time they lie in."""
    where, having, values = make_clauses(con, wanted)
    query = _BATCHES.format(size=BATCH_SPANS, where=where, having=having)
    for ids, low, high in con.execute(query, values).fetchall():
        yield Selection(rollout_ids=ids, since_ns=low, until_ns=high)
