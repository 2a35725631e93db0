"""Lines that wait in memory while the disk refuses them or is slow, and when to ask it again.

Bounded, and without a thread: whoever ends a span asks the disk, unless it was slow a moment ago.
"""

import time
from collections import deque
from typing import Final

PENDING_BYTES: Final = 8 << 20
"""Lines held in memory; what does not fit is lost, and counted, if the disk refuses it."""
SLOW_S: Final = 0.5
"""A write that took longer means a disk that hangs."""
LONG_S: Final = 0.02
"""Shorter writes are never looked at."""
_SHARE: Final = 0.25
"""Of the last second: what long writes may take of it before the disk is left alone."""
_WORK_SHARE: Final = 0.1
"""A process that worked for more of a long write's time waited for its interpreter, not a disk."""
_LONGEST_REST_S: Final = 30.0
_CHUNK_BYTES: Final = 1 << 20
_PAST: Final = 1e-9


class Backlog:
    """Lines in order, and the time until which a slow disk is left alone.

    Attributes:
        lines: Each with how many ended spans it stands for.
        spans: How many all of them stand for.
        rest_until: When the disk may be asked again, by the monotonic clock; 0 if it is quick.
        watched_until: Until when a write's processor time is wanted too, as one took long.
    """

    def __init__(self) -> None:
        self.spans = 0
        self.rest_until = 0.0
        self.lines: deque[tuple[bytes, int]] = deque()
        self._size_bytes = 0
        self._slow_in_a_row = 0
        self.watched_until = 0.0
        self._long_s = 0.0
        self._long_at = 0.0

    def has_room(self, line: bytes) -> bool:
        """Whether the line may wait here."""
        return self._size_bytes + len(line) <= PENDING_BYTES

    def add(self, line: bytes, spans: int) -> None:
        """Hold a line that stands for so many ended spans."""
        self.lines.append((line, spans))
        self._size_bytes += len(line)
        self.spans += spans

    def first(self, *, alone: bool = False) -> tuple[bytes, int]:
        """The text of the first lines, for one write, and how many they are.

        Args:
            alone: Only the very first line.
        """
        text, count = bytearray(), 0
        for line, _ in self.lines:
            if count and (alone or len(text) + len(line) > _CHUNK_BYTES):
                break
            text += line
            count += 1
        return bytes(text), count

    def spans_of(self, count: int) -> int:
        """How many ended spans the first lines stand for."""
        return sum(self.lines[index][1] for index in range(count))

    def written(self, count: int) -> None:
        """Forget the first lines, which are on the disk."""
        for _ in range(count):
            line, spans = self.lines.popleft()
            self._size_bytes -= len(line)
            self.spans -= spans

    def is_resting(self) -> bool:
        """Whether the disk was slow and is left alone for now."""
        return self.rest_until > 0.0 and time.monotonic() < self.rest_until

    def ask_again(self) -> None:
        """End the rest: the disk is asked again, however slow it was."""
        self.rest_until = _PAST

    def is_slow(self, took_s: float, worked_s: float | None) -> bool:
        """Say whether the disk is slow: one write hung, or long ones take too much of a second.

        Args:
            took_s: A write's duration, more than ``LONG_S``.
            worked_s: Processor time that the process used meanwhile, if that is known.
        """
        now = time.monotonic()
        self.watched_until = now + 1.0
        if worked_s is not None and worked_s < took_s * _WORK_SHARE:
            left = max(0.0, 1.0 - (now - self._long_at))
            self._long_s, self._long_at = self._long_s * left + took_s, now
            return took_s > SLOW_S or self._long_s > _SHARE
        return took_s > SLOW_S

    def note_slow(self, took_s: float) -> None:
        """Leave the disk alone for as long, and for twice as long each time it is slow again."""
        rest_s = min(took_s * (1 << min(self._slow_in_a_row, 8)), _LONGEST_REST_S)
        self._slow_in_a_row += 1
        self.rest_until = time.monotonic() + rest_s
        self.watched_until = self.rest_until + 1.0

    def note_quick(self) -> None:
        """The disk answers again."""
        self._slow_in_a_row = 0
        self.rest_until = 0.0
