"""Settled files packed as tightly as they can be, without what is not to be kept.

The manifest alone commits, file by file: whatever is cut off leaves the store whole, and is done by
the next one. Files that were merged stay for a period of grace, for readers that look at them.
Whole rollouts go, never parts of a tree. What has no rollout goes by trace.
"""

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from lightning_otel.errors import NotFoundError, StoreError
from lightning_otel.store import counts as n
from lightning_otel.store.layout import DataFile, Layout, total_bytes
from lightning_otel.store.parquet import SPILL, packing_connection, row_groups, row_of
from lightning_otel.store.rewrite import InterleavedError, Rewrite, TooWideError
from lightning_otel.store.settle import exchange, sealed, settle_as_elected, settler_elected
from lightning_otel.store.snapshot import Snapshot
from lightning_otel.store.spans import rows_of
from lightning_otel.store.sql import ROLLOUT, quoted

if TYPE_CHECKING:
    import duckdb

log = logging.getLogger(__name__)

TARGET_ROWS: Final = 1_000_000
TARGET_BYTES: Final = 256 << 20
"""A file grows no further, so that retention need not write too much anew."""

Progress = Callable[[int, int], None]
"""Told how many of how many rows are done."""


@dataclass(frozen=True, slots=True)
class Retention:
    """Limits of age, size and failures; by default everything is kept.

    Attributes:
        since_ns: Rollouts whose last span ended before this go, Unix nanoseconds.
        max_bytes: The oldest rollouts go until files and segments take no more than this.
        without: Ids of rollouts that go.
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
class Compacted:
    """Work that ``compact`` did, or would do.

    Attributes:
        segments: Segments settled first.
        merged: Files that became others.
        made: What they became.
        unlinked: Files of which nothing was to be kept.
        dropped: Rollouts and spans that went, by reason.
        rejected: Spans left out because two files held their id, by reason.
        left: Files with rows too wide to be merged in the memory allowed.
        bytes_before: Size of files and segments before.
        bytes_after: And after; as before in a dry run.
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


@dataclass(frozen=True, slots=True)
class _Plan:
    """Files of which nothing stays, with their ended spans by reason, and groups to be merged.

    Attributes:
        touched: Names of files that hold something that goes.
    """

    gone: tuple[DataFile, ...]
    counts: Mapping[str, int]
    groups: tuple[tuple[DataFile, ...], ...]
    touched: frozenset[str]


def compact(
    layout: Layout,
    retention: Retention | None = None,
    *,
    is_dry_run: bool = False,
    wait_s: float = 0.0,
    progress: Progress | None = None,
) -> Compacted:
    """Settle what can be, drop what is not to be kept, and merge the files that are left."""
    with elected_alone(layout, wait_s):
        before = store_bytes(layout)
        segments = len(sealed(layout)) if is_dry_run else settle_as_elected(layout).segments
        with packing_connection(layout.new / SPILL) as con:
            dropped = _find_expired(con, layout, retention or Retention())
            plan = _make_plan(con, layout)
            if is_dry_run:
                files = sum(map(len, plan.groups))
                done = Compacted(merged=files, made=len(plan.groups), unlinked=len(plan.gone))
            else:
                done = _carry_out(con, layout, plan, progress)
        return replace(
            done,
            segments=segments,
            dropped=dropped,
            bytes_before=before,
            bytes_after=store_bytes(layout),
        )


def compact_some(
    layout: Layout, max_bytes: int | None = None, *, least_files: int = 64
) -> Mapping[str, int]:
    """Do a little of it, if it is worth it and no other settler is at it.

    Merge a group of small files once there are many, and drop the oldest rollouts of a store that
    has outgrown its limit, and a tenth more: else each settled segment would have files written
    anew.

    Returns:
        Ended spans that went, by reason.
    """
    has_many = len(_list_candidates(layout.read_manifest().live_files)) >= least_files
    is_large = max_bytes is not None and store_bytes(layout) > max_bytes
    if not (has_many or is_large):
        return {}
    with settler_elected(layout) as is_elected:
        if not is_elected:
            return {}
        before = layout.read_manifest().counts
        limit = max_bytes - max_bytes // 10 if is_large and max_bytes is not None else None
        with packing_connection(layout.new / SPILL) as con:
            _find_expired(con, layout, Retention(max_bytes=limit))
            plan = _make_plan(con, layout)
            groups = [group for group in plan.groups if plan.touched & {f.name for f in group}]
            small = (group for group in plan.groups if group not in groups and len(group) > 1)
            groups += [next(small, ())] if has_many else []
            _carry_out(con, layout, replace(plan, groups=tuple(groups)))
        after = layout.read_manifest().counts
    return {name: count - before.get(name, 0) for name, count in after.items()}


@contextlib.contextmanager
def elected_alone(layout: Layout, wait_s: float) -> Iterator[None]:
    """A block in which this process alone changes the manifest."""
    with settler_elected(layout, wait_s=wait_s) as is_elected:
        if not is_elected:
            raise StoreError(
                f"another process settles or compacts {layout.catalogue}; try again later"
            )
        yield


def live_files(layout: Layout) -> tuple[DataFile, ...]:
    """Return the files that count, without those that somebody took away: they may come back."""
    live = layout.read_manifest().live_files
    return tuple(file for file in live if (layout.data / file.name).exists())


def store_bytes(layout: Layout) -> int:
    """Return the size of all files and segments that count."""
    manifest = layout.read_manifest()
    files = [layout.data / file.name for file in manifest.live_files]
    return total_bytes([*files, *layout.unsettled(manifest)])


def _find_expired(
    con: "duckdb.DuckDBPyConnection", layout: Layout, retention: Retention
) -> Mapping[str, Expired]:
    """Fill the table ``expired`` with rollouts and the reason for each; count them by reason.

    Spans in segments that a process still writes to stay, but keep their rollout young.
    """
    con.execute("CREATE TABLE expired (rollout VARCHAR, reason VARCHAR)")
    if retention == Retention():
        return {}
    snapshot = Snapshot.take(layout)
    con.execute(
        f"""
        CREATE TABLE held AS
        SELECT {ROLLOUT} AS rollout, max(coalesce(end_ns, start_ns)) AS newest
        FROM ({snapshot.spans_sql()}) GROUP BY 1
        """
    )
    for rollout_id in retention.without:
        if not _add_expired(con, n.ROLLOUT, f"rollout = {quoted(rollout_id)}"):
            raise NotFoundError(f"no rollout {rollout_id!r}, so nothing was dropped")
    if retention.since_ns is not None:
        _add_expired(con, n.AGE, f"newest < {retention.since_ns}")
    if retention.max_bytes is not None:
        _add_oldest(con, layout, retention.max_bytes)
    closed = sealed(layout)
    still_open = [path.name for path in snapshot.segments if path not in closed]
    rows = con.execute(
        f"""
        SELECT reason, count(DISTINCT rollout), count(rollout) FROM (
          SELECT {ROLLOUT} AS rollout FROM ({snapshot.without(still_open).spans_sql()})
        ) JOIN expired USING (rollout) GROUP BY 1 ORDER BY 1
        """
    ).fetchall()
    return {reason: Expired(int(rollouts), int(spans)) for reason, rollouts, spans in rows}


def _add_expired(con: "duckdb.DuckDBPyConnection", reason: str, where: str) -> int:
    """Have rollouts expire that do not yet; gives how many meet the condition."""
    con.execute(
        f"INSERT INTO expired SELECT rollout, {quoted(reason)} FROM held "
        f"ANTI JOIN expired USING (rollout) WHERE {where}"
    )
    return int(row_of(con, f"SELECT count(*) FROM held WHERE {where}")[0])


def _add_oldest(con: "duckdb.DuckDBPyConnection", layout: Layout, max_bytes: int) -> None:
    """Have the rollouts expire that ended first, until what is left is small enough.

    What a rollout takes is told by the row groups its rows stand in: they hold few rollouts each.
    """
    files, excess = live_files(layout), store_bytes(layout) - max_bytes
    if excess <= 0 or not files:
        return
    groups = row_groups([layout.data / file.name for file in files])
    con.execute(
        f"""
        CREATE TABLE sized AS
        SELECT {ROLLOUT} AS rollout, sum(packed) AS size FROM {rows_of(layout, files)}
        ASOF JOIN ({groups}) ON filename = path AND file_row_number >= begins GROUP BY 1
        """
    )
    _add_expired(
        con,
        n.SIZE,
        f"""rollout IN (SELECT rollout FROM (
          SELECT rollout, size, sum(size) OVER (ORDER BY newest, rollout) AS freed
          FROM held JOIN sized USING (rollout) ANTI JOIN expired USING (rollout)
        ) WHERE freed - size < {excess} - (
          SELECT coalesce(sum(size), 0) FROM sized SEMI JOIN expired USING (rollout)))""",
    )


def _make_plan(con: "duckdb.DuckDBPyConnection", layout: Layout) -> _Plan:
    """Say what is to be done with each file, for the table ``expired``."""
    files = live_files(layout)
    found = []
    if con.execute("SELECT 1 FROM expired LIMIT 1").fetchone() is not None:
        found = con.execute(
            "SELECT parse_filename(filename), reason, count(*), count(end_ns) FROM "
            f"{rows_of(layout, files)} JOIN expired ON expired.rollout = {ROLLOUT} GROUP BY ALL"
        ).fetchall()
    rows: Counter[str] = Counter()
    for name, _, count, _ in found:
        rows[name] += count
    gone = tuple(file for file in files if rows[file.name] == file.rows > 0)
    names = {file.name for file in gone}
    counts = n.added(*({reason: ended} for name, reason, _, ended in found if name in names))
    small = set(_list_candidates(files))
    wanted = [file for file in files if file not in gone and (file in small or rows[file.name])]
    # Nothing is gained from packing anew what is packed already.
    groups = (
        group
        for group in _group_files(wanted)
        if any(not file.is_compact or rows[file.name] for file in group)
    )
    return _Plan(gone, counts, tuple(groups), frozenset(rows))


def _list_candidates(files: Sequence[DataFile]) -> list[DataFile]:
    """Return files that are not packed yet, or so small that they should grow."""
    return [file for file in files if not file.is_compact or _measure_fill(file) < 0.5]


def _measure_fill(file: DataFile) -> float:
    """Return how much of a file's greatest size this one takes."""
    return max(file.rows / TARGET_ROWS, file.size_bytes / TARGET_BYTES)


def _group_files(files: Iterable[DataFile]) -> Iterator[tuple[DataFile, ...]]:
    """Yield files in order of time, so that rollouts meet and old files stay old, up to the target.

    Those of one publication alone: whether its spans are in a lake is true of all or of none.
    """
    group: list[DataFile] = []
    fill = 0.0
    for file in sorted(files, key=lambda file: (file.publication, file.min_start_ns, file.name)):
        is_other = bool(group) and file.publication != group[0].publication
        if group and (is_other or fill + _measure_fill(file) > 1):
            yield tuple(group)
            group, fill = [], 0.0
        group.append(file)
        fill += _measure_fill(file)
    if group:
        yield tuple(group)


def _carry_out(
    con: "duckdb.DuckDBPyConnection",
    layout: Layout,
    plan: _Plan,
    progress: Progress | None = None,
) -> Compacted:
    """Do what is planned, file by file."""
    total = 2 * sum(file.rows for group in plan.groups for file in group)
    done = Counter[str]()

    def step(rows: int) -> None:
        done["rows"] = min(total, done["rows"] + rows)
        if progress is not None:
            progress(done["rows"], total)

    if plan.gone:
        exchange(layout, plan.gone, None, plan.counts)
    waiting = list(reversed(plan.groups))
    rejected: dict[str, int] = {}
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
            done["merged"] += len(rewrite.files)
            done["made"] += made is not None
            left_out = {k: v for k, v in rewrite.counts.items() if k.startswith("rejected.")}
            rejected = n.added(rejected, left_out)
    return Compacted(
        merged=done["merged"],
        made=done["made"],
        unlinked=len(plan.gone),
        rejected=rejected,
        left=done["left"],
    )
