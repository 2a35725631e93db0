"""Selections of spans, and batches of whole rollouts, each reward with the rollout it judges.

Only a reward with a link, or a retraction, goes to another rollout than its own. The adapter's rule
says to which one, given these and the few spans that they name.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from lightning_otel.store.schema import COLUMNS, NARROW_COLUMNS, SPAN_COLUMNS, build_span
from lightning_otel.store.sql import ROLLOUT, attribute_sql, quote_text
from lightning_otel.store.views import ALIVE, ATTEMPTS, IS_ANNOTATION, IS_BARE_REWARD
from lightning_otel.types import Span
from lightning_otel.types import conventions as c

if TYPE_CHECKING:
    import duckdb

    from lightning_otel.adapter.continuations import Reference
    from lightning_otel.adapter.selection import StepSelection
    from lightning_otel.store.source import SpanSource
    from lightning_otel.store.table import Query

    Con = duckdb.DuckDBPyConnection

REWARD_ATTRIBUTES: Final = "reward_attributes"
"""Stands for ``attributes`` of rewards and annotations; empty on other spans."""
INDEX_COLUMNS: Final = (*NARROW_COLUMNS, REWARD_ATTRIBUTES)
"""What tells rollouts, and the rewards given to them from elsewhere: no content."""
SpanKey = tuple[str, str]
"""Trace and span id."""
BATCH_SPANS: Final = 6_000
"""Spans that are in memory at once, unless a rollout has more."""
_THREADS: Final = 2
_LOOKED_AT: Final = ("spans", ALIVE)
TOKENS_A_SPAN: Final = 500
"""A call weighs a span more for so many tokens: that many are 2 KB of text."""
MAY_MOVE: Final = f"""(
  {IS_BARE_REWARD} AND contains(attributes::VARCHAR, {quote_text(c.LINK_PREFIX)})
  OR reward IS NULL AND name = {quote_text(c.SPAN_ANNOTATION)}
    AND contains(attributes::VARCHAR, {quote_text(c.REWARD_RETRACTED)}))"""
"""A reward that may belong to another rollout than the one it was recorded in, or a retraction."""
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
_CANDIDATES: Final = f"SELECT {', '.join(NARROW_COLUMNS)}, attributes FROM spans WHERE {MAY_MOVE}"
_NAMED: Final = f"""
SELECT {", ".join(NARROW_COLUMNS)} FROM spans
WHERE span_id IN (SELECT unnest($1)) OR response_id IN (SELECT unnest($1))"""
_INCOMPLETE: Final = f"""
SELECT rollout_id, attempt_id FROM ({ATTEMPTS}) WHERE status = 'incomplete'"""
_MOVED: Final = """
CREATE OR REPLACE TEMP TABLE moved (
  trace_id VARCHAR, span_id VARCHAR, own_rollout VARCHAR, reward_ns BIGINT, target_rollout VARCHAR)
"""


@dataclass(frozen=True, slots=True)
class Selection:
    """A selection of spans; an empty tuple or None selects all.

    Attributes:
        rollout_ids: Whole ids.
        trace_ids: Whole ids.
        since_ns: Spans that start at this time or later.
        until_ns: Spans that start at this time or earlier.
        only: Names of the spans wanted.
        without: Names of spans not wanted.
        also: What is fetched besides.
        is_ordered: Whether order matters; sorting wide rows costs more than reading them.
        columns: Which columns; ``REWARD_ATTRIBUTES`` may be among them.
    """

    rollout_ids: Sequence[str] = ()
    trace_ids: Sequence[str] = ()
    since_ns: int | None = None
    until_ns: int | None = None
    only: Sequence[SpanKey] = ()
    without: Sequence[SpanKey] = ()
    also: "Selection | None" = None
    is_ordered: bool = False
    columns: Collection[str] = tuple(COLUMNS)

    def query(self) -> tuple[str, list[Any]]:
        """Return the selection as a SQL query and its parameters."""
        parts = [self] if self.also is None else [self, self.also]
        clauses = [part._where_sql() for part in parts]
        # Not one condition with OR: that would keep DuckDB from leaving out whole row groups.
        select = f"SELECT {columns_sql(self.columns)} FROM spans"
        text = " UNION ALL ".join(f"{select} WHERE {where}" for where, _ in clauses)
        if self.is_ordered:
            text = f"SELECT * FROM ({text}) ORDER BY start_ns, process, sequence"
        return text, [value for _, values in clauses for value in values]

    def _where_sql(self) -> tuple[str, list[Any]]:
        terms: list[str] = ["true"]
        values: list[Any] = []
        for column, ids in ((ROLLOUT, self.rollout_ids), ("trace_id", self.trace_ids)):
            if ids:
                terms.append(f"{column} IN (SELECT unnest(?))")
                values.append(list(ids))
        for word, names in (("IN", self.only), ("NOT IN", self.without)):
            if names:
                terms.append(f"(trace_id, span_id) {word} (SELECT unnest(?), unnest(?))")
                values += [list(ids) for ids in zip(*names, strict=True)]
        for sign, time_ns in ((">=", self.since_ns), ("<=", self.until_ns)):
            if time_ns is not None:
                terms.append(f"start_ns {sign} ?")
                values.append(time_ns)
        return " AND ".join(terms), values


def columns_sql(columns: Collection[str]) -> str:
    """Return the columns of a SELECT from ``spans``, in the store's order, in plain SQL."""
    chosen = [name for name in COLUMNS if name in columns]
    if REWARD_ATTRIBUTES in columns and "attributes" not in columns:
        chosen.append(f"CASE WHEN {IS_ANNOTATION} THEN attributes END AS attributes")
    return ", ".join(chosen)


class Placement(NamedTuple):
    """A reward or retraction that may belong to another rollout than its own.

    Attributes:
        own_rollout: The rollout it was recorded in.
        target_rollout: The one it belongs to.
        linked_id: The span or response that it names; empty if it names none.
    """

    trace_id: str
    span_id: str
    own_rollout: str
    start_ns: int
    target_rollout: str
    linked_id: str

    @property
    def is_moved(self) -> bool:
        """True if it belongs to another rollout."""
        return self.own_rollout != self.target_rollout


@dataclass(frozen=True, slots=True)
class SpanReader:
    """The ways to the spans of one store, as it is at one moment.

    Attributes:
        con: A connection with the view ``spans``, which may hold columns without content alone.
        fetch: Reads records with all of their columns.
        look: Returns a connection that has the attributes of all spans.
    """

    con: "Con"
    fetch: Callable[[Selection], Iterable[Mapping[str, Any]]]
    look: "Callable[[], Con]"


def place_rewards(con: "Con", where: str = "true") -> list[Placement]:
    """Return where each reward belongs that has a link, and each retraction."""
    candidates = list(map(_make_light, _read_rows(con, f"{_CANDIDATES} AND {where}")))
    if not candidates:
        return []
    from lightning_otel.adapter.attempts import sort_attempts
    from lightning_otel.adapter.attributes import read_links

    links = [read_links(span.attributes) for span in candidates]
    linked = [link.get(c.RESPONSE_ID) or link.get(c.LINK_SPAN_ID) or "" for link in links]
    keys = {(span.trace_id, span.span_id) for span in candidates}
    targets = map(_make_light, _read_rows(con, _NAMED, [sorted({*linked} - {""})]))
    others = [span for span in targets if (span.trace_id, span.span_id) not in keys]
    attempts = sort_attempts([*others, *candidates])
    homes = {
        (span.trace_id, span.span_id): rollout_id
        for (rollout_id, _), members in attempts.members.items()
        for span in members
    }
    # A retraction belongs to the rollout of what it takes back.
    by_span = {span.span_id: span.rollout_id for span in (*others, *candidates)}
    by_span |= {span_id: rollout_id for (_, span_id), rollout_id in homes.items()}
    placements = []
    for span, linked_id in zip(candidates, linked, strict=True):
        key, rollout = (span.trace_id, span.span_id), span.rollout_id
        is_retraction = c.REWARD_VALUE not in span.attributes
        home = by_span.get(linked_id, rollout) if is_retraction else homes.get(key, rollout)
        placements.append(Placement(*key, rollout, span.start_ns, home, linked_id))
    return placements


def _read_rows(con: "Con", query: str, parameters: Sequence[object] = ()) -> list[dict[str, Any]]:
    cursor = con.execute(query, list(parameters))
    names = [column[0] for column in cursor.description or ()]
    return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]


def _make_light(row: Mapping[str, Any]) -> Span:
    """Return a span of its columns alone, in today's conventions."""
    from lightning_otel.adapter import readers

    (span,) = readers.read([build_span(row)])
    columns = {
        c.ROLLOUT_ID: row["rollout_id"], c.ATTEMPT_ID: row["attempt_id"],
        c.RESPONSE_ID: row["response_id"], c.OPERATION: row["operation"],
        c.REWARD_VALUE: row["reward"],
    }  # fmt: skip
    values = {key: value for key, value in columns.items() if value is not None}
    return replace(span, attributes={**values, **span.attributes})


def create_moved_table(con: "Con", placements: Iterable[Placement] | None = None) -> None:
    """Make the table ``moved`` of the rewards that belong to another rollout than their own."""
    if placements is None:
        placements = place_rewards(con)
    con.execute(_MOVED)
    if rows := [place[:5] for place in placements if place.is_moved]:
        columns = [list(values) for values in zip(*rows, strict=True)]
        con.execute(f"INSERT INTO moved SELECT {', '.join(['unnest(?)'] * 5)}", columns)


def make_selections(
    con: "Con", where: str, having: str = "true", values: Sequence[object] = ()
) -> Iterator[Selection]:
    """Yield whole rollouts until they hold enough spans, with the time they lie in.

    The connection has the table ``moved``; the conditions are those of a query over ``spans``, and
    over its groups by rollout.
    """
    query = _BATCHES.format(size=BATCH_SPANS, where=where, having=having)
    for ids, low, high in con.execute(query, list(values)).fetchall():
        selection = Selection(rollout_ids=ids, since_ns=low, until_ns=high, columns=SPAN_COLUMNS)
        yield adjust_selection(con, selection)


def adjust_selection(con: "Con", selection: Selection) -> Selection:
    """Return the selection without rewards that left its rollouts, and with those that arrived."""

    def find_moved(column: str) -> list[Any]:
        query = f"FROM moved SELECT trace_id, span_id, own_rollout, reward_ns WHERE {column} IN "
        return con.execute(f"{query} (SELECT unnest(?))", [selection.rollout_ids]).fetchall()

    selection = replace(selection, without=[row[:2] for row in find_moved("own_rollout")])
    arrived = find_moved("target_rollout")
    if not arrived:
        return selection
    times = [reward_ns for *_, reward_ns in arrived]
    also = Selection(
        rollout_ids=sorted({rollout_id for _, _, rollout_id, _ in arrived}),
        trace_ids=selection.trace_ids,
        since_ns=min(times),
        until_ns=max(times),
        only=[row[:2] for row in arrived],
    )
    return replace(selection, also=also)


def connect_with_moved(source: "SpanSource") -> "Con":
    """Return a connection whose table ``moved`` holds the rewards that go to another rollout."""
    con = source.connect(_LOOKED_AT, INDEX_COLUMNS)
    create_moved_table(con)
    return con


def read_rollouts(source: "SpanSource", selection: Selection) -> "Query":
    """Return the spans of whole rollouts, each reward with the rollout it judges."""
    con = connect_with_moved(source)
    return source.fetch(adjust_selection(con, selection), con)


def read_batches(
    source: "SpanSource", wanted: "StepSelection | None" = None, con: "Con | None" = None
) -> Iterator[Iterator[Span]]:
    """Yield the spans of whole rollouts, gathered until they are enough.

    Of what is wanted, only rollouts, agents and times are looked at. The connection is one of
    :func:`connect_with_moved`.
    """
    con = con or connect_with_moved(source)
    if source.layout is not None:
        con.execute("SET enable_external_file_cache = false")
        con.execute(f"SET threads = {_THREADS}")  # each reads a row group at once
    clauses = ("true", "true", []) if wanted is None else make_clauses(con, wanted)
    for selection in make_selections(con, *clauses):
        yield map(build_span, source.fetch(selection, con).dicts())


def make_clauses(
    con: "Con", selection: "StepSelection", rollout: str = ROLLOUT
) -> tuple[str, str, list[Any]]:
    """Return the wanted rollouts as SQL over ``spans`` grouped by rollout: where, having, values.

    ``rollout`` is their id.
    """
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
    return " AND ".join(where), " AND ".join(having), values


def list_incomplete(source: "SpanSource", con: "Con | None" = None) -> frozenset[tuple[str, str]]:
    """Return rollout and attempt ids of what broke off, as its process died."""
    con = con or source.connect(_LOOKED_AT, INDEX_COLUMNS)
    # Few stores hold an open span, and to look at all attempts costs more.
    if not con.execute("SELECT 1 FROM spans WHERE end_ns IS NULL LIMIT 1").fetchall():
        return frozenset()
    return frozenset(con.execute(_INCOMPLETE).fetchall())


def read_origins(
    reader: SpanReader, references: "set[Reference]", answers: "set[Reference]"
) -> list[Span]:
    """Return the spans that tell what others refer to, by ids of the server's, and do not tell."""
    from lightning_otel.adapter.continuations import find_references, is_source

    origins: list[Span] = []
    trace_ids: set[str] = set()
    while missing := references - answers:
        answers = answers | missing
        # With all of their traces: a conversation is not looked up answer by answer.
        traces = _find_traces(reader, missing) - trace_ids
        if not traces:
            break
        trace_ids |= traces
        records = reader.fetch(Selection(trace_ids=sorted(traces)))
        calls = [*filter(is_source, map(build_span, records))]
        origins += calls
        references, others = find_references(calls)
        answers |= others
    return origins


def _find_traces(reader: SpanReader, references: "Iterable[Reference]") -> set[str]:
    """Return the traces in which something of the server's is recorded."""
    ids: dict[str, list[str]] = {}
    for key, server_id in references:
        ids.setdefault(key, []).append(server_id)
    con = reader.look() if ids.keys() - {c.RESPONSE_ID} else reader.con
    columns = ["response_id" if key == c.RESPONSE_ID else attribute_sql(key) for key in ids]
    where = " OR ".join(f"{column} IN (SELECT unnest(?))" for column in columns)
    rows = con.execute(f"SELECT DISTINCT trace_id FROM spans WHERE {where}", [*ids.values()])
    return {trace_id for (trace_id,) in rows.fetchall()}
