"""Where a store's files lie, and the manifest that says which of them count.

``X.duckdb`` is the catalogue (views only); everything else lies in ``X.duckdb.d/``: ``new/`` for
files being made, ``live/`` for segments, ``data/`` for settled Parquet, ``manifest.ndjson``.
Nothing in here imports DuckDB: the traced process uses it.
"""

import contextlib
import os
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

import orjson

from lightning_otel.errors import ConfigError, StoreError, StoreMissingError, StoreVersionError
from lightning_otel.store.counts import unstored

MEMORY: Final = ":memory:"
"""Names a store that is kept in this process and gone with it."""
SCHEMA_VERSION: Final = 1
SEGMENT_SUFFIX: Final = ".ndjson"
_SEGMENT_NAME: Final = re.compile(r"[^-]+-\d+-\d+-\d+\.ndjson")
"""Boot, start of the process in nanoseconds, process id, number."""
EMPTY_DATA: Final = "_empty.parquet"
EMPTY_LIVE: Final = "_empty.ndjson"


@dataclass(frozen=True, slots=True)
class DataFile:
    """One settled Parquet file.

    Attributes:
        added_us: When it began to count, Unix microseconds.
        dropped_us: When it ceased to count; None while it does.
    """

    name: str
    added_us: int
    rows: int
    size_bytes: int
    min_start_ns: int
    max_start_ns: int
    dropped_us: int | None = None


@dataclass(frozen=True, slots=True)
class SettledSegment:
    """A segment whose spans stand in a data file.

    Attributes:
        damaged: Lines that did not parse.
        conflicts: Spans left out because their id was taken by a different span.
        lost: Spans its process lost because the disk refused them.
        counts: What became of the spans that ended in it, by reason; see :mod:`counts`.
    """

    name: str
    settled_us: int
    damaged: int = 0
    conflicts: int = 0
    lost: int = 0
    counts: Mapping[str, int] = field(default_factory=dict)

    @property
    def process(self) -> str:
        """Id of the process that wrote it."""
        return self.name.rpartition("-")[0]

    @property
    def tells_of_damage(self) -> bool:
        """Whether something was damaged, rejected or lost."""
        return bool(self.damaged or self.conflicts or self.lost or unstored(self.counts))


@dataclass(frozen=True, slots=True)
class Manifest:
    """Which files and segments count: the only commit mark of the store.

    A reader takes a file for live, and a segment for settled, if the time written here is not later
    than the start of its own transaction, so it sees either the one or the other. The time lies a
    little ahead of the replacement: whoever starts after it reads the new manifest, however often.
    It becomes 0, valid for all, before the segments are unlinked.

    Attributes:
        files: Data files.
        segments: Settled segments, until they are gone.
        counts: What became of the spans of segments that are gone, and of those taken out of the
            store since; see :mod:`counts`.
    """

    files: tuple[DataFile, ...] = ()
    segments: tuple[SettledSegment, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)

    @property
    def live_files(self) -> tuple[DataFile, ...]:
        """Files that count now."""
        return tuple(file for file in self.files if file.dropped_us is None)


class Layout:
    """The paths of one store, named by its catalogue."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Name a store.

        Args:
            path: ``X.duckdb``, or a folder that holds (or will hold) ``traces.duckdb``.

        Raises:
            ConfigError: It is a URL, or ``:memory:``, and so no place on a disk.
        """
        text = os.fspath(path)
        if "://" in text:
            raise ConfigError(f"no engine for {text!r}; name a local path")
        if text == MEMORY:
            raise ConfigError(f"{MEMORY!r} is no place on a disk, as is needed here; name a path")
        given = Path(path).expanduser()
        if given.suffix != ".duckdb":
            given = given / "traces.duckdb"
        # Absolute, because views embed the paths and programs change their directory.
        self.catalogue = Path(os.path.abspath(given))
        self.root = self.catalogue.with_name(self.catalogue.name + ".d")
        self.new = self.root / "new"
        self.live = self.root / "live"
        self.data = self.root / "data"
        self.manifest_path = self.root / "manifest.ndjson"
        self.settler_lock = self.root / "settler.lock"

    def exists(self) -> bool:
        """Whether a store stands here."""
        return self.manifest_path.exists()

    def require(self) -> None:
        """Check that a store stands here.

        Raises:
            StoreMissingError: Nothing does.
        """
        if not self.exists():
            raise StoreMissingError(
                f"no store at {self.catalogue}; record one with lightning_otel.auto_trace(), or "
                "lightning-otel run -- python app.py"
            )

    def create(self) -> None:
        """Make the store, private to the user; harmless if it is there.

        Raises:
            StoreError: It cannot be made, or a database of somebody else's has its name.
            StoreVersionError: A newer version made it.
        """
        try:
            if self.catalogue.exists() and not self.root.exists():
                raise StoreError(
                    f"{self.catalogue} is a database of its own, not a store's catalogue; "
                    "name another path with --store or LIGHTNING_OTEL_STORE"
                )
            self.make_folders()
        except OSError as exc:
            raise StoreError(
                f"cannot make the store {self.catalogue}: {exc.strerror or exc}; "
                "name a writable place with --store or LIGHTNING_OTEL_STORE"
            ) from exc
        self.read_manifest()

    def make_folders(self) -> None:
        """Make what is not there yet; any number of processes may do so at once.

        Raises:
            OSError: Something cannot be made.
        """
        if not self.catalogue.parent.exists():
            _make_private(self.catalogue.parent)
            _add_private(self.catalogue.parent / ".gitignore", b"*\n")
        for folder in (self.root, self.new, self.live, self.data):
            _make_private(folder)
        _add_private(self.root / ".gitignore", b"*\n")
        _add_private(self.live / EMPTY_LIVE, b"")
        if not self.manifest_path.exists():
            made = self._made_manifest(Manifest())
            # Linked, not renamed: a settler may have replaced another process's first manifest.
            with contextlib.suppress(FileExistsError):
                os.link(made, self.manifest_path)
            made.unlink()

    def read_manifest(self) -> Manifest:
        """The manifest as it is now.

        Raises:
            StoreError: It cannot be read.
            StoreVersionError: A newer version wrote it.
        """
        try:
            lines = self.manifest_path.read_bytes().splitlines()
            rows = [orjson.loads(line) for line in lines if line]
        except (OSError, ValueError) as exc:
            raise StoreError(f"cannot read {self.manifest_path}: {exc}") from exc
        for row in rows:
            if row["kind"] == "store" and row["schema"] > SCHEMA_VERSION:
                raise StoreVersionError(
                    f"{self.catalogue} has schema {row['schema']}, this lightning-otel knows "
                    f"{SCHEMA_VERSION}; upgrade with: pip install --upgrade lightning-otel"
                )
        return Manifest(
            files=tuple(
                DataFile(**_fields(DataFile, row)) for row in rows if row["kind"] == "file"
            ),
            segments=tuple(
                SettledSegment(**_fields(SettledSegment, row))
                for row in rows
                if row["kind"] == "segment"
            ),
            counts=next((row["counts"] for row in rows if row["kind"] == "counts"), {}),
        )

    def write_manifest(self, manifest: Manifest, *, before_us: int | None = None) -> bool:
        """Replace the manifest atomically, on disk before it counts.

        Args:
            manifest: The new one.
            before_us: Leave the old one if this time has passed when all is ready.

        Returns:
            Whether the manifest was replaced.
        """
        made = self._made_manifest(manifest)
        if before_us is not None and now_us() >= before_us:
            made.unlink()
            return False
        os.replace(made, self.manifest_path)
        return True

    def _made_manifest(self, manifest: Manifest) -> Path:
        rows: list[dict[str, Any]] = [{"kind": "store", "schema": SCHEMA_VERSION}]
        rows += [{"kind": "file", **_as_dict(file)} for file in manifest.files]
        rows += [{"kind": "segment", **_as_dict(segment)} for segment in manifest.segments]
        if manifest.counts:
            rows.append({"kind": "counts", "counts": manifest.counts})
        text = b"".join(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in rows)
        made = self.new / f"manifest-{os.getpid()}-{time.time_ns()}-{os.urandom(4).hex()}"
        write_private(made, text, is_synced=True)
        return made

    def segments(self) -> list[Path]:
        """Segments in ``live/``, oldest first."""
        found = [path for path in self.live.iterdir() if _SEGMENT_NAME.fullmatch(path.name)]
        return sorted(found, key=lambda path: path.name.split("-")[1:])


def now_us() -> int:
    """The wall clock in Unix microseconds."""
    return time.time_ns() // 1000


def write_private(path: Path, content: bytes, *, is_synced: bool = False) -> None:
    """Make a file that only its owner can read.

    Raises:
        FileExistsError: It is there already.
        OSError: It cannot be written whole; nothing is left of it.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        left = memoryview(content)
        while left:
            left = left[os.write(descriptor, left) :]
        if is_synced:
            os.fsync(descriptor)
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(descriptor)


def _add_private(path: Path, content: bytes) -> None:
    with contextlib.suppress(FileExistsError):
        write_private(path, content)


def _make_private(folder: Path) -> None:
    """Make a folder and those above it, all private: ``parents=True`` would leave these open."""
    for each in (*reversed(folder.parents), folder):
        if not each.exists():
            each.mkdir(mode=0o700, exist_ok=True)


def _as_dict(entry: DataFile | SettledSegment) -> dict[str, Any]:
    return {name: getattr(entry, name) for name in entry.__slots__}


def _fields(kind: type[DataFile | SettledSegment], row: dict[str, Any]) -> dict[str, Any]:
    return {each.name: row[each.name] for each in fields(kind) if each.name in row}


def total_bytes(paths: Iterable[Path]) -> int:
    """Size of the files that are still there."""
    size = 0
    for path in paths:
        try:
            size += path.stat().st_size
        except FileNotFoundError:
            continue
    return size
