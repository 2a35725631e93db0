"""Merge settled files, and drop the rollouts that retention does not keep.

Each file is one commit of the manifest: a compact that is killed leaves the store whole, and the
next one continues. Merged files stay for a grace period, for readers that have opened them.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from lightning_otel.store import counts as n
from lightning_otel.store import removal
from lightning_otel.store.layout import Layout, elect_settler, hold_settler_lock
from lightning_otel.store.manifest import DataFile
from lightning_otel.store.parquet import (
    SPILL,
    bounded_connection,
    fetch_row,
    list_live_files,
)
from lightning_otel.store.retention import (
    Expired,
    Retention,
    find_expired,
    list_deleted,
    list_holders,
    measure_store,
)
from lightning_otel.store.rewrite import InterleavedError, Rewrite, TooWideError
from lightning_otel.store.settle import list_sealed, settle_elected
from lightning_otel.store.snapshot import rows_sql
from lightning_otel.store.sql import ROLLOUT

if TYPE_CHECKING:
    import duckdb

log = logging.getLogger(__name__)

TARGET_ROWS: Final = 1_000_000
TARGET_BYTES: Final = 256 << 20
"""A file grows no further, so that retention need not write too much anew."""

Progress = Callable[[int, int], None]
"""Called with the rows done so far and all rows."""
Group = tuple[DataFile, ...]
"""Files that become one."""


@dataclass(frozen=True, slots=True)
class CompactResult:
    """Work that ``compact`` did, or would do.

    Attributes:
        segments: Segments settled first.
        merged: Files that became others.
        made: What they became.
        unlinked: Files of which nothing was to be kept.
        dropped: Rollouts and spans that went, by reason.
        rejected: Spans left out because two files held their id, by reason.
        left: Files with rows too wide to be merged in the memory allowed.
        bytes_before: Size of everything on the disk before.
        bytes_after: And after; as before in a dry run.
        segments_open: Segments that processes were asked to close and write to yet.
        writers: The numbers of these processes.
        deleted: Ids of rollouts that went for their age or as they were named.
        undeleted: Spans of these that are as they were: open in a process or its segment, or too
            wide.
        aside: If anything was deleted, damaged parts in quarantine, which cannot be looked into.
        is_gone: Whether every file is unlinked that was replaced; true where nothing was deleted.
        bytes_waiting: Size of what was replaced and is on the disk yet.
        waiting_s: How long readers may still need that, seconds.
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
    writers: tuple[int, ...] = ()
    deleted: tuple[str, ...] = ()
    undeleted: int = 0
    aside: int = 0
    is_gone: bool = True
    bytes_waiting: int = 0
    waiting_s: float = 0.0

    @property
    def is_text_left(self) -> bool:
        """True if text that was to be deleted is on the disk yet, or may be."""
        return bool(self.undeleted or self.aside or not self.is_gone)


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

    Processes that record are asked to close their segments. Where text is deleted, they and the
    readers of replaced files are waited for.
    """
    before, asked = removal.measure_disk(layout), removal.list_open_segments(layout)
    if not is_dry_run:
        removal.close_own_segment(layout)
        if removal.close_segments(layout, asked) and retention.is_deletion and wait_s > 0:
            removal.close_segments(layout, list_holders(layout, retention), wait_s, callback)
    with hold_settler_lock(layout):
        segments = len(list_sealed(layout)) if is_dry_run else settle_elected(layout).segments
        with bounded_connection(layout.new / SPILL) as con:
            dropped = find_expired(con, layout, retention, is_dry_run=is_dry_run)
            gone, groups = _make_plan(con, layout)
            if is_dry_run:
                done = CompactResult(merged=sum(map(len, groups)), made=len(groups))
            else:
                done = _carry_out(con, layout, gone + groups, progress)
            deleted, undeleted = list_deleted(con, layout, is_dry_run=is_dry_run)
        still_open = removal.list_open_segments(layout)
    is_gone = is_dry_run or removal.wait_for_unlink(layout, wait_s if deleted else 0.0, callback)
    _, bytes_waiting, waiting_s = removal.measure_leftover(layout)
    names = [path.name for path in asked if path in still_open]
    return replace(
        done,
        segments=segments,
        unlinked=len(gone),
        dropped=dropped,
        bytes_before=before,
        bytes_after=removal.measure_disk(layout),
        segments_open=len(names),
        writers=tuple(sorted({int(name.split("-")[2]) for name in names})),
        deleted=deleted,
        undeleted=undeleted,
        aside=removal.count_unknown_parts(layout) if deleted else 0,
        is_gone=is_gone or not deleted,
        bytes_waiting=bytes_waiting,
        waiting_s=waiting_s,
    )


def compact_if_needed(
    layout: Layout, max_bytes: int | None = None, *, least_files: int = 64
) -> int:
    """Merge one group of small files if there are many, and drop rollouts beyond a size limit.

    Do nothing if another process settles. A tenth more than needed is dropped: else every settled
    segment would have files rewritten.

    Returns:
        How many ended spans went.
    """
    has_many = sum(map(_may_grow, layout.read_manifest().live_files)) >= least_files
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
            find_expired(con, layout, Retention(max_bytes=limit))
            gone, groups = _make_plan(con, layout, most_untouched=int(has_many))
            _carry_out(con, layout, gone + groups)
        return sum(layout.read_manifest().counts.values()) - before


def _make_plan(
    con: "duckdb.DuckDBPyConnection", layout: Layout, *, most_untouched: int | None = None
) -> tuple[list[Group], list[Group]]:
    """Return files of which nothing stays, each alone, and groups to be merged.

    The table ``expired`` says what goes. Groups of which nothing does are limited in number.
    """
    files, rows = list_live_files(layout, layout.read_manifest()), Counter[str]()
    if fetch_row(con, "SELECT count(*) FROM expired") != (0,):
        found = con.execute(
            f"SELECT parse_filename(filename), count(*) FROM {rows_sql(layout, files)} "
            f"JOIN expired ON expired.rollout = {ROLLOUT} GROUP BY 1"
        )
        rows.update(dict(found.fetchall()))
    gone = [(file,) for file in files if rows[file.name] == file.rows > 0]
    wanted = [f for f in files if (f,) not in gone and (_may_grow(f) or rows[f.name])]
    groups = _group_files(wanted)
    touched = [group for group in groups if any(rows[file.name] for file in group)]
    # Nothing is gained from packing anew what is packed already.
    others = [g for g in groups if g not in touched and not all(file.is_compact for file in g)]
    if most_untouched is not None:
        others = [group for group in others if len(group) > 1][:most_untouched]
    return list[Group](gone), touched + others


def _may_grow(file: DataFile) -> bool:
    """Return whether a file is not packed yet, or so small that it should grow."""
    return not file.is_compact or _measure_fill(file) < 0.5


def _measure_fill(file: DataFile) -> float:
    """Return how much of a file's greatest size this one takes."""
    return max(file.rows / TARGET_ROWS, file.size_bytes / TARGET_BYTES)


def _group_files(files: Sequence[DataFile]) -> list[Group]:
    """Group files in order of time, so that rollouts meet and old files stay old.

    Those of one publication alone: whether its spans are in a lake is true of all or of none.
    """
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
    """Rewrite each group into one file, or none if nothing of it stays."""
    total = 2 * sum(file.rows for group in groups for file in group)
    done = Counter[str]()

    def step(rows: int) -> None:
        done["rows"] += rows
        if progress is not None:
            progress(min(done["rows"], total), total)

    waiting = list(reversed(groups))
    while waiting:
        rewrite = Rewrite(con, layout, group := waiting.pop(), step, is_packed=True)
        try:
            made = rewrite.run()
        except InterleavedError:
            middle = len(group) // 2
            waiting += [group[middle:], group[:middle]]
        except TooWideError:
            done["left"] += len(group)
            log.warning(
                "%d files of %s stay as they are: their rows are too wide for the memory allowed",
                len(group),
                layout.catalogue,
            )
        else:
            done["merged"] += len(rewrite.files) if made else 0
            done["made"] += made is not None
            done.update(rewrite.counts)
    rejected = {name: done[name] for name in (n.CONFLICT, n.DUPLICATE) if done[name]}
    return CompactResult(
        merged=done["merged"], made=done["made"], rejected=rejected, left=done["left"]
    )
