"""Detect damage in a store, quarantine it, and report what is missing.

Only bytes that were read and are wrong are damage, not what the system refuses just now. A process
that is not elected, or may not write, reads without the damaged part.
"""

import contextlib
import logging
import shlex
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from lightning_otel import config
from lightning_otel.errors import (
    LightningOtelError,
    StoreDamagedError,
    StoreError,
    disk_remedy,
)
from lightning_otel.store import quarantine
from lightning_otel.store.files import is_own_file, list_names
from lightning_otel.store.layout import SEGMENT_SUFFIX, Layout, elect_settler, now_us
from lightning_otel.store.manifest import DataFile, Manifest
from lightning_otel.store.parquet import list_live_files
from lightning_otel.store.quarantine import Note

if TYPE_CHECKING:
    import duckdb

log = logging.getLogger(__name__)

_SUFFIX: Final = ".parquet"
_NO_FILE: Final = "it is a link or no file, and is never followed"


@dataclass(slots=True)
class _Known:
    """Facts that this process found out about a store."""

    whole: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Size and time of change of data files that are whole."""
    lines: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    """By segment: its inode, the end of the lines that are as written, and their number."""
    excluded: set[str] = field(default_factory=set)
    """Damaged parts that could not be put aside."""
    warned: frozenset[str] = frozenset()


_stores: defaultdict[Path, _Known] = defaultdict(_Known)


def exclude_damage(
    layout: Layout,
    files: Sequence[DataFile] | None = None,
    *,
    manifest: Manifest | None = None,
    is_thorough: bool = False,
) -> dict[str, str]:
    """Quarantine damaged parts, or read without them; return their names and why.

    A process reads each part once (0.03 s for 14 MB), of a segment what was appended since, unless
    ``is_thorough``.
    """
    damaged = _find_damage(layout, files, manifest, is_thorough=is_thorough)
    if damaged:
        excluded = _stores[layout.root].excluded
        excluded.update(damaged)
        with contextlib.suppress(OSError, StoreError), elect_settler(layout) as is_elected:
            if is_elected:
                # Verified once more: another may have moved it, or put a whole one there.
                quarantine_damage(layout, files)
                excluded.difference_update(damaged)
    return damaged


def quarantine_damage(layout: Layout, files: Sequence[DataFile] | None = None) -> dict[str, str]:
    """Verify everything, or some data files, and quarantine what is damaged; settler only."""
    damaged = _find_damage(layout, files, None, is_thorough=True)
    in_files = {name: why for name, why in damaged.items() if name.endswith(_SUFFIX)}
    quarantine.quarantine_files(layout, in_files)
    for name in damaged.keys() - in_files.keys():
        path = layout.live / name
        with contextlib.suppress(FileNotFoundError):
            if is_own_file(path):
                quarantine.quarantine_lines(layout, path)
            else:
                now = now_us()
                note = Note(name, "segment", damaged[name], now, resolved_us=now)
                quarantine.put_aside(layout, path, note)
    return damaged


def recover(exc: "duckdb.Error", layout: Layout) -> dict[str, str]:
    """Exclude the damage that one of DuckDB's errors may come from; return what is damaged."""
    import duckdb

    text = str(exc)
    files: list[DataFile] | None = None
    if f"{layout.data}/" in text:
        files = [file for file in layout.read_manifest().live_files if file.name in text]
    # Errors of the Parquet reader that name no file have no class of their own, or name Parquet;
    # those of a user's query have one, and are not worth a look at every file.
    elif not (
        type(exc) is duckdb.Error
        or isinstance(exc, duckdb.OperationalError)
        or "Parquet file" in text
        or "maximum_object_size" in text
    ):
        return {}
    return exclude_damage(layout, files, is_thorough=True)


def explain(exc: "duckdb.Error", layout: Layout | None, verb: str = "read") -> StoreError:
    """Return the error that says what of a store one of DuckDB's is about; put damage aside."""
    if layout is None:
        text = " ".join(str(exc).split())
        remedy = disk_remedy(exc, "look after what holds them")
        return StoreError(f"cannot {verb} the spans: {text}; {remedy}")
    for name, why in recover(exc, layout).items():
        folder = layout.data if name.endswith(_SUFFIX) else layout.live
        return StoreDamagedError(
            f"cannot read {folder / name}, which is damaged ({why}); read again for all other "
            f"spans, and run: {repair_command(layout)}"
        )
    remedy = disk_remedy(exc, "see: lightning-otel doctor")
    return StoreError(f"cannot {verb} {layout.catalogue}: {exc}; {remedy}")


@contextlib.contextmanager
def translate_errors(layout: Layout, verb: str = "read") -> Iterator[None]:
    """Turn errors of DuckDB and the system in a block into errors that name the store."""
    import duckdb

    try:
        yield
    except duckdb.Error as exc:
        raise explain(exc, layout, verb) from exc
    except OSError as exc:
        remedy = disk_remedy(exc, "see: lightning-otel doctor")
        raise StoreError(f"cannot {verb} {layout.catalogue}: {exc}; {remedy}") from exc


def _find_damage(
    layout: Layout, files: Sequence[DataFile] | None, manifest: Manifest | None, *,
    is_thorough: bool,
) -> dict[str, str]:  # fmt: skip
    manifest, state = manifest or layout.read_manifest(), _stores[layout.root]
    damaged = _find_links(layout) if files is None else {}
    for file in manifest.live_files if files is None else files:
        path = layout.data / file.name
        # Gone, or it cannot be read just now, which says nothing about it.
        with contextlib.suppress(OSError):
            status = path.lstat()
            stamp = status.st_size, status.st_mtime_ns
            if not is_own_file(path):
                damaged[file.name] = _NO_FILE
            elif is_thorough or state.whole.get(file.name) != stamp:
                if ranges := quarantine.find_corrupt_ranges(path, file.checksum):
                    places = ", ".join(f"{first} to {end}" for first, end in ranges[:3])
                    damaged[file.name] = f"the checksum of bytes {places} does not match"
                else:
                    state.whole[file.name] = stamp
    # The folder may have been removed: then it is made anew later.
    for path in layout.list_unsettled(manifest) if files is None and layout.live.exists() else ():
        with contextlib.suppress(OSError):  # settled meanwhile
            if not _read_lines(layout, path, is_thorough=is_thorough)[1]:
                damaged[path.name] = "it has a line that is not as written"
    return damaged


def count_lines(layout: Layout, path: Path) -> int:
    """Count a segment's whole lines as DuckDB does; only what was appended since is read."""
    return _read_lines(layout, path)[0]


def _read_lines(layout: Layout, path: Path, *, is_thorough: bool = False) -> tuple[int, bool]:
    """Return the number of a segment's whole lines, and whether all are as written."""
    state, name, status = _stores[layout.root], path.name, path.stat()
    inode, end, count = state.lines.get(name, (0, 0, 0))
    is_other = inode != status.st_ino or status.st_size < end
    if is_thorough or is_other or name in state.excluded:
        end = count = 0
    ranges, end, more = quarantine.find_corrupt_lines(path, end)
    if not ranges:
        state.lines[name] = status.st_ino, end, count + more
        state.excluded.discard(name)
    return count + more, not ranges


def _find_links(layout: Layout) -> dict[str, str]:
    links: dict[str, str] = {}
    for folder, suffix in ((layout.data, _SUFFIX), (layout.live, SEGMENT_SUFFIX)):
        with contextlib.suppress(FileNotFoundError):
            names = list_names(folder, are_files=False)
            links |= {name: _NO_FILE for name in names if name.endswith(suffix)}
    return links


def release_missing_files(layout: Layout) -> None:
    """Release what missing files were made from, to be read again; settler only.

    A missing file without any stays in the manifest: it may come back, as with its disk.
    """
    manifest = layout.read_manifest()
    absent = {file.name for file in list_missing_files(layout, manifest)}
    segments = {path.name for path in layout.segments()} if absent else set()
    missing = absent & {segment.file for segment in manifest.segments if segment.name in segments}
    missing |= absent & {file.successor for file in quarantine.list_predecessors(layout, manifest)}
    moved = {name for name in absent if (layout.quarantine / name).exists()}
    why = dict.fromkeys(missing, "it is missing") | dict.fromkeys(moved, "it was moved")
    quarantine.quarantine_files(layout, why)


def list_missing_files(layout: Layout, manifest: Manifest) -> list[DataFile]:
    """Return live data files that are not there."""
    names = list_names(layout.data)
    return [file for file in manifest.live_files if file.name not in names]


def list_readable_files(layout: Layout, manifest: Manifest) -> list[DataFile]:
    """Return live data files that are there and not known to be damaged."""
    excluded = list_excluded(layout)
    return [file for file in list_live_files(layout, manifest) if file.name not in excluded]


def list_excluded(layout: Layout) -> frozenset[str]:
    """Return names of what this process reads without, as it lies damaged where it always lay."""
    return frozenset(_stores[layout.root].excluded)


def count_missing_spans(layout: Layout, manifest: Manifest | None = None) -> dict[str, int]:
    """Return how many spans cannot be read for want of each damaged or missing part."""
    manifest = manifest or layout.read_manifest()
    rows = {file.name: file.rows for file in manifest.live_files}
    names = {file.name for file in list_missing_files(layout, manifest)} | list_excluded(layout)
    lacking = {name: rows.get(name, 0) for name in names}
    notes = quarantine.read_notes(layout)
    return lacking | {note.name: note.missing for note in notes if note.is_open}


def warn_of_missing_spans(
    layout: Layout, manifest: Manifest | None = None, also: Collection[str] = ()
) -> None:
    """Warn of spans that cannot be read, once for each state the store is in."""
    state = _stores[layout.root]
    state.excluded.update(also)
    lacking = count_missing_spans(layout, manifest)
    before, state.warned = state.warned, frozenset(lacking)
    if lacking and state.warned != before:
        log.warning(
            "%s: %d spans cannot be read, for %s damaged or missing (%s); run: %s",
            layout.catalogue,
            sum(lacking.values()),
            "a file is" if len(lacking) == 1 else f"{len(lacking)} files are",
            ", ".join(sorted(lacking)[:3]),
            repair_command(layout),
        )


def repair_command(layout: Layout) -> str:
    """Return the command line that gets back what it can in a store."""
    try:
        is_default = Layout(config.STORE.read()).catalogue == layout.catalogue
    except LightningOtelError:  # a URL, or memory
        is_default = False
    option = "" if is_default else f" --store {shlex.quote(str(layout.catalogue))}"
    return f"lightning-otel doctor --repair{option}"
