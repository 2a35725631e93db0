"""The position of one named consumer: the spans it was given, kept on disk beside the store.

What was delivered is a set of span ids, the store's own identity of a span; so it stays right
whatever settling, compacting or copying does to the files, and for spans received from elsewhere.
"""

import fcntl
import os
import re
import sqlite3
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from lightning_otel.errors import ConfigError, StoreError
from lightning_otel.store.arrivals import Key
from lightning_otel.store.layout import Layout, write_private

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_AT_ONCE: Final = 500
_TABLES: Final = """
CREATE TABLE IF NOT EXISTS delivered (key BLOB PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS files (name TEXT PRIMARY KEY) WITHOUT ROWID;
"""


class Position:
    """A consumer's position; one process at a time holds it.

    Attributes:
        files: Data files whose spans were all delivered.
    """

    def __init__(self, layout: Layout, name: str | None) -> None:
        """Open, or begin, a position; without a name it is gone with this object."""
        if name is not None and not _NAME.fullmatch(name):
            raise ConfigError(
                f"{name!r} cannot name a consumer; take letters, digits, dots, dashes and "
                "underscores, at most 100"
            )
        self._name = name
        self._path = layout.root / "followers" / f"{name}.position"
        self._lock = -1
        self._db: sqlite3.Connection | None = None
        try:
            self._open_file()
        except (OSError, sqlite3.Error) as exc:
            self.close()
            raise self._make_error(exc) from exc
        except StoreError:
            self.close()
            raise

    def _open_file(self) -> None:
        path = ""  # a temporary database of SQLite's own
        if self._name is not None:
            self._take_lock()
            path = str(self._path)
            if not self._path.exists():
                write_private(self._path, b"")  # SQLite's own would be open to others
        db = self._db = sqlite3.connect(
            path, isolation_level=None, check_same_thread=False, timeout=5
        )
        # A commit survives the death of the process; after a power cut the last ones may be
        # missing, and their spans are delivered again.
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=NORMAL")
        db.executescript(_TABLES)
        self.files = {name for (name,) in db.execute("SELECT name FROM files")}

    def _take_lock(self) -> None:
        self._path.parent.mkdir(mode=0o700, exist_ok=True)
        path = self._path.with_suffix(".lock")
        self._lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise StoreError(
                f"the consumer {self._name!r} is at work in another process or follower; "
                "stop that one, or follow under another name"
            ) from exc

    def known(self, keys: Collection[Key]) -> set[Key]:
        """Return those of the spans that were delivered."""
        found: set[Key] = set()
        every = list(keys)
        with self._database() as db:
            for start in range(0, len(every), _AT_ONCE):
                some = every[start : start + _AT_ONCE]
                marks = ",".join("?" * len(some))
                rows = db.execute(f"SELECT key FROM delivered WHERE key IN ({marks})", some)
                found.update(key for (key,) in rows)
        return found

    def count(self) -> int:
        """Return how many spans were delivered so far, by all who held this position."""
        with self._database() as db:
            (row,) = db.execute("SELECT count(*) FROM delivered")
        return int(row[0])

    def write(self, keys: Iterable[Key], files: Iterable[str]) -> None:
        """Note which spans, and of which files all, were delivered, in one transaction."""
        names = set(files)
        with self._database() as db, db:
            db.execute("BEGIN IMMEDIATE")
            db.executemany("INSERT OR IGNORE INTO delivered VALUES (?)", ((key,) for key in keys))
            if names != self.files:
                db.execute("DELETE FROM files")
                db.executemany("INSERT INTO files VALUES (?)", [(name,) for name in names])
        self.files = names

    def clear(self) -> None:
        """Forget everything, so that all is delivered again."""
        with self._database() as db:
            db.executescript("BEGIN; DELETE FROM delivered; DELETE FROM files; COMMIT")
        self.files = set()

    def close(self, *, is_done: bool = False) -> None:
        """Let go of the position.

        Args:
            is_done: Also take it away; whoever follows under its name begins anew.
        """
        db, self._db = self._db, None
        if db is not None:
            db.close()
        if is_done and self._lock >= 0:
            # The lock goes last: until then nobody else can have opened what is unlinked here.
            for suffix in (".position", ".position-wal", ".position-shm", ".lock"):
                self._path.with_suffix(suffix).unlink(missing_ok=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    @property
    def is_closed(self) -> bool:
        """True if it was closed."""
        return self._db is None

    @contextmanager
    def _database(self) -> Iterator[sqlite3.Connection]:
        if self._db is None:
            raise StoreError(f"the follower {self._name!r} is closed; follow() again")
        try:
            yield self._db
        except sqlite3.Error as exc:
            raise self._make_error(exc) from exc

    def _make_error(self, exc: Exception) -> StoreError:
        return StoreError(
            f"cannot keep the position {self._path}: {exc}; is there room, and may it be written? "
            "A damaged one can be removed: then everything is delivered again"
        )
