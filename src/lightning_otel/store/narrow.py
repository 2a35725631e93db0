"""Transitions without their bodies: narrow columns for the common attempt, the whole of any other.

DuckDB makes two numbers of each call's messages: what the conversation was before it, and what it
was after. Only these, and no text, come out of it. An attempt that they do not show to be straight
is read whole and adapted the general way, so that the transitions are the same ones either way.
"""

import contextlib
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import TYPE_CHECKING, Final, NamedTuple

from lightning_otel import conventions as c
from lightning_otel.adapter import Adaptation, quick, straight
from lightning_otel.adapter.attempts import AttemptKey
from lightning_otel.adapter.selection import Selection as Wanted
from lightning_otel.formats.format import distinct
from lightning_otel.store.asked import Asked
from lightning_otel.store.batches import BATCH_SPANS, clauses, complete, incomplete, with_moved
from lightning_otel.store.damage import answered
from lightning_otel.store.schema import span_of
from lightning_otel.store.source import Selection, SpanSource
from lightning_otel.store.sql import ROLLOUT, quoted
from lightning_otel.types import Report, Transition

if TYPE_CHECKING:
    import duckdb

ROWS: Final = 50_000
"""Spans whose narrow columns are in memory at once."""
_OTHER, _CALL, _REWARD, _ODD = straight.OTHER, straight.CALL, straight.REWARD, 3
_GENERATIVE: Final = ", ".join(quoted(name) for name in sorted(c.GENERATIVE_OPERATIONS))
_CALLS: Final = ", ".join(quoted(name) for name in sorted(c.CALL_OPERATIONS))
_MARKS: Final = ", ".join(quoted(name) for name in (c.SPAN_ACTION, c.SPAN_OBSERVATION))

# Messages as this package writes them. Whatever is written otherwise is not looked into here.
_GIVEN: Final = '[{"role":"'
_BETWEEN: Final = ',{"role":"'
_ANSWER: Final = 'assistant","parts":['
_FINISH: Final = '],"finish_reason":'


def _says(key: str) -> str:
    return f"contains(attributes::VARCHAR, {quoted(key)})"


_IS_CALL: Final = f"""(operation IN ({_GENERATIVE}) AND scope = {quoted(c.SCOPE)}
  AND name <> {quoted(c.SPAN_ROLLOUT)} AND status <> 'ERROR' AND response_id <> ''
  AND starts_with(input_messages, {quoted(_GIVEN)}) AND ends_with(input_messages, '}}]')
  AND starts_with(output_messages, {quoted(_GIVEN + _ANSWER + "{")})
  AND NOT contains(output_messages, {quoted(_BETWEEN)})
  AND json_valid(input_messages) AND json_valid(output_messages)
  AND NOT {_says(c.ABANDONED)} AND NOT {_says(c.CUT)} AND NOT {_says(c.REWARD_PREFIX + ".")})"""
_IS_REWARD: Final = f"""(reward IS NOT NULL AND operation IS NULL AND scope = {quoted(c.SCOPE)}
  AND name = {quoted(c.SPAN_ANNOTATION)} AND NOT {_says(c.LINK_PREFIX + ".")}
  AND NOT {_says('"lightning.reward.')})"""
_IS_OTHER: Final = f"""(coalesce(operation NOT IN ({_CALLS}), true) AND reward IS NULL
  AND name NOT IN ({_MARKS}) AND NOT {_says(c.REWARD_PREFIX + ".")}
  AND (scope = {quoted(c.SCOPE)} OR (operation IS NULL AND agent IS NULL)))"""

_PIECES: Final = f"string_split(left(input_messages, -1), {quoted(_BETWEEN)})"
_ANSWERED: Final = f"""CASE len(string_split(output_messages, {quoted(_FINISH)}))
    WHEN 1 THEN output_messages[{len(_GIVEN) + 1}:-2]
    WHEN 2 THEN
      split_part(output_messages, {quoted(_FINISH)}, 1)[{len(_GIVEN) + 1}:] || ']}}' END"""
_ROWS: Final = f"""
SELECT rollout, sequence, end_sequence, span_id, parent_span_id, trace_id, agent, kind, attributes,
  start_ns, end_ns,
  CASE WHEN kind = {_CALL} THEN hash(list_append(pieces, answer), instructions) END,
  CASE WHEN last > 0 THEN hash(pieces[1:last], instructions) END,
  otel_resource, prompt_token_ids, response_token_ids, response_logprobs
FROM (
  SELECT *, CASE
      -- A model's message that is not found where it should be, and letters that are escaped.
      WHEN contains(array_to_string(pieces[last + 1:], ' '), '"assistant"')
        OR contains(input_messages, '\\u006') OR contains(input_messages, '\\u007')
        OR (last > 0 AND last = len(pieces)) OR (answer IS NULL AND pieces IS NOT NULL)
      THEN {_ODD} ELSE found END AS kind
  FROM (
    SELECT *, coalesce(len(pieces) + 1 - list_position(list_reverse(list_transform(pieces,
        lambda piece: starts_with(piece, {quoted(_ANSWER)}))), true), 0) AS last
    FROM (
      SELECT rollout, sequence, end_sequence, span_id, parent_span_id, nullif(agent, '') AS agent,
        trace_id, found, input_messages, coalesce(system_instructions, '') AS instructions,
        CASE WHEN found IN ({_CALL}, {_REWARD}) THEN attributes::VARCHAR END AS attributes,
        CASE WHEN found IN ({_CALL}, {_REWARD}) THEN start_ns END AS start_ns,
        CASE WHEN found IN ({_CALL}, {_REWARD}) THEN end_ns END AS end_ns,
        CASE WHEN found = {_CALL} THEN {_PIECES} END AS pieces,
        CASE WHEN found = {_CALL} THEN {_ANSWERED} END AS answer,
        CASE WHEN found = {_CALL} THEN otel_resource::VARCHAR END AS otel_resource,
        CASE WHEN found = {_CALL} THEN prompt_token_ids END AS prompt_token_ids,
        CASE WHEN found = {_CALL} THEN response_token_ids END AS response_token_ids,
        CASE WHEN found = {_CALL} THEN response_logprobs END AS response_logprobs
      FROM (
        SELECT *, {ROLLOUT} AS rollout, CASE
          WHEN ? AND {_says(c.RECEIVED)} THEN {_ODD} WHEN {_IS_CALL} THEN {_CALL}
          WHEN {_IS_REWARD} THEN {_REWARD} WHEN {_IS_OTHER} THEN {_OTHER} ELSE {_ODD} END AS found
        FROM spans
        WHERE start_ns BETWEEN ? AND ? AND {ROLLOUT} IN
          (SELECT rollout FROM plan WHERE batch = ? AND is_sound)
      )
    )
  )
)"""

_PLAN: Final = f"""
CREATE OR REPLACE TABLE plan AS
SELECT *, (sum(spans) OVER (ORDER BY low, rollout) - 1) // {ROWS} AS batch FROM (
  SELECT {ROLLOUT} AS rollout, count(*) AS spans, min(start_ns) AS low, max(start_ns) AS high,
    min(coalesce(nullif(attempt_id, ''), '1')) AS attempt,
    count(*) > count(end_ns) AS is_open,
    min(trace_id) = max(trace_id) AND min(process) = max(process)
      AND min(coalesce(nullif(attempt_id, ''), '1')) = max(coalesce(nullif(attempt_id, ''), '1'))
      AND min(sequence) >= 0 AND min(end_sequence) >= 0 AND count(end_ns) = count(*)
      AND count(process) = count(*) AND count(end_sequence) = count(*) AS is_sound
  FROM spans ANTI JOIN moved USING (trace_id, span_id) WHERE {{where}} GROUP BY 1 HAVING {{having}}
)"""


class Step(NamedTuple):
    """A transition, and its branch."""

    transition: Transition
    branch: int


class Part(NamedTuple):
    """Some rollouts' transitions, and the funnel that led to them."""

    steps: list[Step]
    report: Report


def parts(source: SpanSource, asked: Asked) -> Iterator[Part]:
    """The transitions without their bodies, a group of rollouts at a time.

    Args:
        source: Where the spans are: files on this machine.
        asked: Which rollouts (of what else is wanted, the origin of spans is heeded), and the
            general way, for what is not straight.
    """
    adapter, wanted, include_incomplete = asked
    with _planned(source, wanted) as con:
        out: frozenset[tuple[str, str]] = frozenset()
        if not include_incomplete and con.execute("FROM plan WHERE is_open LIMIT 1").fetchall():
            out = incomplete(source)
        batches = con.execute(
            "SELECT batch, min(low), max(high) FROM plan GROUP BY 1 ORDER BY 1"
        ).fetchall()
        for batch, low, high in batches:
            done: set[str] = set()
            yield _straight(source, con, (low, high, batch), wanted, done)
            for selection in _others(con, batch, done):
                spans = map(span_of, source.fetch(complete(con, selection), con).dicts())
                found = adapter.explain(wanted.spans(spans), incomplete=out)
                yield part_of(found, bodies=False)


def part_of(found: Adaptation, *, bodies: bool) -> Part:
    """Each transition of an adaptation once, with its branch and with its bodies or without."""
    told = (lambda step: step) if bodies else without_bodies
    steps = [Step(told(step), path.branch) for step, path in distinct(found.trajectories)]
    return Part(steps, found.report)


def without_bodies(step: Transition) -> Transition:
    """The transition as narrow columns tell it; there is still a next observation if there was."""
    return replace(
        step,
        observation=(),
        action=(),
        next_observation=None if step.next_observation is None else (),
        tools=(),
        prompt_ids=(),
        response_ids=(),
        logprobs=(),
    )


@contextlib.contextmanager
def _planned(source: SpanSource, wanted: Wanted) -> Iterator["duckdb.DuckDBPyConnection"]:
    """A connection of bounded memory with the table ``plan``: every rollout and its batch."""
    with (
        tempfile.TemporaryDirectory(prefix="lightning-otel-") as folder,
        contextlib.closing(with_moved(source)) as con,
    ):
        con.execute("SET enable_external_file_cache = false")
        con.execute(f"SET temp_directory = {quoted(folder)}")
        con.execute("SET preserve_insertion_order = false")
        # Else it may hold the spans, bodies and all, and look up each rollout in them.
        con.execute("SET disabled_optimizers = 'build_side_probe_side'")

        def plan() -> None:
            where, having, values = clauses(con, wanted)
            con.execute(_PLAN.format(where=where, having=having), values)

        answered(con, source.layout, plan)
        # A reward that came from elsewhere is not among the rollout's own.
        con.execute(
            "UPDATE plan SET is_sound = false WHERE rollout IN (SELECT home_rollout FROM moved)"
        )
        yield con


def _straight(
    source: SpanSource,
    con: "duckdb.DuckDBPyConnection",
    batch: Sequence[int],
    wanted: Wanted,
    done: set[str],
) -> Part:
    """What the batch's straight attempts come to; their rollouts are added to those done."""
    attempts = dict(
        con.execute(
            "SELECT rollout, attempt FROM plan WHERE batch = ? AND is_sound ORDER BY low, rollout",
            [batch[2]],
        ).fetchall()
    )
    groups = answered(con, source.layout, lambda: _fetched(con, batch, attempts, wanted))
    steps: list[Step] = []
    reports = []
    with quick.unswept():
        for rollout, rows in groups.items():
            found = straight.adapt(AttemptKey(rollout, attempts[rollout]), rows)
            if found is not None:
                done.add(rollout)
                steps += [Step(step, 0) for step in found.transitions]
                reports.append(found.report)
    return Part(steps, replace(Report.total(reports), rollouts=len(reports)))


def _fetched(
    con: "duckdb.DuckDBPyConnection",
    batch: Sequence[int],
    rollouts: Iterable[str],
    wanted: Wanted,
) -> dict[str, list[straight.Row]]:
    """The rows of each rollout."""
    groups: dict[str, list[straight.Row]] = {rollout: [] for rollout in rollouts}
    cursor = con.cursor()
    cursor.execute(_ROWS, [not wanted.received, *batch])
    while rows := cursor.fetchmany(2048):
        for row in rows:
            groups[row[0]].append(row)
    return groups


def _others(con: "duckdb.DuckDBPyConnection", batch: int, done: set[str]) -> Iterator[Selection]:
    """The batch's other rollouts, until they hold enough spans to be read whole."""
    rows = con.execute(
        "SELECT rollout, spans, low, high FROM plan WHERE batch = ? ORDER BY low, rollout", [batch]
    ).fetchall()
    chosen: list[tuple[str, int, int, int]] = []
    for row in rows:
        if row[0] in done:
            continue
        if chosen and sum(map(itemgetter(1), chosen)) + row[1] > BATCH_SPANS:
            yield _selection(chosen)
            chosen = []
        chosen.append(row)
    if chosen:
        yield _selection(chosen)


def _selection(chosen: Sequence[tuple[str, int, int, int]]) -> Selection:
    names, _, lows, highs = zip(*chosen, strict=True)
    return Selection(rollout_ids=names, since_ns=min(lows), until_ns=max(highs))
