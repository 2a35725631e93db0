"""The traced process's side of the store: an ended span is a line of its segment, at once.

One ``write`` a span and nothing else: no DuckDB, thread, queue, signal handler or exit hook, so
whatever kills the process, an ended span is already in the page cache. Never raises for a full,
slow or broken disk: a line is written at once, waits in memory or is counted as lost.
"""

import contextlib
import itertools
import logging
import os
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from threading import get_ident
from time import monotonic
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import orjson
from opentelemetry.util.types import AttributeValue

from lightning_otel import config, debugging
from lightning_otel.store import counts as n
from lightning_otel.store.layout import Layout
from lightning_otel.store.lines import (
    control_line,
    end_record,
    identity_of,
    line_of,
    parsed,
    start_record,
)
from lightning_otel.store.schema import Record, record_of_span
from lightning_otel.store.segment import LONG_S, SLOW_S, Pace, Segment, boot_id
from lightning_otel.store.transforms import (
    Transform,
    add_named,
    drop_record,
    everywhere,
    transformed,
)
from lightning_otel.store.values import fragment_of
from lightning_otel.turns import Turns
from lightning_otel.types import Span

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

log = logging.getLogger(__name__)

ROTATE_BYTES: Final = 64 << 20
PENDING_BYTES: Final = 8 << 20
"""Lines held in memory; what does not fit is lost, and counted, if the disk refuses it."""
_CHUNK_BYTES: Final = 1 << 20
"""Written at once of what waits, or of spans that are taken over."""
_LONGEST_ID: Final = 64
_PATIENCE_S: Final = 10.0
_NO_STAMPS: Final[Mapping[str, AttributeValue]] = MappingProxyType({})


class _OpenSpan:
    """A span that has not ended.

    Attributes:
        sequence: Its place in the process.
        stamps: Attributes for its record alone: on the span they would reach every exporter of the
            program, and push out attributes of a span that holds as many as it may.
        began_ns: When it began, by the clock that never goes back; None if that was not seen.
        identity: What stays of it until it ends, once that was read.
        line: The line of its start, once it was made.
    """

    __slots__ = ("began_ns", "identity", "line", "sequence", "stamps")

    def __init__(
        self, sequence: int, stamps: Mapping[str, AttributeValue], began_ns: int | None = None
    ) -> None:
        self.sequence = sequence
        self.stamps = stamps
        self.began_ns = began_ns
        self.identity: Record | None = None
        self.line = b""


class SpanWriter:
    """Turns started and ended spans into lines of the process's segments, and counts them.

    Attributes:
        process: Id of the process: its machine's boot, its start and its number.
        segment: The segment being written; None before the first line and after a seal.
        paths: Every segment of this process, in order.
        lines: All lines, where there is no disk.
    """

    def __init__(self, layout: Layout | None) -> None:
        """Make a writer that opens its segment with the first span.

        Args:
            layout: The store's paths; None keeps the lines in memory.
        """
        self.layout = layout
        self.lines: list[bytes] = []
        self._start_anew()
        _writers.add(self)

    def _start_anew(self) -> None:
        self._turns = Turns(SLOW_S)  # guards the segment and the counts; lists are appended to
        self.pid = os.getpid()
        self.process = f"{boot_id()}-{time.time_ns():019d}-{self.pid}"
        self.segment: Segment | None = None
        self.paths: list[Path] = []
        self._open: dict[tuple[int, int], _OpenSpan] = {}
        self._next = itertools.count(1).__next__
        self._next_number = itertools.count().__next__
        self._resource: tuple[object, orjson.Fragment] | None = None
        # Lines that no write has taken yet, each with the ended spans it stands for.
        self._waiting: list[tuple[bytes, int]] = []
        self._waiting_bytes = 0
        self._written = self._written_here = 0
        # What happened to spans: just now, in all, and what former segments and this one tell.
        self._noted: list[tuple[str, int]] = []
        self._counts: dict[str, int] = {}
        self._told: dict[str, int] = {}
        self._told_here: dict[str, int] = {}
        self._pace = Pace()
        self._writing_thread = 0
        self._is_refusal_told = False
        self._told_lost = 0

    def started(
        self,
        span: "ReadableSpan",
        stamps: Mapping[str, AttributeValue] = _NO_STAMPS,
        transforms: Sequence[Transform] = (),
    ) -> None:
        """Note a started span, so that it is known if the process dies before its end."""
        if os.getpid() != self.pid:
            self.forget()
        sequence = self._next()
        context = span.context
        ids = context.trace_id, context.span_id
        if 0 in ids:
            return
        # Before all else: whatever comes, the end is ours.
        begun = self._open[ids] = _OpenSpan(sequence, stamps, time.monotonic_ns())
        begun.identity = identity_of(span, self.process, sequence)
        record: Record | None = start_record(begun.identity, span, self._resource_of(span), stamps)
        if record and (transforms or everywhere):
            record, _ = transformed(record, transforms)
        if record:
            begun.line = line_of(record)
            self._append_line(begun.line, 0)

    def ended(
        self,
        span: "ReadableSpan",
        body: Mapping[str, str],
        transforms: Sequence[Transform] = (),
    ) -> None:
        """Keep an ended span. One that began in a parent process, or before us, is only counted."""
        self._forget_if_forked()
        context = span.context
        ids = context.trace_id, context.span_id
        begun = self._open.pop(ids, None)
        if begun is not None:
            self._keep_record(span, body, begun, transforms)
        else:
            self.refused(n.INVALID_ID if 0 in ids else n.FOREIGN)

    def exported(self, span: "ReadableSpan", body: Mapping[str, str]) -> None:
        """Keep an ended span whose start we did not see, as an exporter gets it."""
        self._forget_if_forked()
        if span.context.is_valid:
            self._keep_record(span, body, _OpenSpan(self._next(), _NO_STAMPS))
        else:
            self.refused(n.INVALID_ID)

    def add(self, span: Span) -> None:
        """Keep a span that is complete already, such as one received or made by hand."""
        self._forget_if_forked()
        if not (_is_id(span.trace_id) and _is_id(span.span_id)):
            self.refused(n.INVALID_ID)
            return
        spans = 0 if span.end_ns is None else 1
        try:
            record = record_of_span(span)
            if everywhere and not self._transform_record(record, ()):
                return
            line = line_of(record)
        except BaseException:
            self.refused(n.FAULT, spans)
            raise
        self._append_line(line, spans)

    def take(self, spans: Iterable[Span]) -> None:
        """Keep spans that somebody else holds until we have them: with few writes, or not at all.

        Raises:
            OSError: The disk refuses some of them; they are neither held in memory nor counted.
        """
        self._forget_if_forked()
        lines: list[bytes] = []
        size, ended, dropped = 0, 0, 0
        for span in spans:
            record = record_of_span(span)
            if everywhere:
                kept, is_failed = transformed(record, ())
                if kept is None:
                    dropped += span.end_ns is not None
                    continue
                record = kept
                if is_failed:
                    self.note(n.TRANSFORM_FAILED)
            lines.append(line_of(record))
            size += len(lines[-1])
            ended += span.end_ns is not None
            if size >= _CHUNK_BYTES:
                self._take_lines(b"".join(lines), ended)
                lines, size, ended = [], 0, 0
        if lines:
            self._take_lines(b"".join(lines), ended)
        if dropped:  # not before: where the disk refused the others, all of them come again
            self.refused(n.TRANSFORM, dropped)

    def records(self, since: tuple[int, int], *mentions: str) -> list[Record] | None:
        """This process's records since a position, starts without their end among them.

        Args:
            since: As :meth:`position` gave it.
            *mentions: Texts of which a line wanted holds one; the others are not even parsed.

        Returns:
            Parsed lines in order; None if a segment was settled and is gone.
        """
        self.flush()
        index, offset = since
        wanted = [mention.encode("utf-8", "replace") for mention in mentions]
        lines = self.lines[offset:] if self.layout is None else []
        try:
            for path in self.paths[index:]:
                with path.open("rb") as file:
                    file.seek(offset)
                    lines += file.read().splitlines()
                offset = 0
        except FileNotFoundError:
            return None
        found = (parsed(line) for line in lines if any(text in line for text in wanted))
        return [record for record in found if "span_id" in record]

    def _keep_record(
        self,
        span: "ReadableSpan",
        body: Mapping[str, str],
        begun: _OpenSpan,
        transforms: Sequence[Transform] = (),
    ) -> None:
        try:
            identity = begun.identity or identity_of(span, self.process, begun.sequence)
            resource, number = self._resource_of(span), self._next()
            record = end_record(identity, span, resource, begun.stamps, body, number)
            if begun.began_ns is not None and record["end_ns"] < record["start_ns"]:
                # The wall clock was set back meanwhile.
                record["end_ns"] = record["start_ns"] + time.monotonic_ns() - begun.began_ns
            if (transforms or everywhere) and not self._transform_record(record, transforms):
                return
            line = line_of(record)
        except BaseException:  # a fault of ours, or Ctrl-C
            self.refused(n.FAULT)
            raise
        self._append_line(line, spans=1)

    def _transform_record(self, record: Record, transforms: Sequence[Transform]) -> bool:
        """Let an ended span pass through transforms; False if one dropped it."""
        drop = drop_record(record)
        kept, is_failed = transformed(record, transforms)
        if kept is None:
            self.refused(n.TRANSFORM)
            self._append_line(control_line(**drop), spans=0)
            return False
        if is_failed:
            self.note(n.TRANSFORM_FAILED)
        record.clear()
        record.update(kept)
        return True

    def _resource_of(self, span: "ReadableSpan") -> orjson.Fragment:
        resource, cached = span.resource, self._resource
        if cached is None or cached[0] is not resource:
            cached = self._resource = (resource, fragment_of(resource.attributes))
        return cached[1]

    def note(self, name: str) -> None:
        """Count what happened to a span that is kept all the same."""
        self._noted.append((name, 1))

    def refused(self, reason: str, spans: int = 1) -> None:
        """Count spans that ended and will not be kept, at once in the segment.

        Args:
            reason: Name of the count: ``rejected.`` or ``dropped.`` and a word.
            spans: How many.
        """
        self._forget_if_forked()
        if debugging.is_on:
            debugging.tell(f"refused {spans:,} ended span(s): {n.REASONS.get(reason, reason)}")
        self._noted.append((reason, spans))
        self._write_waiting()

    @property
    def lost(self) -> int:
        """Spans dropped so far, but for those that a transform dropped on purpose."""
        counts = [*self._counts.items(), *self._noted]
        return sum([
            count for name, count in counts if name.startswith("dropped.") and name != n.TRANSFORM
        ])  # fmt: skip

    def accounting(self) -> n.Accounting:
        """Return the accounts of this process's spans from its own counters; reads no disk."""
        with self._turns.alone():
            counts, waiting = self._all_counts(), self._waiting_spans()
            ended = self._written + n.unstored(counts) + waiting
            return n.account({**counts, n.ENDED: ended}, stored=self._written, pending=waiting)

    def untold(self) -> dict[str, int]:
        """Return the counts that no segment has yet, spans that wait for the disk included."""
        with self._turns.alone():
            untold, waiting = self._untold_counts(), self._waiting_spans()
            ended = waiting + n.unstored(untold)
            return n.added(untold, {n.PENDING: waiting, n.ENDED: ended})

    def _all_counts(self) -> dict[str, int]:
        return n.added(self._counts, *({name: count} for name, count in self._noted.copy()))

    def _untold_counts(self) -> dict[str, int]:
        told = n.added(self._told, self._told_here)
        return n.added(self._all_counts(), {name: -count for name, count in told.items()})

    def _waiting_spans(self) -> int:
        return sum([spans for _, spans in self._waiting.copy()])

    def position(self) -> tuple[int, int]:
        """Return the place of the next line: the number of the segment, and the offset."""
        if self.layout is None:
            return 0, len(self.lines)
        with self._turns.alone():
            if self.segment is None:
                return len(self.paths), 0
            return len(self.paths) - 1, self.segment.size_bytes

    def flush(self) -> bool:
        """Write what waits in memory, however slow the disk is; whether nothing waits any more."""
        self._forget_if_forked()
        self._write_waiting(is_patient=True)
        return self.layout is None or not (self._waiting or self._noted)

    def seal(self) -> None:
        """Close the segment cleanly, if no span is open; a later span opens a new one.

        With a span open the segment stays open too: were it sealed, the span would be taken for one
        of a dead process, and its end would come too late. So it does while the disk refuses spans:
        if the process ends before it takes them, the segment's last word says how many are lost.
        """
        is_flushed = self.flush()  # it is now or never
        with self._turns.alone() as is_alone:
            if not is_alone or self._writing_thread == get_ident():
                return
            lost, segment = 0, self.segment
            if not is_flushed:
                counts = n.added(self._untold_counts(), {n.DISK: self._waiting_spans()})
                lost = counts.get(n.DISK, 0)
                if segment is not None:
                    ended = self._ended_here() + n.unstored(counts)
                    segment.write_last_word({**counts, n.ENDED: ended})
            elif segment is not None and not self._open:
                with contextlib.suppress(OSError):  # no room: the free lock says the same
                    self._seal_segment(segment, is_rotated=False)
                self._go_on_in(None)
                segment.close()
            lost, self._told_lost = lost - self._told_lost, lost
        if lost > 0 and self.layout is not None:
            log.warning(
                "%d spans are lost: %s refuses them to the end", lost, self.layout.catalogue
            )

    def rotate(self) -> None:
        """Go on in a new segment, also with spans open, so that this one can be settled."""
        self.flush()
        with self._turns.alone() as is_alone:
            is_free = is_alone and self._writing_thread != get_ident()
            if self.segment is not None and is_free:
                self._rotate_segment(self.segment)

    def forget(self) -> None:
        """Start anew in a forked child: its parent's segment, lock and open spans are not ours."""
        if self.segment is not None:
            self.segment.close()  # never unlocked: that would free the parent's lock
        self._start_anew()

    def _forget_if_forked(self) -> None:
        # Where the fork was not Python's own, its hook was not called.
        if os.getpid() != self.pid:
            self.forget()

    def _append_line(self, line: bytes, spans: int) -> None:
        if self.layout is None:
            self.lines.append(line)
            self._written += spans
            return
        size = len(line)
        self._waiting.append((line, spans))
        # With no call in it, here and elsewhere: at any a signal handler may raise, and another
        # thread go on.
        self._waiting_bytes += size
        if not self._write_waiting() and self._waiting:
            self._noted.append((n.SLOW_HELD, spans))

    def _write_waiting(self, *, is_patient: bool = False) -> bool:
        """Write what waits in memory, in order; False if it goes on waiting for a slow disk.

        What comes while somebody writes, be it from a signal handler of this very thread, waits
        until that is done.

        Args:
            is_patient: Whether to ask the disk however slow it was.
        """
        refusal: OSError | None = None
        while (self._waiting or self._noted) and refusal is None and self.layout is not None:
            if not self._turns.take():
                self._drop_newest()
                return False
            try:
                if self._writing_thread == get_ident():
                    return True
                refusal = self._write_all(is_patient=is_patient)
                if refusal is None and self._is_left_alone(is_patient=is_patient):
                    return False
            finally:
                self._turns.release()
        # Told without the lock: a log handler may wait for a thread that is about to end a span.
        if refusal is not None and not self._is_refusal_told and self.layout is not None:
            self._is_refusal_told = True
            log.warning(
                "%s refuses spans (%s); up to 8 MiB are held in memory until it takes them",
                self.layout.catalogue,
                refusal,
            )
        return True

    def _is_left_alone(self, *, is_patient: bool) -> bool:
        """Return whether a slow disk rests; what memory cannot hold is written anyway."""
        return (
            self._pace.rest_until > 0.0
            and not is_patient
            and self._waiting_bytes <= PENDING_BYTES
            and self._pace.is_resting()
        )

    def _write_all(self, *, is_patient: bool) -> OSError | None:
        self._writing_thread = get_ident()
        try:
            while self._waiting and not self._is_left_alone(is_patient=is_patient):
                text, spans, count = self._first_lines()
                try:
                    self._write_lines(text, spans, count)
                except OSError:
                    if count == 1:
                        raise
                    # A disk that is nearly full may have room for one.
                    self._write_lines(*self._waiting[0], 1)
            if self._noted and not (self._waiting or self._is_left_alone(is_patient=is_patient)):
                self._tell_counts()
            self._rotate_if_due()
        except OSError as exc:
            self._drop_newest()
            return exc
        finally:
            self._writing_thread = 0
        return None

    def _first_lines(self) -> tuple[bytes, int, int]:
        """Return the text of the first lines, the spans they stand for, and how many they are."""
        waiting = self._waiting
        if len(waiting) == 1:
            return *waiting[0], 1
        size = count = 0
        for line, _ in waiting.copy():
            size += len(line)
            if count and size > _CHUNK_BYTES:
                break
            count += 1
        first = waiting[:count]
        return b"".join([line for line, _ in first]), sum([spans for _, spans in first]), count

    def _drop_newest(self) -> None:
        while self._waiting and self._waiting_bytes > PENDING_BYTES:
            line, spans = self._waiting.pop()
            size = len(line)
            self._waiting_bytes -= size
            self._noted.append((n.DISK, spans))

    def _tell_counts(self) -> None:
        noted = self._noted.copy()
        untold = self._untold_counts()
        if untold:
            self._write_lines(control_line("count", counts=untold), 0)
        self._told_here = n.added(self._told_here, untold)
        self._counts = n.added(self._counts, *({name: count} for name, count in noted))
        del self._noted[: len(noted)]

    def _write_lines(self, text: bytes, spans: int, count: int = 0) -> None:
        """Write lines, of which so many wait."""
        pace, size = self._pace, len(text)
        before = pace.work_before()
        began = monotonic()
        segment = self.segment
        if segment is None or not segment.append(text, is_checked=spans > 0):
            self._replace_segment(text)
        self._written += spans
        self._written_here += spans
        if count:
            del self._waiting[:count]
            self._waiting_bytes -= size
        took_s = monotonic() - began
        if (took_s > LONG_S or pace.rest_until) and pace.is_slow(took_s, before):
            self._noted.append((n.SLOW_WRITES, 1))
        if segment is not None and segment.has_last_word:
            segment.write_last_word({})  # there is room again

    def _replace_segment(self, text: bytes) -> None:
        """Write into a new segment, as there is none or the one there was is not ours any more."""
        gone, fresh = self.segment, self._new_segment(text)
        if gone is not None and gone.is_removed():
            # What was told in it is told again, and its spans are lost.
            self._written -= self._written_here
            self._noted.append((n.REMOVED, self._written_here))
            self._told_here = {}
        self._go_on_in(fresh)
        if not fresh.append(text):
            raise FileNotFoundError(fresh.path)

    def _ended_here(self) -> int:
        """Spans that are written into this segment, or counted in it."""
        return self._written_here + n.unstored(self._told_here)

    def _new_segment(self, text: bytes = b"") -> Segment:
        """A new segment that begins with the starts of open spans, but for those in the text."""
        assert self.layout is not None
        try:
            segment = Segment(self.layout, self.process, self._next_number())
        except FileNotFoundError:
            self.layout.make_folders()  # somebody removed the store
            segment = Segment(self.layout, self.process, self._next_number())
        starts = [begun.line for begun in list(self._open.values()) if begun.line not in text]
        if starts:
            try:
                segment.append(b"".join(starts))
            except OSError:
                segment.remove()
                raise
        return segment

    def _rotate_if_due(self) -> None:
        segment = self.segment
        if segment and (segment.size_bytes >= ROTATE_BYTES or segment.is_asked_to_close):
            self._rotate_segment(segment)

    def _rotate_segment(self, full: Segment) -> None:
        """Go on in a new segment; if there is no room for it and the seal, go on in the old one.

        Without the seal, the open spans of the old one would be taken for those of a dead process.
        """
        fresh = None
        try:
            fresh = self._new_segment() if self._open else None
            self._seal_segment(full, is_rotated=True)
        except OSError:
            if fresh is not None:
                fresh.remove()
            return
        self._go_on_in(fresh)
        full.close()

    def _seal_segment(self, segment: Segment, *, is_rotated: bool) -> None:
        counts = {n.ENDED: self._ended_here()}
        segment.append(control_line("seal", rotated=is_rotated, counts=counts))

    def _go_on_in(self, segment: Segment | None) -> None:
        self._told = n.added(self._told, self._told_here)
        self._told_here = {}
        self._written_here = 0
        self.segment = segment
        if segment is not None:
            self.paths.append(segment.path)

    def _take_lines(self, lines: bytes, spans: int) -> None:
        """Write lines that somebody else holds until they are here.

        Raises:
            OSError: The disk refuses them; it is as if they had never come.
        """
        if self.layout is None:
            self.lines += lines.splitlines(keepends=True)
            self._written += spans
            return
        with self._turns.alone() as is_alone:
            if not is_alone or self._writing_thread == get_ident():
                raise TimeoutError("a write into the store hangs")
            self._writing_thread = get_ident()
            try:
                self._write_lines(lines, spans)
                self._rotate_if_due()
            finally:
                self._writing_thread = 0


def _is_id(text: str) -> bool:
    """Return whether a hand-made span may have this id; OpenTelemetry's must not be zeros."""
    return 0 < len(text) <= _LONGEST_ID


_writers: "weakref.WeakSet[SpanWriter]" = weakref.WeakSet()
_by_catalogue: dict[Path, SpanWriter] = {}
_registry = Turns(_PATIENCE_S)  # guards _by_catalogue: one writer a store and process


def writer_for(layout: Layout) -> SpanWriter:
    """This process's one writer of a store; makes the store if it is not there.

    Raises:
        StoreError: The store cannot be made.
    """
    writer = _by_catalogue.get(layout.catalogue)
    if writer is not None:
        return writer
    with _registry.alone():
        writer = _by_catalogue.get(layout.catalogue)
        if writer is None:
            layout.create()
            add_named(config.named_transforms())
            writer = _by_catalogue.setdefault(layout.catalogue, SpanWriter(layout))
        return writer


def writer_if_any(layout: Layout) -> SpanWriter | None:
    """This process's writer of a store, if it has one."""
    return _by_catalogue.get(layout.catalogue)


def flush_all() -> bool:
    """Write what waits in memory for any store; whether nothing waits any more."""
    done = [writer.flush() for writer in list(_by_catalogue.values())]
    return all(done)


def seal_all() -> list[Layout]:
    """Close every segment of this process, as it is about to end; return the stores written to."""
    writers = list(_by_catalogue.values())
    for writer in writers:
        writer.seal()
    return [writer.layout for writer in writers if writer.paths and writer.layout is not None]


def _forget_all() -> None:
    global _registry
    _registry = Turns(_PATIENCE_S)
    for writer in list(_writers):
        writer.forget()


_register: Callable[..., None] | None = getattr(os, "register_at_fork", None)
if _register is not None:
    _register(after_in_child=_forget_all)
