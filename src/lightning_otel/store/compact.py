"""Settled files packed as tightly as they can be, and what retention asks for taken out.

The manifest alone commits, file by file: whatever is cut off leaves the store whole, and is done by
the next one. Files that were merged stay for a period of grace, for readers that look at them.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from lightning_otel.errors import StoreError
from lightning_otel.store.damage import look, remove
from lightning_otel.store.layout import DataFile, Layout, Manifest
from lightning_otel.store.merge import Merged, TangledError, merge
from lightning_otel.store.parquet import SPILL, packing_connection
from lightning_otel.store.retention import Doom, Retention, doom, store_bytes
from lightning_otel.store.settle import exchange, sealed, settle_as_elected, settler_elected
from lightning_otel.store.spans import rows_of
from lightning_otel.store.sql import ROLLOUT

if TYPE_CHECKING:
    import duckdb

log = logging.getLogger(__name__)

TARGET_ROWS: Final = 1_000_000
TARGET_BYTES: Final = 256 << 20
"""A file grows no further, so that retention need not write too much anew."""
_THRIFT: Final = (1, 4, 16)
"""By how much slices and row groups shrink where rows prove too wide for the memory allowed."""

Progress = Callable[[int, int], None]
"""Told how many of how many rows are done."""


@dataclass(frozen=True, slots=True)
class Compacted:
    """What ``compact`` did, or would do.

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
    dropped: Mapping[str, Doom] = field(default_factory=dict)
    rejected: Mapping[str, int] = field(default_factory=dict)
    left: int = 0
    bytes_before: int = 0
    bytes_after: int = 0


@dataclass(frozen=True, slots=True)
class _Plan:
    """Files of which nothing stays, with what is counted of them, and those to be merged."""

    gone: tuple[DataFile, ...]
    gone_counts: Mapping[str, int]
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
    retention = retention or Retention()
    with settler_elected(layout, wait_s=wait_s) as is_elected:
        if not is_elected:
            raise StoreError(
                f"another process settles or compacts {layout.catalogue}; try again later"
            )
        if is_dry_run:
            return _foretold(layout, retention)
        before = store_bytes(layout)
        settled = settle_as_elected(layout)
        # A file that was damaged shall not be written anew, with a checksum that says it is whole.
        remove(layout, look(layout, layout.read_manifest(), is_thorough=True))
        with packing_connection(layout.new / SPILL) as con:
            dropped = doom(con, layout, retention, _open_names(layout))
            plan = _plan(con, layout)
            done = _Work(con, layout, plan, progress).done()
        return replace(
            done,
            segments=settled.segments,
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
            retention = Retention(max_bytes=max_bytes - max_bytes // 10)
            doom(con, layout, retention, _open_names(layout))
            plan = _plan(con, layout)
            groups = tuple(group for group in plan.groups if _has_doomed(con, layout, group))
            _Work(con, layout, _whole(layout, replace(plan, groups=groups)), None).done()
        after = layout.read_manifest().counts
    return {name: count - before.get(name, 0) for name, count in after.items()}


def compact_some(layout: Layout, limit: int = 1, *, least_files: int = 64) -> int:
    """Merge a few groups of small files once there are many; gives how many files went into others.

    Args:
        layout: The store's paths.
        limit: How many groups.
        least_files: How many small files are worth it.
    """
    if len(_candidates(layout.read_manifest().live_files)) < least_files:
        return 0
    with settler_elected(layout) as is_elected:
        if not is_elected:
            return 0
        with packing_connection(layout.new / SPILL) as con:
            doom(con, layout, Retention(), ())
            plan = _plan(con, layout)
            groups = tuple(group for group in plan.groups if len(group) > 1)[:limit]
            plan = _whole(layout, replace(plan, groups=groups))
            return _Work(con, layout, plan, None).done().merged


def _open_names(layout: Layout) -> list[str]:
    closed = {path.name for path in sealed(layout)}
    return [path.name for path in layout.segments() if path.name not in closed]


def _foretold(layout: Layout, retention: Retention) -> Compacted:
    waiting = sealed(layout)
    with packing_connection(layout.new / SPILL) as con:
        dropped = doom(con, layout, retention, _open_names(layout))
        plan = _plan(con, layout)
    size = store_bytes(layout)
    return Compacted(
        segments=len(waiting),
        merged=sum(map(len, plan.groups)),
        made=len(plan.groups),
        unlinked=len(plan.gone),
        dropped=dropped,
        bytes_before=size,
        bytes_after=size,
    )


def _plan(con: "duckdb.DuckDBPyConnection", layout: Layout) -> _Plan:
    """What is to be done with each file, for the table ``doomed``."""
    files = there(layout)
    touched = _touched(con, layout, files)
    gone = tuple(file for file in files if touched.get(file.name) == file.rows)
    partly = {name for name in touched if name not in {file.name for file in gone}}
    small = set(_candidates(files))
    candidates = [
        file for file in files if file not in gone and (file in small or file.name in partly)
    ]
    return _Plan(
        gone=gone,
        gone_counts=_ended(con, layout, gone),
        groups=tuple(
            group
            for group in _groups(candidates)
            # Nothing is gained from packing anew what is packed already.
            if any(not file.is_compact or file.name in partly for file in group)
        ),
    )


def _whole(layout: Layout, plan: _Plan) -> _Plan:
    """The plan without the files that are damaged, which are put aside.

    Merged they would be written anew, with a checksum that says they are whole.
    """
    files = tuple(file for group in plan.groups for file in group)
    remove(layout, look(layout, Manifest(files), is_thorough=True))
    left = {file.name for file in there(layout)}
    groups = (tuple(file for file in group if file.name in left) for group in plan.groups)
    return replace(plan, groups=tuple(group for group in groups if group))


def there(layout: Layout) -> tuple[DataFile, ...]:
    """Files that count, without those that somebody took away: they may come back."""
    live = layout.read_manifest().live_files
    return tuple(file for file in live if (layout.data / file.name).exists())


def _candidates(files: Sequence[DataFile]) -> list[DataFile]:
    """Files that are not packed yet, or so small that they should grow."""
    return [file for file in files if not file.is_compact or _fill(file) < 0.5]


def _fill(file: DataFile) -> float:
    """How much of a file's greatest size this one takes."""
    return max(file.rows / TARGET_ROWS, file.size_bytes / TARGET_BYTES)


def _groups(files: Sequence[DataFile]) -> Iterator[tuple[DataFile, ...]]:
    """Files in order of time, so that rollouts meet and old files stay old, up to the target.

    Those of one publication alone: whether its spans are in a lake is true of all or of none.
    """
    group: list[DataFile] = []
    fill = 0.0
    for file in sorted(files, key=lambda file: (file.publication, file.min_start_ns, file.name)):
        is_other = bool(group) and file.publication != group[0].publication
        if group and (is_other or fill + _fill(file) > 1):
            yield tuple(group)
            group, fill = [], 0.0
        group.append(file)
        fill += _fill(file)
    if group:
        yield tuple(group)


def _touched(
    con: "duckdb.DuckDBPyConnection", layout: Layout, files: Sequence[DataFile]
) -> dict[str, int]:
    """Rows of doomed rollouts by name of the file they stand in."""
    if not files or con.execute("SELECT 1 FROM doomed LIMIT 1").fetchone() is None:
        return {}
    rows = con.execute(
        f"SELECT parse_filename(filename), count(*) FROM {rows_of(layout, files)} "
        f"JOIN doomed ON doomed.rollout = {ROLLOUT} GROUP BY 1"
    ).fetchall()
    return {name: int(count) for name, count in rows}


def _has_doomed(
    con: "duckdb.DuckDBPyConnection", layout: Layout, files: Sequence[DataFile]
) -> bool:
    return bool(_touched(con, layout, files))


def _ended(
    con: "duckdb.DuckDBPyConnection", layout: Layout, files: Sequence[DataFile]
) -> dict[str, int]:
    """Ended spans in files that go whole, by reason."""
    if not files:
        return {}
    rows = con.execute(
        f"SELECT reason, count(end_ns) FROM {rows_of(layout, files)} "
        f"JOIN doomed ON doomed.rollout = {ROLLOUT} GROUP BY 1"
    ).fetchall()
    return {reason: int(count) for reason, count in rows if count}


class _Work:
    """A plan being carried out, file by file."""

    def __init__(
        self,
        con: "duckdb.DuckDBPyConnection",
        layout: Layout,
        plan: _Plan,
        progress: Progress | None,
    ) -> None:
        self._con = con
        self._layout = layout
        self._plan = plan
        self._progress = progress
        self._rows = 0
        self._total = 2 * sum(file.rows for group in plan.groups for file in group)

    def done(self) -> Compacted:
        """Do it all."""
        if self._plan.gone:
            exchange(self._layout, self._plan.gone, None, self._plan.gone_counts)
        merged, left, found = 0, 0, []
        waiting = list(reversed(self._plan.groups))
        while waiting:
            group = waiting.pop()
            try:
                result = self._merged(group)
            except TangledError:
                middle = len(group) // 2
                waiting += [group[middle:], group[:middle]]
                continue
            if result is None:
                left += len(group)
                continue
            exchange(self._layout, group, result.file, result.counts)
            merged += len(group)
            found.append(result)
        rejected: dict[str, int] = {}
        for result in found:
            for name, count in result.counts.items():
                if name.startswith("rejected."):
                    rejected[name] = rejected.get(name, 0) + count
        return Compacted(
            merged=merged,
            made=sum(result.file is not None for result in found),
            unlinked=len(self._plan.gone),
            rejected=rejected,
            left=left,
        )

    def _merged(self, group: Sequence[DataFile]) -> Merged | None:
        """The group's new file under ``new/``; None if its rows are too wide."""
        import duckdb

        before = self._rows
        for thrift in _THRIFT:
            self._rows = before
            try:
                return merge(self._con, self._layout, group, self._step, thrift=thrift)
            except duckdb.OutOfMemoryException as exc:
                log.debug("too wide at a thrift of %d: %s", thrift, exc)
        log.warning(
            "%d files of %s stay as they are: their rows are too wide for the memory allowed",
            len(group),
            self._layout.catalogue,
        )
        return None

    def _step(self, rows: int) -> None:
        self._rows += rows
        if self._progress is not None:
            self._progress(min(self._rows, self._total), self._total)
