"""Lines that wait in memory while the disk refuses them or is slow, and when to ask it again.

Bounded, and without a thread: whoever ends a span asks the disk, unless it was slow a moment ago.
"""

import time
from collections import deque
from typing import Final

PENDING_BYTES: Final = 8 << 20
"""Lines held in memory; what does not fit is lost, and counted, if the disk refuses it."""
SLOW_S: Final = 0.5
"""A write that took longer means a disk that hangs. It cannot be much less: a thread that waits for
the interpreter, or for a processor, looks the same."""
_LONGEST_REST_S: Final = 30.0
_CHUNK_BYTES: Final = 1 << 20
_PAST: Final = 1e-9


class Backlog:
    """Lines in order, and the time until which a slow disk is left alone.

    Attributes:
        lines: Each with how many ended spans it stands for.
        spans: How many all of them stand for.
        rest_until: When the disk may be asked again, by the monotonic clock; 0 if it is quick.
    """

    def __init__(self) -> None:
        self.spans = 0
        self.rest_until = 0.0
        self.lines: deque[tuple[bytes, int]] = deque()
        self._size_bytes = 0
        self._slow_in_a_row = 0

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

    def note_slow(self, took_s: float) -> None:
        """Leave the disk alone for as long, and for twice as long each time it is slow again."""
        rest_s = min(took_s * (1 << min(self._slow_in_a_row, 8)), _LONGEST_REST_S)
        self._slow_in_a_row += 1
        self.rest_until = time.monotonic() + rest_s

    def note_quick(self) -> None:
        """The disk answers again."""
        self._slow_in_a_row = 0
        self.rest_until = 0.0
