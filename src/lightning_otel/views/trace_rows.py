"""The spans of one trace as narrow rows, and the rewards that were given to it elsewhere."""

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from lightning_otel import conventions as c
from lightning_otel.store.gist import KIND, REWARD
from lightning_otel.store.schema import COLUMNS, NARROW_COLUMNS, span_of
from lightning_otel.store.source import Selection, SpanSource
from lightning_otel.store.spans import SAME_SPAN_NS
from lightning_otel.store.sql import ROLLOUT, attribute, quoted
from lightning_otel.store.views import NARROW
from lightning_otel.types import Span

if TYPE_CHECKING:
    import duckdb

FACTS: Final = {
    "error_type": c.ERROR_TYPE,
    "operation_name": c.OPERATION_NAME,
    "mark": c.MARK_NAME,
    "tool": c.TOOL_NAME,
    "reward_name": c.REWARD_NAME,
    "link_key": f"{c.LINK_PREFIX}.0.key_match",
    "link_value": f"{c.LINK_PREFIX}.0.value_match",
    "abandoned": c.ABANDONED,
}
"""Attributes that a row tells, by what it calls them; read out of the JSON where it lies."""
SPAN_COLUMNS: Final = (
    "trace_id", "span_id", "parent_span_id", "name", "kind", "start_ns", "end_ns", "status",
    "status_message", "scope", "process", "sequence", "end_sequence", "attributes",
)  # fmt: skip
"""What a span is made of without what was said in it, what happened in it, and its process."""
_SHORT: Final = 200
_AT_ONCE: Final = 2048
_NO_FACTS: Final[Mapping[str, str]] = MappingProxyType({})
_PLUMBING: Final = "|".join(key.replace(".", r"\.") for key in c.PLUMBING_KEYS)
_COLUMNS: Final = f"""trace_id, span_id, parent_span_id, left(name, {_SHORT}) AS name, start_ns,
  end_ns, status, left(status_message, {_SHORT}) AS status_message, operation, agent, model,
  response_id, input_tokens, output_tokens, {ROLLOUT} AS rollout_id, reward, process, sequence,
  end_sequence,
  operation IS NULL AND reward IS NULL
    AND regexp_matches(attributes::VARCHAR, {quoted(f'"({_PLUMBING})":')}) AS is_plumbing,
  [left(fact, {_SHORT}) for fact in json_extract_string(attributes,
    [{", ".join(quoted(f'$."{key}"') for key in FACTS.values())}])] AS facts"""
_GIVEN: Final = "reward IS NOT NULL AND operation IS NULL AND start_ns >= ?"
"""Rewards that are nothing else, from a time on."""
_MAY_LINK: Final = f"SELECT 1 FROM narrow WHERE {_GIVEN} AND {KIND} <> {REWARD} LIMIT 1"
_LATER: Final = f"""
SELECT trace_id, span_id, start_ns FROM narrow WHERE {_GIVEN} AND trace_id <> ?
  AND {ROLLOUT} IN (SELECT {ROLLOUT} FROM narrow WHERE trace_id = ?)"""
_LINKED: Final = f"""
SELECT trace_id, span_id, start_ns FROM spans WHERE {_GIVEN} AND trace_id <> ?
  AND contains(attributes::VARCHAR, {quoted(c.LINK_PREFIX)})
  AND {attribute(f"{c.LINK_PREFIX}.0.value_match")} IN (SELECT unnest(?))"""


_TRACES: Final = f"""
SELECT DISTINCT trace_id FROM narrow
WHERE {ROLLOUT} IN (SELECT unnest(?::VARCHAR[])) AND start_ns >= ?"""
_SIZE: Final = """
SELECT count(*), coalesce(sum(coalesce(strlen(input_messages), 0)
  + coalesce(strlen(output_messages), 0) + strlen(attributes::VARCHAR)), 0)::BIGINT
FROM spans WHERE trace_id = ?"""


class SpanRow(NamedTuple):
    """A span without its content: columns of ``spans``, texts cut short.

    Attributes:
        is_plumbing: Whether it is a request or query of another instrumentor.
        facts: Those of ``FACTS`` that it has; shared by rows, and not to be changed.
    """

    trace_id: str
    span_id: str
    parent_span_id: str | None
    name: str
    start_ns: int
    end_ns: int | None
    status: str
    status_message: str | None
    operation: str | None
    agent: str | None
    model: str | None
    response_id: str | None
    input_tokens: int | None
    output_tokens: int | None
    rollout_id: str
    reward: float | None
    process: str | None
    sequence: int
    end_sequence: int
    is_plumbing: bool
    facts: Mapping[str, str]


class TraceRows(NamedTuple):
    """The rows of a trace."""

    own: list[SpanRow]
    later: list[SpanRow]


def trace_rows(source: SpanSource, trace_id: str) -> TraceRows:
    """The rows of a trace; none where there is no such trace."""
    con = source.connect(("spans", NARROW), (*NARROW_COLUMNS, "attributes"))

    def ask() -> TraceRows:
        own = _read_rows(con, f"trace_id = {quoted(trace_id)}")
        return TraceRows(own, _read_later(con, trace_id, own) if own else [])

    return con.answered(ask)


class Size(NamedTuple):
    """The size of a trace: its spans, and the bytes of its messages."""

    spans: int
    bytes: int


def size_of(source: SpanSource, trace_id: str) -> Size:
    """Measure a trace."""
    con = source.connect(("spans",))

    return Size(*(con.execute(_SIZE, [trace_id]).fetchone() or (0, 0)))


def spans_around(
    source: SpanSource, trace_id: str, columns: Collection[str] = tuple(COLUMNS)
) -> list[Span]:
    """Return the spans of a trace's rollouts, with the rewards given to them elsewhere."""
    rows = trace_rows(source, trace_id)
    rollouts = {row.rollout_id for row in rows.own}
    names = {(row.trace_id, row.span_id) for row in rows.later}
    con = source.connect(("spans", NARROW), (*NARROW_COLUMNS, "attributes"))
    low = min((row.start_ns for row in rows.own), default=0)
    # A rollout may have begun in an earlier trace; what is long past is none of it.
    found = con.execute(_TRACES, [sorted(rollouts), low - SAME_SPAN_NS]).fetchall()
    traces = dict.fromkeys([trace_id, *(name for (name,) in found)])
    traces |= dict.fromkeys(trace for trace, _ in names)
    selection = Selection(trace_ids=list(traces), is_ordered=True, columns=columns)
    spans = map(span_of, source.fetch(selection).dicts())
    return [
        span
        for span in spans
        if span.trace_id == trace_id
        or span.rollout_id in rollouts
        or (span.trace_id, span.span_id) in names
    ]


def may_link(con: "duckdb.DuckDBPyConnection", since_ns: int = 0) -> bool:
    """Tell whether some reward may be linked to what it judges, from its narrow columns."""
    return bool(con.execute(_MAY_LINK, [since_ns]).fetchall())


def _read_later(
    con: "duckdb.DuckDBPyConnection", trace_id: str, own: list[SpanRow]
) -> list[SpanRow]:
    low = min(row.start_ns for row in own)
    found = con.execute(_LATER, [low, trace_id, trace_id]).fetchall()
    if may_link(con, low):
        ids = [name for row in own for name in (row.span_id, row.response_id) if name]
        found += con.execute(_LINKED, [low, trace_id, ids]).fetchall()
    if not found:
        return []
    names = ", ".join(f"({quoted(trace)}, {quoted(span)})" for trace, span, _ in found)
    times = [start_ns for _, _, start_ns in found]
    where = f"start_ns BETWEEN {min(times)} AND {max(times)} AND (trace_id, span_id) IN ({names})"
    return _read_rows(con, where)


def _read_rows(con: "duckdb.DuckDBPyConnection", where: str) -> list[SpanRow]:
    cursor = con.execute(f"SELECT {_COLUMNS} FROM spans WHERE {where} ORDER BY start_ns")
    found: list[SpanRow] = []
    # DuckDB makes an object of every value; most of them say what another row said already.
    known: dict[Any, Any] = {}
    while some := cursor.fetchmany(_AT_ONCE):
        found += (_make_row(values, known) for values in some)
    return found


def _make_row(values: Sequence[Any], known: dict[Any, Any]) -> SpanRow:
    """A row whose texts and facts are those of ``known`` where they are equal."""
    *columns, given = values
    facts = tuple(given or ())
    told = known.get(facts)
    if told is None:
        pairs = zip(FACTS, facts, strict=False)
        told = {name: value for name, value in pairs if value is not None} or _NO_FACTS
        known[facts] = told
    shared = (known.setdefault(each, each) if type(each) is str else each for each in columns)
    return SpanRow._make((*shared, told))
