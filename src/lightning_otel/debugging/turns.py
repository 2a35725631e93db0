"""A lock that no thread waits for without bound: its holder may hang in a write, or be dead."""

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from threading import get_ident
from typing import Final

_LOOK_S: Final = 0.05


class BoundedLock:
    """Lets the threads of a process work one after the other."""

    def __init__(self, patience_s: float = 1.0) -> None:
        """Make a free lock; a holder asleep after ``patience_s`` is known to hang."""
        self._patience_s = patience_s
        self._is_stuck = False
        self._holder = self._turn = 0
        self._renew_lock()

    def _renew_lock(self) -> None:
        # Re-entrant: a signal handler may end a span while this thread is writing another one.
        self._lock = threading.RLock()
        self.release = self._lock.release

    def take(self) -> bool:
        """Take the lock; return False where its holder hangs.

        Once the interpreter finalizes no other thread runs any more: one may have died holding it.
        """
        holder = get_ident()  # once it is taken, no call: in any a signal handler may raise
        while not self._lock.acquire(blocking=False):
            turn = self._turn
            if sys.is_finalizing():
                self._renew_lock()
            elif not self._is_stuck and self._lock.acquire(timeout=self._patience_s):
                break
            elif self._is_stuck or (turn == self._turn and _is_asleep(self._holder)):
                self._is_stuck = True  # nobody else waits for it
                return False
        self._is_stuck = False
        self._holder = holder
        self._turn += 1
        return True

    @contextlib.contextmanager
    def alone(self) -> Iterator[bool]:
        """Hold the lock, if it is to be had; give whether it is held."""
        is_alone = self.take()
        try:
            yield is_alone
        finally:
            if is_alone:
                self.release()


def _is_asleep(holder: int) -> bool:
    """Return whether a thread of this process stays asleep, as one does that a disk keeps.

    One that waits for a processor is ready to run, and one that waits for the interpreter's lock
    wakes up all the time. Elsewhere than on Linux the answer is always yes.
    """
    before = _read_sleeps(holder)
    time.sleep(_LOOK_S)
    return before == _read_sleeps(holder) and "R (running)" not in before


def _read_sleeps(holder: int) -> str:
    number = next(
        (thread.native_id for thread in threading.enumerate() if thread.ident == holder), None
    )
    try:
        text = Path(f"/proc/self/task/{number}/status").read_text()
    except OSError:
        return ""
    return "".join(
        line for line in text.splitlines() if line.startswith(("State", "voluntary_ctxt"))
    )
