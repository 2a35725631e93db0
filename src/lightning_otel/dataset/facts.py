"""Answers from facts: transitions without bodies, and the funnel, without a look at spans.

Facts are what the adapter makes of whole rollouts by a named credit. Composed rewards and
advantages follow from them; other options go through the adapter.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Final, cast

import orjson

from lightning_otel.adapter import Composition, TripletAdapter
from lightning_otel.adapter.advantages import NO_REWARD, AttemptOutcome, compose_rewards
from lightning_otel.adapter.attempts import AttemptKey
from lightning_otel.adapter.rewards import SEVERAL
from lightning_otel.adapter.selection import StepSelection
from lightning_otel.adapter.tokens import CUTS
from lightning_otel.adapter.triplet import INCOMPLETE_ROLLOUT
from lightning_otel.store.facts import USUAL, CreditOptions
from lightning_otel.store.reader import Reader
from lightning_otel.store.selection import make_clauses
from lightning_otel.store.source import SpanSource
from lightning_otel.store.table import Query
from lightning_otel.types import Dropped, Repair, Report, Transition
from lightning_otel.types.transitions import STEP_COLUMNS, TRANSITION_BODIES, fast_constructor

if TYPE_CHECKING:
    from lightning_otel.dataset.query import TransitionQuery

_NO_BODIES: Final = dict.fromkeys(TRANSITION_BODIES, ())
_FIELDS: Final = tuple(field.name for field in fields(Transition))
_make_step: Final = fast_constructor(Transition)
_JSON: Final = tuple(name for name, kind in STEP_COLUMNS.items() if kind == "JSON")
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
SELECT kind, rollout_id, attempt_id, group_id, trace_id, span_id, start_ns, name, reward, rewards,
  reason, reasons, notes, is_attempt, is_waiting, reported_spans, {", ".join(_COUNTS.values())},
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
_OUTCOMES: Final = """
SELECT rollout_id, attempt_id, coalesce(group_id, ''), start_ns, steps > 0 AND NOT is_out,
  CASE WHEN is_out THEN '{}' ELSE rewards::VARCHAR END, CASE WHEN NOT is_out THEN reward END
FROM wanted WHERE kind = 'attempt' AND is_attempt"""
_COMPOSED: Final = """
CREATE OR REPLACE TABLE reading.composed AS
SELECT unnest(?::VARCHAR[]) AS rewards, unnest(?::DOUBLE[]) AS value, unnest(?::VARCHAR[]) AS reason
"""
_ESTIMATES: Final = """
CREATE OR REPLACE TABLE reading.estimates AS
SELECT unnest(?::VARCHAR[]) AS rollout_id, unnest(?::VARCHAR[]) AS attempt_id,
  unnest(?::VARCHAR[]) AS group_id, unnest(?::DOUBLE[]) AS advantage, unnest(?::VARCHAR[]) AS reason
"""
_REVISED: Final = """
CREATE OR REPLACE VIEW reading.revised AS
SELECT steps.* REPLACE ({columns}), composed.reason AS composition, estimates.reason AS comparison
FROM steps LEFT JOIN reading.composed ON steps.rewards::VARCHAR = composed.rewards
LEFT JOIN reading.estimates ON (steps.rollout_id, steps.attempt_id)
  = (estimates.rollout_id, estimates.attempt_id)"""
_COMPOSED_COLUMNS: Final = "composed.value AS reward"
_COMPARED_COLUMNS: Final = """
estimates.group_id AS group_id, estimates.advantage AS advantage,
1 / count(*) OVER (PARTITION BY steps.rollout_id, steps.attempt_id, steps.agent) AS weight"""
_COUNTED: Final = """
FROM reading.revised SEMI JOIN (FROM wanted WHERE kind = 'attempt' AND NOT is_out)
USING (rollout_id, attempt_id)"""
# Of an attempt its first step says why it has no advantage.
_LOST: Final = f"""
SELECT span_id, trace_id, 'composition', composition {_COUNTED} WHERE composition <> ''
UNION ALL
SELECT span_id, trace_id, 'advantage', comparison
FROM (
  SELECT *, min(start_ns) OVER (PARTITION BY rollout_id, attempt_id, agent) AS first_ns {_COUNTED}
  WHERE comparison <> '')
QUALIFY row_number() OVER (
  PARTITION BY rollout_id, attempt_id ORDER BY first_ns, agent, branch, step) = 1"""


def can_answer(query: "TransitionQuery") -> bool:
    """Return whether facts hold what an adapter makes of the spans that count."""
    credit, wanted = _credit_of(query.adapter), query.wanted
    # A few rollouts are adapted sooner than another credit's facts of all are made.
    is_cheap = credit == USUAL or wanted.rollout_ids is None
    return credit is not None and wanted.received and wanted.as_of_ns is None and is_cheap


def _credit_of(adapter: object) -> CreditOptions | None:
    """Return how an adapter gives credit; None if it does what facts do not hold."""
    usual = TripletAdapter()
    if not isinstance(adapter, TripletAdapter) or not isinstance(adapter.credit, str):
        return None
    how, is_discounted = adapter.comparison(), adapter.credit == "discounted"
    is_data = isinstance(adapter.compose, Composition) and not is_discounted
    plain = replace(
        adapter, credit=usual.credit, gamma=usual.gamma, reward=None, advantage=None,
        compose=usual.compose if is_data else adapter.compose,
    )  # fmt: skip
    if plain != usual or (how is not None and how.group_by is not None):
        return None
    return CreditOptions(adapter.credit, adapter.gamma if is_discounted else usual.gamma)


class FactReader:
    """Reads what facts answer to a query, on one connection for all questions."""

    def __init__(self, source: SpanSource, query: "TransitionQuery") -> None:
        """Take a query that facts can answer."""
        self._source = source.with_credit(_credit_of(query.adapter) or USUAL)
        self._query, self._adapter = query, cast(TripletAdapter, query.adapter)
        self._is_composed = self._adapter.compose is not TripletAdapter().compose
        self._is_revised = self._is_composed or self._adapter.advantage is not None
        self._con: Reader | None = None

    def _connect(self) -> Reader:
        if self._con is None:
            self._con = self._source.connect_overview()
        else:
            self._con.refresh()
        if self._is_revised:
            self._revise_steps(self._con)
        return self._con

    def _revise_steps(self, con: Reader) -> None:
        adapter, columns = self._adapter, list[str]()
        results: dict[str, tuple[float | None, str]] = {}
        if self._is_composed:
            texts = con.execute("SELECT DISTINCT rewards::VARCHAR FROM steps").fetchall()
            for text in {text for (text,) in texts} - {None, "{}"}:
                results[text] = compose_rewards(adapter.compose, orjson.loads(text))
            columns.append(_COMPOSED_COLUMNS)
        estimates = []
        if adapter.advantage is not None:
            con.execute(_WANTED.format(where="true"), [self._query.include_incomplete])
            by_key = adapter.estimate(map(self._read_outcome, con.execute(_OUTCOMES).fetchall()))
            estimates = [(*key, *estimate[:3]) for key, estimate in by_key.items()]
            columns.append(_COMPARED_COLUMNS)
        composed = [(text, *result) for text, result in results.items()]
        for statement, rows in ((_COMPOSED, composed), (_ESTIMATES, estimates)):
            places = range(statement.count("?"))
            con.execute(statement, [[row[place] for row in rows] for place in places])
        con.execute(_REVISED.format(columns=", ".join(columns)))

    def _read_outcome(self, row: tuple[Any, ...]) -> AttemptOutcome:
        rollout_id, attempt_id, group_id, start_ns, has_steps, text, value = row
        key, rewards, reason = AttemptKey(rollout_id, attempt_id), orjson.loads(text), ""
        if rewards and self._is_composed:
            value, reason = compose_rewards(self._adapter.compose, rewards)
        return AttemptOutcome(
            key, group_id, start_ns, rewards, value, reason or NO_REWARD, has_steps
        )

    def query_steps(self, *more: str) -> Query:
        """Return transitions as rows without bodies, with ``more`` columns."""
        con, query = self._connect(), self._query
        where, values = _choose_rollouts(con, query.wanted)
        terms = [where]
        if not query.include_incomplete:
            terms.append(f"(rollout_id, attempt_id) NOT IN ({_INCOMPLETE})")
        for term, value in _choose_steps(con, query.wanted).items():
            terms.append(term)
            values += value
        columns = ", ".join([*STEP_COLUMNS, *more])
        conditions, steps = " AND ".join(terms), "reading.revised" if self._is_revised else "steps"
        return Query(
            con, f"SELECT {columns} FROM {steps} WHERE {conditions} ORDER BY {_ORDER}", values
        )

    def read_steps(self) -> Iterator[Transition]:
        """Yield the transitions without bodies."""
        for row in self.read_records("has_next"):
            row |= {**_NO_BODIES, "next_observation": () if row["has_next"] else None}
            yield _make_step(*map(row.__getitem__, _FIELDS))

    def read_records(self, *more: str) -> Iterator[dict[str, Any]]:
        """Yield transitions as JSON values by column, with ``more`` columns."""
        for row in self.query_steps(*more).dicts():
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
        values = [self._query.include_incomplete, *values]
        return con.run(lambda: self._revise_report(con, _count_wanted(con, where, values)))

    def _revise_report(self, con: Reader, report: Report) -> Report:
        if not self._is_revised:
            return report
        ((rewarded,),) = con.execute(f"SELECT count(reward) {_COUNTED}").fetchall()
        lost = [Dropped(*row) for row in con.execute(_LOST).fetchall()]
        choice, notes = SEVERAL.partition("{")[0], report.notes
        if self._is_composed:
            notes = {note: count for note, count in notes.items() if not note.startswith(choice)}
        return replace(report, rewarded=rewarded, dropped=(*report.dropped, *lost), notes=notes)


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


def _choose_rollouts(con: Reader, selection: StepSelection) -> tuple[str, list[Any]]:
    where, having, values = make_clauses(con, selection, "rollout_id")
    if not values:
        return "true", []
    chosen = f"SELECT rollout_id FROM ({_BEGUN}) WHERE {where} GROUP BY 1 HAVING {having}"
    return f"rollout_id IN ({chosen})", values


def _choose_steps(con: Reader, selection: StepSelection) -> Mapping[str, list[Any]]:
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
