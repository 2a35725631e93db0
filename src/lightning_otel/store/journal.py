"""Buffer and write a process's segment lines, and count what became of its spans.

A line is written at once, waits in memory for a full or hanging disk, or is counted as lost.
"""

import contextlib
import itertools
import logging
import os
import time
from pathlib import Path
from threading import get_ident
from typing import Final

from lightning_otel import debugging
from lightning_otel.debugging.turns import BoundedLock
from lightning_otel.store import counts as n
from lightning_otel.store.layout import Layout
from lightning_otel.store.lines import format_control_line
from lightning_otel.store.pace import DiskPace
from lightning_otel.store.segment import NO_ROOM, Segment, read_boot_id
from lightning_otel.store.template import add_catalogue

log = logging.getLogger(__name__)

ROTATE_BYTES: Final = 64 << 20
PENDING_BYTES: Final = 8 << 20
"""Lines held in memory; what does not fit is lost, and counted, if the disk refuses it."""
CHUNK_BYTES: Final = 1 << 20
"""Written at once of what waits, or of spans that are taken over."""


class Journal:
    """The lines of one process: any thread appends, one at a time writes.

    Attributes:
        layout: The store's paths; None keeps the ``lines`` in memory.
        process: Id of the process: its machine's boot, its start and its number.
        segment: The segment being written; None before the first line and after a seal.
        paths: Every segment of this process, in order.
    """

    def __init__(self, layout: Layout | None) -> None:
        self.layout = layout
        self.lines: list[bytes] = []
        self._start_anew()

    def _start_anew(self) -> None:
        self._turns = BoundedLock()  # guards the segment and the counts; lists are appended to
        self.pid = os.getpid()
        self.process = f"{read_boot_id()}-{time.time_ns():019d}-{self.pid}"
        self.segment: Segment | None = None
        self.paths: list[Path] = []
        self._next_number = itertools.count().__next__
        # Lines that no write has taken yet, each with the ended spans it stands for.
        self._waiting: list[tuple[bytes, int]] = []
        self._waiting_bytes = 0
        # Lines that were written, and how many are to be before whoever writes now may go.
        self._written = self._due = 0
        self._stored = self._stored_in_segment = 0
        # What happened to spans: counts in no segment yet, in former segments, and in this one.
        self._new_counts: list[tuple[str, int]] = []
        self._earlier_counts: dict[str, int] = {}
        self._segment_counts: dict[str, int] = {}
        self._pace = DiskPace()
        self._writing_thread = self._reported_lost = 0
        self._is_rotation_due = self._is_refusal_logged = False

    def _open_lines(self) -> list[bytes]:
        return []

    def count_unstored(self, reason: str, spans: int = 1) -> None:
        """Count spans that ended and will not be kept, by a reason of :mod:`counts`, at once."""
        self._forget_if_forked()
        self._note_unstored(reason, spans)
        self._write_waiting()

    def _note_unstored(self, reason: str, spans: int) -> None:
        if debugging.is_on:
            debugging.log(f"refused {spans:,} ended span(s): {n.REASONS.get(reason, reason)}")
        self._note_count(reason, spans)

    def _note_count(self, name: str, spans: int) -> None:
        if spans:
            self._new_counts.append((name, spans))

    @property
    def lost(self) -> int:
        """Spans dropped so far, but for those that a transform dropped on purpose."""
        counts = [*self._earlier_counts.items(), *self._segment_counts.items(), *self._new_counts]
        return sum([
            count for name, count in counts if name.startswith("dropped.") and name != n.TRANSFORM
        ])  # fmt: skip

    def accounting(self) -> n.Accounting:
        """Return the accounts of this process's spans from its own counters; reads no disk."""
        with self._turns.alone():
            counts = n.sum_counts(
                self._earlier_counts, self._segment_counts, self._sum_new_counts()
            )
            pending = self._count_waiting()
            ended = self._stored + n.count_unstored(counts) + pending
            counts |= {n.ENDED: ended, n.PENDING: pending}
            return n.make_accounting(counts, stored=self._stored)

    def unwritten_counts(self) -> dict[str, int]:
        """Return the counts that no segment has yet, spans that wait for the disk included."""
        with self._turns.alone():
            unwritten_counts, pending = self._sum_new_counts(), self._count_waiting()
            ended = pending + n.count_unstored(unwritten_counts)
            return n.sum_counts(unwritten_counts, {n.PENDING: pending, n.ENDED: ended})

    def _sum_new_counts(self, first: int | None = None) -> dict[str, int]:
        return n.sum_counts(*({name: count} for name, count in self._new_counts[:first]))

    def _count_waiting(self) -> int:
        return sum([spans for _, spans in self._waiting.copy()])

    def _count_ended(self) -> int:
        return self._stored_in_segment + n.count_unstored(self._segment_counts)

    def position(self) -> tuple[int, int]:
        """Return the place of the next line: the number of the segment, and the offset."""
        if self.layout is None:
            return 0, len(self.lines)
        with self._turns.alone():
            if self.segment is None:
                return len(self.paths), 0
            return len(self.paths) - 1, self.segment.size_bytes

    def flush(self) -> bool:
        """Write what waits in memory; whether all of it is written.

        What other threads add meanwhile is theirs to write. A disk whose last write hung is not
        asked: only an ended span does that, once it has rested.
        """
        self._forget_if_forked()
        with self._turns.alone():
            due = self._written + len(self._waiting)
        if not self._pace.is_hanging:
            self._write_waiting()
        return self.layout is None or (self._written >= due and not self._new_counts)

    def seal(self) -> None:
        """Close the segment cleanly, if no span is open and the disk accepts spans.

        Sealed, an open span would be taken for one of a dead process, and its end come too late. If
        the process ends before the disk takes its spans, the segment's first line says how many are
        lost.
        """
        is_flushed = self.flush()  # it is now or never
        with self._turns.alone() as is_alone:
            if is_alone and self._writing_thread == get_ident():
                return
            lost, segment = 0, self.segment
            if not is_flushed:
                counts = n.sum_counts(self._sum_new_counts(), {n.DISK: self._count_waiting()})
                lost = counts.get(n.DISK, 0)
                if segment is not None and is_alone and not self._pace.is_hanging:
                    ended = self._count_ended() + n.count_unstored(counts)
                    segment.write_final_counts({**counts, n.ENDED: ended})
            elif segment is not None and is_alone and not self._open_lines():
                with contextlib.suppress(OSError):  # no room: the free lock says the same
                    self._seal_segment(segment, is_rotated=False)
                self._switch_segment(None)
                segment.close()
            lost, self._reported_lost = lost - self._reported_lost, lost
        if lost > 0 and self.layout is not None:
            why = "hangs" if self._pace.is_hanging or not is_alone else "refuses them"
            log.warning("%d spans are lost: %s %s to the end", lost, self.layout.catalogue, why)

    def rotate(self) -> None:
        """Go on in a new segment, also with spans open, so that this one can be settled."""
        self.flush()
        with self._turns.alone() as is_alone:
            if is_alone and self._writing_thread != get_ident():
                self._rotate_segment()

    def forget(self) -> None:
        """Start anew in a forked child: its parent's segment, lock and open spans are not ours."""
        if self.segment is not None:
            self.segment.close()  # never unlocked: that would free the parent's lock
        self._start_anew()

    def _forget_if_forked(self) -> None:
        # Where the fork was not Python's own, its hook was not called.
        if os.getpid() != self.pid:
            self.forget()

    def _append_line(self, line: bytes, spans: int, *, may_wait: bool = False) -> None:
        if self.layout is None:
            self.lines.append(line)
            self._stored += spans
            return
        size = len(line)
        self._waiting.append((line, spans))
        # No call in this line, here and elsewhere: in any call a signal handler may raise, and
        # another thread may run.
        self._waiting_bytes += size
        if may_wait and self._pace.is_slow and self._waiting_bytes < CHUNK_BYTES:
            return  # goes with the next end
        if not self._write_waiting() and self._waiting:
            self._note_count(n.SLOW_HELD, spans)

    def _write_now(self, lines: bytes, spans: int) -> None:
        """Write lines that somebody else holds until they are here; a refused line never came."""
        if self.layout is None:
            self.lines += lines.splitlines(keepends=True)
            self._stored += spans
            return
        with self._turns.alone() as is_alone:
            is_free = is_alone and self._writing_thread != get_ident()
            if not is_free or self._pace.is_resting():
                raise TimeoutError("a write into the store hangs")
            self._writing_thread = get_ident()
            try:
                self._write_lines(lines, spans)
                if self._is_rotation_due:
                    self._rotate_segment()
            finally:
                self._writing_thread = 0

    def _write_waiting(self) -> bool:
        """Write what waits in memory now, in order; False if it goes on waiting for the disk.

        What comes while somebody writes, from a signal handler of this thread too, waits for that.
        """
        refusal, is_due = None, self.layout is not None
        while is_due and (self._waiting or self._new_counts) and refusal is None:
            if not self._turns.take():
                self._drop_newest()
                return False
            try:
                self._due = self._written + len(self._waiting)
                if self._writing_thread == get_ident():
                    return True  # a signal handler's: the write that it broke into goes on with it
                self._writing_thread = get_ident()
                try:
                    while self._written < self._due or self._new_counts:
                        # A hanging disk is left alone; what does not fit in memory is written.
                        is_resting = self._pace.is_hanging and self._pace.is_resting()
                        if is_resting and self._waiting_bytes <= PENDING_BYTES:
                            return False
                        if len(self._waiting) == 1 and not self._new_counts:
                            self._write_lines(*self._waiting[0], 1)
                        else:
                            self._write_batch()
                    if self._is_rotation_due:
                        self._rotate_segment()
                except OSError as exc:
                    self._drop_newest()
                    refusal = exc
                finally:
                    self._writing_thread = 0
                is_due = self._written < self._due
            finally:
                self._turns.release()
        # Logged without the lock: a handler may wait for a thread that is about to end a span.
        if refusal is not None and not self._is_refusal_logged and self.layout is not None:
            self._is_refusal_logged = True
            log.warning(
                "%s refuses spans (%s); up to 8 MiB are held in memory until it takes them, "
                "and lost with the process",
                self.layout.catalogue,
                refusal,
            )
        return True

    def _write_batch(self) -> None:
        size = lines = 0
        for line, _ in self._waiting.copy():
            size += len(line)
            if lines and size > CHUNK_BYTES:
                break
            lines += 1
        batch, counts = self._waiting[:lines], len(self._new_counts)
        text = b"".join([line for line, _ in batch])
        try:
            self._write_lines(text, sum([spans for _, spans in batch]), lines, counts)
        except OSError:
            if lines + bool(counts) <= 1 or self._pace.is_hanging:
                raise
            # A disk that is nearly full may have room for one.
            self._write_lines(*batch[0], 1)

    def _drop_newest(self) -> None:
        while self._waiting and self._waiting_bytes > PENDING_BYTES:
            line, spans = self._waiting.pop()
            size = len(line)
            self._waiting_bytes -= size
            if spans:
                self._new_counts.append((n.DISK, spans))

    def _write_lines(self, text: bytes, spans: int, lines: int = 0, counts: int = 0) -> None:
        """Write a text, which is so many lines of those that wait, and so many of the counts."""
        size, new_counts = len(text), {}
        if counts:
            new_counts = self._sum_new_counts(counts)
            text += format_control_line("count", counts=new_counts)
        former = segment = self.segment
        if segment is None or not segment.append(text):
            segment = self._replace_segment(text)
        self._stored += spans
        self._stored_in_segment += spans
        if lines:
            del self._waiting[:lines]
            self._written += lines
            self._waiting_bytes -= size
        if counts:
            total = n.sum_counts(self._segment_counts, new_counts)
            self._segment_counts, self._new_counts[:counts] = total, []
        if self._pace.is_hanging:
            self._new_counts.append((n.SLOW_WRITES, 1))
        if former is not None and former.has_final_counts:
            former.write_final_counts({})  # there is room again
        if segment.size_bytes >= ROTATE_BYTES or segment.is_asked_to_close:
            self._is_rotation_due = True

    def _replace_segment(self, text: bytes) -> Segment:
        """Write into a new segment, as there is none or the one there was is not ours any more."""
        gone, refusal = self.segment, None
        try:
            fresh = self._new_segment(text)
        except OSError as exc:
            if self._pace.is_hanging or exc.errno not in NO_ROOM:
                raise
            fresh, refusal = self._new_segment(), exc  # there may be room for counts
        if gone is not None and gone.is_removed():
            # Its counts are written again, and its spans are lost.
            self._stored -= self._stored_in_segment
            self._note_count(n.REMOVED, self._stored_in_segment)
            self._new_counts += self._segment_counts.items()
            self._segment_counts = {}
        self._switch_segment(fresh)
        if refusal is not None:
            raise refusal
        return fresh

    def _new_segment(self, text: bytes = b"") -> Segment:
        """A new segment that begins with the starts of open spans, but for those in the text."""
        assert self.layout is not None
        lines = b"".join([line for line in self._open_lines() if line not in text]) + text
        try:
            return Segment(self.layout, self.process, self._next_number(), self._pace, lines)
        except FileNotFoundError:
            self.layout.make_folders()  # somebody removed the store
            add_catalogue(self.layout)
            return Segment(self.layout, self.process, self._next_number(), self._pace, lines)

    def _rotate_segment(self) -> None:
        """Go on in a new segment; if there is no room for it and the seal, go on in the old one."""
        fresh, full, self._is_rotation_due = None, self.segment, False
        if full is None:
            return
        try:
            fresh = self._new_segment() if self._open_lines() else None
            self._seal_segment(full, is_rotated=True)
        except OSError:
            if fresh is not None:
                fresh.remove()
            return
        self._switch_segment(fresh)
        full.close()

    def _seal_segment(self, segment: Segment, *, is_rotated: bool) -> None:
        counts = {n.ENDED: self._count_ended()}
        segment.append(format_control_line("seal", rotated=is_rotated, counts=counts))

    def _switch_segment(self, segment: Segment | None) -> None:
        self._earlier_counts = n.sum_counts(self._earlier_counts, self._segment_counts)
        self._segment_counts = {}
        self._stored_in_segment = 0
        self.segment = segment
        if segment is not None:
            self.paths.append(segment.path)
