"""Merge settled files, and drop the rollouts that retention does not keep.

Each file is one commit of the manifest: the next compact continues one that was killed. Merged
files stay for a grace period. Retention drops whole rollouts; a span without one goes with its
trace.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from lightning_otel.errors import NotFoundError
from lightning_otel.store import counts as n
from lightning_otel.store import removal
from lightning_otel.store.facts import delete_facts
from lightning_otel.store.files import total_bytes
from lightning_otel.store.layout import Layout, elect_settler, hold_settler_lock
from lightning_otel.store.manifest import DataFile
from lightning_otel.store.parquet import (
    SPILL,
    bounded_connection,
    fetch_row,
    list_live_files,
    row_groups_sql,
)
from lightning_otel.store.rewrite import InterleavedError, Rewrite, TooWideError
from lightning_otel.store.selection import create_moved_table
from lightning_otel.store.settle import (
    list_sealed,
    list_unsealed,
    settle_elected,
    wait_until_visible,
)
from lightning_otel.store.snapshot import IS_SPAN, SEGMENT_COLUMNS, Snapshot, ndjson_sql, rows_sql
from lightning_otel.store.sql import ROLLOUT, new_connection, quote_paths, quote_text
from lightning_otel.store.views import IS_ANNOTATION

if TYPE_CHECKING:
    import duckdb

log = logging.getLogger(__name__)

TARGET_ROWS: Final = 1_000_000
TARGET_BYTES: Final = 256 << 20
"""A file grows no further, so that retention need not write too much anew."""
_MANY_FILES: Final = 64
_IS_DELETED: Final = f"reason <> {quote_text(n.SIZE)}"

Progress = Callable[[int, int], None]
"""Called with the rows done so far and all rows."""
Group = tuple[DataFile, ...]
"""Files that become one."""


@dataclass(frozen=True, slots=True)
class Retention:
    """Limits of age (Unix nanoseconds), size and failures; by default everything is kept.

    The oldest rollouts go until files and segments take ``max_bytes``; ``without`` are ids that go.
    """

    since_ns: int | None = None
    max_bytes: int | None = None
    without: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Expired:
    """Rollouts and spans that go for one reason."""

    rollouts: int
    spans: int


@dataclass(frozen=True, slots=True)
class CompactResult:
    """Work that ``compact`` did, or would do.

    Attributes:
        segments: Segments settled first.
        merged: Files that became the files ``made``.
        unlinked: Files of which nothing was to be kept.
        dropped: Rollouts and spans that went, by reason.
        rejected: Spans left out because two files held their id, by reason.
        left: Files with rows too wide to be merged in the memory allowed.
        bytes_before: Size of everything on the disk before; ``bytes_after`` as well in a dry run.
        segments_open: Segments that other processes were asked to close, and write to yet.
        deleted: Rollouts that went for their age or as they were named.
        open_spans: Spans of these that a process holds open, or that stand in its segment.
        aside: Damaged parts in quarantine, which cannot be looked into, if rollouts were deleted.
        queued: Tasks of these that wait or run in the queue.
        is_gone: Whether every file is unlinked that held these; true where there are none.
        bytes_waiting: Size of what was replaced, on the disk for readers ``waiting_s`` longer.
    """

    segments: int = 0
    merged: int = 0
    made: int = 0
    unlinked: int = 0
    dropped: Mapping[str, Expired] = field(default_factory=dict)
    rejected: Mapping[str, int] = field(default_factory=dict)
    left: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    segments_open: int = 0
    deleted: tuple[str, ...] = ()
    open_spans: int = 0
    aside: int = 0
    queued: int = 0
    is_gone: bool = True
    bytes_waiting: int = 0
    waiting_s: float = 0.0

    @property
    def is_text_left(self) -> bool:
        """True if text that was to be deleted is on the disk yet, or may be."""
        is_kept = self.open_spans or self.aside or self.queued or (self.left and self.deleted)
        return bool(is_kept or not self.is_gone)


def compact(
    layout: Layout,
    retention: Retention,
    *,
    is_dry_run: bool = False,
    wait_s: float = 0.0,
    progress: Progress | None = None,
    callback: removal.Callback | None = None,
) -> CompactResult:
    """Settle what can be, drop what is not to be kept, and merge the files that are left.

    Where rollouts are deleted, processes that record and readers of replaced files are waited for.
    """
    before, open_segments = removal.measure_disk(layout), removal.list_open_segments(layout)
    if not is_dry_run:
        removal.close_own_segment(layout, Path.exists)
        if removal.close_segments(layout, open_segments) and wait_s:
            with new_connection() as con:
                _find_expired(con, layout, retention)
                holders = _count_open(con, layout)
            removal.close_segments(layout, holders, wait_s, callback)
    with hold_settler_lock(layout):
        segments = len(list_sealed(layout)) if is_dry_run else settle_elected(layout).segments
        with bounded_connection(layout.new / SPILL) as con:
            dropped = _find_expired(con, layout, retention, is_dry_run=is_dry_run)
            gone, groups = _make_plan(con, layout)
            if is_dry_run:
                result = CompactResult(merged=sum(map(len, groups)), made=len(groups))
            else:
                result = _carry_out(con, layout, gone + groups, progress)
            open_spans = 0 if is_dry_run else sum(_count_open(con, layout).values())
            rows = con.execute(f"SELECT rollout FROM expired WHERE {_IS_DELETED}").fetchall()
    is_gone = is_dry_run or removal.wait_for_unlink(layout, wait_s if rows else 0.0, callback)
    bytes_waiting, waiting_s = removal.measure_leftover(layout, layout.read_manifest())
    return replace(
        result,
        segments=segments,
        unlinked=len(gone),
        dropped=dropped,
        bytes_before=before,
        bytes_after=removal.measure_disk(layout),
        segments_open=len({*open_segments}.intersection(removal.list_open_segments(layout))),
        deleted=tuple(rollout for (rollout,) in rows),
        open_spans=open_spans,
        aside=removal.count_unknown_parts(layout) if rows else 0,
        is_gone=is_gone or not rows,
        bytes_waiting=bytes_waiting,
        waiting_s=waiting_s,
    )


def compact_if_needed(layout: Layout, max_bytes: int | None) -> int:
    """Merge one group of small files if there are many, and drop rollouts beyond a size limit.

    Nothing if another process settles. A tenth more than needed is dropped, lest every settled
    segment rewrites files. Return how many ended spans went.
    """
    has_many = sum(map(_may_grow, layout.read_manifest().live_files)) >= _MANY_FILES
    limit = None
    if max_bytes is not None and measure_store(layout) > max_bytes:
        limit = max_bytes - max_bytes // 10
    if not has_many and limit is None:
        return 0
    with elect_settler(layout) as is_elected:
        if not is_elected:
            return 0
        before = sum(layout.read_manifest().counts.values())
        with bounded_connection(layout.new / SPILL) as con:
            _find_expired(con, layout, Retention(max_bytes=limit))
            gone, groups = _make_plan(con, layout, most_untouched=int(has_many))
            _carry_out(con, layout, gone + groups)
        return sum(layout.read_manifest().counts.values()) - before


def measure_store(layout: Layout) -> int:
    """Return the size of all files and segments that count."""
    manifest = layout.read_manifest()
    files = [layout.data / file.name for file in manifest.live_files]
    return total_bytes([*files, *layout.list_unsettled(manifest)])


def _find_expired(
    con: "duckdb.DuckDBPyConnection",
    layout: Layout,
    retention: Retention,
    *,
    is_dry_run: bool = False,
) -> Mapping[str, Expired]:
    """Fill the table ``expired`` with rollouts and reasons; count them by reason.

    Spans in segments that a process still writes to stay, and keep their rollout young.
    """
    con.execute("CREATE TABLE expired (rollout VARCHAR, reason VARCHAR)")
    if retention == Retention():
        return {}
    snapshot = Snapshot.take(layout)
    con.execute(
        f"CREATE TABLE held AS SELECT {ROLLOUT} AS rollout, max(coalesce(end_ns, start_ns)) "
        f"AS newest, 0 AS size FROM ({snapshot.spans_sql()}) GROUP BY 1"
    )
    expire = "INSERT INTO expired SELECT rollout, '{}' FROM held ANTI JOIN expired USING (rollout)"
    for rollout_id in set(retention.without):
        where = f"WHERE rollout = {quote_text(rollout_id)}"
        if fetch_row(con, f"SELECT count(*) FROM held {where}") == (0,):
            raise NotFoundError(f"no rollout {rollout_id!r}, so nothing was dropped")
        con.execute(f"{expire.format(n.ROLLOUT)} {where}")
    if retention.since_ns is not None:
        con.execute(f"{expire.format(n.AGE)} WHERE newest < {retention.since_ns}")
    files = list_live_files(layout, layout.read_manifest())
    if files and retention.max_bytes is not None:
        excess = measure_store(layout) - retention.max_bytes
        # What a rollout takes is told by the row groups its rows stand in: they hold few each.
        groups = row_groups_sql([layout.data / file.name for file in files])
        con.execute(
            f"""
            CREATE OR REPLACE TABLE held AS SELECT rollout, newest, coalesce(sum(packed), 0) AS size
            FROM held LEFT JOIN (
              SELECT {ROLLOUT} AS rollout, packed FROM {rows_sql(layout, files)}
              ASOF JOIN ({groups}) ON filename = path AND file_row_number >= begins
            ) USING (rollout) GROUP BY ALL
            """
        )
        con.execute(
            f"""
            {expire.format(n.SIZE)} WHERE rollout IN (SELECT rollout FROM (
              SELECT rollout, size, sum(size) OVER (ORDER BY newest, rollout) AS freed
              FROM held ANTI JOIN expired USING (rollout) WHERE size > 0
            ) WHERE freed - size < {excess} - (
              SELECT coalesce(sum(size), 0) FROM held SEMI JOIN expired USING (rollout)))
            """
        )
    # A reward that was given alone goes with the rollout it judges; one within another is its part.
    con.execute(f"CREATE TEMP VIEW spans AS {snapshot.spans_sql()}")
    if fetch_row(con, "SELECT count(*) FROM expired") != (0,):
        create_moved_table(con)
        con.execute(
            "INSERT INTO expired SELECT own_rollout, any_value(reason) FROM moved "
            "JOIN expired ON target_rollout = rollout WHERE own_rollout NOT IN (SELECT rollout "
            f"FROM expired UNION SELECT {ROLLOUT} FROM spans WHERE NOT {IS_ANNOTATION}) GROUP BY 1"
        )
    # Not those of the snapshot: what was settled just now counts a moment later for readers.
    still_open = [path.name for path in list_unsealed(layout)]
    counted = snapshot if is_dry_run else snapshot.without(still_open)
    alive = [quote_text(name.rpartition("-")[0]) for name in still_open] or ["''"]
    rows = con.execute(
        f"""
        SELECT reason, count(DISTINCT rollout), count(rollout) FROM (
          SELECT {ROLLOUT} AS rollout FROM ({counted.spans_sql()})
          WHERE end_ns IS NOT NULL OR process NOT IN ({", ".join(alive)})
        ) JOIN expired USING (rollout) GROUP BY 1 ORDER BY 1
        """
    ).fetchall()
    return {reason: Expired(int(rollouts), int(spans)) for reason, rollouts, spans in rows}


def _count_open(con: "duckdb.DuckDBPyConnection", layout: Layout) -> dict[Path, int]:
    paths = layout.list_unsettled(layout.read_manifest())
    if not paths:
        return {}
    lines = ndjson_sql(quote_paths(paths), SEGMENT_COLUMNS)
    rows = con.execute(
        f"""
        SELECT filename, count(DISTINCT (trace_id, span_id))
        FROM (SELECT *, {ROLLOUT} AS rollout FROM {lines} WHERE {IS_SPAN} AND record <> 'drop')
        SEMI JOIN (FROM expired WHERE {_IS_DELETED}) USING (rollout) GROUP BY 1
        """
    ).fetchall()
    return {Path(path): int(count) for path, count in rows}


def _make_plan(
    con: "duckdb.DuckDBPyConnection", layout: Layout, *, most_untouched: int | None = None
) -> tuple[list[Group], list[Group]]:
    """Return files of which nothing stays, and groups to merge; ``expired`` says what goes."""
    files, rows = list_live_files(layout, layout.read_manifest()), Counter[str]()
    if fetch_row(con, "SELECT count(*) FROM expired") != (0,):
        result = con.execute(
            f"SELECT parse_filename(filename), count(*) FROM {rows_sql(layout, files)} "
            f"JOIN expired ON expired.rollout = {ROLLOUT} GROUP BY 1"
        )
        rows.update(dict(result.fetchall()))
    gone = [(file,) for file in files if rows[file.name] == file.rows > 0]
    candidates = [f for f in files if (f,) not in gone and (_may_grow(f) or rows[f.name])]
    groups = _group_files(candidates)
    touched = [group for group in groups if any(rows[file.name] for file in group)]
    # Nothing is gained from packing anew what is packed already.
    others = [g for g in groups if g not in touched and not all(file.is_compact for file in g)]
    if most_untouched is not None:
        others = [group for group in others if len(group) > 1][:most_untouched]
    return list[Group](gone), touched + others


def _may_grow(file: DataFile) -> bool:
    return not file.is_compact or _measure_fill(file) < 0.5


def _measure_fill(file: DataFile) -> float:
    return max(file.rows / TARGET_ROWS, file.size_bytes / TARGET_BYTES)


def _group_files(files: Sequence[DataFile]) -> list[Group]:
    """Group files of one publication in order of time, so that rollouts meet."""
    groups: list[list[DataFile]] = []
    fill = 0.0
    for file in sorted(files, key=lambda file: (file.publication, file.min_start_ns, file.name)):
        fill += _measure_fill(file)
        if groups and groups[-1][0].publication == file.publication and fill <= 1:
            groups[-1].append(file)
        else:
            groups.append([file])
            fill = _measure_fill(file)
    return list(map(tuple, groups))


def _carry_out(
    con: "duckdb.DuckDBPyConnection",
    layout: Layout,
    groups: Sequence[Group],
    progress: Progress | None = None,
) -> CompactResult:
    total = 2 * sum(file.rows for group in groups for file in group)
    counts = Counter[str]()

    def step(rows: int) -> None:
        counts["rows"] += rows
        if progress is not None:
            progress(min(counts["rows"], total), total)

    queue = list(reversed(groups))
    while queue:
        rewrite = Rewrite(con, layout, group := queue.pop(), step, is_packed=True)
        try:
            output = rewrite.run()
        except InterleavedError:
            middle = len(group) // 2
            queue += [group[middle:], group[:middle]]
        except TooWideError:
            counts["left"] += len(group)
            log.warning(
                "%d files of %s stay as they are: their rows are too wide for the memory allowed",
                len(group),
                layout.catalogue,
            )
        else:
            counts["merged"] += len(rewrite.files) if output else 0
            counts["made"] += output is not None
            counts.update(rewrite.counts)
    if fetch_row(con, "SELECT count(*) FROM expired") != (0,):
        wait_until_visible(layout)
        delete_facts(layout.facts)
    rejected = {name: counts[name] for name in (n.CONFLICT, n.DUPLICATE) if counts[name]}
    return CompactResult(
        merged=counts["merged"], made=counts["made"], rejected=rejected, left=counts["left"]
    )
