"""Follow a store: deliver every ended span once to each named consumer."""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Final

from lightning_otel.errors import StoreError
from lightning_otel.store.arrivals import Arrivals
from lightning_otel.store.layout import Layout
from lightning_otel.store.position import Ended, Key, Position, make_key
from lightning_otel.store.schema import build_span
from lightning_otel.types import Span

POLL_S: Final = 0.1
"""How often a live follower looks, where a look takes little."""
_LEAST_COMMIT_S: Final = 1.0


class Follower:
    """One named consumer of a store; iterate over it, or take batches, or both.

    A span counts as delivered when the next one, or the next batch, is asked for, and at
    :meth:`commit`. It is committed to disk within a second, and when all there was has been taken;
    whoever dies before that is given those spans again, and no others.

    Spans of one process come in the order in which they were written.
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
        """Open the consumer's position, or begin one that without a name ends with this object.

        Spans that ``select`` refuses are passed over; the rest as ``Store.follow`` has it.
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
        self._arrivals = Arrivals(self._layout, self._position, since_ns=self._since_ns)
        self._scan = self._arrivals.read()
        self._queue: deque[Ended] = deque()
        self._pending: set[Key] = set()  # of those that wait and those in hand
        self._in_hand: list[Ended] = []
        self._committed = time.monotonic()

    def __repr__(self) -> str:
        return f"<Follower {self.name!r} of {self._layout.catalogue}>"

    def __enter__(self) -> "Follower":
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
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
            if self.idle_s is not None and now - last >= self.idle_s:
                return
            # A look at very many segments takes its time: it is not all that is done.
            self._stop.wait(max(POLL_S, 5 * (now - began)))
        self._write_position()

    def batch(self, limit: int = 10_000, *, limit_bytes: int | None = None) -> list[Span]:
        """Return up to ``limit`` new spans, none further once lines are ``limit_bytes``."""
        self._take_back()
        spans: list[Span] = []
        size = 0
        while len(spans) < limit and (limit_bytes is None or size < limit_bytes):
            if not self._fill_queue():
                break
            size += self._queue[0].size
            spans.append(self._hand_span())
        if not spans:
            self._write_position()
        return spans

    def commit(self, spans: Iterable[Span] | None = None) -> None:
        """Note on disk that spans were delivered, by default all handed out; they never come again.

        Raises:
            StoreError: The disk refuses it.
        """
        keys = None
        if spans is not None:
            keys = {make_key(span.trace_id, span.span_id) for span in spans}
        self._note_delivered(keys)
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
        self._position.settled_ns = self._arrivals.find_newest_ns()
        while self.batch():
            pass

    def close(self, *, is_done: bool = False) -> None:
        """Let go of the position; with ``is_done`` take it away for good."""
        self._stop.set()
        with contextlib.suppress(ValueError):  # another thread is reading
            self._scan.close()
        self._position.close(is_done=is_done)

    def _hand_span(self) -> Span:
        ended = self._queue.popleft()
        self._in_hand.append(ended)
        return build_span(ended.record)

    def _take_back(self) -> None:
        self._note_delivered()
        if time.monotonic() - self._committed >= _LEAST_COMMIT_S:
            self._write_position()

    def _note_delivered(self, keys: Collection[Key] | None = None) -> None:
        """Count those in hand as delivered that have one of some keys, by default all."""
        in_hand, self._in_hand = self._in_hand, []
        for ended in in_hand:
            if keys is None or ended.key in keys:
                self._position.add(ended)
                self._pending.discard(ended.key)
            else:
                self._in_hand.append(ended)

    def _write_position(self) -> None:
        is_settled = any(ended.is_settled for ended in (*self._in_hand, *self._queue))
        if is_settled or self._arrivals.bound is None:
            self._position.write()
        else:
            self._arrivals.advance_position()
        self._committed = time.monotonic()

    def _fill_queue(self) -> bool:
        """Read on until there is a span to hand out; False at the end of all there is now."""
        is_anew = False
        while not self._queue:
            block = next(self._scan, None)
            if block is not None:
                self._queue.extend(self._select_spans(block))
            elif is_anew:
                return False
            else:  # what came since that pass began is there now, too
                self._scan, is_anew = self._arrivals.read(), True
        return True

    def _select_spans(self, block: list[Ended]) -> Iterator[Ended]:
        for ended in block:
            if ended.key in self._pending:
                continue
            is_wanted = ended.record["start_ns"] >= self._since_ns
            if is_wanted and self._select is not None:
                is_wanted = self._select(build_span(ended.record))
            if not is_wanted:
                self._position.add(ended)
                continue
            self._pending.add(ended.key)
            yield ended
