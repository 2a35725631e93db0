"""The list of traces: which match, how many they are, and one page of them, newest first.

Each look reads no more than it needs: narrow columns of all spans say which traces match, those of
a page's spans what is told of each, and of two spans a trace what was asked. A reward given later
stands in a trace of its own, which to a person is none.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

from lightning_otel.store.attempt_rewards import LAST_REWARD
from lightning_otel.store.digest import KIND, RECEIVED, REWARD
from lightning_otel.store.live import list_live_processes
from lightning_otel.store.reader import Reader
from lightning_otel.store.schema import NARROW_COLUMNS
from lightning_otel.store.source import INDEX_COLUMNS, SpanSource
from lightning_otel.store.sql import ROLLOUT, attribute_sql, quote_text
from lightning_otel.store.views import (
    DUPLICATE_CALLS,
    IS_ANNOTATION,
    NARROW,
    ROLLOUTS,
    alive_macro_sql,
)
from lightning_otel.types import conventions as c
from lightning_otel.views.previews import (
    ANSWERS_OF,
    WORDS_OF,
    answer_words,
    choose_words,
    json_needle,
)

if TYPE_CHECKING:
    import duckdb

_GENERATIVE: Final = ", ".join(map(quote_text, sorted(c.GENERATIVE_OPERATIONS)))
_CHUNK: Final = 4_000
"""Traces whose texts are looked through at once."""
_MEMORY: Final = "512MB"
"""Of DuckDB's, before it spills to the disk."""
_SEARCH_S: Final = 2.0
"""How long texts are looked through before what was found so far is told."""
REWARDS_SINCE: Final = "reward IS NOT NULL AND operation IS NULL AND start_ns >= ?"
"""Rewards that are nothing else, from a time on."""

Status: TypeAlias = Literal["ended", "failed", "running", "incomplete"]
STATUSES: Final[tuple[Status, ...]] = ("ended", "failed", "running", "incomplete")


@dataclass(frozen=True, slots=True)
class TraceFilter:
    """A filter of traces; by default it holds all.

    Attributes:
        agent: Name or glob of an agent that acts in it, as of a model.
        rewarded: Its rollout has a reward.
        resource_version: Name or glob of a version that acted in it; or ``name@version`` of one
            resource.
        received: Spans of it came over the network or were imported.
        text: Stands in a message, a task or another attribute; or begins its id.
    """

    agent: str | None = None
    model: str | None = None
    status: str | None = None
    rewarded: bool | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    has_error: bool | None = None
    since_ns: int | None = None
    until_ns: int | None = None
    resource_version: str | None = None
    received: bool | None = None
    text: str = ""

    @property
    def is_about_rewards(self) -> bool:
        """True if it depends on a reward."""
        return (self.rewarded, self.min_reward, self.max_reward) != (None, None, None)


class Cursor(NamedTuple):
    """The last trace of a page: the next one begins after it."""

    start_ns: int
    trace_id: str


@dataclass(frozen=True, slots=True)
class TraceRow:
    """A trace in a list.

    Attributes:
        end_ns: The end of its last span, as far as they ended.
        status: ``failed`` if a root of it did, ``running`` or ``incomplete`` if it did not end.
        calls: Requests for an answer of a model, each counted once however many tracers told of it.
        reward: That of its rollout; None if there is none.
        words: The first words of its task, or of what a user asked.
        answer: The first words of its last answer.
    """

    trace_id: str
    rollout_id: str
    start_ns: int
    end_ns: int
    status: Status
    agents: tuple[str, ...]
    models: tuple[str, ...]
    spans: int
    errors: int
    calls: int
    tools: int
    input_tokens: int | None
    output_tokens: int | None
    reward: float | None
    words: str
    answer: str


@dataclass(frozen=True, slots=True)
class TracePage:
    """A page of the list.

    Attributes:
        rows: Newest first.
        total: How many match in all; of a search that was not finished how many were found.
        following: Where the next page begins; None on the last one.
        searched_ns: Down to which start texts were looked through, if that is not all; Unix
            nanoseconds.
    """

    rows: list[TraceRow]
    total: int
    following: Cursor | None = None
    searched_ns: int | None = None


def may_link(con: "duckdb.DuckDBPyConnection", since_ns: int = 0) -> bool:
    """Tell whether some reward or retraction may be linked, from its narrow columns."""
    where = f"{IS_ANNOTATION} AND start_ns >= ? AND {KIND} <> {REWARD}"
    look = f"SELECT 1 FROM narrow WHERE {where} LIMIT 1"
    return bool(con.execute(look, [since_ns]).fetchall())


def find_traces(
    source: SpanSource,
    wanted: TraceFilter | None = None,
    *,
    after: Cursor | None = None,
    limit: int = 50,
) -> TracePage:
    """One page of the traces that match."""
    wanted = wanted or TraceFilter()
    views = ("spans", NARROW, *(("rollouts",) if wanted.is_about_rewards else ()))
    is_about_bodies = wanted.text or wanted.resource_version or wanted.received is not None
    is_wide = is_about_bodies or source.layout is not None
    con = source.connect(views, None if is_wide else INDEX_COLUMNS)
    alive = list_live_processes(source.layout) if source.layout is not None else ()
    con.execute(f"SET memory_limit = '{_MEMORY}'")
    return con.run(lambda: _find_page(con, wanted, alive, after, limit))


def _find_page(
    con: Reader, wanted: TraceFilter, alive: Sequence[str], after: Cursor | None, limit: int
) -> TracePage:
    query, values = _match_narrow(wanted, alive)
    con.execute(f"CREATE OR REPLACE TEMP TABLE found AS {query}", values)
    searched_ns = _search_text(con, wanted.text, after, limit) if wanted.text else None
    (total,) = con.execute("SELECT count(*) FROM found").fetchone() or (0,)
    where = "" if after is None else "WHERE (start_ns, trace_id) < (?, ?)"
    rows = con.execute(
        f"SELECT trace_id, start_ns, last_ns FROM found {where} "
        f"ORDER BY start_ns DESC, trace_id DESC LIMIT {int(limit) + 1}",
        [] if after is None else list(after),
    ).fetchall()
    shown = rows[:limit]
    last = Cursor(shown[-1][1], shown[-1][0]) if len(rows) > limit else None
    if last is None and searched_ns is not None:
        last = Cursor(searched_ns, "")
    return TracePage(_read_rows(con, shown, alive), total, last, searched_ns)


def _match_narrow(wanted: TraceFilter, alive: Sequence[str]) -> tuple[str, list[Any]]:
    """The query for all traces that match by their narrow columns, and its parameters."""
    having = [f"count(*) FILTER (name <> {quote_text(c.SPAN_ANNOTATION)}) > 0"]
    where: list[str] = ["true"]
    values: list[Any] = []
    for column, pattern in (("agent", wanted.agent), ("model", wanted.model)):
        if pattern is not None:
            having.append(f"bool_or({column} = ? OR {column} GLOB ?)")
            values += [pattern, pattern]
    if wanted.has_error is not None:
        having.append(f"bool_or(status = 'ERROR') = {wanted.has_error}")
    if wanted.status is not None:
        having.append(f"{_status_sql(alive)} = {quote_text(wanted.status)}")
    for sign, time_ns in ((">=", wanted.since_ns), ("<", wanted.until_ns)):
        if time_ns is not None:
            having.append(f"min(start_ns) {sign} ?")
            values.append(time_ns)
    inner: list[Any] = []
    if wanted.received is not None:
        having.append(f"bool_or(gist_kind & {RECEIVED} > 0) = {wanted.received}")
    if wanted.resource_version is not None:
        condition, inner = _version_condition(wanted.resource_version)
        where.append(f"trace_id IN (SELECT trace_id FROM spans WHERE {condition})")
    matching = f"FROM narrow WHERE {' AND '.join(where)} GROUP BY 1 HAVING {' AND '.join(having)}"
    found = "SELECT trace_id, min(start_ns) AS start_ns, max(start_ns) AS last_ns"
    if not wanted.is_about_rewards:
        return f"{found} {matching}", [*inner, *values]
    terms, more = ["true"], list[float]()
    if wanted.rewarded is not None:
        terms.append(f"(reward IS NOT NULL) = {wanted.rewarded}")
    for sign, bound in ((">=", wanted.min_reward), ("<=", wanted.max_reward)):
        if bound is not None:
            terms.append(f"reward {sign} ?")
            more.append(bound)
    return (
        f"SELECT trace_id, start_ns, last_ns FROM "
        f"({found}, any_value({ROLLOUT}) AS rollout_id {matching}) LEFT JOIN "
        f"(SELECT rollout_id, {LAST_REWARD} AS reward FROM rollouts GROUP BY 1) "
        f"USING (rollout_id) WHERE {' AND '.join(terms)}",
        [*inner, *values, *more],
    )


def _version_condition(version: str) -> tuple[str, list[Any]]:
    """The condition for spans of a resource's version, which only attributes tell."""
    name, at, number = version.partition("@")
    own = attribute_sql(c.RESOURCE_VERSION)
    condition, values = f"{own} = ? OR {own} GLOB ?", [version, version]
    if at:
        # The object says of agents which version of each resource: {"*": {"prompt": "v3"}}.
        condition += f" OR contains(replace({attribute_sql(c.RESOURCES)}, ' ', ''), ?)"
        values.append(json.dumps({name: number}, separators=(",", ":"))[1:-1])
    return f"contains(attributes::VARCHAR, 'lightning.resource') AND ({condition})", values


def _status_sql(alive: Sequence[str]) -> str:
    lives = f"process IN ({', '.join(map(quote_text, alive))})" if alive else "false"
    is_root, is_open = "parent_span_id IS NULL AND reward IS NULL", "end_ns IS NULL"
    return f"""CASE WHEN bool_or({is_root} AND status = 'ERROR') THEN 'failed'
    WHEN NOT bool_or({is_open}) OR (bool_or({is_root} AND NOT {is_open})
      AND NOT bool_or({is_root} AND {is_open})) THEN 'ended'
    WHEN bool_or({is_open} AND {lives}) THEN 'running' ELSE 'incomplete' END"""


def _search_text(con: Reader, text: str, after: Cursor | None, limit: int) -> int | None:
    """Keep of ``found`` what has a text in it, a chunk at a time until a page is full.

    Return the start of the oldest trace looked at, if some were not.
    """
    con.execute("ALTER TABLE found RENAME TO candidates")
    con.execute("CREATE OR REPLACE TEMP TABLE found AS FROM candidates LIMIT 0")
    until = (1 << 62, "") if after is None else tuple(after)
    began, needle = time.monotonic(), json_needle(text)
    while True:
        con.execute(
            "CREATE OR REPLACE TEMP TABLE chunk AS FROM candidates "
            "WHERE (start_ns, trace_id) < (?, ?) "
            f"ORDER BY start_ns DESC, trace_id DESC LIMIT {_CHUNK}",
            list(until),
        )
        low, high, last = con.execute(
            "SELECT min(start_ns), max(last_ns), arg_min(trace_id, (start_ns, trace_id)) FROM chunk"
        ).fetchone() or (None, None, None)
        if low is None:
            return None
        con.execute(f"INSERT INTO found {_HOLDING}", [low, high, *[needle] * 4, text.lower()])
        until = (low, last)
        (count,) = con.execute("SELECT count(*) FROM found").fetchone() or (0,)
        if count > limit or time.monotonic() - began > _SEARCH_S:
            more = con.execute(
                "SELECT 1 FROM candidates WHERE (start_ns, trace_id) < (?, ?) LIMIT 1",
                list(until),
            ).fetchall()
            return low if more else None


def _read_rows(
    con: Reader, found: Sequence[tuple[str, int, int]], alive: Sequence[str]
) -> list[TraceRow]:
    if not found:
        return []
    names = [row[0] for row in found]
    low, high = min(row[1] for row in found), max(row[2] for row in found)
    con.execute(
        f"CREATE OR REPLACE TEMP TABLE page AS FROM narrow "
        f"WHERE trace_id IN ({', '.join(map(quote_text, names))}) AND start_ns BETWEEN ? AND ?",
        [low, high],
    )
    cursor = con.execute(_word_status(alive))
    keys = [column[0] for column in cursor.description or ()]
    told = {row[0]: dict(zip(keys, row, strict=True)) for row in cursor.fetchall()}
    # The reward of a rollout is told by all of its spans, not by those of the page alone.
    con.execute(_NEAR_PAGE.format(linked=_LINKED if may_link(con) else ""))
    con.execute(alive_macro_sql(alive))
    rewards = dict(con.execute(_EARNED).fetchall())
    words = choose_words(_read_texts(con, _FIRST, WORDS_OF, low, high))
    answers = dict(_read_texts(con, _LAST, ANSWERS_OF, low, high))
    for name, row in told.items():
        row |= {key: tuple(row[key] or ()) for key in ("agents", "models")}
        row |= {"words": words.get(name, ""), "answer": answer_words(answers.get(name))}
        row |= {"reward": rewards.get(row["rollout_id"])}
    return [TraceRow(**told[name]) for name in names if name in told]


def _read_texts(con: Reader, choose: str, texts: str, low: int, high: int) -> list[tuple[Any, ...]]:
    """Read texts of a few spans of each trace of the page."""
    names = con.execute(choose).fetchall()
    if not names:
        return []
    traces, spans = (", ".join(map(quote_text, ids)) for ids in zip(*names, strict=True))
    return con.execute(texts.format(traces=traces, ids=spans), [low, high]).fetchall()


_HOLDING: Final = """
SELECT * FROM chunk WHERE trace_id IN (
  SELECT trace_id FROM spans WHERE start_ns BETWEEN ? AND ? AND (
    contains(lower(input_messages), ?) OR contains(lower(output_messages), ?)
    OR contains(lower(attributes::VARCHAR), ?) OR contains(lower(system_instructions), ?)
  )) OR starts_with(trace_id, ?)"""

_FIRST: Final = f"""
SELECT trace_id, arg_min(span_id, (start_ns, sequence)) FROM page
WHERE operation IN ({_GENERATIVE}) GROUP BY trace_id
UNION ALL
SELECT trace_id, span_id FROM page WHERE name = {quote_text(c.SPAN_ROLLOUT)}"""

_LAST: Final = f"""
SELECT trace_id, arg_max(span_id, (start_ns, sequence)) FROM page
WHERE operation IN ({_GENERATIVE}) GROUP BY trace_id"""

_NEAR_PAGE: Final = f"""
CREATE OR REPLACE TEMP TABLE beside AS
SELECT {", ".join((*NARROW_COLUMNS, "attributes"))} FROM spans
WHERE {ROLLOUT} IN (SELECT {ROLLOUT} FROM page) {{linked}}"""

_LINKED: Final = f"""
OR ({IS_ANNOTATION} AND contains(attributes::VARCHAR, {quote_text(c.LINK_PREFIX)}))"""

_EARNED: Final = f"""
WITH spans AS (FROM beside)
SELECT rollout_id, {LAST_REWARD} FROM ({ROLLOUTS}) GROUP BY 1"""


def _word_status(alive: Sequence[str]) -> str:
    is_call = f"operation IN ({_GENERATIVE}) AND is_repeated IS NULL"
    return f"""
WITH spans AS (FROM page), {DUPLICATE_CALLS}
SELECT trace_id, any_value({ROLLOUT}) AS rollout_id, min(start_ns) AS start_ns,
  max(coalesce(end_ns, start_ns)) AS end_ns, {_status_sql(alive)} AS status,
  list_sort(list(DISTINCT agent) FILTER (agent <> '')) AS agents,
  list_sort(list(DISTINCT model) FILTER (model <> '')) AS models,
  count(*) AS spans, count(*) FILTER (status = 'ERROR') AS errors,
  count(*) FILTER ({is_call}) AS calls,
  count(*) FILTER (operation = {quote_text(c.EXECUTE_TOOL)}) AS tools,
  sum(input_tokens) FILTER ({is_call})::BIGINT AS input_tokens,
  sum(output_tokens) FILTER ({is_call})::BIGINT AS output_tokens
FROM page LEFT JOIN (SELECT *, true AS is_repeated FROM repeated) USING (trace_id, span_id)
GROUP BY trace_id"""
