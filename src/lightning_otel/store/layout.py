"""The places of a store's files, and the manifest as it lies there.

``X.duckdb`` is the catalogue (views only); everything else lies in ``X.duckdb.d/``: ``new/`` for
files being made, ``live/`` for segments, ``data/`` for settled Parquet, ``facts/`` for what the
adapter made of it, ``quarantine/`` for what is damaged, ``manifest.ndjson`` and its copy.
The traced process uses it: no DuckDB.
"""

import contextlib
import os
import re
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from lightning_otel import config
from lightning_otel.errors import (
    ConfigError,
    StoreDamagedError,
    StoreError,
    StoreMissingError,
    StoreVersionError,
)
from lightning_otel.store.files import (
    add_private,
    file_lock,
    list_names,
    make_private,
    put_file,
    total_bytes,
    write_private,
)
from lightning_otel.store.lake import EXAMPLE, is_lake, lake_address
from lightning_otel.store.manifest import (
    DATA_NAME,
    SCHEMA_VERSION,
    SEGMENT_NAME,
    Manifest,
    format_manifest,
    parse_manifest,
)

if TYPE_CHECKING:
    from lightning_otel.store import SpanStore

_INSTEAD: Final = {
    "redis": ", which lasts, or for many machines clickhouse://… or ducklake:postgres://…",
    "postgres": f", or {EXAMPLE}",
    "chdb": ", or a server: clickhouse://host:8123/database",
}
"""What to take instead of an engine that people ask for."""
STATE_VERSION: Final = 1
MEMORY: Final = ":memory:"
"""Names a store that is kept in this process and gone with it."""
SEGMENT_SUFFIX: Final = ".ndjson"
EMPTY_DATA: Final = "_empty.parquet"
FACTS_VERSION: Final = 3
"""Raised whenever the adapter answers otherwise, so that facts are computed anew."""
EMPTY_FACTS: Final = f"facts-{FACTS_VERSION}-empty.parquet"
FACTS_MARK: Final = "deletion.mark"
"""A file that is locked to add facts, and changes when they are deleted."""
EMPTY_LIVE: Final = "_empty.ndjson"
WORTHWHILE_BYTES: Final = 16 << 20
WORTHWHILE_SEGMENTS: Final = 64
ELECTION_S: Final = 10.0
"""How long what a user asks for waits for a settler to finish."""
REPAIR: Final = "run: lightning-otel doctor --repair"


def read_facts_mark(folder: Path) -> bytes:
    """Return the mark of the last deletion of facts, empty before the first one."""
    try:
        return (folder / FACTS_MARK).read_bytes()
    except OSError:
        return b""


def working_folder() -> Path:
    """Return the folder that this process works in; StoreError if somebody removed it."""
    try:
        return Path.cwd()
    except FileNotFoundError as exc:
        raise StoreError(
            "the working directory is gone; name the store by an absolute path, with --store or "
            "LIGHTNING_OTEL_STORE"
        ) from exc


class Layout:
    """The paths of one store, named by its catalogue."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Name a store: ``X.duckdb``, its folder, or one for ``traces.duckdb``.

        Of a lake it is the store on this machine that recordings go to.
        """
        text = os.fspath(path)
        if ":" in text and is_lake(text):
            # What is recorded with a lake for its store waits here to be published.
            path = text = lake_address(text).local or config.DEFAULT_STORE
        if "://" in text:
            address = re.sub("//[^/]*@", "//…@", text.partition("?")[0])  # without a password
            hint = next((advice for name, advice in _INSTEAD.items() if name in address), "")
            raise ConfigError(f"no engine for {address!r}; name a local path{hint}")
        if "\\" in text:
            raise ConfigError(
                f"DuckDB opens no path with a backslash, as in {text!r}; name another"
            )
        if text == MEMORY:
            raise ConfigError(f"{MEMORY!r} is no place on a disk, as is needed here; name a path")
        target = Path(path).expanduser()
        if target.name.endswith(".duckdb.d"):  # the folder of a store names it, too
            target = target.with_suffix("")
        if target.suffix != ".duckdb":
            target = target / "traces.duckdb"
        # Absolute, because views embed the paths and programs change their directory.
        self.catalogue = Path(
            os.path.abspath(target if target.is_absolute() else working_folder() / target)
        )
        self.root = self.catalogue.with_name(self.catalogue.name + ".d")
        self.new = self.root / "new"
        self.live = self.root / "live"
        self.data = self.root / "data"
        self.facts = self.root / "facts"
        self.quarantine = self.root / "quarantine"
        self.manifest_path = self.root / "manifest.ndjson"
        self.manifest_copy = self.root / "manifest.copy.ndjson"
        self.settler_lock = self.root / "settler.lock"
        self.state_path = self.root / "state.sqlite"

    def exists(self) -> bool:
        """Return whether a store exists here; settled spans may lie here without a manifest."""
        is_there = self._stands_there(self.manifest_path) or self.manifest_copy.exists()
        return is_there or any(self.data.glob("spans-*.parquet"))

    def has_state(self) -> bool:
        """Return whether a state lies beside it."""
        return self._stands_there(self.state_path)

    def _stands_there(self, path: Path) -> bool:
        try:
            return path.exists()
        except OSError as exc:
            raise StoreError(
                f"cannot read {path}: {exc.strerror}; look at the owner and mode of {self.root}"
            ) from exc

    def refuse_links(self, folder: Path | None = None) -> None:
        """Check that no link in the store's folder, or one below it, leads out of it.

        Raises:
            StoreError: A link stands there.
        """
        with contextlib.suppress(FileNotFoundError, PermissionError):
            with os.scandir(folder or self.root) as entries:
                link = next((entry.path for entry in entries if entry.is_symlink()), None)
            if link is not None:
                raise StoreError(
                    f"{link} is a link, and no link within a store is followed; put there what it "
                    f"leads to, or let a link lead to {self.root} as a whole"
                )

    def require(self) -> None:
        """Check that a store stands here, and no link in its folder."""
        self.refuse_links()
        if not self.exists():
            # Such as the demo's, which people look for where their own would be.
            stores = [path.with_suffix("") for path in self.catalogue.parent.glob("*.duckdb.d")]
            rivals = [path for path in stores if path != self.catalogue and Layout(path).exists()]
            other = f"there is {min(rivals)}: name it with --store; or " if rivals else ""
            if self.catalogue.is_file() and not self.root.exists():
                raise StoreError(
                    f"{self.catalogue} is a database of its own, such as export duckdb writes, and "
                    "no store; query it with duckdb, or name the store it came from with --store"
                )
            if self.root.exists():
                other = f"{self.root} has no manifest: put its copy back; {other}"
            raise StoreMissingError(
                f"no store at {self.catalogue}; {other}record one with "
                "lightning_otel.auto_trace(), or lightning-otel run -- python app.py"
            )

    def create(self) -> None:
        """Make the store, private to the user; harmless if it is there."""
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
        """Make what is not there yet; any number of processes may do so at once."""
        self.refuse_links()
        if not self.catalogue.parent.exists():
            make_private(self.catalogue.parent)
            add_private(self.catalogue.parent / ".gitignore", b"*\n")
        for folder in (self.root, self.new, self.live, self.data, self.facts):
            make_private(folder)
        add_private(self.root / ".gitignore", b"*\n")
        add_private(self.live / EMPTY_LIVE, b"")
        if not self.exists():
            draft = self._make_file(format_manifest(Manifest()))
            # Linked, not renamed: a settler may have replaced another process's first manifest.
            with contextlib.suppress(FileExistsError):
                os.link(draft, self.manifest_path)
            draft.unlink()

    def read_manifest(self) -> Manifest:
        """Return the manifest as it is now; where it is damaged, as its copy says.

        Raises:
            StoreDamagedError: Neither it nor its copy is whole.
            StoreError: A link stands in the store's folder.
            StoreVersionError: A newer version wrote it.
        """
        return self.find_manifest()[1]

    def find_manifest(self) -> tuple[Path, Manifest]:
        """Return the manifest with its path, or that of its copy if only that is whole."""
        self.refuse_links()
        damages = []
        for path in (self.manifest_path, self.manifest_copy):
            try:
                return path, self._parsed_manifest(path)
            except StoreDamagedError as exc:
                damages.append(exc)
        raise damages[0]

    def is_copy_whole(self) -> bool:
        """Return whether the manifest's copy is whole, or was not made yet."""
        try:
            return not self.manifest_copy.exists() or bool(
                self._parsed_manifest(self.manifest_copy)
            )
        except StoreDamagedError:
            return False

    def _parsed_manifest(self, path: Path) -> Manifest:
        try:
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode):
                raise ValueError("it is no file")
            stamp = status.st_ino, status.st_size, status.st_mtime_ns
            entry = _parsed.get(path)
            if entry is not None and entry[0] == stamp:
                return entry[1]
            schema, manifest = parse_manifest(path.read_bytes())
        except FileNotFoundError as exc:
            raise StoreDamagedError(f"{path} is missing; {REPAIR}") from exc
        except (ValueError, KeyError, TypeError) as exc:
            raise StoreDamagedError(f"{path} is damaged: {exc}; {REPAIR}") from exc
        except OSError as exc:
            raise StoreError(f"cannot read {path}: {exc}") from exc
        check_schema(self.catalogue, schema)
        _parsed[path] = stamp, manifest
        return manifest

    def write_manifest(self, manifest: Manifest, *, before_us: int | None = None) -> bool:
        """Replace the manifest atomically, on disk before it counts; tell if it was.

        Its copy, replaced first, is never older: reading it instead loses no commit. What a commit
        names lies on the disk before either is written.
        """
        text = format_manifest(manifest)
        copy, draft = self._make_file(text), self._make_file(text)
        if before_us is not None and now_us() >= before_us:
            copy.unlink()
            draft.unlink()
            return False
        put_file(copy, self.manifest_copy)
        put_file(draft, self.manifest_path)
        return True

    def _make_file(self, text: bytes) -> Path:
        draft = self.new / f"manifest-{os.getpid()}-{time.time_ns()}-{os.urandom(4).hex()}"
        write_private(draft, text, is_synced=True)
        return draft

    def list_unsettled(self, manifest: Manifest) -> list[Path]:
        """Segments in ``live/`` that a manifest does not call settled, oldest first."""
        settled = manifest.settled
        return [path for path in self.segments() if path.name not in settled]

    def segments(self) -> list[Path]:
        """Segments in ``live/``, oldest first."""
        names = filter(SEGMENT_NAME.fullmatch, list_names(self.live))
        return sorted(map(self.live.joinpath, names), key=lambda path: path.name.split("-")[1:])

    def data_files(self) -> list[Path]:
        """Data files that are there, whether they count or not, in order of their names."""
        return sorted(map(self.data.joinpath, filter(DATA_NAME.fullmatch, list_names(self.data))))


@contextlib.contextmanager
def elect_settler(layout: Layout, *, wait_s: float = 0.0) -> Iterator[bool]:
    """Elect this process the one that changes the manifest; give False if another one is."""
    with file_lock(layout.settler_lock, wait_s=wait_s) as descriptor:
        yield descriptor is not None


@contextlib.contextmanager
def hold_settler_lock(layout: Layout, wait_s: float | None = None) -> Iterator[None]:
    """Hold the settler lock for a block; wait for another process that holds it."""
    with elect_settler(layout, wait_s=ELECTION_S if wait_s is None else wait_s) as is_elected:
        if not is_elected:
            raise StoreError(
                f"another process settles or compacts {layout.catalogue}; try again later"
            )
        yield


def find_state(store: "SpanStore") -> str | None:
    """Return the place of a store's state, as ``State`` takes it; None if there is none.

    Found without SQLAlchemy, which takes 13 MB. A shared state is taken to be there.
    """
    value = config.STATE.read() or None
    if value is not None and "://" in value:
        return value
    layout = store.local.layout if value is None else Layout(value)
    return str(layout.catalogue) if layout is not None and layout.has_state() else None


def check_state(name: object, version: int) -> None:
    """Refuse a state that a newer version made."""
    if version > STATE_VERSION:
        raise StoreVersionError(
            f"the state {name} has version {version}, and this release reads up to "
            f"{STATE_VERSION}; pip install --upgrade lightning-otel"
        )


def check_schema(name: object, schema: int) -> None:
    """Refuse what a newer version wrote."""
    if schema > SCHEMA_VERSION:
        raise StoreVersionError(
            f"{name} has schema {schema}, this lightning-otel knows {SCHEMA_VERSION}; "
            "upgrade with: pip install --upgrade lightning-otel"
        )


def now_us() -> int:
    """Return the wall clock in Unix microseconds."""
    return time.time_ns() // 1000


_parsed: dict[Path, tuple[tuple[int, int, int], Manifest]] = {}
"""By path: inode, size and time of change of the manifest parsed last; each is a new file."""


def is_settling_due(segments: Sequence[Path]) -> bool:
    """Return whether enough segments wait for them to be settled: many, or large ones."""
    return len(segments) >= WORTHWHILE_SEGMENTS or total_bytes(segments) >= WORTHWHILE_BYTES
