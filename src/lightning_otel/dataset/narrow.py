"""Transitions without their bodies: narrow columns for the common attempt, the whole of any other.

Three ways, each for what the one before it does not decide, and all to the same transitions: SQL
over narrow rows, for attempts that plainly go straight on; a walk over the rows of one attempt,
which reads attributes and tokens too; and the general way, which reads all of it.
"""

import os
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from lightning_otel.adapter import Adaptation
from lightning_otel.dataset.batches import BATCH_SPANS, clauses, complete, hold_moved, incomplete
from lightning_otel.dataset.exact import flowing
from lightning_otel.dataset.plain import Plain, StepCount
from lightning_otel.dataset.query import Asked
from lightning_otel.dataset.walked import Group, walked
from lightning_otel.formats.format import distinct
from lightning_otel.formats.transition_rows import NARROW_COLUMNS, row
from lightning_otel.store.gist import KIND, REWARD
from lightning_otel.store.layout import Layout
from lightning_otel.store.narrow_rows import NarrowRows
from lightning_otel.store.reader import Reader
from lightning_otel.store.schema import span_of
from lightning_otel.store.source import INDEX_COLUMNS, Selection, SpanSource
from lightning_otel.store.sql import ROLLOUT, quoted
from lightning_otel.store.table import Query, hold, insert, remove_folder
from lightning_otel.types import Report, Transition

if TYPE_CHECKING:
    pass

ROWS: Final = 200_000
"""Spans whose narrow rows are in memory at once."""
WALKED: Final = 50_000
"""Spans whose attributes and tokens are."""
MEMORY: Final = "512MB"
"""Of DuckDB's, before it spills to the disk."""
THREADS: Final = 4

_PLAN: Final = f"""
CREATE OR REPLACE TABLE plan AS
SELECT *, (sum(spans) OVER (ORDER BY low, rollout) - 1) // {ROWS} AS batch,
  row_number() OVER (ORDER BY low, rollout) AS number
FROM (
  SELECT {ROLLOUT} AS rollout, count(*) AS spans, min(start_ns) AS low, max(start_ns) AS high,
    count(*) > count(end_ns) AS is_open
  FROM every {{moved}} WHERE {{where}} GROUP BY 1 HAVING {{having}}
)"""
_MAY_MOVE: Final = f"""reward IS NOT NULL AND operation IS NULL
  AND (attempt_id IS NULL OR {KIND} <> {REWARD})"""


class Part(NamedTuple):
    """Some rollouts' transitions, and the funnel that led to them.

    Attributes:
        steps: Each with its branch; to be gone through, if at all, before the next part is asked
            for.
        put: Appends the rows of all of them to a table on the pass's connection; None if that is
            not quicker than to make them of the steps.
        counts: Counts them likewise.
    """

    steps: Iterable[tuple[Transition, int]]
    report: Report
    put: Callable[[str], None] | None = None
    counts: Callable[[], Iterable[StepCount]] | None = None

    def counted(self) -> Iterable[StepCount]:
        """How many steps each rollout came to, by what they were made with; instead of ``steps``.

        Of the steps of one rollout that were made with the same, there may be several counts.
        """
        if self.counts is not None:
            return self.counts()
        return (
            StepCount(step.rollout_id, step.resources, 1, int(step.reward is not None))
            for step, _ in self.steps
        )


def parts(source: SpanSource, layout: Layout, asked: Asked) -> Iterator[Part]:
    """The transitions without their bodies, a group of rollouts at a time.

    Args:
        source: Where the spans are.
        layout: Its paths: files on this machine.
        asked: Which rollouts (of what else is wanted, the origin of spans is heeded), and the
            general way, for what is not straight.
    """
    with _Pass(source, layout, asked) as work:
        yield from work.parts()


def query(
    source: SpanSource, layout: Layout, asked: Asked, keep: Callable[[Report], None]
) -> Query:
    """The same as rows of one table, which spills to the disk if it is large.

    Args:
        source: As :func:`parts` takes it.
        layout: Likewise.
        asked: Likewise; only the steps wanted are in the table.
        keep: Is given the funnel.
    """
    work = _Pass(source, layout, asked)
    hold(work.con, "held", NARROW_COLUMNS)
    reports: list[Report] = []
    for part in work.parts():
        reports = [Report.total([*reports, part.report])]
        if part.put is not None and asked.wanted.wants_all:
            part.put("held")
            continue
        steps = (each for each in part.steps if asked.wanted.wants(each[0]))
        rows = (row(step, branch, NARROW_COLUMNS) for step, branch in steps)
        insert(work.con, "held", rows, NARROW_COLUMNS)
    keep(Report.total(reports))
    found = Query(work.con, "SELECT * FROM held")
    weakref.finalize(found, work.tidy)
    return found


def part_of(found: Adaptation, *, bodies: bool) -> Part:
    """Each transition of an adaptation once, with its branch and with its bodies or without."""
    told = (lambda step: step) if bodies else without_bodies
    steps = ((told(step), path.branch) for step, path in distinct(found.trajectories))
    return Part(steps, found.report)  # who wants the report alone makes no step


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


class _Pass:
    """One pass over the rollouts that are asked for, on a connection of bounded memory.

    Attributes:
        con: The connection.
    """

    def __init__(self, source: SpanSource, layout: Layout, asked: Asked) -> None:
        """Plan it: the table ``plan`` has every rollout and its batch."""
        self._source, self._layout, self._asked = source, layout, asked
        self._folder = Path(tempfile.mkdtemp(prefix="lightning-otel-"))
        self._general: Reader | None = None
        self.con = self._connected("narrow")
        # What is beyond it spills to the disk; each thread needs some to read with.
        self.con.execute(f"SET memory_limit = '{MEMORY}'")
        self.con.execute(f"SET threads = {min(THREADS, os.cpu_count() or 1)}")
        try:
            self._rows = NarrowRows(self.con, layout)
            hold_moved(self.con, is_likely=self._may_move())
            self.con.answered(self._plan)
        except BaseException:
            self.close()
            raise

    def _may_move(self) -> bool:
        """Whether there is a reward that may be one for another rollout."""
        self._rows.define()  # anew, where a file turned out to be damaged
        found = self.con.execute(f"SELECT 1 FROM every WHERE {_MAY_MOVE} LIMIT 1")
        return bool(found.fetchall())

    def _connected(self, name: str) -> Reader:
        con = self._source.connect(("spans",), INDEX_COLUMNS)
        con.execute("SET enable_external_file_cache = false")
        # DuckDB makes the folder when it needs it, and takes it away when it is closed.
        con.execute(f"SET temp_directory = {quoted(str(self._folder / name))}")
        con.execute("SET preserve_insertion_order = false")
        return con

    def __enter__(self) -> "_Pass":
        """It."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def close(self) -> None:
        """Close what it reads with."""
        self.con.close()
        if self._general is not None:
            self._general.close()
        self.tidy()

    def tidy(self) -> None:
        """Take the folder away."""
        remove_folder(self._folder)

    def _plan(self) -> None:
        con = self.con
        self._rows.define()
        where, having, values = clauses(con, self._asked.wanted)
        is_moved = con.execute("FROM moved LIMIT 1").fetchall()
        moved = "ANTI JOIN moved USING (trace_id, span_id)" if is_moved else ""
        con.execute(_PLAN.format(moved=moved, where=where, having=having), values)
        # A reward that came from elsewhere is not among the rollout's own.
        con.execute(
            "CREATE OR REPLACE TABLE apart AS SELECT number FROM plan WHERE rollout IN "
            "(SELECT home_rollout FROM moved UNION SELECT own_rollout FROM moved)"
        )

    def parts(self) -> Iterator[Part]:
        """The parts, each as soon as it is known."""
        con, wanted = self.con, self._asked.wanted
        out: frozenset[tuple[str, str]] = frozenset()
        is_open = (
            not self._asked.include_incomplete
            and con.execute("FROM plan WHERE is_open LIMIT 1").fetchall()
        )
        if is_open:
            out = incomplete(self._source)
        batches = con.execute(
            "SELECT batch, min(low), max(high) FROM plan GROUP BY 1 ORDER BY 1"
        ).fetchall()
        for batch, low, high in batches:
            self._rows.choose(batch, low, high)
            plain = Plain(con, self._layout, received=wanted.received)
            made = zip(plain.transitions(), repeat(0))
            yield Part(made, plain.report(), plain.put, plain.counted)
            left = self._left("NOT coalesce(is_sound, false)")
            for groups in _gathered(self._left("is_sound AND NOT is_plain"), WALKED):
                found = walked(con, self._layout, groups, received=wanted.received)
                left += [group for group in groups if group.name not in found]
                steps = [(step, 0) for each in found.values() for step in each.transitions]
                report = Report.total(each.report for each in found.values())
                yield Part(steps, replace(report, rollouts=len(found)))
            for groups in _gathered(sorted(left), BATCH_SPANS):
                yield part_of(self._adapted(groups, out), bodies=False)

    def _left(self, condition: str) -> list[Group]:
        """Rollouts of the batch that are judged so."""
        rows = self.con.execute(
            "SELECT number, rollout, attempt, coalesce(judged.spans, part.spans), low, high "
            f"FROM part LEFT JOIN judged USING (number) WHERE {condition} ORDER BY number"
        ).fetchall()
        return [Group(*row) for row in rows]

    def _adapted(self, groups: Sequence[Group], out: frozenset[tuple[str, str]]) -> Adaptation:
        """What the general way makes of some rollouts, which are read whole."""
        adapter, wanted, _ = self._asked
        selection = Selection(
            rollout_ids=[group.name for group in groups],
            since_ns=min(group.low for group in groups),
            until_ns=max(group.high for group in groups),
        )
        if self._general is None:
            self._general = self._connected("general")
        found = self._source.fetch(complete(self.con, selection), self._general)
        with flowing(self._general):
            spans = map(span_of, found.dicts())
            return adapter.explain(wanted.spans(spans), incomplete=out)


def _gathered(groups: Iterable[Group], spans: int) -> Iterator[list[Group]]:
    """Rollouts until they hold enough spans."""
    chosen: list[Group] = []
    held = 0
    for group in groups:
        if chosen and held + group.spans > spans:
            yield chosen
            chosen, held = [], 0
        chosen.append(group)
        held += group.spans
    if chosen:
        yield chosen
