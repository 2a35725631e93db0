"""Settled files packed as tightly as they can be, without what retention lets go.

The manifest alone commits, file by file: whatever is cut off leaves the store whole, and is done by
the next one. Files that were merged stay for a period of grace, for readers that look at them.
"""

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from lightning_otel.errors import StoreError
from lightning_otel.store.counts import added
from lightning_otel.store.damage import look, remove
from lightning_otel.store.layout import DataFile, Layout
from lightning_otel.store.merge import Merge, TangledError
from lightning_otel.store.parquet import SPILL, packing_connection
from lightning_otel.store.retention import Expired, Retention, expire, live_files, store_bytes
from lightning_otel.store.rewrite import TooWideError
from lightning_otel.store.settle import exchange, sealed, settle_as_elected, settler_elected
from lightning_otel.store.spans import rows_of
from lightning_otel.store.sql import ROLLOUT

if TYPE_CHECKING:
    import duckdb

log = logging.getLogger(__name__)

TARGET_ROWS: Final = 1_000_000
TARGET_BYTES: Final = 256 << 20
"""A file grows no further, so that retention need not write too much anew."""

Progress = Callable[[int, int], None]
"""Told how many of how many rows are done."""


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
    """Files of which nothing stays, with their ended spans by reason, and groups to be merged."""

    gone: tuple[DataFile, ...]
    counts: Mapping[str, int]
    groups: tuple[tuple[DataFile, ...], ...]


def compact(
    layout: Layout,
    retention: Retention | None = None,
    *,
    is_dry_run: bool = False,
    wait_s: float = 0.0,
    progress: Progress | None = None,
) -> Compacted:
    """Settle what can be, drop what is not to be kept, and merge the files that are left.

    Args:
        layout: The store's paths; its catalogue must stand there.
        retention: What is to be kept; by default everything.
        is_dry_run: Only say what would happen.
        wait_s: How long to wait for another settler to finish.
        progress: Told how far it is.

    Raises:
        StoreError: Another settler is at it.
        NotFoundError: A rollout that is to go is not there.
        OSError: There is no room.
        duckdb.Error: A file cannot be read, or there is no room.
    """
    with elected_alone(layout, wait_s):
        before = store_bytes(layout)
        segments = len(sealed(layout)) if is_dry_run else settle_as_elected(layout).segments
        if not is_dry_run:
            put_damaged_aside(layout, live_files(layout))
        with packing_connection(layout.new / SPILL) as con:
            dropped = expire(con, layout, retention or Retention(), _open_names(layout))
            plan = _make_plan(con, layout)
            done = _foretell_plan(plan) if is_dry_run else _carry_out(con, layout, plan, progress)
        return replace(
            done,
            segments=segments,
            dropped=dropped,
            bytes_before=before,
            bytes_after=store_bytes(layout),
        )


def hold_size(layout: Layout, max_bytes: int) -> Mapping[str, int]:
    """Drop the oldest rollouts if the store has outgrown its limit, and a tenth more.

    Without that tenth each settled segment would have files written anew.

    Returns:
        Ended spans that went, by reason; none while another settler is at it.
    """
    if store_bytes(layout) <= max_bytes:
        return {}
    with settler_elected(layout) as is_elected:
        if not is_elected:
            return {}
        before = layout.read_manifest().counts
        with packing_connection(layout.new / SPILL) as con:
            limit = Retention(max_bytes=max_bytes - max_bytes // 10)
            expire(con, layout, limit, _open_names(layout))
            plan = _make_plan(con, layout)
            groups = [group for group in plan.groups if _expired_in(con, layout, group)]
            _carry_out(con, layout, _verify_plan(layout, plan, groups))
        after = layout.read_manifest().counts
    return {name: count - before.get(name, 0) for name, count in after.items()}


def compact_some(layout: Layout, limit: int = 1, *, least_files: int = 64) -> int:
    """Merge a few groups of small files once there are many; gives how many files went into others.

    Args:
        layout: The store's paths.
        limit: How many groups.
        least_files: How many small files are worth it.
    """
    if len(_list_candidates(layout.read_manifest().live_files)) < least_files:
        return 0
    with settler_elected(layout) as is_elected:
        if not is_elected:
            return 0
        with packing_connection(layout.new / SPILL) as con:
            expire(con, layout, Retention())
            plan = _make_plan(con, layout)
            groups = [group for group in plan.groups if len(group) > 1][:limit]
            return _carry_out(con, layout, _verify_plan(layout, plan, groups)).merged


@contextlib.contextmanager
def elected_alone(layout: Layout, wait_s: float) -> Iterator[None]:
    """A block in which this process alone changes the manifest.

    Raises:
        StoreError: Another one does.
    """
    with settler_elected(layout, wait_s=wait_s) as is_elected:
        if not is_elected:
            raise StoreError(
                f"another process settles or compacts {layout.catalogue}; try again later"
            )
        yield


def put_damaged_aside(layout: Layout, files: Sequence[DataFile]) -> None:
    """Verify files before they are written anew, with a checksum that says they are whole."""
    remove(layout, look(layout, files, is_thorough=True))


def _open_names(layout: Layout) -> list[str]:
    closed = {path.name for path in sealed(layout)}
    return [path.name for path in layout.segments() if path.name not in closed]


def _make_plan(con: "duckdb.DuckDBPyConnection", layout: Layout) -> _Plan:
    """Say what is to be done with each file, for the table ``expired``."""
    files = live_files(layout)
    expired = _expired_in(con, layout, files)
    rows: Counter[str] = Counter()
    for (name, _), (count, _) in expired.items():
        rows[name] += count
    gone = tuple(file for file in files if rows[file.name] == file.rows > 0)
    names = {file.name for file in gone}
    counts: Counter[str] = Counter()
    for (name, reason), (_, ended) in expired.items():
        counts[reason] += ended if name in names else 0
    small = set(_list_candidates(files))
    wanted = [file for file in files if file not in gone and (file in small or rows[file.name])]
    # Nothing is gained from packing anew what is packed already.
    groups = (
        group
        for group in _group_files(wanted)
        if any(not file.is_compact or rows[file.name] for file in group)
    )
    return _Plan(gone, added(counts), tuple(groups))


def _verify_plan(layout: Layout, plan: _Plan, groups: Sequence[tuple[DataFile, ...]]) -> _Plan:
    """Return a plan for some of its groups, without files that are damaged, which go aside."""
    put_damaged_aside(layout, [file for group in groups for file in group])
    left = {file.name for file in live_files(layout)}
    kept = (tuple(file for file in group if file.name in left) for group in groups)
    return replace(plan, groups=tuple(filter(None, kept)))


def _list_candidates(files: Sequence[DataFile]) -> list[DataFile]:
    """Return files that are not packed yet, or so small that they should grow."""
    return [file for file in files if not file.is_compact or _measure_fill(file) < 0.5]


def _measure_fill(file: DataFile) -> float:
    """Return how much of a file's greatest size this one takes."""
    return max(file.rows / TARGET_ROWS, file.size_bytes / TARGET_BYTES)


def _group_files(files: Sequence[DataFile]) -> Iterator[tuple[DataFile, ...]]:
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


def _expired_in(
    con: "duckdb.DuckDBPyConnection", layout: Layout, files: Sequence[DataFile]
) -> dict[tuple[str, str], tuple[int, int]]:
    """Return rows and ended spans of expired rollouts, by name of their file and reason."""
    if not files or con.execute("SELECT 1 FROM expired LIMIT 1").fetchone() is None:
        return {}
    rows = con.execute(
        f"SELECT parse_filename(filename), reason, count(*), count(end_ns) "
        f"FROM {rows_of(layout, files)} JOIN expired ON expired.rollout = {ROLLOUT} GROUP BY ALL"
    ).fetchall()
    return {(name, reason): (int(count), int(ended)) for name, reason, count, ended in rows}


def _foretell_plan(plan: _Plan) -> Compacted:
    files = sum(map(len, plan.groups))
    return Compacted(merged=files, made=len(plan.groups), unlinked=len(plan.gone))


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
    rejected: Counter[str] = Counter()
    waiting = list(reversed(plan.groups))
    while waiting:
        producer = Merge(con, layout, group := waiting.pop(), step)
        try:
            made = producer.rewrite()
        except TangledError:
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
            done["merged"] += len(group)
            done["made"] += made is not None
            rejected.update({k: v for k, v in producer.counts.items() if k.startswith("rejected.")})
    return Compacted(
        merged=done["merged"],
        made=done["made"],
        unlinked=len(plan.gone),
        rejected=dict(rejected),
        left=done["left"],
    )
