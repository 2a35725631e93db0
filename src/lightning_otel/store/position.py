"""A consumer's position: what it has of a store, in a size that does not depend on the spans.

One time tells of settled spans: the consumer has all that were settled until then. Of later ones,
and of those in segments, it has those whose numbers in their process are marked, or whose keys are
listed, until they are settled and delivered. A span that nothing tells of is delivered.
"""

import contextlib
import hashlib
import re
import sqlite3
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

import orjson

from lightning_otel.errors import ConfigError, StoreError, disk_remedy
from lightning_otel.store.files import file_lock, make_private, write_private
from lightning_otel.store.layout import Layout
from lightning_otel.store.schema import Record

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_AT_ONCE: Final = 500
_FREE_PAGES: Final = 16
_TABLES: Final = """
CREATE TABLE IF NOT EXISTS delivered (key BLOB PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS marks (origin TEXT PRIMARY KEY, bounds TEXT NOT NULL) WITHOUT ROWID;
"""
_SETTLED: Final = ""
"""Names the mark that is a time."""

Key = bytes
"""Twelve bytes that stand for a span's trace and span id."""


def make_key(trace_id: str, span_id: str) -> Key:
    """Hash a span's ids: of 10 million spans two share a key with a chance of 1e-15."""
    text = f"{trace_id}/{span_id}".encode("utf-8", "replace")
    return hashlib.blake2b(text, digest_size=12).digest()


class Place(NamedTuple):
    """The key of a span, and its number in a process; -1 where none tells it from others."""

    key: Key
    process: str
    number: int


class Ended(NamedTuple):
    """An ended span and the length of its line, more or less.

    ``origin`` names the mark for its numbers; empty if it has no number of its own.
    """

    key: Key
    record: Record
    origin: str
    is_settled: bool
    size: int


class Bound(NamedTuple):
    """The end of a pass: the last time of settled spans, and the segments that are not settled."""

    settled_ns: int
    origins: frozenset[str]


class Numbers:
    """A set of numbers as the bounds of its ranges: the first of each, and one past its last."""

    def __init__(self, bounds: Iterable[int] = ()) -> None:
        self.bounds = list(bounds)

    def __contains__(self, number: int) -> bool:
        return bisect_right(self.bounds, number) % 2 == 1

    def add(self, number: int) -> bool:
        """Add a number; return whether it is new."""
        if number in self:
            return False
        for bound in (number, number + 1):
            place = bisect_left(self.bounds, bound)
            if self.bounds[place : place + 1] == [bound]:
                del self.bounds[place]  # two ranges meet here
            else:
                self.bounds.insert(place, bound)
        return True


class Position:
    """A consumer's position, one process's at a time, with all settled until ``settled_ns``."""

    def __init__(self, layout: Layout, name: str | None) -> None:
        if name is not None and not _NAME.fullmatch(name):
            raise ConfigError(
                f"{name!r} cannot name a consumer; take letters, digits, dots, dashes and "
                "underscores, at most 100"
            )
        self._name, self._layout = name, layout
        self._path = layout.root / "followers" / f"{name}.position"
        self._lock = contextlib.ExitStack()
        self._db: sqlite3.Connection | None = None
        try:
            self._open_file()
        except (OSError, sqlite3.Error, ValueError) as exc:
            self.close()
            raise self._make_error(exc) from exc
        except StoreError:
            self.close()
            raise

    def _open_file(self) -> None:
        path = ""  # a temporary database of SQLite's own
        if self._name is not None:
            make_private(self._path.parent)
            self._layout.refuse_links(self._path.parent)
            if self._lock.enter_context(file_lock(self._path.with_suffix(".lock"))) is None:
                raise StoreError(
                    f"the consumer {self._name!r} is at work in another process or follower; "
                    "stop that one, or follow under another name"
                )
            path = str(self._path)
            if not self._path.exists():
                write_private(self._path, b"")  # SQLite's own would be open to others
        db = self._db = sqlite3.connect(
            path, isolation_level=None, check_same_thread=False, timeout=5
        )
        # A commit survives the death of the process; after a power cut the last ones may be
        # missing, and their spans are delivered again.
        db.execute("PRAGMA page_size=1024")
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=NORMAL")
        db.executescript(_TABLES)
        marks = {
            origin: Numbers(orjson.loads(bounds))
            for origin, bounds in db.execute("SELECT origin, bounds FROM marks")
        }
        self.settled_ns = marks.pop(_SETTLED, Numbers([0])).bounds[0]
        self._set_marks(marks)

    def _set_marks(self, marks: dict[str, Numbers]) -> None:
        self._marks = marks
        self._by_process: defaultdict[str, list[Numbers]] = defaultdict(list)
        for origin, numbers in marks.items():
            self._by_process[origin.rpartition("-")[0]].append(numbers)
        self._changed: set[str] = set()
        self._keys: set[Key] = set()
        self._bound: Bound | None = None

    def select_new(self, places: Sequence[Place]) -> list[bool]:
        """Return for each of some spans whether the consumer does not have it."""
        delivered = self._find_keys([place.key for place in places])
        by_process = self._by_process
        return [
            key not in delivered
            and not (number >= 0 and any(number in mark for mark in by_process.get(process, ())))
            for key, process, number in places
        ]

    def _find_keys(self, keys: Sequence[Key]) -> set[Key]:
        matches = self._keys.intersection(keys)
        with self._database() as db:
            for start in range(0, len(keys), _AT_ONCE):
                part = keys[start : start + _AT_ONCE]
                places = ",".join("?" * len(part))
                rows = db.execute(f"SELECT key FROM delivered WHERE key IN ({places})", part)
                matches.update(key for (key,) in rows)
        return matches

    def add(self, span: Ended) -> None:
        """Note that a span was delivered; :meth:`write` puts that on the disk."""
        if not span.origin:
            self._keys.add(span.key)
            return
        numbers = self._marks.get(span.origin)
        if numbers is None:
            numbers = self._marks[span.origin] = Numbers()
            self._by_process[span.origin.rpartition("-")[0]].append(numbers)
        numbers.add(span.record["sequence"])  # of no other span: so ranges meet
        numbers.add(span.record["end_sequence"])
        self._changed.add(span.origin)

    def write(self) -> None:
        """Put on the disk what was delivered, in one transaction."""
        if not (self._keys or self._changed):
            return
        rows = [(origin, _format_bounds(self._marks[origin].bounds)) for origin in self._changed]
        with self._database() as db, db:
            db.execute("BEGIN IMMEDIATE")
            db.executemany(
                "INSERT OR IGNORE INTO delivered VALUES (?)", [(key,) for key in self._keys]
            )
            db.executemany("INSERT OR REPLACE INTO marks VALUES (?, ?)", rows)
        self._changed, self._keys = set(), set()

    def advance(self, bound: Bound, origins: Collection[str], keys: Iterable[Key]) -> None:
        """Note that all settled spans of a bound were delivered, and forget what told of them.

        Marks of segments that came since (``origins``), and ``keys`` of spans in segments, stay.
        """
        self.write()
        if bound == self._bound:
            return
        unsettled = bound.origins.union(origins)
        marks = {origin: mark for origin, mark in self._marks.items() if origin in unsettled}
        with self._database() as db:
            with db:
                db.execute("BEGIN IMMEDIATE")
                db.execute("CREATE TEMP TABLE unsettled (key BLOB)")
                db.executemany("INSERT INTO unsettled VALUES (?)", ((key,) for key in keys))
                db.execute("DELETE FROM delivered WHERE key NOT IN (SELECT key FROM unsettled)")
                db.execute("DROP TABLE unsettled")
                outdated = [(origin,) for origin in self._marks.keys() - marks.keys()]
                db.executemany("DELETE FROM marks WHERE origin = ?", outdated)
                time = _format_bounds([bound.settled_ns])
                db.execute("INSERT OR REPLACE INTO marks VALUES (?, ?)", (_SETTLED, time))
            if db.execute("PRAGMA freelist_count").fetchone()[0] > _FREE_PAGES:
                db.execute("VACUUM")
                db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._set_marks(marks)
        self.settled_ns, self._bound = bound.settled_ns, bound

    def clear(self) -> None:
        """Forget everything, so that all is delivered again."""
        with self._database() as db:
            db.executescript("BEGIN; DELETE FROM delivered; DELETE FROM marks; COMMIT")
        self.settled_ns = 0
        self._set_marks({})

    def close(self, *, is_done: bool = False) -> None:
        """Let go of the position; with ``is_done`` take it away: its name begins anew."""
        db, self._db = self._db, None
        if db is not None:
            db.close()
            if is_done and self._name is not None:
                # The lock goes last: until then nobody else can have opened what is unlinked here.
                for suffix in (".position", ".position-wal", ".position-shm", ".lock"):
                    self._path.with_suffix(suffix).unlink(missing_ok=True)
        self._lock.close()

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
            f"cannot keep the position {self._path}: {exc}; "
            + disk_remedy(exc, "remove a damaged one: then everything is delivered again")
        )


def _format_bounds(bounds: Collection[int]) -> str:
    return orjson.dumps(list(bounds)).decode()
