"""Write segments into sorted Parquet, exactly once: one settler at a time, safe to kill.

A batch of sealed segments becomes one file, renamed into ``data/``; replacing the manifest is the
commit. The segments are unlinked after a grace period, for readers that opened them before.
"""

import contextlib
import fcntl
import logging
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from lightning_otel.store.counts import sum_counts
from lightning_otel.store.damage import (
    list_missing_files,
    quarantine_damage,
    release_missing_files,
)
from lightning_otel.store.files import list_names, put_file, total_bytes
from lightning_otel.store.layout import Layout, elect_settler, now_us
from lightning_otel.store.manifest import (
    DATA_NAME,
    FURTHEST_AHEAD_US,
    DataFile,
    Manifest,
    SettledSegment,
)
from lightning_otel.store.packing import make_parquet
from lightning_otel.store.parquet import SPILL, bounded_connection, sync
from lightning_otel.store.quarantine import quarantine_lines
from lightning_otel.store.recovery import restore_manifest
from lightning_otel.store.segment import read_boot_id
from lightning_otel.store.sieve import sift_segments, sifted_sql

if TYPE_CHECKING:
    import duckdb

log = logging.getLogger(__name__)

BATCH_BYTES: Final = 64 << 20
"""Segments packed at once: bounds the settler's memory whatever the backlog."""
GRACE_US: Final = 60_000_000
COMMIT_AHEAD_US: Final = 500_000
"""How far ahead of its writing a manifest counts; see :class:`Manifest`."""
_TAIL_BYTES: Final = 256
_SEAL_LINE: Final = b'{"record":"seal"'


@dataclass(frozen=True, slots=True)
class SettleResult:
    """Segments and spans that one settling packed, and the files it made."""

    segments: int = 0
    rows: int = 0
    files: int = 0


def settle_for_reader(layout: Layout, limit: int | None = None) -> SettleResult:
    """Settle, at most ``limit`` batches; log what cannot be, as on a full disk: it can be read."""
    import duckdb

    try:
        return settle(layout, limit)
    except (OSError, duckdb.Error) as exc:
        log.warning("%s could not be settled: %s", layout.catalogue, exc)
        return SettleResult()


def settle(layout: Layout, limit: int | None = None, *, wait_s: float = 0.0) -> SettleResult:
    """Pack sealed segments, a batch of at most 64 MB at a time; nothing if another process does.

    At most ``limit`` batches; another settler is waited for ``wait_s``.

    Raises:
        OSError: There is no room.
        duckdb.Error: DuckDB cannot write, or read a file it must look into.
    """
    with elect_settler(layout, wait_s=wait_s) as is_elected:
        return settle_elected(layout, limit) if is_elected else SettleResult()


def settle_elected(layout: Layout, limit: int | None = None) -> SettleResult:
    """Settle in the process that :func:`elect_settler` has elected."""
    restore_manifest(layout)
    release_missing_files(layout)
    sweep(layout)
    batches, names = list(islice(_list_batches(list_sealed(layout)), limit)), set[str]()
    if not batches:
        return SettleResult()
    import duckdb

    segments = rows = files = 0
    while batches:
        # One for all batches, as it uses its memory again; damage may leave it of no use.
        with bounded_connection(layout.new / SPILL) as con:
            try:
                while batches:
                    count = _settle_batch(con, layout, batches[0])
                    segments, rows = segments + len(batches.pop(0)), rows + count
                    files += bool(count)
            except duckdb.Error:
                damage = quarantine_damage(layout)
                if names >= damage.keys():
                    raise
                names |= damage.keys()
    return SettleResult(segments, rows, files)


def list_sealed(layout: Layout) -> list[Path]:
    """List segments without a writer: sealed, or of this boot and unlocked."""
    return _list_segments(layout, is_sealed=True)


def list_unsealed(layout: Layout) -> list[Path]:
    """List segments that a process may still write to."""
    return _list_segments(layout, is_sealed=False)


def _list_segments(layout: Layout, *, is_sealed: bool) -> list[Path]:
    boot = read_boot_id()
    segments = layout.list_unsettled(layout.read_manifest())
    return [path for path in segments if _is_sealed(path, boot) is is_sealed]


def _is_sealed(path: Path, boot: str) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        size = os.fstat(descriptor).st_size
        tail = os.pread(descriptor, _TAIL_BYTES, max(0, size - _TAIL_BYTES))
        _, newline, last = tail.rstrip(b"\n").rpartition(b"\n")
        # Of a longer last line only the end is seen, which may hold anything.
        if last.startswith(_SEAL_LINE) and (newline or size <= _TAIL_BYTES):
            return True
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A foreign boot is an earlier one of this machine, whose writer surely died, or another
        # machine's on a shared disk: the writer's start in the name must lie before this boot.
        began_ns = time.time_ns() - time.monotonic_ns()
        return path.name.startswith(boot) or int(path.name.split("-")[1]) < began_ns
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)


def _list_batches(paths: Sequence[Path]) -> Iterator[list[Path]]:
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


def _settle_batch(con: "duckdb.DuckDBPyConnection", layout: Layout, batch: Sequence[Path]) -> int:
    copy = layout.new / SPILL / f"{os.urandom(8).hex()}.ndjson"
    names = sift_segments(batch, copy)
    sifted = frozenset(names)
    remainder = [path for path in batch if path.name not in sifted]
    for path in remainder:
        quarantine_lines(layout, path, is_closed=True)
    lines = sifted_sql(copy, names, remainder)
    file, segments = make_parquet(con, layout, layout.read_manifest(), batch, lines)
    copy.unlink()
    replace_files(layout, (), file, settled=segments)
    return file.rows if file else 0


def replace_files(
    layout: Layout,
    old: Sequence[DataFile],
    file: DataFile | None,
    counts: Mapping[str, int] = MappingProxyType({}),
    *,
    settled: Sequence[SettledSegment] = (),
    keeps_segments: bool = True,
) -> None:
    """Commit a new file, if any, under ``new/`` in place of others, in one write of the manifest.

    ``counts`` are of spans left out, by reason; with ``keeps_segments`` the old files' segments
    stand in for a damaged new file.
    """
    if file is not None:
        replaced = [
            folder / entry.name for entry in old for folder in (layout.data, layout.quarantine)
        ]
        replaced += [layout.live / segment.name for segment in settled]
        put_file(layout.new / file.name, layout.data / file.name, replaced)
        sync(layout.data)
    names = {file.name for file in old}
    manifest = layout.read_manifest()
    ahead_us, is_written = COMMIT_AHEAD_US, False
    while not is_written:
        commit_us = now_us() + ahead_us
        changed = manifest.replace_files(
            names,
            file,
            counts,
            settled,
            # Segments that wait to be taken away would bring back what was left out.
            is_whole=not counts and keeps_segments,
            commit_us=commit_us,
        )
        is_written = layout.write_manifest(changed, before_us=commit_us - ahead_us // 2)
        ahead_us *= 2  # on a slow disk


def wait_until_visible(layout: Layout) -> None:
    """Wait until the last commit counts for every reader that starts now."""
    files = layout.read_manifest().files
    newest_us = max((max(file.added_us, file.dropped_us or 0) for file in files), default=0)
    while 0 <= (left_us := newest_us - now_us()) <= FURTHEST_AHEAD_US:
        time.sleep(left_us / 1e6 + 0.001)


def sweep(layout: Layout, *, is_asked: bool = False) -> None:
    """Unlink files and segments that were replaced, and files that a dead settler left.

    At most once in the grace period, unless ``is_asked``: a reader that has listed a file and not
    opened it yet fails.
    """
    shutil.rmtree(layout.new / SPILL, ignore_errors=True)
    manifest = layout.read_manifest()
    now = now_us()
    times = [segment.settled_us for segment in manifest.segments if segment.settled_us]
    times += [file.dropped_us for file in manifest.files if file.dropped_us is not None]
    if times and min(times) < now - (1 if is_asked else 2) * GRACE_US:
        changed = _settle_for_everyone(layout, manifest, now - GRACE_US)
        if changed != manifest:
            layout.write_manifest(manifest := changed)
    gone = {segment.name for segment in manifest.segments if segment.settled_us == 0}
    for path in layout.segments():
        if path.name in gone:
            path.unlink(missing_ok=True)
    for name in list_names(layout.new):
        path = layout.new / name
        with contextlib.suppress(FileNotFoundError):
            is_old = path.stat().st_mtime < time.time() - GRACE_US / 1e6
            if is_old and not DATA_NAME.fullmatch(name):
                path.unlink()


def _settle_for_everyone(layout: Layout, manifest: Manifest, before_us: int) -> Manifest:
    """Make commits before a time valid for every reader, whatever its clock says.

    Segments that are gone since the last sweep are left out, unless they tell of damage.
    """
    missing = {file.name for file in list_missing_files(layout, manifest)}
    files: list[DataFile] = []
    spent = list(manifest.spent)
    for file in manifest.files:
        if file.added_us < before_us:
            file = replace(file, added_us=0)
        # Where its successor is missing, as in a copy, this one may be the last that has its spans.
        if file.dropped_us is None or file.dropped_us >= before_us or file.successor in missing:
            files.append(file)
            continue
        (layout.data / file.name).unlink(missing_ok=True)  # first: what is unnamed may be adopted
        if not file.successor:
            spent.append(file.name)
    segments: list[SettledSegment] = []
    gone: list[SettledSegment] = []
    names = {path.name for path in layout.segments()}
    for segment in manifest.segments:
        is_there = segment.settled_us or segment.name in names
        (segments if is_there or segment.has_damage else gone).append(segment)
    return replace(
        manifest,
        files=tuple(files),
        spent=tuple(spent),
        segments=tuple(
            replace(segment, settled_us=0) if segment.settled_us < before_us else segment
            for segment in segments
        ),
        counts=sum_counts(manifest.counts, *(segment.counts for segment in gone)),
    )
