"""Answers from facts: transitions without bodies, and the funnel, without a look at spans.

Facts are what the adapter makes of whole rollouts with its defaults. Other options go through the
adapter.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import orjson

from lightning_otel.adapter import TripletAdapter
from lightning_otel.adapter.selection import Selection
from lightning_otel.adapter.tokens import CUTS
from lightning_otel.adapter.triplet import INCOMPLETE_ROLLOUT
from lightning_otel.dataset.batches import make_clauses
from lightning_otel.dataset.formats.transition_rows import BODIES, NARROW_COLUMNS, transition
from lightning_otel.store.reader import Reader
from lightning_otel.store.source import SpanSource, connect_overview
from lightning_otel.store.table import Query
from lightning_otel.types import Dropped, Repair, Report, Transition

if TYPE_CHECKING:
    from lightning_otel.dataset.query import TransitionQuery

_NO_BODIES: Final = dict.fromkeys(BODIES, ())
_JSON: Final = tuple(name for name, kind in NARROW_COLUMNS.items() if kind == "JSON")
_ORDER: Final = (
    "min(start_ns) OVER (PARTITION BY rollout_id), rollout_id, attempt_id, agent, branch, step, "
    "start_ns"
)
# A rollout may hold nothing but rewards that wait for what they judge.
_BEGUN: Final = """
SELECT rollout_id, start_ns FROM rollouts UNION ALL
SELECT rollout_id, start_ns FROM facts SEMI JOIN attempts USING (fingerprint)
WHERE kind = 'reward' AND is_waiting"""
_INCOMPLETE: Final = "SELECT rollout_id, attempt_id FROM attempts WHERE status = 'incomplete'"
_COUNTS: Final = {
    "calls": "reported_calls", "transitions": "steps", "exact": "exact", "rewards": "reward_spans",
    "rewards_placed": "rewards_placed", "rewarded": "rewarded",
}  # fmt: skip
"""Counts of a report, and the columns of an attempt that hold them."""
_WANTED: Final = f"""
CREATE OR REPLACE TEMP TABLE wanted AS
SELECT kind, rollout_id, trace_id, span_id, start_ns, name, reward, reason, reasons, notes,
  is_attempt, is_waiting, reported_spans, {", ".join(_COUNTS.values())},
  (rollout_id, attempt_id) IN ({_INCOMPLETE} AND NOT ?) AS is_out
FROM facts SEMI JOIN attempts USING (fingerprint)
WHERE (kind IN ('attempt', 'left_out', 'repair') OR kind IN ('call', 'reward')
  AND (is_out OR is_waiting)) AND {{where}}"""
_FUNNEL: Final = f"""
SELECT coalesce(sum(reported_spans), 0)::BIGINT + count(*) FILTER (is_waiting) AS spans,
  count(DISTINCT rollout_id) FILTER (is_attempt) AS rollouts,
  {
    ", ".join(
        f"coalesce(sum({column}) FILTER (NOT is_out), 0)::BIGINT AS {name}"
        for name, column in _COUNTS.items()
    )
}
FROM wanted"""
# Of an attempt that broke off every call and reward is left out.
_DROPPED: Final = """
SELECT span_id, trace_id, CASE kind WHEN 'left_out' THEN name ELSE kind END,
  CASE WHEN is_out AND is_waiting IS NOT true AND (kind = 'call' OR reward IS NOT NULL)
    THEN ? ELSE reason END,
  kind <> 'left_out'
FROM wanted
WHERE kind = 'left_out' AND NOT is_out
  OR kind IN ('call', 'reward') AND (is_out OR coalesce(is_waiting, false))
ORDER BY start_ns, span_id"""
_REPAIRS: Final = "SELECT span_id, trace_id, name FROM wanted WHERE kind = 'repair' ORDER BY ALL"
_NOTES: Final = """
SELECT reasons::VARCHAR, notes::VARCHAR, count(*) FROM wanted
WHERE kind = 'attempt' AND is_attempt AND NOT is_out GROUP BY ALL"""


def can_answer(query: "TransitionQuery") -> bool:
    """Return whether facts hold what an adapter makes of the spans that count."""
    usual, adapter = TripletAdapter(), query.adapter
    is_usual = isinstance(adapter, TripletAdapter) and replace(adapter, gamma=usual.gamma) == usual
    return is_usual and query.wanted.received


class FactReader:
    """Reads what facts answer to a query, on one connection for all questions."""

    def __init__(self, source: SpanSource, query: "TransitionQuery") -> None:
        """Take a query that facts can answer."""
        self._source, self._query = source, query
        self._con: Reader | None = None

    def _connect(self) -> Reader:
        """Return the connection, with views of the store as it is now."""
        if self._con is None:
            self._con = connect_overview(self._source)
        else:
            self._con.refresh()
        return self._con

    def query_steps(self, *more: str) -> Query:
        """Return the transitions as rows without bodies, with more columns of ``steps``."""
        con, query = self._connect(), self._query
        where, values = _choose_rollouts(con, query.wanted)
        terms = [where]
        if not query.include_incomplete:
            terms.append(f"(rollout_id, attempt_id) NOT IN ({_INCOMPLETE})")
        for term, value in _choose_steps(con, query.wanted).items():
            terms.append(term)
            values += value
        columns = ", ".join([*NARROW_COLUMNS, *more])
        conditions = " AND ".join(terms)
        return Query(
            con, f"SELECT {columns} FROM steps WHERE {conditions} ORDER BY {_ORDER}", values
        )

    def read_steps(self) -> Iterator[Transition]:
        """Yield the transitions without bodies."""
        for row in self.query_steps("has_next").dicts():
            following = () if row.pop("has_next") else None
            yield transition({**_NO_BODIES, **row, "next_observation": following})

    def read_records(self) -> Iterator[dict[str, Any]]:
        """Yield the transitions as JSON values by column."""
        for row in self.query_steps().dicts():
            for name in _JSON:
                row[name] = orjson.loads(row[name]) if row[name] is not None else None
            yield row

    def count_steps(self) -> Iterator[int]:
        """Yield the number of transitions."""
        yield self.query_steps().count()

    def read_report(self) -> Report:
        """Return the funnel of the rollouts that the query looks at."""
        con = self._connect()
        where, values = _choose_rollouts(con, self._query.wanted)
        return con.run(lambda: _count_wanted(con, where, [self._query.include_incomplete, *values]))


def _count_wanted(con: Reader, where: str, values: list[Any]) -> Report:
    con.execute(_WANTED.format(where=where), values)
    cursor = con.execute(_FUNNEL)
    names = [column[0] for column in cursor.description or ()]
    counts = dict(zip(names, cursor.fetchall()[0], strict=True))
    dropped = con.execute(_DROPPED, [INCOMPLETE_ROLLOUT]).fetchall()
    inexact, notes = Counter[str](), Counter[str]()
    for *texts, number in con.execute(_NOTES).fetchall():
        for total, text in zip((inexact, notes), texts, strict=True):
            for name, count in orjson.loads(text or "{}").items():
                total[name] += count * number
    for noun in ("call", "reward"):
        counts[f"{noun}s"] += sum(is_apart and other == noun for *_, other, _, is_apart in dropped)
    return Report(
        **counts,
        dropped=tuple(Dropped(*row[:4]) for row in dropped),
        repairs=tuple(Repair(*row) for row in con.execute(_REPAIRS).fetchall()),
        inexact=dict(inexact.most_common()),
        notes=dict(notes.most_common()),
    )


def _choose_rollouts(con: Reader, selection: Selection) -> tuple[str, list[Any]]:
    """Return a condition on ``rollout_id``, and its values."""
    where, having, values = make_clauses(con, selection, "rollout_id")
    if not values:
        return "true", []
    chosen = f"SELECT rollout_id FROM ({_BEGUN}) WHERE {where} GROUP BY 1 HAVING {having}"
    return f"rollout_id IN ({chosen})", values


def _choose_steps(con: Reader, selection: Selection) -> Mapping[str, list[Any]]:
    """Return conditions on steps, each with its values."""
    terms: dict[str, list[Any]] = {}
    if selection.agents:
        names = con.execute("SELECT DISTINCT agent FROM steps").fetchall()
        chosen = [name for (name,) in names if selection.wants_agent(name)]
        terms["agent IN (SELECT unnest(?::VARCHAR[]))"] = [chosen]
    if selection.resource_version is not None:
        stamp = "coalesce(resource_version, ''), resources::VARCHAR"
        stamps = con.execute(f"SELECT DISTINCT {stamp} FROM steps").fetchall()
        versions = [
            (version, text)
            for version, text in stamps
            if selection.wants_version(version, orjson.loads(text or "{}"))
        ]
        columns = [[row[place] for row in versions] for place in (0, 1)]
        terms[f"({stamp}) IN (SELECT unnest(?::VARCHAR[]), unnest(?::VARCHAR[]))"] = columns
    for term, value in {
        "mode = ?": selection.mode,
        "(reward IS NOT NULL) = ?": selection.rewarded,
        "reward >= ?": selection.min_reward,
        "reward <= ?": selection.max_reward,
        "capture = ?": selection.capture,
    }.items():
        if value is not None:
            terms[term] = [value]
    if not selection.truncated:
        terms["coalesce(finish_reason, '') NOT IN (SELECT unnest(?::VARCHAR[]))"] = [[*CUTS]]
    return terms
