"""Transitions by a linear walk over narrow columns, to which bodies are joined last, if at all.

What is not linear, the general adapter reads whole and adapts afterwards; both give the same.
"""

import atexit
import math
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice, repeat
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import orjson

from lightning_otel.adapter import Adaptation
from lightning_otel.adapter.call_facts import Step, TokenFacts, Walk, check_tokens
from lightning_otel.adapter.calls import HistoryParser, read_call
from lightning_otel.adapter.linear import CALL, OTHER, TOOL
from lightning_otel.adapter.selection import Selection
from lightning_otel.adapter.triplet import gc_paused
from lightning_otel.dataset.batches import make_clauses
from lightning_otel.dataset.formats.transition_rows import NARROW_COLUMNS, row
from lightning_otel.dataset.query import StepBatch, make_batch
from lightning_otel.dataset.tables import write_rows
from lightning_otel.store.batches import BATCH_SPANS, TOKENS_A_SPAN, create_moved_table
from lightning_otel.store.digest import DIGEST, IRREGULAR, KIND, RECEIVED, TOKENS
from lightning_otel.store.reader import Reader
from lightning_otel.store.schema import BODY_COLUMNS
from lightning_otel.store.source import SpanSource
from lightning_otel.store.sql import ROLLOUT, quote_text
from lightning_otel.store.table import Query
from lightning_otel.store.views import NARROW
from lightning_otel.types import Call, Report, Span
from lightning_otel.types import conventions as c

ROWS: Final = 200_000
"""Spans whose narrow rows are in memory at once."""
ROWS_WITH_BODIES: Final = 20_000
"""Likewise, where bodies are joined to them."""
MEMORY: Final = "512MB"
"""Of DuckDB's, before it spills to the disk."""
THREADS: Final = 4
_FETCH: Final = 2048

_PLAN: Final = f"""
CREATE OR REPLACE TABLE plan AS
SELECT *, (sum(spans) OVER (ORDER BY low, rollout) - 1) // {{rows}} AS batch,
  row_number() OVER (ORDER BY low, rollout) AS number
FROM (
  SELECT {ROLLOUT} AS rollout, count(*) AS spans, min(start_ns) AS low, max(start_ns) AS high
  FROM narrow {{moved}} WHERE {{where}} GROUP BY 1 HAVING {{having}}
)"""
# A reward that came from elsewhere is not among the rollout's own.
_APART: Final = """
CREATE OR REPLACE TABLE apart AS SELECT number FROM plan WHERE rollout IN
  (SELECT target_rollout FROM moved UNION SELECT own_rollout FROM moved)"""

_PART: Final = """
CREATE OR REPLACE TABLE part AS SELECT number, rollout, spans, low, high FROM plan
WHERE batch = ?"""
_CHOSEN: Final = f"""
CREATE OR REPLACE TABLE chosen AS
SELECT number, trace_id, span_id, parent_span_id, start_ns, end_ns, nullif(agent, '') AS agent,
  response_id, input_tokens, output_tokens, coalesce(nullif(attempt_id, ''), '1') AS attempt,
  process, sequence, end_sequence, operation = {quote_text(c.EXECUTE_TOOL)} AS is_tool,
  {", ".join(DIGEST)}
FROM narrow JOIN part ON rollout = {ROLLOUT} WHERE start_ns BETWEEN ? AND ?"""

_SOUND: Final = f"""
CREATE OR REPLACE TABLE sound AS
SELECT number, count(*) AS rows, any_value(attempt) AS attempt, any_value(trace_id) AS trace_id
FROM chosen ANTI JOIN apart USING (number) GROUP BY number
HAVING count(DISTINCT hash(trace_id, process, attempt)) = 1 AND bool_and(coalesce(
  process IS NOT NULL AND end_ns IS NOT NULL AND sequence BETWEEN 0 AND end_sequence
  AND {KIND} <> {IRREGULAR} AND (gist_kind & {RECEIVED} = 0 OR {{received}})
  AND ({KIND} = {OTHER} OR gist_facts IS NOT NULL)
  AND span_id NOT IN ('', {quote_text("0" * 16)}), false))"""
_ATTEMPTS: Final = """
SELECT number, rows, rollout, attempt, trace_id FROM sound JOIN part USING (number)
ORDER BY number"""
_READ: Final = f"""
SELECT span_id, nullif(parent_span_id, ''), sequence, end_sequence, agent,
  CASE WHEN is_tool AND {KIND} = {OTHER} THEN {TOOL} ELSE {KIND} END, chosen.rowid, gist_facts,
  gist_before, gist_after, gist_kind & {TOKENS} > 0, response_id, span_id, start_ns, end_ns,
  input_tokens, output_tokens
FROM chosen SEMI JOIN sound USING (number) ORDER BY number, sequence"""
_SAMPLED: Final = f"""
CREATE OR REPLACE TABLE sampled AS
SELECT rowid AS spot, trace_id, span_id, start_ns, gist_facts AS facts, output_tokens
FROM chosen SEMI JOIN sound USING (number) WHERE {KIND} = {CALL} AND gist_kind & {TOKENS} > 0"""
_TEXTS: Final = """
SELECT spot, facts, sampled.output_tokens, prompt_token_ids, response_token_ids, response_logprobs
FROM spans JOIN sampled ON sampled.trace_id = spans.trace_id AND sampled.span_id = spans.span_id
  AND sampled.start_ns = spans.start_ns
WHERE spans.start_ns BETWEEN ? AND ?"""
_SAID: Final = f"""
SELECT trace_id, span_id, start_ns, {", ".join(BODY_COLUMNS)} FROM spans
WHERE start_ns BETWEEN ? AND ? AND trace_id IN (SELECT unnest(?::VARCHAR[]))
  AND input_messages IS NOT NULL"""
_PUT: Final = """
INSERT INTO {table} SELECT {values} FROM made JOIN chosen ON chosen.rowid = spot
  JOIN sound USING (number) JOIN part USING (number) JOIN said USING (place)
ORDER BY number, sequence"""
_VALUES: Final[Mapping[str, str]] = {
    **{name: name for name in NARROW_COLUMNS},
    "rollout_id": "rollout",
    "attempt_id": "sound.attempt",
    "agent": "said.agent",
    "branch": "0",
    "is_shared": "false",
    "trace_id": "sound.trace_id",
    "group_id": "''",
    "advantage": "NULL",
    "weight": "1.0",
}
_TOLD: Final = (
    "agent", "resource_version", "mode", "model", "finish_reason", "capture", "inexact",
)  # fmt: skip


Adapt = Callable[[Sequence[str]], Iterable[Adaptation]]
"""The general adapter, for the rollouts of these names."""


def query(
    source: SpanSource,
    wanted: Selection,
    adapt: Adapt,
    keep: Callable[[Report], None],
) -> Query:
    """Return the transitions as rows of one table, which spills to the disk if it is large.

    ``adapt`` gets what is not linear, ``keep`` the funnel.
    """
    work = _Pass(source, wanted, bodies=False)
    kinds = ", ".join(f'"{name}" {kind}' for name, kind in NARROW_COLUMNS.items())
    work.con.execute(f"CREATE OR REPLACE TABLE held ({kinds})")
    report = Report()
    for part in work.parts(adapt):
        report = Report.total([report, part.report])
        if part.put is not None and wanted.wants_all:
            part.put("held")
            continue
        steps = (each for each in part.steps if wanted.wants(each[0]))
        rows = (row(step, branch, NARROW_COLUMNS) for step, branch in steps)
        with tempfile.NamedTemporaryFile(suffix=".ndjson") as file:
            work.con.execute(f"INSERT INTO held FROM {write_rows(rows, NARROW_COLUMNS, file)}")
    keep(report)
    found = Query(work.con, "SELECT * FROM held")
    weakref.finalize(found, _remove_folder, work.folder)
    return found


def parts(
    source: SpanSource, wanted: Selection, adapt: Adapt, *, bodies: bool
) -> Iterator[StepBatch]:
    """Yield transitions a group of rollouts at a time; arguments as :func:`query` takes them."""
    work = _Pass(source, wanted, bodies=bodies)
    try:
        yield from work.parts(adapt)
    finally:
        work.close()


class _Pass:
    """One pass over the wanted rollouts, on a connection of bounded memory."""

    def __init__(self, source: SpanSource, wanted: Selection, *, bodies: bool) -> None:
        """Plan it: the table ``plan`` has every rollout and its batch."""
        self.folder = Path(tempfile.mkdtemp(prefix="lightning-otel-"))
        self._wanted, self._bodies = wanted, bodies
        con = self.con = source.connect(("spans", NARROW))
        con.execute("SET enable_external_file_cache = false")
        # DuckDB makes the folder when it needs it, and takes it away when it is closed.
        con.execute(f"SET temp_directory = {quote_text(str(self.folder / 'spilled'))}")
        con.execute("SET preserve_insertion_order = false")
        con.execute(f"SET memory_limit = '{MEMORY}'")
        # Each thread needs some of it to read with.
        con.execute(f"SET threads = {min(THREADS, os.cpu_count() or 1)}")
        try:
            create_moved_table(con)
            con.run(self._plan_batches)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the connection, and take its folder away."""
        self.con.close()
        _remove_folder(self.folder)

    def _plan_batches(self) -> None:
        con = self.con
        where, having, values = make_clauses(con, self._wanted)
        is_moved = con.execute("FROM moved LIMIT 1").fetchall()
        moved = "ANTI JOIN moved USING (trace_id, span_id)" if is_moved else ""
        rows = ROWS_WITH_BODIES if self._bodies else ROWS
        con.execute(_PLAN.format(rows=rows, moved=moved, where=where, having=having), values)
        con.execute(_APART)

    def parts(self, adapt: Adapt) -> Iterator[StepBatch]:
        """The parts, each as soon as it is known; what is not linear at last."""
        con, bodies = self.con, self._bodies
        left: list[str] = []
        batches = con.execute(
            "SELECT batch, min(low), max(high) FROM plan GROUP BY 1 ORDER BY 1"
        ).fetchall()
        for batch, low, high in batches:
            con.execute(_PART, [batch])
            con.execute(_CHOSEN, [low, high])
            con.execute(_SOUND.format(received=self._wanted.received))
            walks, others = self._walk_batch()
            left += others
            for walk in walks:
                calls = _read_calls(con, walk) if bodies else ()
                if calls is None:
                    left += walk.rollouts
                    continue
                put = None if bodies else partial(_append_rows, con, walk)
                steps = zip(walk.transitions(calls), repeat(0))
                yield StepBatch(steps, walk.report(), walk.adaptation, put)
        for found in adapt(left) if left else ():
            yield make_batch(found, bodies=bodies)

    @gc_paused()
    def _walk_batch(self) -> tuple[list[Walk], list[str]]:
        """Walk over the batch, so many spans at a time; return the rollouts left over, too."""
        con, most = self.con, BATCH_SPANS if self._bodies else math.inf
        tokens = _check_tokens(con)
        walks, size, linear = [Walk(tokens)], 0, set()
        attempts = con.execute(_ATTEMPTS).fetchall()
        rows = _fetch_rows(con, _READ)
        for number, count, *ids in attempts:
            own = list(islice(rows, count))
            weight = count + sum(sum(filter(None, row[-2:])) for row in own) // TOKENS_A_SPAN
            if size + weight > most and walks[-1].steps:
                walks.append(Walk(tokens))
                size = 0
            size += weight
            if walks[-1].add(ids, own):
                linear.add(number)
        names = con.execute("SELECT number, rollout FROM part ORDER BY number").fetchall()
        return walks, [name for number, name in names if number not in linear]


def _read_calls(con: Reader, walk: Walk) -> list[Call] | None:
    """Read the call of each step; None if the general adapter must look closer at one."""
    names = [(step.attempt[2], *step.rest[1:3]) for step in walk.steps]
    if not names:
        return []
    traces, _, starts = zip(*names, strict=True)
    asked = [min(starts), max(starts), list(set(traces))]
    rows = con.run(lambda: list(_fetch_rows(con, _SAID, asked)))
    keys = tuple(BODY_COLUMNS.values())
    said = {row[:3]: dict(zip(keys, row[3:], strict=True)) for row in rows}
    found, history = list[Call](), HistoryParser()
    for trace_id, span_id, start_ns in names:
        attributes = said.get((trace_id, span_id, start_ns), {})
        span = Span(trace_id, span_id, None, "", 0, 0, attributes=attributes)
        call = read_call(span, "", history)
        if not isinstance(call, Call):
            return None
        found.append(call)
    return found


def _fetch_rows(
    con: Reader, query: str, values: Sequence[object] = ()
) -> Iterator[tuple[Any, ...]]:
    cursor = con.cursor()
    cursor.execute(query, values)
    while rows := cursor.fetchmany(_FETCH):
        yield from rows


def _check_tokens(con: Reader) -> dict[int, TokenFacts]:
    """Check the tokens of calls, a few at a time; none if they do not fit in the memory allowed."""
    import duckdb

    con.execute(_SAMPLED)
    times = con.execute("SELECT min(start_ns), max(start_ns) FROM sampled").fetchall()[0]
    if times[0] is None:
        return {}

    def act() -> dict[int, TokenFacts]:
        try:
            return {
                spot: check_tokens(facts, count, texts)
                for spot, facts, count, *texts in _fetch_rows(con, _TEXTS, times)
            }
        except duckdb.OutOfMemoryException:
            return {}

    # Spans flow past the few rows. Else DuckDB may hold the spans, bodies and all, and look up each
    # row in them.
    con.execute("SET disabled_optimizers = 'build_side_probe_side'")
    try:
        return con.run(act)
    finally:
        con.execute("RESET disabled_optimizers")


def _append_rows(con: Reader, walk: Walk, table: str) -> None:
    """Append the rows of the linear attempts to a table of transitions without bodies."""
    said: dict[tuple[int, int], tuple[int, Step]] = {}  # many steps say the same
    places = [
        said.setdefault((id(step.call), id(step.rewards)), (len(said), step))[0]
        for step in walk.steps
    ]
    calls = [step.call for _, step in said.values()]
    rewards = [step.rewards for _, step in said.values()]
    _hold_columns(
        con,
        "said",
        place=("BIGINT", range(len(said))),
        **{name: ("VARCHAR", map(attrgetter(name), calls)) for name in _TOLD},
        resources=("VARCHAR", (_dump_json(call.resources) for call in calls)),
        sampling=("VARCHAR", (_dump_json(call.sampling) for call in calls)),
        rewards=("VARCHAR", map(_dump_json, rewards)),
        reward=("DOUBLE", (next(iter(named.values()), None) for named in rewards)),
    )
    _hold_columns(
        con,
        "made",
        spot=("BIGINT", map(attrgetter("spot"), walk.steps)),
        step=("BIGINT", map(attrgetter("step"), walk.steps)),
        done=("BOOLEAN", map(attrgetter("done"), walk.steps)),
        place=("BIGINT", places),
    )
    values = ", ".join(_VALUES[name] for name in NARROW_COLUMNS)
    con.execute(_PUT.format(table=table, values=values))


def _hold_columns(con: Reader, table: str, **columns: tuple[str, Iterable[Any]]) -> None:
    """Make a table of columns; their texts are read in a fifth of the time that lists take."""
    lists = ", ".join(f"unnest(?::JSON::{kind}[]) AS {name}" for name, (kind, _) in columns.items())
    values = [_dump_json(list(held)) for _, held in columns.values()]
    con.execute(f"CREATE OR REPLACE TABLE {table} AS SELECT {lists}", values)


def _dump_json(found: object) -> str:
    return orjson.dumps(found).decode()


def _remove_folder(folder: Path) -> None:
    """Take a folder away; at the end of the process if a result still being read lies in it."""
    try:
        folder.rmdir()
    except OSError:
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
