"""Damage found by readers: which part of the store it is, put aside so that the rest is read.

A part is called damaged only if its bytes were read and are wrong; what the system refuses just now
(an I/O error, no more open files) says nothing about it. A process that is not elected at that
moment, or may not write, reads without the damaged part and leaves it where it is.
"""

import contextlib
import logging
import os
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from lightning_otel import config
from lightning_otel.errors import LightningOtelError, StoreDamagedError, StoreError
from lightning_otel.store import quarantine
from lightning_otel.store.election import settler_elected
from lightning_otel.store.layout import DataFile, Layout, Manifest
from lightning_otel.store.sql import new_connection, quoted

if TYPE_CHECKING:
    import duckdb

log = logging.getLogger(__name__)

_SUFFIX: Final = ".parquet"

_avoided: dict[Path, set[str]] = {}
"""By store: files and segments known to be damaged that could not be put aside."""
_verified: dict[Path, tuple[int, int]] = {}
"""Size and time of change of data files that this process read, and that are whole."""
_verified_to: dict[Path, int] = {}
"""How far this process read segments whose lines are whole."""
_told: dict[Path, frozenset[str]] = {}
"""By store: what was told of last."""


@contextlib.contextmanager
def reading(layout: Layout, verb: str = "read") -> Iterator[None]:
    """A block in which an error of DuckDB or the system says what was done to which store."""
    import duckdb

    try:
        yield
    except duckdb.Error as exc:
        raise explain(exc, layout, verb) from exc
    except OSError as exc:
        raise StoreError(f"cannot {verb} {layout.catalogue}: {exc}; is there room?") from exc


def explain(exc: "duckdb.Error", layout: Layout | None, verb: str = "read") -> StoreError:
    """Return the error that says what of a store one of DuckDB's is about.

    What is damaged is put aside, so that another attempt reads the rest.
    """
    if layout is None:
        text = " ".join(str(exc).split())
        return StoreError(f"cannot {verb} the spans: {text}; look after what holds them")
    found = find_damage(exc, layout)
    if not found:
        return StoreError(f"cannot {verb} {layout.catalogue}: {exc}; see: lightning-otel doctor")
    exclude_parts(layout, found)
    name, why = next(iter(found.items()))
    folder = layout.data if name.endswith(_SUFFIX) else layout.live
    return StoreDamagedError(
        f"cannot read {folder / name}, which is damaged ({why}); read again for all other "
        f"spans, and run: {repair_command(layout)}"
    )


def find_damage(exc: "duckdb.Error", layout: Layout) -> dict[str, str]:
    """Return what is damaged, and why, where one of DuckDB's errors may come from that."""
    import duckdb

    text = str(exc)
    files: Sequence[DataFile] = layout.read_manifest().live_files
    if f"{layout.data}/" in text:
        files = [file for file in files if file.name in text]
    # Errors of the Parquet reader that name no file have no class of their own, or name Parquet;
    # those of a user's query have one, and are not worth a look at every file.
    elif not (
        type(exc) is duckdb.Error
        or isinstance(exc, duckdb.OperationalError)
        or "Parquet file" in text
        or "maximum_object_size" in text
    ):
        return {}
    return find_damaged_parts(layout, files, is_thorough=True)


def list_excluded(layout: Layout) -> frozenset[str]:
    """Return names of what this process reads without, as it lies damaged where it always lay."""
    return frozenset(_avoided.get(layout.root, ()))


def find_damaged_parts(
    layout: Layout, files: Sequence[DataFile] | None = None, *, is_thorough: bool = False
) -> dict[str, str]:
    """Return data files and segments that are damaged, and why; missing ones are not among them.

    A process reads each once (0.03 s for 14 MB), and of a segment what was appended since.
    """
    manifest = layout.read_manifest()
    files = manifest.live_files if files is None else files
    found = find_damaged_files(layout, files, is_thorough=is_thorough)
    # The folder may have been removed: then it is made anew later.
    for path in layout.unsettled(manifest) if layout.live.exists() else ():
        if _has_corrupt_lines(layout, path, is_thorough=is_thorough):
            found[path.name] = "it has a line that is not as written"
    return found


def find_damaged_files(
    layout: Layout, files: Sequence[DataFile], *, is_thorough: bool
) -> dict[str, str]:
    """Return data files that are damaged, and why, as :func:`look` does."""
    found: dict[str, str] = {}
    for file in files:
        path = layout.data / file.name
        try:
            status = path.stat()
        except FileNotFoundError:
            continue
        stamp = status.st_size, status.st_mtime_ns
        is_known = _verified.get(path) == stamp or not file.checksum
        if is_known and not is_thorough:
            continue
        if why := _fault_of(path, file):
            found[file.name] = why
        else:
            _verified[path] = stamp
    return found


def exclude_damage(layout: Layout) -> None:
    """Verify what this process has not read yet, and read without what is damaged."""
    exclude_parts(layout, find_damaged_parts(layout))


def _has_corrupt_lines(layout: Layout, path: Path, *, is_thorough: bool) -> bool:
    known = _avoided.get(layout.root, set())
    start = 0 if is_thorough or path.name in known else _verified_to.get(path, 0)
    try:
        ranges, end = quarantine.find_corrupt_lines(path, start)
    except OSError:  # settled meanwhile, or DuckDB shall say what is wrong with it
        return False
    if not ranges:
        _verified_to[path] = end
        known.discard(path.name)
    return bool(ranges)


def _fault_of(path: Path, file: DataFile) -> str:
    """Say how a data file is damaged; empty if it is not, is gone, or cannot be read just now."""
    import duckdb

    try:
        if file.checksum:
            ranges = quarantine.find_corrupt_ranges(path, file.checksum)
            places = ", ".join(f"{first} to {end}" for first, end in ranges[:3])
            return f"the checksum of bytes {places} does not match" if ranges else ""
        with new_connection() as con:
            con.sql(f"SELECT bit_xor(hash(COLUMNS(*))) FROM {quoted(str(path))}").fetchall()
    except (OSError, duckdb.OperationalError, duckdb.InterruptException):
        return ""
    except duckdb.Error as exc:
        return str(exc).partition("\n")[0].replace(str(path), path.name)
    return ""


def list_missing_files(layout: Layout, manifest: Manifest) -> list[DataFile]:
    """Return live data files that are not there."""
    there = set(os.listdir(layout.data))
    return [file for file in manifest.live_files if file.name not in there]


def put_missing_aside(layout: Layout) -> None:
    """Have segments read and settled again that stood in a file which is gone; settler only.

    A missing file without any is left in the manifest: it may come back, as with its disk.
    """
    manifest = layout.read_manifest()
    absent = {file.name for file in list_missing_files(layout, manifest)}
    waiting = {path.name for path in layout.segments()} if absent else set()
    held = {each.file for each in manifest.segments if each.name in waiting}
    moved = {name for name in absent if (layout.quarantine / name).exists()}
    if again := absent & (held | moved):
        quarantine.put_aside(
            layout, {name: "it was moved" if name in moved else "it is missing" for name in again}
        )


def exclude_parts(layout: Layout, found: Mapping[str, str]) -> None:
    """Put damaged parts aside, or let this process read without them."""
    if not found:
        return
    try:
        with settler_elected(layout) as is_elected:
            if is_elected:
                put_damage_aside(layout, found)
                return
    except (OSError, StoreError):
        log.debug("%s keeps what is damaged", layout.root, exc_info=True)
    _avoided.setdefault(layout.root, set()).update(found)


def put_damage_aside(layout: Layout, found: Mapping[str, str]) -> None:
    """Put damaged parts aside; only for the elected settler."""
    # Verified once more: another process may have put it aside, or put a whole one there.
    files = [file for file in layout.read_manifest().files if file.name in found]
    damaged = {file.name: _fault_of(layout.data / file.name, file) for file in files}
    if damaged := {name: why for name, why in damaged.items() if why}:
        quarantine.put_aside(layout, damaged)
    for name in found:
        if not name.endswith(_SUFFIX):
            with contextlib.suppress(FileNotFoundError):
                quarantine.put_aside_lines(layout, layout.live / name)


def warn_of_missing_spans(layout: Layout, also: Collection[str] = ()) -> None:
    """Warn of spans that cannot be read, once for each state the store is in."""
    if also:
        _avoided.setdefault(layout.root, set()).update(also)
    lacking = count_missing_spans(layout)
    names = frozenset(lacking)
    if names == _told.get(layout.root, frozenset()):
        return
    _told[layout.root] = names
    if names:
        log.warning(
            "%s: %d spans cannot be read, for %s damaged or missing (%s); %s",
            layout.catalogue,
            sum(lacking.values()),
            "a file is" if len(names) == 1 else f"{len(names)} files are",
            ", ".join(sorted(names)[:3]),
            f"run: {repair_command(layout)}",
        )


def repair_command(layout: Layout) -> str:
    """Return the command line that gets back what it can in a store."""
    try:
        is_default = Layout(config.store_path()).catalogue == layout.catalogue
    except LightningOtelError:  # a URL, or memory
        is_default = False
    named = "" if is_default else f" --store {shlex.quote(str(layout.catalogue))}"
    return f"lightning-otel doctor --repair{named}"


def count_missing_spans(layout: Layout) -> dict[str, int]:
    """Return how many spans cannot be read for want of each damaged or missing part."""
    manifest = layout.read_manifest()
    rows = {file.name: file.rows for file in manifest.live_files}
    found = {name: rows.get(name, 0) for name in list_excluded(layout)}
    found.update({file.name: file.rows for file in list_missing_files(layout, manifest)})
    found.update(
        {note.name: note.missing for note in quarantine.read_notes(layout) if note.is_open}
    )
    return found
