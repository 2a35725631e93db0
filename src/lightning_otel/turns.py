"""A lock that no thread waits for without bound, and what those do who do not get it.

Who cannot have it leaves a call to whoever has it: so a write that hangs holds one thread only.
"""

import contextlib
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

LEFT_BYTES: Final = 8 << 20
"""Memory that calls may hold while they wait."""


class Turns:
    """Lets the threads of a process write one after the other."""

    def __init__(
        self, patience_s: float = 1.0, take_over: Callable[[], None] = lambda: None
    ) -> None:
        """Make a free lock.

        Args:
            patience_s: How long to wait for it, until a holder is known to hang.
            take_over: Called with the lock held where a thread died holding it.
        """
        self._patience_s = patience_s
        self._take_over = take_over
        # Re-entrant: a signal handler may end a span while this thread is writing another one.
        self._lock = threading.RLock()
        self._is_stuck = False
        self._left: deque[tuple[int, Callable[[], None]]] = deque()
        self._left_bytes = 0

    def take(self) -> bool:
        """Take the lock; False where its holder hangs.

        Once the interpreter finalizes no other thread runs any more: one may have died holding it.
        """
        if self._lock.acquire(blocking=False):
            self._is_stuck = False
            return True
        if sys.is_finalizing():
            self._lock = threading.RLock()
            self._lock.acquire()
            self._take_over()
            return True
        if not self._is_stuck and self._lock.acquire(timeout=self._patience_s):
            return True
        self._is_stuck = True  # nobody else waits for it
        return False

    def release(self) -> None:
        """Free the lock."""
        self._lock.release()

    @contextlib.contextmanager
    def alone(self) -> Iterator[bool]:
        """Hold the lock, if it is to be had; give whether it is held."""
        is_alone = self.take()
        try:
            yield is_alone
        finally:
            if is_alone:
                self.release()

    def has_room(self, size_bytes: int) -> bool:
        """Say whether so much may be left."""
        return self._left_bytes + size_bytes <= LEFT_BYTES

    def leave(self, spans: int, call: Callable[[], None], size_bytes: int = 0) -> bool:
        """Leave a call to the holder; True if the lock is ours now, as it was freed meanwhile."""
        self._left_bytes += size_bytes
        self._left.append((spans, call))
        return self._lock.acquire(blocking=False)

    def change(self, spans: int, call: Callable[[], None]) -> None:
        """Make a call with the lock held, at once or as soon as somebody holds it."""
        if self.take():
            try:
                call()
            finally:
                self.release()
        elif self.leave(spans, call):
            try:
                self.make_left_calls()
            finally:
                self.release()

    def make_left_calls(self) -> None:
        """Make the calls that were left; for the holder."""
        while self._left:
            self._left.popleft()[1]()
        self._left_bytes = 0

    @property
    def has_left_calls(self) -> bool:
        """Whether calls wait for a holder."""
        return bool(self._left)

    @property
    def left_spans(self) -> int:
        """Ended spans that the calls left stand for."""
        return sum(spans for spans, _ in self._left.copy())
