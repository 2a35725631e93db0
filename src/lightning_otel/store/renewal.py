"""Renew the facts of a store: compute those of attempts that changed, and of what depends on them.

An attempt changed if its spans have another fingerprint than those its facts were made of. Facts
are computed by whole rollouts. A rollout also depends on others: on those that hold what its
rewards name, on those in which its rewards were recorded, and on those whose responses it goes on
from; its rows of the kind ``dependency`` hold their ids, known or not.
"""

import json
import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lightning_otel.store.facts import (
    FACT_COLUMNS,
    NO_FACTS,
    USUAL,
    CreditOptions,
    files_sql,
    is_merge_due,
    keep_facts,
    list_facts,
    remove_replaced,
)
from lightning_otel.store.schema import build_span
from lightning_otel.store.selection import (
    Placement,
    SpanReader,
    create_moved_table,
    make_selections,
    place_rewards,
    read_origins,
)
from lightning_otel.store.sql import ROLLOUT, quote_text
from lightning_otel.store.table import json_line
from lightning_otel.store.views import ATTEMPTS, IS_ANNOTATION
from lightning_otel.types import Span
from lightning_otel.types import conventions as c

if TYPE_CHECKING:
    import duckdb

    from lightning_otel.adapter.continuations import Reference

log = logging.getLogger(__name__)

_MOST_ROWS: Final = 200_000
"""Rows in memory before a file is made of them."""
_AT_ONCE: Final = 2_000
_FRESH: Final = f"CREATE OR REPLACE TABLE reading.fresh AS SELECT {NO_FACTS} LIMIT 0"
_ADD: Final = f"""
INSERT INTO reading.fresh SELECT unnest(row) FROM (
  SELECT json_transform(line, {quote_text(json.dumps(FACT_COLUMNS))}) AS row
  FROM (SELECT unnest($1::VARCHAR[]) AS line))"""
_LARGE: Final = 5_000
"""Spans of an attempt that is not computed anew, while it runs, until it has grown by an eighth,
has its first reward, or is judged from elsewhere."""
_RUNNING: Final = f"""
SELECT rollout_id FROM attempts WHERE status = 'running' AND spans >= {_LARGE} LIMIT 1"""
_NONE_GROWS: Final = """
CREATE OR REPLACE TABLE reading.growing (rollout_id VARCHAR, attempt_id VARCHAR)"""
_GROWING: Final = f"""
CREATE OR REPLACE TABLE reading.growing AS
SELECT rollout_id, attempt_id, facts.fingerprint FROM attempts
JOIN (FROM facts WHERE kind = 'attempt') AS facts USING (rollout_id, attempt_id)
WHERE status = 'running' AND attempts.spans BETWEEN {_LARGE} AND facts.spans * 9 // 8
  AND attempts.fingerprint <> facts.fingerprint AND NOT EXISTS (
    -- Who judges from elsewhere does so in a trace of its own.
    SELECT 1 FROM spans WHERE {IS_ANNOTATION} AND start_ns > facts.end_ns
    AND {ROLLOUT} = attempts.rollout_id AND coalesce(attempt_id, '1') = attempts.attempt_id
    AND (facts.reward_spans = 0 OR parent_span_id IS NULL))"""
_SHOW_GROWING: Final = """
UPDATE reading.attempts SET fingerprint = growing.fingerprint, is_current = false
FROM reading.growing AS growing
WHERE (growing.rollout_id, growing.attempt_id) = (attempts.rollout_id, attempts.attempt_id)
  AND growing.fingerprint IN (SELECT fingerprint FROM facts WHERE kind = 'attempt')"""
_CHANGED: Final = """
SELECT DISTINCT rollout_id FROM attempts ANTI JOIN reading.growing USING (rollout_id, attempt_id)
ANTI JOIN (FROM facts WHERE kind = 'attempt') USING (rollout_id, attempt_id, fingerprint)
UNION
SELECT DISTINCT rollout_id FROM (FROM facts WHERE kind = 'attempt') AS facts ANTI JOIN attempts
  USING (rollout_id, attempt_id)"""
_BOUNDS: Final = """
SELECT min(start_ns), max(end_ns) FROM attempts WHERE rollout_id IN (FROM reading.stale)"""
_DEPENDENT: Final = """
SELECT DISTINCT rollout_id FROM facts WHERE kind = 'dependency' AND name IS NULL
  AND rollout_id NOT IN (FROM reading.stale) AND dependency IN (
    FROM reading.stale
    UNION ALL SELECT unnest([span_id, response_id]) FROM spans WHERE {is_stale})"""
_KNOWN: Final = "FROM reading.stale SEMI JOIN attempts ON rollout = rollout_id"
_FINGERPRINTS: Final = """
SELECT rollout_id, attempt_id, fingerprint FROM attempts
WHERE rollout_id IN (SELECT unnest(?))"""
_RENEWED: Final = "SELECT rollout_id FROM reading.fresh WHERE kind = 'attempt'"
_GONE: Final = """
SELECT rollout_id FROM (FROM facts WHERE kind = 'attempt') ANTI JOIN attempts USING (rollout_id)
LIMIT 1"""
_SHARING: Final = """
SELECT DISTINCT rollout_id FROM facts WHERE kind = 'dependency' AND name IS NOT NULL
  AND rollout_id NOT IN (FROM reading.stale)
  AND (name, dependency) IN (SELECT name, dependency FROM reading.fresh
    WHERE kind = 'dependency' AND name IS NOT NULL)"""


def renew_facts(
    reader: SpanReader,
    folder: Path,
    mark: bytes,
    *,
    may_compute: bool,
    page: tuple[str, Sequence[object]] | None = None,
    credit: CreditOptions = USUAL,
) -> None:
    """Define ``attempts`` and ``facts`` on a connection, as ``spans`` has them now.

    Args:
        reader: The spans.
        folder: Where files of facts lie.
        mark: The last deletion of facts before the spans were read.
        may_compute: Whether to compute what is not current; if not, it shows as that.
        page: A query for the rollouts that will be looked at, if these are few: where many are
            stale, only they are renewed.
        credit: How rewards reach calls in these facts.
    """
    con = reader.con
    con.execute("CREATE SCHEMA IF NOT EXISTS reading")
    con.execute(f"CREATE OR REPLACE TABLE reading.attempts AS {ATTEMPTS}")
    con.execute("CREATE OR REPLACE VIEW attempts AS FROM reading.attempts")
    paths = list_facts(folder, credit.prefix)
    con.execute(f"CREATE OR REPLACE VIEW facts AS {files_sql(paths)}")
    if not may_compute:
        return
    is_one_large = bool(_list_values(con, _RUNNING))
    con.execute(_GROWING if is_one_large else _NONE_GROWS)
    stale = _list_values(con, _CHANGED)
    if page is not None and len(stale) > _AT_ONCE:
        stale = _choose_stale(con, stale, page)
    if stale:
        _Renewal(reader, folder, mark, paths, credit).run(stale)
    if is_one_large:
        con.execute(_SHOW_GROWING)


def _choose_stale(
    con: "duckdb.DuckDBPyConnection", stale: list[str], page: tuple[str, Sequence[object]]
) -> list[str]:
    """Return the stale rollouts of a page, with those whose rewards they have, and what is gone."""
    query, values = page
    chosen = {rollout_id for (rollout_id,) in con.execute(query, list(values)).fetchall()}
    con.execute("CREATE OR REPLACE TABLE reading.stale AS SELECT unnest(?) AS rollout", [stale])
    chosen.update(
        place.own_rollout
        for place in place_rewards(con, _stale_sql(con))
        if place.target_rollout in chosen
    )
    chosen.update(_list_values(con, "FROM reading.stale EXCEPT SELECT rollout_id FROM attempts"))
    return [rollout_id for rollout_id in stale if rollout_id in chosen]


def _stale_sql(con: "duckdb.DuckDBPyConnection") -> str:
    """Return the condition that a span is of a stale rollout; by time most others are not read."""
    ((low, high),) = con.execute(_BOUNDS).fetchall()
    times = "false" if low is None else f"start_ns BETWEEN {low} AND {high}"
    return f"{times} AND {ROLLOUT} IN (FROM reading.stale)"


def has_unwritten_facts(con: "duckdb.DuckDBPyConnection") -> bool:
    """Return whether facts that were computed on a connection are in its memory alone."""
    return bool(_list_values(con, "SELECT 1 FROM duckdb_tables() WHERE table_name = 'fresh'"))


class _Renewal:
    def __init__(
        self, reader: SpanReader, folder: Path, mark: bytes, paths: list[Path],
        credit: CreditOptions,
    ) -> None:  # fmt: skip
        self._reader, self._con, self._credit = reader, reader.con, credit
        self._folder, self._mark, self._paths = folder, mark, paths
        self._is_unwritten = False

    def run(self, stale: Sequence[str]) -> None:
        """Compute the facts of rollouts and of what depends on them, and define ``facts``."""
        con, has_facts = self._con, bool(self._paths)
        con.execute(_FRESH)
        con.execute("CREATE OR REPLACE TABLE reading.stale (rollout VARCHAR)")
        while stale:
            placements = self._add_dependent(stale, has_facts=has_facts)
            self._compute(placements)
            # Who else takes part in a conversation is told by its spans alone.
            stale = _list_values(con, _SHARING) if has_facts else []
            con.execute("DELETE FROM reading.stale")
        self._keep()
        self._define()
        if self._is_unwritten:
            return
        con.execute("DROP TABLE reading.fresh")
        if is_merge_due(self._paths) or _list_values(con, _GONE):
            base = self._write(self._paths)
            self._paths = [base] if base is not None else self._paths
            self._define()

    def _add_dependent(self, rollouts: Sequence[str], *, has_facts: bool) -> list[Placement]:
        """Fill the table of stale rollouts; return where the rewards belong that they hold."""
        con, placements = self._con, list[Placement]()
        while rollouts:
            con.execute("INSERT INTO reading.stale SELECT unnest(?)", [list(rollouts)])
            is_stale = _stale_sql(con)
            placements = place_rewards(con, is_stale)
            targets = {place.target_rollout for place in placements}
            targets.difference_update(_list_values(con, "FROM reading.stale"))
            if has_facts:
                targets.update(_list_values(con, _DEPENDENT.format(is_stale=is_stale)))
            rollouts = sorted(targets)
        return placements

    def _compute(self, placements: Sequence[Placement]) -> None:
        from lightning_otel.adapter.triplet import gc_paused

        con = self._con
        create_moved_table(con, placements)
        dependencies = _find_dependencies(placements)
        rollouts, complete = _list_values(con, _KNOWN), set[str]()
        with gc_paused():
            for selection in make_selections(con, _stale_sql(con)):
                records = list(self._reader.fetch(selection))
                self._add_rows(records, selection.rollout_ids, dependencies)
                complete.update(selection.rollout_ids)
                log.info("facts of %d of %d rollouts computed", len(complete), len(rollouts))
        # All that these rollouts hold belongs to others.
        if empty := [rollout_id for rollout_id in rollouts if rollout_id not in complete]:
            self._add_rows((), empty, dependencies)

    def _add_rows(
        self,
        records: Sequence[Mapping[str, Any]],
        rollouts: Sequence[str],
        dependencies: Mapping[str, Iterable[str]],
    ) -> None:
        """Add the rows of whole rollouts to those in memory, and make a file of these if many."""
        from lightning_otel.adapter import TripletAdapter
        from lightning_otel.adapter.attempts import AttemptKey
        from lightning_otel.adapter.continuations import find_references
        from lightning_otel.store.fact_rows import make_rows

        keys = self._con.execute(_FINGERPRINTS, [list(rollouts)]).fetchall()
        fingerprints = {AttemptKey(*key): fingerprint for *key, fingerprint in keys}
        spans = list(map(build_span, records))
        references, answers = find_references(spans)
        visible = {
            (record["trace_id"], record["span_id"])
            for record in records
            if record["operation"] in c.CALL_OPERATIONS
        }
        origins = read_origins(self._reader, references, answers)
        explained = TripletAdapter(*self._credit).explain(spans, origins=origins)
        rows = [
            *make_rows(explained, spans, fingerprints, visible),
            *(
                {"kind": "dependency", "rollout_id": rollout_id, "dependency": name}
                for rollout_id in rollouts
                for name in dependencies.get(rollout_id, ())
            ),
            *_list_references(spans, references, answers),
        ]
        self._con.execute(_ADD, [[json_line(row).decode() for row in rows]])
        ((count,),) = self._con.execute("SELECT count(*) FROM reading.fresh").fetchall()
        if count > _MOST_ROWS:
            self._keep()

    def _keep(self) -> None:
        """Make a file of the rows in memory; where that fails, they stay there."""
        if self._is_unwritten:
            return
        path = self._write()
        self._is_unwritten = path is None
        if path is not None:
            self._paths.append(path)
            self._con.execute(_FRESH)

    def _write(self, replaced: Sequence[Path] = ()) -> Path | None:
        prefix = self._credit.prefix
        path = keep_facts(self._con, self._folder, self._mark, prefix, replaced)
        remove_replaced(self._folder, prefix)
        return path

    def _define(self) -> None:
        query = files_sql(self._paths)
        if self._is_unwritten:
            older = f"FROM ({query}) ANTI JOIN ({_RENEWED}) USING (rollout_id)"
            query = f"{older} UNION ALL FROM reading.fresh"
        self._con.execute(f"CREATE OR REPLACE VIEW facts AS {query}")


def _list_values(con: "duckdb.DuckDBPyConnection", query: str) -> list[str]:
    return [value for (value,) in con.execute(query).fetchall()]


def _find_dependencies(placements: Iterable[Placement]) -> dict[str, set[str]]:
    """Return the rollouts and ids that the facts of each rollout depend on for its rewards."""
    names: defaultdict[str, set[str]] = defaultdict(set)
    for place in placements:
        names[place.own_rollout].add(place.linked_id)
        if place.is_moved:
            names[place.own_rollout].add(place.target_rollout)
            names[place.target_rollout].add(place.own_rollout)
    return names


def _list_references(
    spans: Iterable[Span], references: "set[Reference]", answers: "set[Reference]"
) -> Iterator[Mapping[str, Any]]:
    """Yield what rollouts refer to on a server, and what they tell of it that others ask for."""
    from lightning_otel.adapter.continuations import find_references

    if not references and all(key == c.RESPONSE_ID for key, _ in answers):
        return
    by_rollout: dict[str, list[Span]] = {}
    for span in spans:
        by_rollout.setdefault(span.rollout_id, []).append(span)
    for rollout_id, members in by_rollout.items():
        references, answers = find_references(members)
        for key, name in references | answers:
            is_response = key == c.RESPONSE_ID
            if not is_response or (key, name) not in answers:
                shared = {} if is_response else {"name": key}
                yield {"kind": "dependency", "rollout_id": rollout_id, "dependency": name, **shared}
