"""How far one named consumer has come: which spans it was given, kept on disk beside the store.

What was delivered is a set of span ids, the store's own identity of a span; so it stays right
whatever settling, compacting or copying does to the files. How far each file was read stands beside
it, only to find what is new without looking at everything.
"""

import fcntl
import hashlib
import os
import re
import sqlite3
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Final

from lightning_otel.errors import ConfigError, StoreError
from lightning_otel.store.layout import Layout, write_private

Key = bytes
"""Twelve bytes that stand for a span's trace and span id."""

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_AT_ONCE: Final = 500
_TABLES: Final = """
CREATE TABLE IF NOT EXISTS delivered (key BLOB PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS segments (
  name TEXT PRIMARY KEY, offset INTEGER NOT NULL, seen INTEGER
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS files (name TEXT PRIMARY KEY) WITHOUT ROWID;
"""


def key_of(trace_id: str, span_id: str) -> Key:
    """What a span's ids are kept as: of 10 million spans two share it with a chance of 1e-15."""
    text = f"{trace_id}/{span_id}".encode("utf-8", "replace")
    return hashlib.blake2b(text, digest_size=12).digest()


class Reach:
    """How far a segment was read.

    Attributes:
        offset: Bytes whose spans were all delivered.
        seen: Up to which number every start and end of its process was read; None if unknown.
    """

    __slots__ = ("offset", "seen")

    def __init__(self, offset: int = 0, seen: int | None = None) -> None:
        self.offset = offset
        self.seen = seen


class Position:
    """A consumer's position; one process at a time holds it."""

    def __init__(self, layout: Layout, name: str) -> None:
        """Open, or begin, a position.

        Raises:
            ConfigError: The name cannot be a file's.
            StoreError: Another process holds it, or it cannot be read or written.
        """
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"{name!r} cannot name a consumer; take letters, digits, dots, dashes and "
                "underscores, at most 100"
            )
        self.name = name
        self._path = followers_folder(layout) / f"{name}.position"
        self._lock = -1
        self._db: sqlite3.Connection | None = None
        try:
            self._open()
        except (OSError, sqlite3.Error) as exc:
            self.close()
            raise self._error(exc) from exc
        except StoreError:
            self.close()
            raise

    def _open(self) -> None:
        self._path.parent.mkdir(mode=0o700, exist_ok=True)
        self._lock = os.open(
            self._path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise StoreError(
                f"the consumer {self.name!r} is at work in another process or follower; "
                "stop that one, or follow under another name"
            ) from exc
        if not self._path.exists():
            write_private(self._path, b"")  # SQLite's own would be open to others
        db = self._db = sqlite3.connect(
            self._path, isolation_level=None, check_same_thread=False, timeout=5
        )
        # A commit survives the death of the process; after a power cut the last ones may be
        # missing, and their spans are delivered again.
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=NORMAL")
        db.executescript(_TABLES)
        self.segments = {
            name: Reach(offset, seen)
            for name, offset, seen in db.execute("SELECT name, offset, seen FROM segments")
        }
        self.files = {name for (name,) in db.execute("SELECT name FROM files")}

    def known(self, keys: Collection[Key]) -> set[Key]:
        """Which of the spans were delivered.

        Raises:
            StoreError: The position cannot be read.
        """
        found: set[Key] = set()
        every = list(keys)
        try:
            for start in range(0, len(every), _AT_ONCE):
                some = every[start : start + _AT_ONCE]
                marks = ",".join("?" * len(some))
                found.update(
                    key
                    for (key,) in self._opened().execute(
                        f"SELECT key FROM delivered WHERE key IN ({marks})", some
                    )
                )
        except sqlite3.Error as exc:
            raise self._error(exc) from exc
        return found

    def count(self) -> int:
        """How many spans were delivered so far, by all who held this position."""
        (row,) = self._opened().execute("SELECT count(*) FROM delivered")
        return int(row[0])

    def write(
        self,
        keys: Iterable[Key],
        segments: Mapping[str, Reach] | None = None,
        files: Iterable[str] = (),
        gone: Iterable[str] = (),
    ) -> None:
        """Note what was delivered, in one transaction.

        Args:
            keys: Spans delivered.
            segments: How far segments were read; all their spans up to there are delivered.
            files: Data files whose spans are all delivered.
            gone: Segments and data files that are no more.

        Raises:
            StoreError: The disk refuses it; nothing of it was noted.
        """
        db = self._opened()
        names = [(name,) for name in gone]
        try:
            db.execute("BEGIN IMMEDIATE")
            try:
                db.executemany("INSERT OR IGNORE INTO delivered VALUES (?)", ((k,) for k in keys))
                db.executemany(
                    "INSERT OR REPLACE INTO segments VALUES (?, ?, ?)",
                    [(name, r.offset, r.seen) for name, r in (segments or {}).items()],
                )
                db.executemany(
                    "INSERT OR IGNORE INTO files VALUES (?)", [(name,) for name in files]
                )
                db.executemany("DELETE FROM segments WHERE name = ?", names)
                db.executemany("DELETE FROM files WHERE name = ?", names)
                db.execute("COMMIT")
            except BaseException:
                if db.in_transaction:
                    db.execute("ROLLBACK")
                raise
        except sqlite3.Error as exc:
            raise self._error(exc) from exc

    def clear(self) -> None:
        """Forget everything, so that all is delivered again."""
        self._opened().executescript(
            "BEGIN; DELETE FROM delivered; DELETE FROM segments; DELETE FROM files; COMMIT"
        )
        self.segments.clear()
        self.files.clear()

    def remove(self) -> None:
        """Take the position away; whoever follows under its name begins anew."""
        # The lock goes last: until then nobody else can have opened what is unlinked here.
        self._close_db()
        for suffix in (".position", ".position-wal", ".position-shm"):
            self._path.with_suffix(suffix).unlink(missing_ok=True)
        self._path.with_suffix(".lock").unlink(missing_ok=True)
        self.close()

    @property
    def is_closed(self) -> bool:
        """Whether it was let go of."""
        return self._db is None

    def close(self) -> None:
        """Let go of the position."""
        self._close_db()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _close_db(self) -> None:
        db, self._db = self._db, None
        if db is not None:
            db.close()

    def _opened(self) -> sqlite3.Connection:
        if self._db is None:
            raise StoreError(f"the follower {self.name!r} is closed; follow() again")
        return self._db

    def _error(self, exc: Exception) -> StoreError:
        return StoreError(
            f"cannot keep the position {self._path}: {exc}; is there room, and may it be written? "
            "A damaged one can be removed: then everything is delivered again"
        )


def followers_folder(layout: Layout) -> Path:
    """Where a store's consumers keep their positions."""
    return layout.root / "followers"


def position_names(layout: Layout) -> list[str]:
    """The consumers that have a position in a store."""
    return sorted(path.stem for path in followers_folder(layout).glob("*.position"))
