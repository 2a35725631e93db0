"""The traced process's side of the store: an ended span is a line of its segment, at once.

One ``write`` a span and nothing else: no DuckDB, thread, queue, signal handler or exit hook, so
whatever kills the process, an ended span is already in the page cache.
"""

import contextlib
import itertools
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import orjson

from lightning_otel.store.layout import Layout
from lightning_otel.store.lines import control_line, line_of, parsed, start_line_of
from lightning_otel.store.schema import Record, record_of_span
from lightning_otel.store.sdk import end_record, identity_of, start_record
from lightning_otel.store.segment import Segment, boot_id
from lightning_otel.store.values import fragment_of
from lightning_otel.types import Span

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

log = logging.getLogger(__name__)

ROTATE_BYTES: Final = 64 << 20
PENDING_BYTES: Final = 8 << 20
"""Lines held in memory while the disk refuses them; beyond that spans are lost and counted."""

_WRITE_BYTES: Final = 1 << 20

_SEAL: Final = "seal"
_COUNT: Final = "count"


class _Begun(NamedTuple):
    """A span that has not ended: its start's line, its columns so far, its place in the process."""

    line: bytes
    identity: Record
    sequence: int


class SpanWriter:
    """Turns started and ended spans into lines, and never raises for a full or broken disk."""

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
        # Re-entrant: a signal handler may end a span while this thread is writing another one.
        # Guards segment, pending and their counters against the process's other threads.
        self._lock = threading.RLock()
        self.pid = os.getpid()
        self.process = f"{boot_id()}-{time.time_ns():019d}-{self.pid}"
        self.segment: Segment | None = None
        self.paths: list[Path] = []
        self.lost = 0
        self.foreign = 0
        self._open: dict[tuple[int, int], _Begun] = {}
        self._pending: deque[bytes] = deque()
        self._pending_bytes = 0
        self._next = itertools.count(1).__next__
        self._next_number = itertools.count().__next__
        self._lost_told = 0
        self._is_writing = False
        self._is_refusal_told = False
        self._resource: tuple[object, orjson.Fragment] | None = None

    def started(self, span: "ReadableSpan") -> None:
        """Note a started span, so that it is known if the process dies before its end."""
        self._forget_if_forked()
        sequence = self._next()
        context = span.context
        ids = context.trace_id, context.span_id
        self._open[ids] = _Begun(b"", {}, sequence)  # whatever comes, the end is ours
        identity = identity_of(span)
        line = start_line_of(
            start_record(
                span,
                identity,
                process=self.process,
                sequence=sequence,
                otel_resource=self._resource_of(span),
            )
        )
        self._open[ids] = _Begun(line, identity, sequence)
        self._append(line, spans=0)

    def ended(self, span: "ReadableSpan", body: Mapping[str, str]) -> None:
        """Keep an ended span. One that began in a parent process, or before us, is only counted."""
        self._forget_if_forked()
        context = span.context
        begun = self._open.pop((context.trace_id, context.span_id), None)
        if begun is None:
            self.foreign += 1
        else:
            self._keep(span, body, begun.identity or identity_of(span), begun.sequence)

    def exported(self, span: "ReadableSpan") -> None:
        """Keep an ended span whose start we did not see, as an exporter gets it."""
        self._forget_if_forked()
        self._keep(span, {}, identity_of(span), self._next())

    def add(self, span: Span) -> None:
        """Keep a span that is complete already, such as one received or made by hand."""
        self._forget_if_forked()
        self._append(line_of(record_of_span(span)), spans=1)

    def take(self, spans: Iterable[Span]) -> None:
        """Keep spans that somebody else holds until we have them: with few writes, or not at all.

        Raises:
            OSError: The disk refuses some of them; they are neither held in memory nor counted.
        """
        self._forget_if_forked()
        lines: list[bytes] = []
        size = 0
        for span in spans:
            lines.append(line_of(record_of_span(span)))
            size += len(lines[-1])
            if size >= _WRITE_BYTES:
                self._take(b"".join(lines))
                lines, size = [], 0
        if lines:
            self._take(b"".join(lines))

    def _take(self, lines: bytes) -> None:
        if self.layout is None:
            self.lines += lines.splitlines(keepends=True)
            return
        with self._lock:
            self._put(lines)

    def position(self) -> tuple[int, int]:
        """Where this process's next line will stand: which of its segments, and how far in."""
        if self.layout is None:
            return 0, len(self.lines)
        with self._lock:
            if self.segment is None:
                return len(self.paths), 0
            return len(self.paths) - 1, self.segment.size_bytes

    def records(self, since: tuple[int, int], *mentions: str) -> list[Record] | None:
        """This process's records since a position, starts without their end among them.

        Args:
            since: As :meth:`position` gave it.
            *mentions: Texts of which a line wanted holds one; the others are not even parsed.

        Returns:
            Parsed lines in order; None if a segment was settled and is gone.
        """
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

    def seal(self) -> None:
        """Close the segment cleanly, if no span is open; a later span opens a new one.

        With a span open the segment stays open too: were it sealed, the span would be taken for one
        of a dead process, and its end would come too late.
        """
        with self._lock:
            if self._pending:
                self._write(b"", 0)
            segment = self.segment
            if segment is None or self._open or self._is_writing:
                return
            self.segment = None
            with contextlib.suppress(OSError):  # no room for it: the free lock says the same
                segment.append(control_line(_SEAL, rotated=False))
            segment.close()

    def forget(self) -> None:
        """Start anew in a forked child: its parent's segment, lock and open spans are not ours."""
        if self.segment is not None:
            self.segment.close()  # never unlocked: that would free the parent's lock
        self._start_anew()

    def _forget_if_forked(self) -> None:
        # Where the fork was not Python's own, its hook was not called.
        if os.getpid() != self.pid:
            self.forget()

    def _keep(
        self, span: "ReadableSpan", body: Mapping[str, str], identity: Record, sequence: int
    ) -> None:
        record = end_record(
            span,
            body,
            identity,
            process=self.process,
            sequence=sequence,
            end_sequence=self._next(),
            otel_resource=self._resource_of(span),
        )
        self._append(line_of(record), spans=1)

    def _resource_of(self, span: "ReadableSpan") -> orjson.Fragment:
        resource = span.resource
        cached = self._resource
        if cached is None or cached[0] is not resource:
            cached = self._resource = (resource, fragment_of(resource.attributes))
        return cached[1]

    def _append(self, line: bytes, spans: int) -> None:
        if self.layout is None:
            self.lines.append(line)
            return
        with self._lock:
            if self._is_writing:
                refusal = self._interject(line, spans)
            else:
                self._is_writing = True
                refusal = self._write(line, spans)
                if self._pending and refusal is None:
                    refusal = self._write(b"", 0)
                self._is_writing = False
        # Told without the lock: a log handler may wait for a thread that is about to end a span.
        if refusal is not None and not self._is_refusal_told:
            self._is_refusal_told = True
            log.warning(
                "%s refuses spans (%s); up to 8 MiB are held in memory until it takes them",
                self.layout.catalogue,
                refusal,
            )

    def _interject(self, line: bytes, spans: int) -> OSError | None:
        """Write the line of a signal handler, or a finalizer, that interrupts this very thread.

        Whatever it interrupted, only the open segment may be touched; where there is none yet, the
        line waits until the interrupted write goes on.
        """
        segment = self.segment
        try:
            if segment is not None and segment.is_intact():
                segment.append(line)
                return None
        except OSError as exc:
            self._hold(line, spans)
            return exc
        self._hold(line, spans)
        return None

    def _write(self, line: bytes, spans: int) -> OSError | None:
        """Write what is pending and the line; on refusal hold the line, or count it lost."""
        try:
            if self._pending or self.lost > self._lost_told:
                self._catch_up()
            if line:
                self._put(line)
        except OSError as exc:
            self._hold(line, spans)
            return exc
        return None

    def _hold(self, line: bytes, spans: int) -> None:
        if self._pending_bytes + len(line) > PENDING_BYTES:
            self.lost += spans
        elif line:
            self._pending.append(line)
            self._pending_bytes += len(line)

    def _catch_up(self) -> None:
        while self._pending:
            line = self._pending.popleft()
            try:
                self._put(line)
            except OSError:
                self._pending.appendleft(line)
                raise
            self._pending_bytes -= len(line)
        lost = self.lost
        if lost > self._lost_told:
            self._put(control_line(_COUNT, lost=lost - self._lost_told))
            self._lost_told = lost

    def _put(self, line: bytes) -> None:
        segment = self.segment
        if segment is None or not segment.is_intact():
            segment = self._new_segment(line)
            self._go_on_in(segment)
        segment.append(line)
        if segment.size_bytes >= ROTATE_BYTES:
            self._rotate(segment)

    def _new_segment(self, line: bytes = b"") -> Segment:
        """A new segment that knows every span still open, but the one whose start is the line."""
        assert self.layout is not None
        try:
            segment = Segment(self.layout, self.process, self._next_number())
        except FileNotFoundError:
            self.layout.make_folders()  # somebody removed the store
            segment = Segment(self.layout, self.process, self._next_number())
        starts = b"".join(one.line for one in list(self._open.values()) if one.line is not line)
        if starts:
            try:
                segment.append(starts)
            except OSError:
                segment.remove()
                raise
        return segment

    def _rotate(self, full: Segment) -> None:
        """Go on in a new segment; if there is no room for it and the seal, go on in the old one.

        Without the seal, the open spans of the old one would be taken for those of a dead process.
        """
        fresh = None
        try:
            fresh = self._new_segment() if self._open else None
            full.append(control_line(_SEAL, rotated=True))
        except OSError:
            if fresh is not None:
                fresh.remove()
            return
        self._go_on_in(fresh)
        full.close()

    def _go_on_in(self, segment: Segment | None) -> None:
        self.segment = segment
        if segment is not None:
            self.paths.append(segment.path)


_writers: "weakref.WeakSet[SpanWriter]" = weakref.WeakSet()
_by_catalogue: dict[Path, SpanWriter] = {}
_registry_lock = threading.RLock()  # guards _by_catalogue: one writer a store and process


def writer_for(layout: Layout) -> SpanWriter:
    """This process's one writer of a store; makes the store if it is not there.

    Raises:
        StoreError: The store cannot be made.
    """
    with _registry_lock:
        writer = _by_catalogue.get(layout.catalogue)
        if writer is None:
            layout.create()
            writer = _by_catalogue[layout.catalogue] = SpanWriter(layout)
        return writer


def writer_if_any(layout: Layout) -> SpanWriter | None:
    """This process's writer of a store, if it has one."""
    return _by_catalogue.get(layout.catalogue)


def _forget_all() -> None:
    global _registry_lock
    _registry_lock = threading.RLock()
    for writer in list(_writers):
        writer.forget()


_register: Callable[..., None] | None = getattr(os, "register_at_fork", None)
if _register is not None:
    _register(after_in_child=_forget_all)
