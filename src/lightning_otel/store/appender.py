"""Lines into a process's segments, whatever the disk does, and what became of each.

Never raises for a full, slow or broken disk: a line is written at once, waits in memory or is
counted as lost. Knows nothing of what stands in a line but how many ended spans it stands for.
"""

import contextlib
import itertools
import logging
import os
import resource
import time
from functools import partial
from pathlib import Path
from time import monotonic, process_time
from typing import Final

from lightning_otel import debugging
from lightning_otel.store import counts as n
from lightning_otel.store.backlog import LONG_S, SLOW_S, Backlog
from lightning_otel.store.layout import Layout
from lightning_otel.store.lines import control_line
from lightning_otel.store.segment import Segment, boot_id
from lightning_otel.turns import Turns

log = logging.getLogger(__name__)

ROTATE_BYTES: Final = 64 << 20

_SEAL: Final = "seal"
_COUNT: Final = "count"
_NOTHING: Final[tuple[bytes, int]] = (b"", 0)


class Appender:
    """The open segment of a process, what waits for it, and the counts.

    Attributes:
        process: Id of the process: its machine's boot, its start and its number.
        segment: The segment being written; None before the first line and after a seal.
        paths: Every segment of this process, in order.
        lines: All lines, where there is no disk.
        ended_spans: Spans that ended here, whatever became of them.
    """

    def __init__(self, layout: Layout | None) -> None:
        """Open nothing yet: the first line does.

        Args:
            layout: The store's paths; None keeps the lines in memory.
        """
        self.layout = layout
        self.lines: list[bytes] = []
        self._start_anew()

    def _start_anew(self) -> None:
        # Guards segment, backlog and the counters against the process's other threads.
        self._turns = Turns(SLOW_S, self._take_over)
        self.pid = os.getpid()
        self.process = f"{boot_id()}-{time.time_ns():019d}-{self.pid}"
        self.segment: Segment | None = None
        self.paths: list[Path] = []
        self.ended_spans = 0
        self._counts: dict[str, int] = {}
        self._untold: dict[str, int] = {}
        self._told_here: dict[str, int] = {}
        self._written = 0
        self._written_here = 0
        self._ended_sealed = 0
        self._backlog = Backlog()
        self._next_number = itertools.count().__next__
        self._in_flight = _NOTHING
        self._is_writing = False
        self._is_refusal_told = False
        self._told_lost = 0

    def _take_over(self) -> None:
        """Go on where a dead thread held the lock: what it was writing is written anew."""
        (line, spans), self._in_flight = self._in_flight, _NOTHING
        self._is_writing = False
        if self.segment is not None:
            self.segment.take_back()
        self._hold(line, spans)

    def _open_lines(self) -> list[bytes]:
        """Lines that every segment begins with, as what they say goes on."""
        return []

    def note(self, name: str) -> None:
        """Count what happened to a span that is kept all the same."""
        self._turns.change(0, partial(self._count, name, 1))

    def refused(self, reason: str, spans: int = 1) -> None:
        """Count spans that ended and will not be kept, at once in the segment.

        Args:
            reason: Name of the count: ``rejected.`` or ``dropped.`` and a word.
            spans: How many.
        """
        self._forget_if_forked()
        if debugging.is_on:
            debugging.tell(f"refused {spans:,} ended span(s): {n.REASONS.get(reason, reason)}")
        self._turns.change(spans, partial(self._count, reason, spans, ended=spans))
        self._append(b"", 0)

    @property
    def lost(self) -> int:
        """Spans dropped so far, but for those that a transform dropped on purpose."""
        return sum(
            count
            for name, count in self._counts.items()
            if name.startswith("dropped.") and name != n.TRANSFORM
        )

    def accounting(self) -> n.Accounting:
        """What became of the spans that ended in this process; its own count, the disk unread."""
        with self._turns.alone() as is_alone:
            left = self._turns.left_spans
            counts = {**self._counts, n.ENDED: self.ended_spans + left}
            waiting = self._backlog.spans + left + (0 if is_alone else self._in_flight[1])
            return n.account(counts, stored=self._written, pending=waiting)

    def untold(self) -> dict[str, int]:
        """What no line of a segment tells yet: spans that wait for the disk, and counts."""
        with self._turns.alone():
            waiting = self._backlog.spans + self._turns.left_spans
            ended = waiting + n.unstored(self._untold)
            return n.added(self._untold, {n.PENDING: waiting, n.ENDED: ended})

    def position(self) -> tuple[int, int]:
        """Where this process's next line will stand: which of its segments, and how far in."""
        if self.layout is None:
            return 0, len(self.lines)
        with self._turns.alone():
            if self.segment is None:
                return len(self.paths), 0
            return len(self.paths) - 1, self.segment.size_bytes

    def flush(self) -> bool:
        """Write what waits in memory, however slow the disk is; whether nothing waits any more."""
        self._forget_if_forked()
        with self._turns.alone() as is_alone:
            if not is_alone or self._is_writing:
                return False
            self._turns.make_left_calls()
            while self._backlog.lines:
                self._backlog.ask_again()
                if self._write_alone(b"", 0) is not None:
                    return False
            if self._untold:
                self._backlog.ask_again()
                return self._write_alone(b"", 0) is None
            return True

    def seal(self) -> None:
        """Close the segment cleanly, if no span is open; a later span opens a new one.

        With a span open the segment stays open too: were it sealed, the span would be taken for one
        of a dead process, and its end would come too late. So it does while the disk refuses spans:
        if the process ends before it takes them, the segment's last word says how many are lost.
        """
        lost = 0
        with self._turns.alone() as is_alone:
            if not is_alone or self._is_writing:
                return
            is_flushed = self.flush()  # it is now or never
            segment = self.segment
            if not is_flushed:
                lost = self._say_last_word()
            elif segment is not None and not self._open_lines():
                self.segment = None
                with contextlib.suppress(OSError):  # no room for it: the free lock says the same
                    self._seal(segment, rotated=False)
                segment.close()
            lost, self._told_lost = lost - self._told_lost, lost
        if lost > 0 and self.layout is not None:
            log.warning(
                "%d spans are lost: %s refuses them to the end", lost, self.layout.catalogue
            )

    def _say_last_word(self) -> int:
        """Note how many spans are lost unless the disk takes them later; return their number."""
        counts = n.added(self._untold, {n.DISK: self._backlog.spans})
        if self.segment is not None:
            ended = self._ended_here() + n.unstored(counts)
            with contextlib.suppress(OSError):
                self.segment.write_last_word({**counts, n.ENDED: ended})
        return counts.get(n.DISK, 0)

    def rotate(self) -> None:
        """Go on in a new segment, also with spans open, so that this one can be settled."""
        with self._turns.alone() as is_alone:
            full = self.segment
            if full is None or not is_alone or self._is_writing:
                return
            self.flush()
            if self.segment is full:
                self._rotate(full)

    def forget(self) -> None:
        """Start anew in a forked child: its parent's segment, lock and open spans are not ours."""
        if self.segment is not None:
            self.segment.close()  # never unlocked: that would free the parent's lock
        self._start_anew()

    def _forget_if_forked(self) -> None:
        # Where the fork was not Python's own, its hook was not called.
        if os.getpid() != self.pid:
            self.forget()

    def _append(self, line: bytes, spans: int) -> None:
        if self.layout is None:
            self.ended_spans += spans
            self._written += spans
            if line:
                self.lines.append(line)
            return
        if not self._turns.take():
            if not self._leave_line(line, spans):
                return
            line, spans = b"", 0
        refusal = None
        try:
            if self._is_writing:
                refusal = self._interject(line, spans)
            elif not (self._backlog.rest_until and self._waits(line, spans)):
                refusal = self._write_alone(line, spans)
            if self._turns.has_left_calls and not self._is_writing:
                self._turns.make_left_calls()
                refusal = self._write_alone(b"", 0) or refusal
        finally:
            self._turns.release()
        if self._turns.has_left_calls:  # left between the look and the release
            self._append(b"", 0)
        # Told without the lock: a log handler may wait for a thread that is about to end a span.
        if refusal is not None and not self._is_refusal_told:
            self._is_refusal_told = True
            log.warning(
                "%s refuses spans (%s); up to 8 MiB are held in memory until it takes them",
                self.layout.catalogue,
                refusal,
            )

    def _leave_line(self, line: bytes, spans: int) -> bool:
        """Leave a line to who hangs, for when that is over; its spans are lost if it has no room.

        Returns:
            Whether it is over already, and the lock is ours.
        """
        if not self._turns.has_room(len(line)):
            return self._turns.leave(spans, partial(self._count, n.DISK, spans, ended=spans))
        return self._turns.leave(spans, partial(self._hold_ended, line, spans), len(line))

    def _hold_ended(self, line: bytes, spans: int) -> None:
        self.ended_spans += spans
        self._count(n.SLOW_HELD, spans)
        self._hold(line, spans)

    def _take(self, lines: bytes, spans: int) -> None:
        """Write lines that somebody else holds until they are here.

        Raises:
            OSError: The disk refuses them; it is as if they had never come.
        """
        if self.layout is None:
            self.ended_spans += spans
            self._written += spans
            self.lines += lines.splitlines(keepends=True)
            return
        with self._turns.alone() as is_alone:
            if not is_alone:
                raise TimeoutError("a write into the store hangs")
            self.ended_spans += spans
            self._in_flight = (lines, spans)
            try:
                self._put(lines, spans)
            finally:
                if self._in_flight is not _NOTHING:
                    self._in_flight = _NOTHING
                    self.ended_spans -= spans
                    if self.segment is not None:
                        self.segment.take_back()
            self._rotate_if_due()

    def _waits(self, line: bytes, spans: int) -> bool:
        """Whether the line waits in memory, as the disk was slow just before.

        What does not fit asks the disk again, however slow: a slow disk loses nothing.
        """
        if not self._backlog.is_resting():
            return False
        if not self._backlog.has_room(line):
            self._backlog.ask_again()
            return False
        self._backlog.add(line, spans)
        self.ended_spans += spans
        self._count(n.SLOW_HELD, spans)
        return True

    def _write_alone(self, line: bytes, spans: int) -> OSError | None:
        """Write while only a signal handler or finalizer of this thread may come between."""
        # With no call between, at which a signal handler may raise: what is in flight has ended.
        self._is_writing = True
        self._in_flight = (line, spans)
        self.ended_spans += spans
        try:
            refusal = self._write(line, spans)
            if refusal is None and (self._backlog.lines or self._untold):
                refusal = self._write(b"", 0)  # what came between
        finally:
            self._is_writing = False
            if self._in_flight is not _NOTHING:
                # A signal handler raised, as Ctrl-C does, before the line was noted as written.
                self._in_flight = _NOTHING
                if self.segment is not None:
                    self.segment.take_back()
                self._hold(line, spans)
        return refusal

    def _interject(self, line: bytes, spans: int) -> OSError | None:
        """Write the line of a signal handler, or a finalizer, that interrupts this very thread.

        Whatever it interrupted, only the open segment may be touched; where there is none yet, the
        line waits until the interrupted write goes on.
        """
        segment = self.segment
        self.ended_spans += spans
        try:
            if line and segment is not None and segment.append(line):
                self._written += spans
                self._written_here += spans
                return None
        except OSError as exc:
            self._hold(line, spans)
            return exc
        self._hold(line, spans)
        return None

    def _write(self, line: bytes, spans: int) -> OSError | None:
        """Write what is pending and the line; on refusal hold the line, or count it lost."""
        refusal = None
        try:
            if self._backlog.lines or self._untold:
                self._make_way(line)
            if line and not self._backlog.lines:
                self._put(line, spans)
            else:
                self._hold(line, spans)  # the disk is slow again
        except OSError as exc:
            refusal = exc
            self._hold(line, spans)
        self._in_flight = _NOTHING
        self._rotate_if_due()
        return refusal

    def _make_way(self, line: bytes) -> None:
        """Write what is pending, while the disk is quick; however slow, until the line has room."""
        self._catch_up()
        while self._backlog.lines and not self._backlog.has_room(line):
            self._backlog.ask_again()
            self._catch_up()

    def _hold(self, line: bytes, spans: int) -> None:
        if not self._backlog.has_room(line):
            self._count(n.DISK, spans)
        elif line:
            self._backlog.add(line, spans)

    def _count(self, name: str, spans: int, *, ended: int = 0) -> None:
        if spans:
            so_far, untold = self._counts.get(name, 0), self._untold.get(name, 0)
            # With no call between, as in ``_write_alone``.
            self._counts[name] = so_far + spans
            self._untold[name] = untold + spans
            self.ended_spans += ended

    def _catch_up(self) -> None:
        backlog = self._backlog
        while backlog.lines and not backlog.is_resting():
            text, count = backlog.first()
            try:
                self._put(text, backlog.spans_of(count))
            except OSError:
                if count == 1:
                    raise
                # A disk that is nearly full may have room for one.
                text, count = backlog.first(alone=True)
                self._put(text, backlog.spans_of(count))
            backlog.written(count)
        if self._untold and not backlog.lines and not backlog.is_resting():
            told = dict(self._untold)
            self._put(control_line(_COUNT, counts=told), 0)
            self._told_here = n.added(self._told_here, told)
            # Not emptied: what was counted meanwhile is told the next time.
            self._untold = n.added(self._untold, {name: -count for name, count in told.items()})

    def _put(self, line: bytes, spans: int) -> None:
        began = monotonic()
        before = (process_time(), _waits()) if began < self._backlog.watched_until else None
        segment = self.segment
        if segment is None or not segment.append(line):
            self._replaced(segment, line).append(line)
        # With no call between: a signal handler may raise at any.
        self._written += spans
        self._written_here += spans
        if line is self._in_flight[0]:
            self._in_flight = _NOTHING
        took_s = monotonic() - began
        if took_s > LONG_S:
            worked = None
            if before is not None and _waits() != before[1]:  # else others had the processor
                worked = process_time() - before[0]
            if self._backlog.is_slow(took_s, worked):
                self._backlog.note_slow(took_s)
                self._count(n.SLOW_WRITES, 1)
        elif self._backlog.rest_until:
            self._backlog.note_quick()
        if self.segment is not None and self.segment.has_last_word:
            with contextlib.suppress(OSError):
                self.segment.write_last_word({})  # there is room again

    def _replaced(self, gone: Segment | None, line: bytes) -> Segment:
        """A new segment, instead of none or of one that is not ours any more."""
        fresh = self._new_segment(line)
        if gone is not None and gone.is_removed():
            # What was told in it is told again, and its spans are lost.
            self._written -= self._written_here
            self._untold = n.added(self._untold, self._told_here)
            self._count(n.REMOVED, self._written_here)
        elif gone is not None:
            self._ended_sealed += self._ended_here()
        self._go_on_in(fresh)
        return fresh

    def _ended_here(self) -> int:
        """Spans that ended since the last seal and are written, or counted, by now."""
        waiting = self._backlog.spans + n.unstored(self._untold) + self._in_flight[1]
        return self.ended_spans - waiting - self._ended_sealed

    def _new_segment(self, line: bytes = b"") -> Segment:
        """A new segment that begins with the lines that go on, but for the one being written."""
        assert self.layout is not None
        try:
            segment = Segment(self.layout, self.process, self._next_number())
        except FileNotFoundError:
            self.layout.make_folders()  # somebody removed the store
            segment = Segment(self.layout, self.process, self._next_number())
        starts = b"".join(one for one in self._open_lines() if one is not line)
        if starts:
            try:
                segment.append(starts)
            except OSError:
                segment.remove()
                raise
        return segment

    def _rotate_if_due(self) -> None:
        segment = self.segment
        if segment and (segment.size_bytes >= ROTATE_BYTES or segment.is_asked_to_close):
            self._rotate(segment)

    def _rotate(self, full: Segment) -> None:
        """Go on in a new segment; if there is no room for it and the seal, go on in the old one.

        Without the seal, the open spans of the old one would be taken for those of a dead process.
        """
        fresh = None
        try:
            fresh = self._new_segment() if self._open_lines() else None
            self._seal(full, rotated=True)
        except OSError:
            if fresh is not None:
                fresh.remove()
            return
        self._go_on_in(fresh)
        full.close()

    def _seal(self, segment: Segment, *, rotated: bool) -> None:
        ended = self._ended_here()
        segment.append(control_line(_SEAL, rotated=rotated, counts={n.ENDED: ended}))
        self._ended_sealed += ended
        self._written_here, self._told_here = 0, {}

    def _go_on_in(self, segment: Segment | None) -> None:
        self.segment = segment
        self._written_here, self._told_here = 0, {}
        if segment is not None:
            self.paths.append(segment.path)


def _waits() -> int:
    """Return how often this thread gave up the processor of itself, as for a disk."""
    who = getattr(resource, "RUSAGE_THREAD", None)  # Linux and FreeBSD alone
    return time.monotonic_ns() if who is None else resource.getrusage(who).ru_nvcsw
