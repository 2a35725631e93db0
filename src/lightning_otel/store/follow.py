"""Following a store: every ended span once, live or in batches, from a position of one's own.

Live segments are read line by line, settled files by what of them was not delivered yet; whichever
way a span comes first, its id is noted, so that no settling or compacting brings it twice.
"""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Final, NamedTuple

from lightning_otel.errors import StoreError
from lightning_otel.store.layout import Layout, Manifest
from lightning_otel.store.position import Key, Position, Reach, key_of
from lightning_otel.store.schema import span_of
from lightning_otel.store.tail import Found, Numbers, Tail
from lightning_otel.types import Span

log = logging.getLogger(__name__)

POLL_S: Final = 0.1
"""How often a live follower looks, where a look takes little."""
_LEAST_COMMIT_S: Final = 1.0
_MOST_SEEN: Final = 10_000
_COARSE_NS: Final = 1_000_000_000
"""How far a file's time may lie behind the clock, on any filesystem."""


class _Block(NamedTuple):
    """Spans read in one go, and what is true of the position when all are delivered.

    Attributes:
        is_old: Whether they stand in a file with spans that were there when all was passed over.
    """

    found: list[Found]
    reaches: Mapping[str, Reach] = {}
    files: Collection[str] = ()
    is_old: bool = False


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
        name: str,
        *,
        idle_s: float | None = None,
        since_ns: int = 0,
        select: Callable[[Span], bool] | None = None,
        mentions: Collection[bytes] = (),
    ) -> None:
        """Open the consumer's position, or begin one.

        Args:
            layout: The store's paths.
            name: The consumer's name.
            idle_s: Seconds without a new span after which an iteration ends; None for never.
            since_ns: Only spans that start at this time or later.
            select: Which spans are wanted; the others are passed over.
            mentions: Texts of which a wanted span's line holds one; saves reading the others.

        Raises:
            ConfigError: The name cannot be used.
            StoreMissingError: There is no store.
            StoreError: The consumer is at work already, or its position cannot be kept.
        """
        layout.require()
        self._layout = layout
        self.name = name
        self.idle_s = idle_s
        self._since_ns = since_ns
        self._select = select
        self._mentions = tuple(mentions)
        self._position = Position(layout, name)
        self._stop = threading.Event()
        self._skipped_ns = 0
        self._tails: dict[str, Tail] = {}
        self._numbers: dict[str, Numbers] = {}
        self._seen: dict[str, int] = {}
        self._passed: set[str] = set()
        self._begin()

    def _begin(self) -> None:
        self._scan = self._pass()
        self._block: _Block | None = None
        self._queue: deque[Found] = deque()
        self._handed: set[Key] = set()
        self._delivered: list[Key] = []
        self._in_hand: list[Key] = []
        self._reached: dict[str, Reach] = {}
        self._finished: list[str] = []
        self._gone: list[str] = []
        self._committed = time.monotonic()

    def __repr__(self) -> str:
        return f"<Follower {self.name!r} of {self._layout.catalogue}>"

    def __enter__(self) -> "Follower":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close; what is in hand counts as delivered unless the block failed."""
        if self._position.is_closed:
            return
        try:
            if exc is None:
                self.commit()
            else:
                self._write()
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
            if self._fill():
                try:
                    yield self._hand(self._queue.popleft())
                except GeneratorExit:  # left early: the one in hand may not be dealt with
                    with contextlib.suppress(StoreError):
                        self._write()
                    raise
                self._take_back()
                last = time.monotonic()
                if last - self._committed >= _LEAST_COMMIT_S:
                    self._write()
                continue
            self._write()
            now = time.monotonic()
            if self.idle_s is not None and now - last >= self.idle_s and not any(self._held()):
                return
            # A look at very many segments takes its time: it is not all that is done.
            self._stop.wait(max(POLL_S, 5 * (now - began)))
        self._write()

    def batch(self, limit: int = 10_000, *, limit_bytes: int | None = None) -> list[Span]:
        """The spans there are now and that were not delivered yet; empty if there are none.

        Args:
            limit: At most so many.
            limit_bytes: No further one once they are so large, as their lines are long.
        """
        self._take_back()
        if time.monotonic() - self._committed >= _LEAST_COMMIT_S:
            self._write()
        spans: list[Span] = []
        size = 0
        while len(spans) < limit and (limit_bytes is None or size < limit_bytes):
            if self._fill():
                found = self._queue.popleft()
                size += found.size
                spans.append(self._hand(found))
            elif any(self._held()) and not spans and not self._stop.wait(0.02):
                continue  # shorter than half a second: a line that comes first is on its way
            else:
                break
        if not spans:
            self._write()
        return spans

    def commit(self, spans: Iterable[Span] | None = None) -> None:
        """Note on disk that spans were delivered; they never come again.

        Args:
            spans: Some of those handed out last; by default all that were handed out.

        Raises:
            StoreError: The disk refuses it.
        """
        if spans is None:
            self._take_back()
        else:
            done = {key_of(span.trace_id, span.span_id) for span in spans}
            self._delivered += [key for key in self._in_hand if key in done]
            self._in_hand = [key for key in self._in_hand if key not in done]
        self._write()

    def stop(self) -> None:
        """End the iteration, from any thread."""
        self._stop.set()

    def rewind(self) -> None:
        """Forget what was delivered: everything comes again."""
        self._position.clear()
        self._tails.clear()
        self._numbers.clear()
        self._seen.clear()
        self._begin()

    def skip(self) -> None:
        """Pass over all there is: only what is written from now on comes, however old it is."""
        self._skipped_ns = time.time_ns()
        names = [file.name for file in self._layout.read_manifest().live_files]
        self._position.write((), files=names)
        self._position.files.update(names)
        while self.batch():
            pass

    def count(self) -> int:
        """How many spans were delivered under this name and committed, passed over ones too."""
        return self._position.count()

    def close(self, *, is_done: bool = False) -> None:
        """Let go of the position, so that another process may follow under this name.

        Args:
            is_done: Whether nobody will follow under it any more: the position is taken away.
        """
        self._stop.set()
        with contextlib.suppress(ValueError):  # another thread is reading
            self._scan.close()
        if is_done:
            self._position.remove()
        else:
            self._position.close()

    def _hand(self, found: Found) -> Span:
        self._in_hand.append(found.key)
        return span_of(found.record)

    def _take_back(self) -> None:
        """What was handed out is delivered: the next is asked for."""
        self._delivered += self._in_hand
        self._in_hand = []

    def _write(self) -> None:
        """Put the position on disk."""
        is_between = not self._queue and not self._in_hand
        if is_between:
            self._reach()
        if self._delivered or self._reached or self._finished or self._gone:
            self._position.write(
                self._delivered,
                self._reached if is_between else None,
                self._finished if is_between else (),
                self._gone,
            )
            self._handed.difference_update(self._delivered)
            self._delivered = []
            self._gone = []
            if is_between:
                self._reached = {}
                self._finished = []
        self._committed = time.monotonic()

    def _fill(self) -> bool:
        """Read on until there is a span to hand out; False at the end of all there is now."""
        while not self._queue:
            self._reach()
            block = next(self._scan, None)
            if block is None:
                self._scan = self._pass()
                return False
            self._block = block
            self._queue.extend(self._wanted(block.found, is_old=block.is_old))
        return True

    def _reach(self) -> None:
        """The block read last is used up."""
        block, self._block = self._block, None
        if block is None:
            return
        self._reached.update(block.reaches)
        self._position.segments.update(block.reaches)
        self._finished += block.files
        self._position.files.update(block.files)

    def _wanted(self, found: list[Found], *, is_old: bool) -> Iterator[Found]:
        """Those not delivered yet, each once; what is not selected is passed over."""
        if not found:
            return
        known = self._position.known([each.key for each in found])
        for each in found:
            if each.key in known or each.key in self._handed:
                continue
            self._handed.add(each.key)
            is_passed = is_old and (each.record["end_ns"] or 0) < self._skipped_ns
            is_early = each.record["start_ns"] < self._since_ns
            if (
                is_passed
                or is_early
                or (self._select is not None and not self._select(span_of(each.record)))
            ):
                self._delivered.append(each.key)
            else:
                yield each

    def _held(self) -> Iterator[Found]:
        """Spans read that wait for one that ended before them."""
        for numbers in self._numbers.values():
            yield from numbers.held

    def _pass(self) -> Generator[_Block, None, None]:
        """All that is there and was not read yet: first what is settled, as it is the older."""
        # Listed before the manifest is read: what is settled in between is in both, never in none.
        paths = self._layout.segments()
        manifest = self._layout.read_manifest()
        settled = manifest.settled
        live = [path for path in paths if path.name not in settled]
        self._forget_all_but({path.name for path in live})
        for path in live:
            self._numbers_of(path.name.rpartition("-")[0])
        yield from self._file_blocks(manifest)
        for path in live:
            tail = self._tails.get(path.name)
            if tail is None:
                with contextlib.suppress(FileNotFoundError):
                    if path.stat().st_mtime_ns < self._since_ns - _COARSE_NS:
                        continue
                reach = self._position.segments.get(path.name, Reach())
                process = path.name.rpartition("-")[0]
                tail = self._tails[path.name] = Tail(path, reach, self._numbers_of(process))
            try:
                yield from self._segment_blocks(tail)
            except FileNotFoundError:
                # Settled and taken away: what it held comes first, so nothing newer is read now.
                return

    def _forget_all_but(self, names: set[str]) -> None:
        """Let go of segments that count no more, and of processes without any."""
        for name in [*self._tails, *self._position.segments]:
            if name not in names:
                self._tails.pop(name, None)
                if self._position.segments.pop(name, None) is not None:
                    self._reached.pop(name, None)
                    self._gone.append(name)
        processes = {name.rpartition("-")[0] for name in names}
        for process in self._numbers.keys() - processes:
            if not self._numbers[process].held:
                self._forget_numbers(process)

    def _numbers_of(self, process: str) -> Numbers:
        """What was read of a process, shared by all its segments and files."""
        if process not in self._numbers:
            seen = [
                reach.seen
                for name, reach in self._position.segments.items()
                if name.rpartition("-")[0] == process and reach.seen is not None
            ]
            self._numbers[process] = Numbers(max(seen, default=self._seen.get(process)))
        return self._numbers[process]

    def _forget_numbers(self, process: str) -> None:
        """Let go of a process without live segments, but for how far it was read."""
        numbers = self._numbers.pop(process)
        if numbers.seen is not None:
            if len(self._seen) >= _MOST_SEEN:
                self._seen.clear()
            self._seen[process] = numbers.seen

    def _segment_blocks(self, tail: Tail) -> Iterator[_Block]:
        if not tail.has_more():
            return
        process = tail.path.name.rpartition("-")[0]
        with tail.path.open("rb") as file:
            while (found := tail.read(file, self._mentions)) is not None:
                yield _Block(
                    found,
                    reaches={
                        name: each.reach
                        for name, each in self._tails.items()
                        if name.rpartition("-")[0] == process
                    },
                )

    def _file_blocks(self, manifest: Manifest) -> Iterator[_Block]:
        from lightning_otel.store.unread import unread

        counted = {file.name for file in manifest.files}
        for name in [name for name in self._position.files if name not in counted]:
            self._position.files.discard(name)
            self._gone.append(name)
        living = set(self._numbers)
        read: list[str] = []
        for file in manifest.live_files:
            if file.name in self._position.files or file.name in self._passed:
                continue
            if file.max_start_ns < self._since_ns:
                self._passed.add(file.name)
                continue
            path = self._layout.data / file.name
            is_damaged = False
            for found in unread(
                self._layout, path, self._position.known, self._since_ns, self._numbers_of
            ):
                is_damaged = found is None
                # Files that were passed over may be merged, and stand there under another name.
                yield _Block(found or [], is_old=_stamp_of(file.name) < self._skipped_ns)
            if is_damaged:
                self._skip(file.name)
            else:
                read.append(file.name)
        for process in self._numbers.keys() - living:
            # It may live all the same: just after a rotation it has no segment.
            yield _Block(self._numbers[process].ready([]))
        # What waits for a line to come is found again in its file, should we die.
        if read and not any(each.segment == "" for each in self._held()):
            yield _Block([], files=read)

    def _skip(self, name: str) -> None:
        """Pass over a file that cannot be read now; it is tried again by the next follower."""
        if (self._layout.data / name).exists():
            self._passed.add(name)
            log.warning(
                "%s cannot be read, so its spans are not delivered to %r; see: "
                "lightning-otel doctor --store %s",
                self._layout.data / name,
                self.name,
                self._layout.catalogue,
            )


def _stamp_of(name: str) -> int:
    """When a data file was made, or the oldest of those that were merged into it."""
    return int(name.split("-")[1])
