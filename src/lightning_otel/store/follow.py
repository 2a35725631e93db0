"""Follow a store: deliver every ended span once to each named consumer.

A position is the set of ids of delivered spans. So it is independent of settling, compacting and
copying, and holds for received spans, which have no number in any process of this machine.
"""

import contextlib
import re
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from lightning_otel.errors import ConfigError, StoreError, disk_remedy
from lightning_otel.store.arrivals import Arrivals, Ended, Key, make_key
from lightning_otel.store.files import file_lock, make_private, write_private
from lightning_otel.store.layout import Layout
from lightning_otel.store.schema import build_span
from lightning_otel.store.snapshot import Snapshot
from lightning_otel.types import Span

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
        self._name, self._layout = name, layout
        self._path = layout.root / "followers" / f"{name}.position"
        self._lock = contextlib.ExitStack()
        self._is_locked = False
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
        make_private(self._path.parent)
        self._layout.refuse_links(self._path.parent)
        if self._lock.enter_context(file_lock(self._path.with_suffix(".lock"))) is None:
            raise StoreError(
                f"the consumer {self._name!r} is at work in another process or follower; "
                "stop that one, or follow under another name"
            )
        self._is_locked = True

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
        if is_done and self._is_locked:
            # The lock goes last: until then nobody else can have opened what is unlinked here.
            for suffix in (".position", ".position-wal", ".position-shm", ".lock"):
                self._path.with_suffix(suffix).unlink(missing_ok=True)
        self._is_locked = False
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


POLL_S: Final = 0.1
"""How often a live follower looks, where a look takes little."""
_LEAST_COMMIT_S: Final = 1.0


class Follower:
    """One named consumer of a store; iterate over it, or take batches, or both.

    A span counts as delivered when the next one, or the next batch, is asked for, and at
    :meth:`commit`. What was delivered is committed to disk at the latest after a second, and when
    all there was has been taken. Whoever dies between a delivery and its commit is given those
    spans again, and no others; nothing is ever left out.

    Spans of one process come in the order in which they ended.
    """

    def __init__(
        self,
        layout: Layout,
        name: str | None,
        *,
        idle_s: float | None = None,
        since_ns: int = 0,
        select: Callable[[Span], bool] | None = None,
    ) -> None:
        """Open the consumer's position, or begin one; others as ``Store.follow`` has them.

        Spans that ``select`` refuses are passed over. Without a name the position ends with this
        object.
        """
        layout.require()
        self._layout = layout
        self.name = name
        self.idle_s = idle_s
        self._since_ns = since_ns
        self._select = select
        self._position = Position(layout, name)
        self._stop = threading.Event()
        self._begin_reading()

    def _begin_reading(self) -> None:
        position = self._position
        self._arrivals = Arrivals(
            self._layout, position.known, position.files, since_ns=self._since_ns
        )
        self._scan = self._arrivals.read()
        self._queue: deque[Ended] = deque()
        self._handed: set[Key] = set()
        self._delivered: list[Key] = []
        self._in_hand: list[Key] = []
        self._committed = time.monotonic()

    def __repr__(self) -> str:
        return f"<Follower {self.name!r} of {self._layout.catalogue}>"

    def __enter__(self) -> "Follower":
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Close; what is in hand counts as delivered unless the block failed."""
        if self._position.is_closed:
            return
        try:
            if kind is None:
                self.commit()
            else:
                self._write_position()
        finally:
            self.close()

    def __del__(self) -> None:
        if hasattr(self, "_scan"):
            self.close()

    def __iter__(self) -> Iterator[Span]:
        """Each new span as it ends, until :meth:`stop`, or nothing came for ``idle_s``."""
        last = time.monotonic()
        while not self._stop.is_set():
            began = time.monotonic()
            if self._fill_queue():
                try:
                    yield self._hand_span()
                except GeneratorExit:  # left early: the one in hand may not be dealt with
                    with contextlib.suppress(StoreError):
                        self._write_position()
                    raise
                self._take_back()
                last = time.monotonic()
                continue
            self._write_position()
            now = time.monotonic()
            if (
                self.idle_s is not None
                and now - last >= self.idle_s
                and not self._arrivals.is_holding
            ):
                return
            # A look at very many segments takes its time: it is not all that is done.
            self._stop.wait(max(POLL_S, 5 * (now - began)))
        self._write_position()

    def batch(self, limit: int = 10_000, *, limit_bytes: int | None = None) -> list[Span]:
        """The spans there are now and that were not delivered yet; empty if there are none.

        Args:
            limit: At most so many.
            limit_bytes: No further one once they are so large, as their lines are long.
        """
        self._take_back()
        spans: list[Span] = []
        size = 0
        while len(spans) < limit and (limit_bytes is None or size < limit_bytes):
            if self._fill_queue():
                size += self._queue[0].size
                spans.append(self._hand_span())
            elif self._arrivals.is_holding and not spans and not self._stop.wait(0.02):
                continue  # shorter than half a second: a line that comes first is on its way
            else:
                break
        if not spans:
            self._write_position()
        return spans

    def commit(self, spans: Iterable[Span] | None = None) -> None:
        """Note on disk that spans were delivered, by default all handed out; they never come again.

        Raises:
            StoreError: The disk refuses it.
        """
        done = None
        if spans is not None:
            done = {make_key(span.trace_id, span.span_id) for span in spans}
        self._delivered += [key for key in self._in_hand if done is None or key in done]
        self._in_hand = [key for key in self._in_hand if done is not None and key not in done]
        self._write_position()

    def stop(self) -> None:
        """End the iteration, from any thread."""
        self._stop.set()

    def rewind(self) -> None:
        """Forget what was delivered: everything comes again."""
        self._position.clear()
        self._begin_reading()

    def skip(self) -> None:
        """Pass over all there is: only what is written from now on comes, however old it is."""
        self._arrivals.skipped_ns = time.time_ns()
        self._arrivals.files.update(file.name for file in Snapshot.take(self._layout).files)
        while self.batch():
            pass

    def close(self, *, is_done: bool = False) -> None:
        """Let go of the position, so that another process may follow under this name.

        Args:
            is_done: Whether nobody will follow under it any more: the position is taken away.
        """
        self._stop.set()
        with contextlib.suppress(ValueError):  # another thread is reading
            self._scan.close()
        self._position.close(is_done=is_done)

    def _hand_span(self) -> Span:
        found = self._queue.popleft()
        self._in_hand.append(found.key)
        return build_span(found.record)

    def _take_back(self) -> None:
        """Count what was handed out as delivered: the next is asked for."""
        self._delivered += self._in_hand
        self._in_hand = []
        if time.monotonic() - self._committed >= _LEAST_COMMIT_S:
            self._write_position()

    def _write_position(self) -> None:
        """Put the position on disk."""
        files = self._position.files
        if not (self._queue or self._in_hand or self._arrivals.is_holding):
            files = self._arrivals.files
        if self._delivered or files != self._position.files:
            self._position.write(self._delivered, files)
            self._handed.difference_update(self._delivered)
            self._delivered = []
        self._committed = time.monotonic()

    def _fill_queue(self) -> bool:
        """Read on until there is a span to hand out; False at the end of all there is now."""
        is_anew = False
        while not self._queue:
            found = next(self._scan, None)
            if found is not None:
                self._queue.extend(self._select_new(found))
            elif is_anew:
                return False
            else:  # what came since that pass began is there now, too
                self._scan, is_anew = self._arrivals.read(), True
        return True

    def _select_new(self, found: list[Ended]) -> Iterator[Ended]:
        """Yield those not delivered yet, each once; what is not selected is passed over."""
        known = self._position.known([each.key for each in found]) if found else set()
        for each in found:
            if each.key in known or each.key in self._handed:
                continue
            self._handed.add(each.key)
            is_early = each.record["start_ns"] < self._since_ns
            if is_early or (self._select is not None and not self._select(build_span(each.record))):
                self._delivered.append(each.key)
            else:
                yield each
