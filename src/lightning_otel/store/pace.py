"""The pace of a disk, told apart from whatever else keeps a thread that writes.

By the clock, a busy processor, the interpreter's lock and a fork make a write look slow. Its time
is the disk's only as far as its thread neither worked, nor waited for a processor, nor took turns
with other threads. Where a crowd waits for a processor, so do the kernel's writing threads: a disk
that hangs is told from them only by a longer wait.
"""

import contextlib
import os
import resource
import sys
import threading
from time import monotonic
from typing import Final

SLOW_S: Final = 0.02
"""A disk that takes longer is asked once a span: starts ride with the next end."""
HANG_S: Final = 1.1
"""A disk that takes longer is left alone for a while."""
_LONGEST_REST_S: Final = 30.0
_FRESH_S: Final = 0.1
_USUAL_CROWD: Final = 8
"""Threads that want one processor without a filesystem's own being kept for long."""
_TURN_S: Final = 0.05
"""What each further one may keep them: some 16 slices of 3 ms (1.5 s were seen among 60)."""
_THREAD: Final = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)  # the latter on macOS


class DiskPace:
    """Times writes, and lets a disk rest that hung: as long as the write took, then twice that.

    A write is slow from 20 ms on, and hangs from a second on.
    """

    def __init__(self) -> None:
        self.is_slow = self.is_hanging = False
        self._rest_until = 0.0
        self._hangs_in_a_row = 0
        self._excuses = _Excuses()

    def is_resting(self) -> bool:
        """Return whether the disk hung at the last write, and is not asked yet."""
        return self.is_hanging and monotonic() < self._rest_until

    def write(self, descriptor: int, text: bytes) -> int:
        """Write as ``os.write`` does, and time it."""
        excuses, began = self._excuses, monotonic()
        if self.is_slow or began - excuses.read_at > _FRESH_S:
            excuses.count_new()
        try:
            return os.write(descriptor, text)
        finally:  # a disk that refuses may have hung as well
            took_s = monotonic() - began
            if took_s > SLOW_S:
                self._judge(took_s - excuses.count_new())
            elif self.is_slow:
                self._judge(took_s)

    def _judge(self, disk_s: float) -> None:
        self.is_slow = disk_s > SLOW_S
        self.is_hanging = disk_s > HANG_S and disk_s - _read_crowd() * _TURN_S > HANG_S
        if not self.is_hanging:
            self._hangs_in_a_row = 0
            return
        self._rest_until = monotonic() + min(
            disk_s * (1 << min(self._hangs_in_a_row, 8)), _LONGEST_REST_S
        )
        self._hangs_in_a_row += 1


class _Excuses(threading.local):
    """Seconds of a thread in which no disk was waited for, as counted at ``read_at``."""

    read_at = -_FRESH_S
    _worked_s = _delay_s = 0.0
    _sleeps = 0

    def count_new(self) -> float:
        """Count those since the last count.

        Who waits for the interpreter's lock sleeps once per switch interval: each sleep but one may
        be such a turn.
        """
        usage, delay_s = resource.getrusage(_THREAD), _read_delay()
        worked_s, sleeps = usage.ru_utime + usage.ru_stime, usage.ru_nvcsw
        turns_s = max(0, sleeps - self._sleeps - 1) * sys.getswitchinterval()
        new_s = worked_s - self._worked_s + delay_s - self._delay_s + turns_s
        self._worked_s, self._delay_s, self._sleeps = worked_s, delay_s, sleeps
        self.read_at = monotonic()
        return new_s


def _read_delay() -> float:
    """Return how long this thread has waited for a processor so far; only Linux tells."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(_read_words("/proc/thread-self/schedstat")[1]) / 1e9
    return 0.0


def _read_crowd() -> float:
    """Return how many more threads than usual want each processor now; only Linux tells."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        wanting = int(_read_words("/proc/loadavg")[3].partition(b"/")[0])
        return max(0.0, wanting / (os.cpu_count() or 1) - _USUAL_CROWD)
    return 0.0


def _read_words(path: str) -> list[bytes]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, 99).split()
    finally:
        os.close(descriptor)
