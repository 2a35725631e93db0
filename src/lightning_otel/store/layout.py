"""Where a store's files lie, and the manifest that says which of them count.

``X.duckdb`` is the catalogue (views only); everything else lies in ``X.duckdb.d/``: ``new/`` for
files being made, ``live/`` for segments, ``data/`` for settled Parquet, ``manifest.ndjson``.
Nothing in here imports DuckDB: the traced process uses it.
"""

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import orjson

from lightning_otel.errors import StoreError, StoreMissingError, StoreVersionError

SCHEMA_VERSION: Final = 1
SEGMENT_SUFFIX: Final = ".ndjson"
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
    """

    name: str
    settled_us: int
    damaged: int = 0
    conflicts: int = 0
    lost: int = 0


@dataclass(frozen=True, slots=True)
class Manifest:
    """Which files and segments count: the only commit mark of the store.

    A reader takes a file for live, and a segment for settled, from the microsecond written here, and
    compares it with the start of its own transaction; so it sees either the segment or the file.
    """

    files: tuple[DataFile, ...] = ()
    segments: tuple[SettledSegment, ...] = ()

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
        """
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
        """Make the folders, private to the user; harmless if they are there.

        Raises:
            StoreError: The folders cannot be made.
            StoreVersionError: A newer version made them.
        """
        try:
            if not self.catalogue.parent.exists():
                self.catalogue.parent.mkdir(mode=0o700, parents=True)
                _ignore_in_git(self.catalogue.parent)
            for folder in (self.root, self.new, self.live, self.data):
                folder.mkdir(mode=0o700, exist_ok=True)
            if not self.manifest_path.exists():
                _ignore_in_git(self.root)
                (self.live / EMPTY_LIVE).touch(mode=0o600)
                self.write_manifest(Manifest())
        except OSError as exc:
            raise StoreError(
                f"cannot make the store {self.catalogue}: {exc.strerror or exc}; "
                "name a writable place with --store or LIGHTNING_OTEL_STORE"
            ) from exc
        self.read_manifest()

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
            files=tuple(DataFile(**_fields(row)) for row in rows if row["kind"] == "file"),
            segments=tuple(
                SettledSegment(**_fields(row)) for row in rows if row["kind"] == "segment"
            ),
        )

    def write_manifest(self, manifest: Manifest) -> None:
        """Replace the manifest atomically, on disk before it counts."""
        rows: list[dict[str, Any]] = [{"kind": "store", "schema": SCHEMA_VERSION}]
        rows += [{"kind": "file", **_as_dict(file)} for file in manifest.files]
        rows += [{"kind": "segment", **_as_dict(segment)} for segment in manifest.segments]
        text = b"".join(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in rows)
        made = self.new / f"manifest-{os.getpid()}-{time.time_ns()}"
        descriptor = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, text)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(made, self.manifest_path)

    def segments(self) -> list[Path]:
        """Segments in ``live/``, oldest first."""
        found = [path for path in self.live.glob(f"*{SEGMENT_SUFFIX}") if path.name != EMPTY_LIVE]
        return sorted(found, key=lambda path: path.name.split("-")[1:])


def now_us() -> int:
    """The wall clock in Unix microseconds."""
    return time.time_ns() // 1000


def dropped(file: DataFile, at_us: int) -> DataFile:
    """The file, counting no more from the given time on."""
    return replace(file, dropped_us=at_us)


def _ignore_in_git(folder: Path) -> None:
    path = folder / ".gitignore"
    if not path.exists():
        path.write_text("*\n")


def _as_dict(entry: DataFile | SettledSegment) -> dict[str, Any]:
    return {name: getattr(entry, name) for name in entry.__slots__}


def _fields(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != "kind"}


def total_bytes(paths: Iterable[Path]) -> int:
    """Size of the files that are still there."""
    size = 0
    for path in paths:
        try:
            size += path.stat().st_size
        except FileNotFoundError:
            continue
    return size
