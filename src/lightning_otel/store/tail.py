"""A segment read while it grows: whole lines, in the order of its process's own numbers.

A thread takes its number before it writes, so of two that end spans at once the later number may
stand first. Whoever reads on waits for the missing number, but not for ever: a number whose line
the disk refused never comes.
"""

import re
import time
from collections.abc import Collection
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

from lightning_otel.store.lines import parsed
from lightning_otel.store.position import Key, Reach, key_of
from lightning_otel.store.schema import Record

HOLD_S: Final = 0.5
"""How long a span waits for one that ended before it and was not read yet."""
_MOST_HELD: Final = 5_000
_BLOCK_BYTES: Final = 1 << 20
_LONGEST: Final = 64 << 20
_SPAN: Final = b'{"record":"span"'
_START: Final = b'{"record":"start"'
_DROP: Final = b'{"record":"drop"'
_NUMBER: Final = re.compile(rb'"sequence":(\d+)')
_NUMBERS: Final = re.compile(rb'"sequence":(\d+),"end_sequence":(\d+)')


class Found(NamedTuple):
    """An ended span that was read.

    Attributes:
        segment: The segment it was read from; empty if from a settled file.
        start: Where in its segment its line begins.
        number: Position of its end in the segment's own process; -1 for a span from elsewhere.
        size: Length of its line, more or less.
    """

    key: Key
    record: Record
    segment: str
    start: int
    number: int
    size: int


class Numbers:
    """Which numbers of a process were read, and which of its spans wait for a lower one.

    Attributes:
        seen: Up to which number every start and end was read; None if nothing was.
        held: Spans that wait, from whichever of the process's segments.
    """

    def __init__(self, seen: int | None) -> None:
        self.seen = seen
        self.held: list[Found] = []
        self._ahead: set[int] = set()
        self._since = 0.0

    def note(self, numbers: Collection[int], first: int | None) -> None:
        """Take in what stood in some lines.

        Args:
            numbers: Those of starts and ends.
            first: From which number on lines are expected, if nothing was read yet.
        """
        if self.seen is None:
            if first is None:
                return
            self.seen = first - 1
        was_whole = not self._ahead
        self._ahead.update(number for number in numbers if number > self.seen)
        while self.seen + 1 in self._ahead:
            self.seen += 1
            self._ahead.discard(self.seen)
        if self._ahead and was_whole:
            self._since = time.monotonic()

    def ready(self, found: list[Found], until: int | None = None) -> list[Found]:
        """Those of the spans, and of those held, that need not wait; the others are held.

        Args:
            found: Spans that were just read.
            until: Where more spans are about to be read whose numbers are noted already: the last
                number before these.
        """
        every = list({each.key: each for each in self.held + found}.values())
        seen = self.seen or 0
        if any(each.number > seen for each in every) and (
            time.monotonic() - self._since >= HOLD_S or len(every) > _MOST_HELD
        ):
            self._give_up(max(each.number for each in every))
            seen = self.seen or 0
        last = seen if until is None else min(seen, until)
        self.held = [each for each in every if each.number > last]
        return _in_order([each for each in every if each.number <= last])

    def _give_up(self, number: int) -> None:
        """Wait no more for what is missing below a number."""
        self.seen = max(self.seen or 0, number)
        self._ahead = {each for each in self._ahead if each > self.seen}
        while self.seen + 1 in self._ahead:
            self.seen += 1
            self._ahead.discard(self.seen)
        self._since = time.monotonic()


class Tail:
    """One segment being read."""

    def __init__(self, path: Path, reach: Reach, numbers: Numbers) -> None:
        """Begin, or go on, to read.

        Args:
            path: The segment.
            reach: How far it was read and delivered.
            numbers: Those of its process, shared by its segments.
        """
        self.path = path
        self._process, _, number = path.stem.rpartition("-")
        self._is_first = int(number) == 0
        self._offset = reach.offset
        self._numbers = numbers
        self._size = -1

    @property
    def reach(self) -> Reach:
        """Up to where all spans were handed out."""
        name = self.path.name
        held = (found.start for found in self._numbers.held if found.segment == name)
        return Reach(min(held, default=self._offset), self._numbers.seen)

    def has_more(self) -> bool:
        """Whether there is something to look at.

        Raises:
            FileNotFoundError: The segment was settled and is gone.
        """
        size = self.path.stat().st_size
        return bool(self._numbers.held) or (size > self._offset and size != self._size)

    def read(self, file: BinaryIO, mentions: Collection[bytes]) -> list[Found] | None:
        """The next ended spans; None at the end of what there is.

        Args:
            file: The segment, opened.
            mentions: Texts of which a line wanted holds one; every line if there is none.
        """
        block = self._block(file)
        if not block and not self._numbers.held:
            return None
        ready = self._numbers.ready(self._spans_in(block, mentions))
        return ready if block or ready else None

    def _block(self, file: BinaryIO) -> bytes:
        """Whole lines from here on; empty where there is none yet."""
        size = _BLOCK_BYTES
        while True:
            file.seek(self._offset)
            block = file.read(size)
            end = block.rfind(b"\n") + 1
            if end or len(block) < size or size > _LONGEST:
                break
            size *= 4
        if not end:
            self._size = self._offset + len(block)
            if size > _LONGEST:  # no line of ours: it is stepped over, piece by piece
                self._offset += len(block)
        return block[:end]

    def _spans_in(self, block: bytes, mentions: Collection[bytes]) -> list[Found]:
        found: list[Found] = []
        numbers: list[int] = []
        for line in block.splitlines(keepends=True):
            start = self._offset
            self._offset += len(line)
            if line.startswith(_SPAN):
                span = self._span_of(line, start, mentions, numbers)
                if span is not None:
                    found.append(span)
            elif line.startswith(_DROP) and (match := _NUMBERS.search(line)):
                numbers += (int(match[1]), int(match[2]))
            elif line.startswith(_START) and (match := _NUMBER.search(line)):
                numbers.append(int(match[1]))
        # In a later segment starts that were written anew stand first: they tell nothing of what
        # came between.
        ends = [each.number for each in found if each.number >= 0]
        self._numbers.note(numbers, 1 if self._is_first else min(ends, default=None))
        return found

    def _span_of(
        self, line: bytes, start: int, mentions: Collection[bytes], numbers: list[int]
    ) -> Found | None:
        if mentions and not any(text in line for text in mentions):
            if self._process.encode() in line and (match := _NUMBERS.search(line)):
                numbers += (int(match[1]), int(match[2]))
            return None
        record = parsed(line)
        get = record.get
        ids = get("trace_id"), get("span_id")
        is_span = all(type(each) is str for each in ids) and type(get("start_ns")) is int
        if not is_span or get("end_ns") is None:
            return None  # a damaged line, which the settler counts
        number = -1
        if get("process") == self._process and type(get("end_sequence")) is int:
            number = record["end_sequence"]
            numbers += (record["sequence"], number)
        key = key_of(record["trace_id"], record["span_id"])
        return Found(key, record, self.path.name, start, number, len(line))


def _in_order(found: list[Found]) -> list[Found]:
    """The process's own spans by their number, those it took from elsewhere where they stand."""
    own = iter(sorted((each for each in found if each.number >= 0), key=lambda each: each.number))
    return [next(own) if each.number >= 0 else each for each in found]
