"""Damage found by readers: which part of the store it is, put aside so that the rest is read.

A file is called damaged only if its bytes were read and are wrong; what the system refuses just now
(an I/O error, no more open files) says nothing about it. Whoever is not elected at that moment, or
may not write, reads without the damaged part and leaves it where it is.
"""

import contextlib
import logging
import os
import shlex
import tempfile
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from lightning_otel import config
from lightning_otel.errors import LightningOtelError, StoreDamagedError, StoreError
from lightning_otel.store import quarantine
from lightning_otel.store.checksums import wounds_of
from lightning_otel.store.election import settler_elected
from lightning_otel.store.layout import (
    EMPTY_DATA,
    DataFile,
    Layout,
    Manifest,
    write_private,
)
from lightning_otel.store.spans import empty_data_statement
from lightning_otel.store.sql import keep_quiet, quoted

if TYPE_CHECKING:
    import duckdb

log = logging.getLogger(__name__)

_SUFFIX: Final = ".parquet"
_REFUSALS: Final = ("Cannot open file", "Could not read", "Could not seek", "Cannot access")
"""Words of DuckDB for what the system refuses."""

_avoided: dict[Path, set[str]] = {}
"""By store: files and segments known to be damaged that could not be put aside."""
_verified: dict[Path, tuple[int, int]] = {}
"""Size and time of change of data files that this process read, and that are whole."""
_verified_to: dict[Path, int] = {}
"""How far this process read segments whose lines are whole."""
_told: dict[Path, frozenset[str]] = {}
"""By store: what was told of last."""


@contextlib.contextmanager
def reading(layout: Layout | None, verb: str = "read") -> Iterator[None]:
    """A block in which a damaged file of the store is an error that names it.

    Args:
        layout: The store's paths; None if it has no files.
        verb: What is done to the store, for the error where no file is damaged.

    Raises:
        StoreError: DuckDB cannot read one of the store's files.
    """
    import duckdb

    try:
        yield
    except duckdb.Error as exc:
        if layout is None:
            raise _elsewhere(verb, exc) from exc
        raise damage_of(exc, layout) or StoreError(
            f"cannot {verb} {layout.catalogue}: {exc}; see: lightning-otel doctor"
        ) from exc


def _elsewhere(verb: str, exc: "duckdb.Error") -> StoreError:
    return StoreError(
        f"cannot {verb} the spans: {' '.join(str(exc).split())}; look after what holds them"
    )


def damage_of(exc: "duckdb.Error", layout: Layout) -> StoreError | None:
    """The error that names the damage behind one of DuckDB's; None if none is behind it.

    What is damaged is put aside, so that who reads again reads the rest.
    """
    found = find_damage(exc, layout)
    if not found:
        return None
    avoid(layout, found)
    name, why = next(iter(found.items()))
    return StoreDamagedError(
        f"cannot read {_place(layout, name)}, which is damaged ({why}); read again for all other "
        f"spans, and run: {repair_command(layout)}"
    )


def avoided(layout: Layout) -> frozenset[str]:
    """Names of what this process reads without, as it lies damaged where it always lay."""
    return frozenset(_avoided.get(layout.root, ()))


def look(layout: Layout, manifest: Manifest, *, is_thorough: bool = False) -> dict[str, str]:
    """Data files and segments that are damaged, and why; missing ones are not among them.

    A process reads each once (0.03 s for 14 MB), and of a segment what was appended since.

    Args:
        layout: The store's paths.
        manifest: What is live.
        is_thorough: Read all once more, also files of older versions, which have no checksum.

    Raises:
        OSError: The store's folder cannot be read.
    """
    found: dict[str, str] = {}
    folder = f"{layout.data}/"
    for file in manifest.live_files:
        try:
            status = os.stat(folder + file.name)  # a Path costs ten times more, for each file
        except FileNotFoundError:
            continue
        stamp = status.st_size, status.st_mtime_ns
        is_as_made = stamp == (file.size_bytes, file.mtime_ns or status.st_mtime_ns)
        path = layout.data / file.name
        is_known = _verified.get(path) == stamp or (is_as_made and not file.checksum)
        if is_known and not is_thorough:
            continue
        why = fault_of(path, file)
        if why:
            found[file.name] = why
        else:
            _verified[path] = stamp
    # The folder may have been removed: then it is made anew later.
    for path in layout.unsettled(manifest) if layout.live.exists() else ():
        if _has_corrupt_lines(layout, path, is_thorough=is_thorough):
            found[path.name] = "it has a line that is not as written"
    return found


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


def missing(layout: Layout, manifest: Manifest) -> list[DataFile]:
    """Live data files that are not there.

    Raises:
        OSError: The folder cannot be read.
    """
    there = set(os.listdir(layout.data))
    return [file for file in manifest.live_files if file.name not in there]


def put_missing_aside(layout: Layout) -> None:
    """Have segments read and settled again that stood in a file which is gone; settler only.

    A missing file without any is left in the manifest: it may come back, as with its disk.

    Raises:
        OSError: The store cannot be written.
    """
    manifest = layout.read_manifest()
    absent = {file.name for file in missing(layout, manifest)}
    waiting = {path.name for path in layout.segments()} if absent else set()
    held = {each.file for each in manifest.segments if each.name in waiting}
    moved = {name for name in absent if (layout.quarantine / name).exists()}
    again = absent & (held | moved)
    if again:
        quarantine.put_aside(
            layout, {name: "it was moved" if name in moved else "it is missing" for name in again}
        )


def avoid(layout: Layout, found: Mapping[str, str]) -> None:
    """Put damaged parts aside, or let this process read without them."""
    if not found:
        return
    try:
        with settler_elected(layout) as is_elected:
            if is_elected:
                remove(layout, found)
                return
    except (OSError, StoreError):
        log.debug("%s keeps what is damaged", layout.root, exc_info=True)
    _avoided.setdefault(layout.root, set()).update(found)


def remove(layout: Layout, found: Mapping[str, str]) -> None:
    """Put damaged parts aside; only for the elected settler.

    Raises:
        OSError: The store cannot be written.
    """
    files = {name: why for name, why in found.items() if name.endswith(_SUFFIX)}
    if EMPTY_DATA in files:
        del files[EMPTY_DATA]
        write_empty_data(layout)
    # Looked at once more: another process may have put it aside, or put a whole one there.
    listed = {file.name: file for file in layout.read_manifest().files}
    files = {
        name: why for name, why in files.items() if fault_of(layout.data / name, listed.get(name))
    }
    if files:
        quarantine.put_aside(layout, files)
    for name in found:
        if not name.endswith(_SUFFIX):
            with contextlib.suppress(FileNotFoundError):
                quarantine.put_aside_lines(layout, layout.live / name)


def tell(layout: Layout, also: Collection[str] = ()) -> None:
    """Warn of spans that cannot be read, once for each state the store is in.

    Args:
        layout: The store's paths.
        also: Names of what a process that read for this one read without.
    """
    if also:
        _avoided.setdefault(layout.root, set()).update(also)
    lacking = lacks(layout)
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
    """The command line that gets back what it can in a store."""
    try:
        is_default = Layout(config.store_path()).catalogue == layout.catalogue
    except LightningOtelError:  # a URL, or memory
        is_default = False
    named = "" if is_default else f" --store {shlex.quote(str(layout.catalogue))}"
    return f"lightning-otel doctor --repair{named}"


def lacks(layout: Layout) -> dict[str, int]:
    """How many spans cannot be read for want of each damaged or missing part."""
    manifest = layout.read_manifest()
    rows = {file.name: file.rows for file in manifest.live_files}
    found = {name: rows.get(name, 0) for name in avoided(layout)}
    found.update({file.name: file.rows for file in missing(layout, manifest)})
    found.update({note.name: note.missing for note in quarantine.notes(layout) if note.is_open})
    return found


def write_empty_data(layout: Layout) -> None:
    """Write the data file without rows, in place of whatever stands there.

    Raises:
        OSError: The store cannot be written.
    """
    made = layout.new / f"{os.getpid()}-{os.urandom(4).hex()}-{EMPTY_DATA}"
    write_private(made, _empty_data())
    os.replace(made, layout.data / EMPTY_DATA)


@cache
def _empty_data() -> bytes:
    """The content of a data file without rows: the same for every store, and 30 ms to be made."""
    import duckdb

    with tempfile.TemporaryDirectory(prefix="lightning-otel-") as folder:
        path = Path(folder) / EMPTY_DATA
        with duckdb.connect() as con:
            con.execute(empty_data_statement(path))
        return path.read_bytes()


def find_damage(exc: "duckdb.Error", layout: Layout) -> dict[str, str]:
    """What is damaged, by name, and why, where one of DuckDB's errors may come from that."""
    import duckdb

    text = str(exc)
    if "maximum_object_size" in text:
        return _corrupt(text, layout)
    # Errors of the Parquet reader that name no file have no class of their own, or name Parquet;
    # those of a user's query have one, and are not worth a look at every file.
    is_nameless = (
        type(exc) is duckdb.Error
        or isinstance(exc, duckdb.OperationalError)
        or "Parquet file" in text
    )
    suspects = sorted(layout.data.glob(f"*{_SUFFIX}"))
    if not is_nameless or f"{layout.data}/" in text:
        suspects = [path for path in suspects if str(path) in text]
    if not suspects:
        return {}
    listed = {file.name: file for file in layout.read_manifest().files}
    faults = ((path.name, fault_of(path, listed.get(path.name))) for path in suspects)
    return {name: fault for name, fault in faults if fault}


def catalogue_fault(layout: Layout) -> str:
    """Why ``X.duckdb`` cannot be opened; empty if it can."""
    import duckdb

    try:
        duckdb.connect(str(layout.catalogue), read_only=True).close()
    except duckdb.IOException as exc:
        text = str(exc).partition("\n")[0]
        return "" if any(words in text for words in (*_REFUSALS, "lock")) else text
    except duckdb.Error as exc:
        return str(exc).partition("\n")[0]
    return ""


def fault_of(path: Path, file: DataFile | None = None) -> str:
    """How a data file is damaged; empty if it is not, is gone, or cannot be read just now.

    Args:
        path: The file.
        file: Its entry in the manifest, which may know its checksum.
    """
    try:
        if file is not None and file.checksum:
            return str(wounds_of(path, file.checksum) or "")
        with path.open("rb") as content:  # what the system refuses is refused here too
            while content.read(1 << 20):
                pass
    except OSError:
        return ""
    fault = _scan(path)
    return fault if fault and _scan(path) == fault else ""


def _scan(path: Path) -> str:
    """Why DuckDB cannot read every value of a file; empty if it can, or the file is gone."""
    import duckdb

    try:
        with duckdb.connect() as con:
            keep_quiet(con)
            con.execute(f"SELECT bit_xor(hash(COLUMNS(*))) FROM read_parquet({quoted(str(path))})")
            con.fetchall()
    except (duckdb.OutOfMemoryException, duckdb.InterruptException):
        return ""
    except duckdb.Error as exc:
        text = str(exc).partition("\n")[0]
        if not path.exists() or any(words in text for words in _REFUSALS):
            return ""
        return text.replace(str(path), path.name)
    return ""


def _corrupt(text: str, layout: Layout) -> dict[str, str]:
    found = {}
    for path in layout.segments():
        if str(path) in text and _has_corrupt_lines(layout, path, is_thorough=True):
            found[path.name] = "it has a line longer than any of ours"
    return found


def _place(layout: Layout, name: str) -> Path:
    return (layout.data if name.endswith(_SUFFIX) else layout.live) / name
