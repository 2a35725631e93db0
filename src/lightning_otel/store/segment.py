"""The traced process's side of the store: every ended span becomes a line of its own segment, at once.

One ``write`` a span and nothing else: no DuckDB, thread, queue, signal handler or exit hook, so
whatever kills the process, an ended span is already in the page cache.
"""

import fcntl
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import orjson
from opentelemetry.sdk.trace import ReadableSpan

from lightning_otel import conventions as c
from lightning_otel.store.layout import SEGMENT_SUFFIX, Layout
from lightning_otel.store.schema import (
    Record,
    fragment_of,
    line_of,
    record_of,
    record_of_span,
    text_or_none,
)
from lightning_otel.types import Span

log = logging.getLogger(__name__)

ROTATE_BYTES: Final = 64 << 20
PENDING_BYTES: Final = 8 << 20
"""Lines held in memory while the disk refuses them; beyond that spans are lost and counted."""

_OPEN_FLAGS: Final = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_SEAL: Final = "seal"
_COUNT: Final = "count"


def boot_id() -> str:
    """Eight characters that differ between two boots of one machine and between machines."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        # Elsewhere than on Linux: the boot's time in minutes, from the clock that stands still never.
        text = f"{int(time.time() - time.monotonic()) // 60:08x}"
    return text.strip().replace("-", "")[:8]


def control_line(record: str, **fields: Any) -> bytes:
    """A line that is no span: a seal, or a count of spans lost."""
    return orjson.dumps({"record": record, **fields}, option=orjson.OPT_APPEND_NEWLINE)


class Segment:
    """An append-only file of one process, locked while it is open.

    It is made under a temporary name, locked, then renamed into ``live/``: otherwise a settler could
    take it between the opening and the locking.
    """

    def __init__(self, layout: Layout, process: str, number: int) -> None:
        """Make and lock the file.

        Raises:
            OSError: The store is not there, is full or refuses us.
        """
        name = f"{process}-{number:06d}{SEGMENT_SUFFIX}"
        self.path = layout.live / name
        made = layout.new / name
        self._descriptor = os.open(made, _OPEN_FLAGS, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.rename(made, self.path)
        except OSError:
            os.close(self._descriptor)
            raise
        self.size_bytes = 0

    def append(self, lines: bytes) -> None:
        """Write whole lines, or nothing.

        Raises:
            OSError: The disk is full or gone; the file ends as it ended before.
        """
        written = os.write(self._descriptor, lines)
        if written != len(lines):
            # A torn line would swallow the next one.
            end = os.fstat(self._descriptor).st_size
            os.ftruncate(self._descriptor, end - written)
            raise OSError(28, "short write: no space left on device")
        self.size_bytes += written

    def close(self) -> None:
        """Close the file, which frees its lock unless a parent process still holds it."""
        os.close(self._descriptor)


class SpanWriter:
    """Turns started and ended spans into lines, and never raises for a full or broken disk."""

    def __init__(self, layout: Layout | None) -> None:
        """Make a writer that opens its segment with the first span.

        Args:
            layout: The store's paths; None keeps the lines in memory.
        """
        self.layout = layout
        self.lines: list[bytes] = []
        self.lost = 0
        self.foreign = 0
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
        self._open: dict[tuple[int, int], tuple[bytes, int]] = {}
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._sequence = 0
        self._lost_told = 0
        self._resource: tuple[object, orjson.Fragment] | None = None

    def started(self, span: ReadableSpan) -> None:
        """Note a started span, so that it is known if the process dies before its end."""
        if os.getpid() != self.pid:
            self.forget()
        sequence = self._next()
        context = span.context
        line = line_of(self._start_record(span, sequence))
        self._open[context.trace_id, context.span_id] = (line, sequence)
        self._append(line, spans=0)

    def ended(self, span: ReadableSpan, body: Mapping[str, str]) -> None:
        """Keep an ended span. One that began in a parent process, or before us, is only counted."""
        context = span.context
        begun = self._open.pop((context.trace_id, context.span_id), None)
        if begun is None or os.getpid() != self.pid:
            self.foreign += 1
            return
        record = self._record(span, body, begun[1], self._next())
        self._append(line_of(record), spans=1)

    def exported(self, span: ReadableSpan) -> None:
        """Keep an ended span whose start we did not see, as an exporter gets it."""
        sequence = self._next()
        record = self._record(span, {}, sequence, self._next())
        self._append(line_of(record), spans=1)

    def add(self, span: Span) -> None:
        """Keep a span that is complete already, such as one received or made by hand."""
        self._append(line_of(record_of_span(span)), spans=1)

    def position(self) -> tuple[int, int]:
        """Where this process's next line will stand: which of its segments, and how far in."""
        if self.layout is None:
            return 0, len(self.lines)
        with self._lock:
            if self.segment is None:
                return len(self.paths), 0
            return len(self.paths) - 1, self.segment.size_bytes

    def records(self, since: tuple[int, int], mention: str) -> list[Record] | None:
        """This process's records since a position, starts without their end among them.

        Args:
            since: As :meth:`position` gave it.
            mention: Text that the lines wanted hold; the others are not even parsed.

        Returns:
            Parsed lines in order; None if a segment was settled and is gone.
        """
        index, offset = since
        wanted = mention.encode()
        lines = self.lines[offset:] if self.layout is None else []
        try:
            for path in self.paths[index:]:
                lines += path.read_bytes()[offset:].splitlines()
                offset = 0
        except FileNotFoundError:
            return None
        return [orjson.loads(line) for line in lines if wanted in line]

    def seal(self) -> None:
        """Close the segment cleanly; a later span opens a new one."""
        with self._lock:
            if self._pending:
                self._write(b"", 0)
            if self.segment is not None:
                self._close(self.segment, is_rotated=False)

    def forget(self) -> None:
        """Start anew in a forked child: its parent's segment, lock and open spans are not ours."""
        if self.segment is not None:
            self.segment.close()  # never unlocked: that would free the parent's lock
        self.lost = 0
        self.foreign = 0
        self._start_anew()

    def _next(self) -> int:
        self._sequence += 1
        return self._sequence

    def _start_record(self, span: ReadableSpan, sequence: int) -> Record:
        # Written by hand, not by record_of: a start carries little and is written for every span.
        context, parent, scope = span.context, span.parent, span.instrumentation_scope
        attributes = dict(span.attributes or {})
        return {
            "record": "start",
            "trace_id": format(context.trace_id, "032x"),
            "span_id": format(context.span_id, "016x"),
            "parent_span_id": format(parent.span_id, "016x") if parent is not None else None,
            "name": span.name if type(span.name) is str else f"<{type(span.name).__name__}>",
            "kind": span.kind.name,
            "start_ns": int(span.start_time or 0),
            "end_ns": None,
            "status": "UNSET",
            "status_message": "",
            "operation": text_or_none(attributes.get(c.OPERATION)),
            "agent": text_or_none(attributes.get(c.AGENT_NAME)),
            "model": text_or_none(attributes.get(c.REQUEST_MODEL)),
            "rollout_id": text_or_none(attributes.get(c.ROLLOUT_ID)),
            "attempt_id": text_or_none(attributes.get(c.ATTEMPT_ID)),
            "process": self.process,
            "sequence": sequence,
            "end_sequence": -1,
            "scope": scope.name if scope is not None else "",
            "attributes": attributes,
            "events": [],
            "otel_resource": self._resource_of(span),
        }

    def _record(
        self, span: ReadableSpan, body: Mapping[str, str], sequence: int, end_sequence: int
    ) -> Record:
        context, parent, scope = span.context, span.parent, span.instrumentation_scope
        status = span.status
        return record_of(
            trace_id=format(context.trace_id, "032x"),
            span_id=format(context.span_id, "016x"),
            parent_span_id=format(parent.span_id, "016x") if parent is not None else None,
            name=span.name if type(span.name) is str else f"<{type(span.name).__name__}>",
            kind=span.kind.name,
            start_ns=int(span.start_time or 0),
            end_ns=int(span.end_time or 0),
            status=status.status_code.name,
            status_message=status.description or "",
            attributes=dict(span.attributes or {}),
            events=[
                {
                    "name": event.name,
                    "time_ns": event.timestamp,
                    "attributes": dict(event.attributes or {}),
                }
                for event in span.events
            ],
            links=[
                {
                    "trace_id": format(link.context.trace_id, "032x"),
                    "span_id": format(link.context.span_id, "016x"),
                    "attributes": dict(link.attributes or {}),
                }
                for link in span.links
            ],
            otel_resource=self._resource_of(span),
            scope=scope.name if scope is not None else "",
            process=self.process,
            sequence=sequence,
            end_sequence=end_sequence,
            body=body,
        )

    def _resource_of(self, span: ReadableSpan) -> orjson.Fragment:
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
            self._write(line, spans)

    def _write(self, line: bytes, spans: int) -> None:
        """Write what is pending and the line; on refusal hold them, or count them lost."""
        lines = b"".join([*self._pending, line]) if self._pending else line
        if self.lost > self._lost_told:
            lines += control_line(_COUNT, lost=self.lost - self._lost_told)
        try:
            segment = self._writable()
            segment.append(lines)
        except OSError as exc:
            self._hold(line, spans, exc)
            return
        self._pending.clear()
        self._pending_bytes = 0
        self._lost_told = self.lost
        if segment.size_bytes >= ROTATE_BYTES:
            self._rotate(segment)

    def _hold(self, line: bytes, spans: int, exc: OSError) -> None:
        if not self._pending and not self.lost:
            log.warning("the store refuses spans (%s); holding up to 8 MiB in memory", exc)
        if self._pending_bytes + len(line) <= PENDING_BYTES:
            self._pending.append(line)
            self._pending_bytes += len(line)
        else:
            self.lost += spans

    def _writable(self) -> Segment:
        if self.segment is None:
            assert self.layout is not None
            self.segment = Segment(self.layout, self.process, len(self.paths))
            self.paths.append(self.segment.path)
        return self.segment

    def _close(self, segment: Segment, *, is_rotated: bool) -> None:
        try:
            segment.append(control_line(_SEAL, rotated=is_rotated))
        except OSError:
            log.debug("no room to seal %s; its lock says the same", segment.path)
        segment.close()
        self.segment = None

    def _rotate(self, segment: Segment) -> None:
        """Go on in a new segment that knows every span still open."""
        self._close(segment, is_rotated=True)
        starts = b"".join(line for line, _ in list(self._open.values()))
        if starts:
            self._write(starts, 0)


_writers: "weakref.WeakSet[SpanWriter]" = weakref.WeakSet()
_by_catalogue: dict[Path, SpanWriter] = {}
_registry_lock = threading.Lock()  # guards _by_catalogue: one writer a store and process


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
    _registry_lock = threading.Lock()
    for writer in list(_writers):
        writer.forget()


_register: Callable[..., None] | None = getattr(os, "register_at_fork", None)
if _register is not None:
    _register(after_in_child=_forget_all)
