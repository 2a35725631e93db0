"""Segments into sorted Parquet, exactly once: one settler at a time, restartable at any instruction.

A batch of sealed segments becomes one file under a temporary name, which is renamed into ``data/``;
then the manifest is replaced, and only that makes the file count and its segments cease to. Segments
and replaced files are unlinked after a grace period, for readers that opened them just before.
"""

import contextlib
import fcntl
import logging
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from lightning_otel.store.layout import (
    SCHEMA_VERSION,
    DataFile,
    Layout,
    Manifest,
    SettledSegment,
    now_us,
    total_bytes,
)
from lightning_otel.store.schema import COLUMNS
from lightning_otel.store.segment import boot_id
from lightning_otel.store.views import SEGMENT_COLUMNS, quoted, read_ndjson

if TYPE_CHECKING:
    import duckdb

log = logging.getLogger(__name__)

BATCH_BYTES: Final = 64 << 20
"""Segments packed at once: bounds the settler's memory whatever the backlog."""
GRACE_US: Final = 60_000_000
WORTHWHILE_BYTES: Final = 16 << 20
WORTHWHILE_SEGMENTS: Final = 64
_TAIL_BYTES: Final = 256


@dataclass(frozen=True, slots=True)
class Settled:
    """What one settling did."""

    segments: int = 0
    rows: int = 0
    files: int = 0


@contextlib.contextmanager
def settler_elected(layout: Layout, *, wait_s: float = 0.0) -> Iterator[bool]:
    """Whether this process is the one settler now; the election ends with the block.

    Args:
        layout: The store's paths.
        wait_s: How long to wait for another settler to finish.
    """
    descriptor = os.open(layout.settler_lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + wait_s
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    yield False
                    return
                time.sleep(0.02)
            else:
                yield True
                return
    finally:
        os.close(descriptor)


def settle_if_worthwhile(layout: Layout) -> Settled:
    """Settle when enough is waiting; a few small segments read as fast where they are."""
    waiting = _unsettled(layout, layout.read_manifest())
    if len(waiting) < WORTHWHILE_SEGMENTS and total_bytes(waiting) < WORTHWHILE_BYTES:
        return Settled()
    return settle(layout)


def settle(layout: Layout, *, wait_s: float = 0.0) -> Settled:
    """Pack every sealed segment, a batch at a time; nothing if another process is at it.

    Args:
        layout: The store's paths.
        wait_s: How long to wait for another settler to finish first.
    """
    done = Settled()
    with settler_elected(layout, wait_s=wait_s) as is_elected:
        if not is_elected:
            return done
        _sweep(layout)
        for batch in _batches(_sealed(layout, layout.read_manifest())):
            rows = _settle_batch(layout, batch)
            done = Settled(
                done.segments + len(batch), done.rows + rows, done.files + (1 if rows else 0)
            )
    return done


def _unsettled(layout: Layout, manifest: Manifest) -> list[Path]:
    settled = {segment.name for segment in manifest.segments}
    return [path for path in layout.segments() if path.name not in settled]


def _sealed(layout: Layout, manifest: Manifest) -> list[Path]:
    """Segments nobody writes to any more: sealed, or of this boot and unlocked."""
    boot = boot_id()
    return [path for path in _unsettled(layout, manifest) if _is_sealed(path, boot)]


def _is_sealed(path: Path, boot: str) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        size = os.fstat(descriptor).st_size
        tail = os.pread(descriptor, _TAIL_BYTES, max(0, size - _TAIL_BYTES))
        if b'{"record":"seal"' in tail.rstrip(b"\n").rpartition(b"\n")[2]:
            return True
        if not path.name.startswith(boot):
            return _is_older_boot(path)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        return True
    finally:
        os.close(descriptor)


def _is_older_boot(path: Path) -> bool:
    """Whether the machine was started again since: only then did the segment's writer surely die.

    On a local disk a foreign boot id is an earlier boot of this machine; the writer's start time,
    which stands in the name, must lie before this boot.
    """
    started_ns = int(path.name.split("-")[1])
    return started_ns < time.time_ns() - time.monotonic_ns()


def _batches(paths: Sequence[Path]) -> Iterator[list[Path]]:
    batch: list[Path] = []
    size = 0
    for path in paths:
        length = total_bytes([path])
        if batch and size + length > BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(path)
        size += length
    if batch:
        yield batch


def _settle_batch(layout: Layout, paths: Sequence[Path]) -> int:
    import duckdb

    manifest = layout.read_manifest()
    con = duckdb.connect(config={"threads": "1"})
    try:
        con.execute("SET enable_progress_bar = false")
        con.execute("SET memory_limit = '400MB'")
        con.execute(f"SET temp_directory = {quoted(str(layout.new / 'spill'))}")
        con.execute("SET preserve_insertion_order = false")
        file, segments = _pack(con, layout, manifest, paths)
    finally:
        con.close()
    if file is not None:
        os.replace(layout.new / file.name, layout.data / file.name)
        _sync_folder(layout.data)
    commit_us = now_us()
    files = (*manifest.files, replace(file, added_us=commit_us)) if file else manifest.files
    layout.write_manifest(
        Manifest(
            files,
            (
                *manifest.segments,
                *(replace(segment, settled_us=commit_us) for segment in segments),
            ),
        )
    )
    return file.rows if file else 0


def _pack(
    con: "duckdb.DuckDBPyConnection", layout: Layout, manifest: Manifest, paths: Sequence[Path]
) -> tuple[DataFile | None, list[SettledSegment]]:
    """Write the batch's Parquet under ``new/`` and count what was in each segment."""
    listed = "[" + ", ".join(quoted(str(path)) for path in paths) + "]"
    columns = ", ".join(COLUMNS)
    con.execute(
        f"CREATE VIEW raw AS SELECT *, parse_filename(filename) AS segment "
        f"FROM {read_ndjson(listed, SEGMENT_COLUMNS)}"
    )
    # Narrow pass: which line of each span counts, and what became of the rest. The start of a span
    # is written anew when a segment rotates, so in a rotated segment it means nothing.
    con.execute(
        """
        CREATE TABLE lines AS
        SELECT segment, record, trace_id, span_id, start_ns, end_sequence, process, sequence,
          coalesce(rotated, false) AS rotated, coalesce(lost, 0) AS lost
        FROM raw
        """
    )
    con.execute(
        """
        CREATE TABLE chosen AS
        SELECT trace_id, span_id, segment, sequence, end_sequence, process, record, start_ns FROM lines
        WHERE span_id IS NOT NULL AND (record = 'span' OR (record = 'start' AND segment NOT IN
          (SELECT segment FROM lines WHERE record = 'seal' AND rotated)))
        QUALIFY row_number() OVER
          (PARTITION BY trace_id, span_id ORDER BY record = 'start', segment, sequence) = 1
        """
    )
    _leave_out_settled(con, layout, manifest)
    rows, low, high = _row(con, "SELECT count(*), min(start_ns), max(start_ns) FROM chosen")
    segments = [
        SettledSegment(name, 0, int(damaged), int(conflicts), int(lost))
        for name, damaged, conflicts, lost in con.execute(
            """
            SELECT l.segment, count(*) FILTER (l.record IS NULL),
              count(*) FILTER (l.record = 'span' AND c.span_id IS NULL), coalesce(sum(l.lost), 0)
            FROM lines l LEFT JOIN chosen c
              ON l.trace_id = c.trace_id AND l.span_id = c.span_id AND l.segment = c.segment
             AND l.end_sequence = c.end_sequence
            GROUP BY 1
            """
        ).fetchall()
    ]
    named = {segment.name for segment in segments}
    segments += [SettledSegment(path.name, 0) for path in paths if path.name not in named]
    if not rows:
        return None, segments
    name = f"spans-{time.time_ns():019d}-{secrets.token_hex(4)}.parquet"
    made = layout.new / name
    con.execute(
        f"""
        COPY (
          SELECT {columns} FROM raw SEMI JOIN chosen
            USING (trace_id, span_id, segment, record, sequence, end_sequence)
          ORDER BY trace_id, agent, start_ns, sequence
        ) TO {quoted(str(made))}
        (FORMAT parquet, COMPRESSION zstd, COMPRESSION_LEVEL 3, ROW_GROUP_SIZE 20480,
         KV_METADATA {{schema: '{SCHEMA_VERSION}'}})
        """
    )
    _sync(made)
    return DataFile(name, 0, int(rows), made.stat().st_size, int(low), int(high)), segments


def _leave_out_settled(
    con: "duckdb.DuckDBPyConnection", layout: Layout, manifest: Manifest
) -> None:
    """Drop chosen spans whose id a settled file holds already: the first one wins.

    The same span has the same start wherever it was recorded twice, so only files whose time range
    meets the batch's are asked.
    """
    low, high = _row(con, "SELECT min(start_ns), max(start_ns) FROM chosen")
    if low is None:
        return
    near = [
        quoted(str(layout.data / file.name))
        for file in manifest.live_files
        if file.min_start_ns <= high and file.max_start_ns >= low
    ]
    if near:
        con.execute(
            f"""
            DELETE FROM chosen USING (
              SELECT trace_id, span_id FROM read_parquet([{", ".join(near)}])
              WHERE start_ns BETWEEN {low} AND {high}
            ) held WHERE chosen.trace_id = held.trace_id AND chosen.span_id = held.span_id
            """
        )


def _row(con: "duckdb.DuckDBPyConnection", query: str) -> tuple[int, ...]:
    row = con.execute(query).fetchone()
    assert row is not None
    return tuple(row)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_sync_folder = _sync


def _sweep(layout: Layout) -> None:
    """Unlink what ceased to count long enough ago, and what a dead settler left half made."""
    now = now_us()
    manifest = layout.read_manifest()
    old_files = [
        file for file in manifest.files if file.dropped_us and file.dropped_us < now - GRACE_US
    ]
    old_segments = [segment for segment in manifest.segments if segment.settled_us < now - GRACE_US]
    for file in old_files:
        (layout.data / file.name).unlink(missing_ok=True)
    gone = set()
    for segment in old_segments:
        (layout.live / segment.name).unlink(missing_ok=True)
        if not (segment.damaged or segment.conflicts or segment.lost):
            gone.add(segment.name)
    if old_files or gone:
        layout.write_manifest(
            Manifest(
                tuple(file for file in manifest.files if file not in old_files),
                tuple(s for s in manifest.segments if s.name not in gone),
            )
        )
    _sweep_new(layout, manifest)


def _sweep_new(layout: Layout, manifest: Manifest) -> None:
    listed = {file.name for file in manifest.files}
    for path in [*layout.new.iterdir(), *layout.data.glob("spans-*.parquet")]:
        if path.name in listed or path.is_dir():
            continue
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_mtime < time.time() - GRACE_US / 1e6:
                path.unlink()
