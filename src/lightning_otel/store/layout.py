"""Where a store's files lie, and the manifest that says which of them count.

``X.duckdb`` is the catalogue (views only); everything else lies in ``X.duckdb.d/``: ``new/`` for
files being made, ``live/`` for segments, ``data/`` for settled Parquet, ``quarantine/`` for what is
damaged, ``manifest.ndjson`` and its copy.
Nothing in here imports DuckDB: the traced process uses it.
"""

import contextlib
import os
import re
import time
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

import orjson

from lightning_otel.config import DEFAULT_STORE
from lightning_otel.errors import (
    ConfigError,
    StoreDamagedError,
    StoreError,
    StoreMissingError,
    StoreVersionError,
)
from lightning_otel.store.counts import unstored
from lightning_otel.store.lake import EXAMPLE, is_lake, lake_address

_INSTEAD: Final = {
    "redis": ", which lasts, or for many machines clickhouse://… or ducklake:postgres://…",
    "postgres": f", or {EXAMPLE}",
}
"""What to take instead of an engine that people ask for."""
MEMORY: Final = ":memory:"
"""Names a store that is kept in this process and gone with it."""
SCHEMA_VERSION: Final = 1
SEGMENT_SUFFIX: Final = ".ndjson"
_SEGMENT_NAME: Final = re.compile(r"[^-]+-\d+-\d+-\d+\.ndjson")
"""Boot, start of the process in nanoseconds, process id, number."""
FURTHEST_AHEAD_US: Final = 10_000_000
"""A commit is written a moment before it counts; a later one is of a clock that went back since."""
EMPTY_DATA: Final = "_empty.parquet"
EMPTY_LIVE: Final = "_empty.ndjson"
REPAIR: Final = "run: lightning-otel doctor --repair"


@dataclass(frozen=True, slots=True)
class DataFile:
    """One settled Parquet file.

    Attributes:
        added_us: When it began to count, Unix microseconds.
        dropped_us: When it ceased to count; None while it does.
        is_compact: Whether ``compact`` made it, and packed it as tightly as it can.
        publication: What it goes into lakes as, with all files of the same one; empty if that is
            not settled yet. Files of different publications are never packed into one.
        schema: The version of the columns in it.
        checksum: As ``checksums.checksum_of`` gives it; empty if it was never taken.
        mtime_ns: Its time of change when it was made; 0 if not known. A file is never written to
            again, so another one is a reason to verify it.
    """

    name: str
    added_us: int
    rows: int
    size_bytes: int
    min_start_ns: int
    max_start_ns: int
    dropped_us: int | None = None
    is_compact: bool = False
    publication: str = ""
    schema: int = 1
    checksum: str = ""
    mtime_ns: int = 0


@dataclass(frozen=True, slots=True)
class SettledSegment:
    """A segment whose spans stand in a data file.

    Attributes:
        damaged: Lines that did not parse.
        conflicts: Spans left out because their id was taken by a different span.
        lost: Spans its process lost because the disk refused them.
        counts: What became of the spans that ended in it, by reason; see :mod:`counts`.
        file: The data file its spans stand in; empty if it is not known or there is none.
        rows: Its spans that stand in that file.
    """

    name: str
    settled_us: int
    damaged: int = 0
    conflicts: int = 0
    lost: int = 0
    counts: Mapping[str, int] = field(default_factory=dict)
    file: str = ""
    rows: int = 0

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
            store since: ``dropped.age``, ``dropped.size`` and ``dropped.rollout`` by retention,
            ``rejected.conflict`` and ``rejected.duplicate`` where two files held one id; see
            :mod:`counts`.
    """

    files: tuple[DataFile, ...] = ()
    segments: tuple[SettledSegment, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)

    @property
    def live_files(self) -> tuple[DataFile, ...]:
        """Files that count now."""
        return tuple(file for file in self.files if file.dropped_us is None)

    @property
    def settled(self) -> frozenset[str]:
        """Names of the segments that were settled."""
        return frozenset(segment.name for segment in self.segments)

    def settled_by(self, time_us: int) -> frozenset[str]:
        """Names of the segments that are settled for whoever begins at this time or later."""
        return frozenset(
            each.name for each in self.segments if is_in_effect(each.settled_us, time_us)
        )


def is_in_effect(commit_us: int, time_us: int) -> bool:
    """Say whether a commit counts at a time: also one so far ahead that the clock went back."""
    return not time_us < commit_us <= time_us + FURTHEST_AHEAD_US


class Layout:
    """The paths of one store, named by its catalogue."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Name a store.

        Args:
            path: ``X.duckdb``, or a folder that holds (or will hold) ``traces.duckdb``; of a lake
                the store on this machine that recordings go to.

        Raises:
            ConfigError: It is a URL, or ``:memory:``, and so no place on a disk.
        """
        text = os.fspath(path)
        if is_lake(text):
            # What is recorded with a lake for its store waits here to be published.
            path = text = lake_address(text).local or DEFAULT_STORE
        if "://" in text:
            shown = re.sub("//[^/]*@", "//…@", text.partition("?")[0])  # without a password
            hint = next((each for name, each in _INSTEAD.items() if name in shown), "")
            raise ConfigError(f"no engine for {shown!r}; name a local path{hint}")
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
        self.quarantine = self.root / "quarantine"
        self.manifest_path = self.root / "manifest.ndjson"
        self.manifest_copy = self.root / "manifest.copy.ndjson"
        self.settler_lock = self.root / "settler.lock"
        self.state_path = self.root / "state.sqlite"

    def exists(self) -> bool:
        """Whether a store stands here.

        Raises:
            StoreError: Nobody may look.
        """
        return self._stands(self.manifest_path) or self._has_lost_manifest()

    def has_state(self) -> bool:
        """Whether a state lies beside it.

        Raises:
            StoreError: Nobody may look.
        """
        return self._stands(self.state_path)

    def _stands(self, path: Path) -> bool:
        try:
            return path.exists()
        except OSError as exc:
            raise StoreError(
                f"cannot read {path}: {exc.strerror}; look at the owner and mode of {self.root}"
            ) from exc

    def _has_lost_manifest(self) -> bool:
        """Whether settled spans lie here that a new, empty manifest would disown."""
        return self.manifest_copy.exists() or any(self.data.glob("spans-*.parquet"))

    def require(self) -> None:
        """Check that a store stands here.

        Raises:
            StoreMissingError: Nothing does.
            StoreError: Nobody may look.
        """
        if not self.exists():
            # Such as the demo's, which people look for where their own would be.
            beside = [path.with_suffix("") for path in self.catalogue.parent.glob("*.duckdb.d")]
            other = f"there is {min(beside)}: name it with --store; or " if beside else ""
            raise StoreMissingError(
                f"no store at {self.catalogue}; {other}record one with "
                "lightning_otel.auto_trace(), or lightning-otel run -- python app.py"
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
        with contextlib.suppress(StoreDamagedError):  # a reader mends it; to write needs none
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
        if not self.exists():
            made = self._made(_manifest_text(Manifest()))
            # Linked, not renamed: a settler may have replaced another process's first manifest.
            with contextlib.suppress(FileExistsError):
                os.link(made, self.manifest_path)
            made.unlink()

    def read_manifest(self) -> Manifest:
        """The manifest as it is now; where it is damaged, as its copy says.

        Raises:
            StoreDamagedError: Neither it nor its copy is whole.
            StoreError: It cannot be read.
            StoreVersionError: A newer version wrote it.
        """
        return self._read_manifest()[1]

    def whole_manifest(self) -> Path:
        """The manifest, or its copy if only that is whole.

        Raises:
            StoreDamagedError: Neither is.
        """
        return self._read_manifest()[0]

    def _read_manifest(self) -> tuple[Path, Manifest]:
        damages = []
        for path in (self.manifest_path, self.manifest_copy):
            try:
                return path, self._parsed_manifest(path)
            except StoreDamagedError as exc:
                damages.append(exc)
        raise damages[0]

    def _parsed_manifest(self, path: Path) -> Manifest:
        try:
            status = path.stat()
            stamp = status.st_ino, status.st_size, status.st_mtime_ns
            known = _parsed.get(path)
            if known is not None and known[0] == stamp:
                return known[1]
            rows = _manifest_rows(path.read_bytes())
            newest = max(row["schema"] for row in rows if "schema" in row)
            manifest = _manifest_of(rows) if newest <= SCHEMA_VERSION else None
        except FileNotFoundError as exc:
            raise StoreDamagedError(f"{path} is missing; {REPAIR}") from exc
        except (ValueError, KeyError, TypeError) as exc:
            raise StoreDamagedError(f"{path} is damaged: {exc}; {REPAIR}") from exc
        except OSError as exc:
            raise StoreError(f"cannot read {path}: {exc}") from exc
        if manifest is None:
            raise StoreVersionError(
                f"{self.catalogue} has schema {newest}, this lightning-otel knows "
                f"{SCHEMA_VERSION}; upgrade with: pip install --upgrade lightning-otel"
            )
        _parsed[path] = stamp, manifest
        return manifest

    def write_manifest(self, manifest: Manifest, *, before_us: int | None = None) -> bool:
        """Replace the manifest atomically, on disk before it counts.

        Its copy is replaced first: it is never older than the manifest, so that reading it instead
        loses no commit; and what a commit names lies on the disk before either is written.

        Args:
            manifest: The new one.
            before_us: Leave the old one if this time has passed when all is ready.

        Returns:
            Whether the manifest was replaced.
        """
        text = _manifest_text(manifest)
        copy, made = self._made(text), self._made(text)
        if before_us is not None and now_us() >= before_us:
            copy.unlink()
            made.unlink()
            return False
        os.replace(copy, self.manifest_copy)
        os.replace(made, self.manifest_path)
        return True

    def _made(self, text: bytes) -> Path:
        made = self.new / f"manifest-{os.getpid()}-{time.time_ns()}-{os.urandom(4).hex()}"
        write_private(made, text, is_synced=True)
        return made

    def unsettled(self, manifest: Manifest) -> list[Path]:
        """Segments in ``live/`` that a manifest does not call settled, oldest first."""
        settled = manifest.settled
        return [path for path in self.segments() if path.name not in settled]

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


_parsed: dict[Path, tuple[tuple[int, int, int], Manifest]] = {}
"""By path: inode, size and time of change of the manifest parsed last; each is a new file."""


def _manifest_text(manifest: Manifest) -> bytes:
    """One JSON object a line; the last one tells whether all those before it are as written."""
    rows: list[dict[str, Any]] = [{"kind": "store", "schema": SCHEMA_VERSION, "ends": True}]
    rows += [{"kind": "file", **_as_dict(file)} for file in manifest.files]
    rows += [{"kind": "segment", **_as_dict(segment)} for segment in manifest.segments]
    if manifest.counts:
        rows.append({"kind": "counts", "counts": manifest.counts})
    text = b"".join(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in rows)
    return text + orjson.dumps(_end_of(text), option=orjson.OPT_APPEND_NEWLINE)


def _end_of(text: bytes) -> dict[str, Any]:
    return {"kind": "end", "crc32": zlib.crc32(text)}


def _manifest_rows(text: bytes) -> list[dict[str, Any]]:
    """The rows of a manifest; one without an end is whole if it was not written with one.

    Raises:
        ValueError: It is not as it was written.
    """
    lines = text.splitlines(keepends=True)
    rows = [orjson.loads(line) for line in lines]
    if not rows or rows[0]["kind"] != "store":
        raise ValueError("its beginning is gone")
    if rows[0]["schema"] <= SCHEMA_VERSION and rows[0].get("ends"):
        if rows[-1]["kind"] != "end":
            raise ValueError("its end is gone")
        if rows[-1] != _end_of(text[: -len(lines[-1])]):
            raise ValueError("its checksum does not match")
    return rows


def _manifest_of(rows: Iterable[dict[str, Any]]) -> Manifest:
    rows = list(rows)
    return Manifest(
        files=tuple(DataFile(**_fields(DataFile, row)) for row in rows if row["kind"] == "file"),
        segments=tuple(
            SettledSegment(**_fields(SettledSegment, row))
            for row in rows
            if row["kind"] == "segment"
        ),
        counts=next((row["counts"] for row in rows if row["kind"] == "counts"), {}),
    )


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
