"""The traced process's side of the store: an ended span is a line of its segment, at once.

One ``write`` a span and nothing else: whatever kills the process, an ended span is already in the
page cache. Never raises for a full, slow or broken disk.
"""

import itertools
import os
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import orjson
from opentelemetry.util.types import AttributeValue

from lightning_otel import config
from lightning_otel.adapter.rewards import evaluations_of, with_evaluations
from lightning_otel.debugging.turns import BoundedLock
from lightning_otel.redact.secrets import scrub_attributes
from lightning_otel.store import counts as n
from lightning_otel.store.journal import CHUNK_BYTES, Journal
from lightning_otel.store.layout import Layout
from lightning_otel.store.lines import (
    build_start_record,
    complete_record,
    format_control_line,
    format_line,
    parse_line,
    read_records,
)
from lightning_otel.store.schema import Record, build_record, build_span
from lightning_otel.store.template import add_catalogue
from lightning_otel.store.transforms import (
    Transform,
    add_named_transforms,
    apply_transforms,
    build_drop_record,
    global_transforms,
)
from lightning_otel.types import Span
from lightning_otel.types.values import json_fragment

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

_LONGEST_ID: Final = 64
_PATIENCE_S: Final = 10.0
_NO_STAMPS: Final[Mapping[str, AttributeValue]] = MappingProxyType({})


class _OpenSpan:
    """A span that has not ended, with the record and the line of its start, once they are made."""

    sequence = 0
    # Attributes for its record alone: on the span they would reach every exporter, and push out
    # attributes of a span that holds as many as it may.
    stamps: Mapping[str, AttributeValue] = _NO_STAMPS
    began_ns: int | None = None  # by the clock that never goes back; None if that was not seen
    record: Record | None = None
    line = b""
    transforms: Sequence[Transform] = ()


class SpanWriter(Journal):
    """Turns started and ended spans into lines of the process's segments, and counts them."""

    def __init__(self, layout: Layout | None) -> None:
        super().__init__(layout)
        _writers.add(self)

    def _start_anew(self) -> None:
        super()._start_anew()
        self._open: dict[tuple[int, int], _OpenSpan] = {}
        self._next = itertools.count(1).__next__
        self._resource: tuple[object, orjson.Fragment] | None = None

    def _open_lines(self) -> list[bytes]:
        return [entry.line for entry in list(self._open.values())]

    def started(
        self,
        span: "ReadableSpan",
        stamps: Mapping[str, AttributeValue] = _NO_STAMPS,
        transforms: Sequence[Transform] = (),
        *,
        is_written: bool = True,
    ) -> None:
        """Note a started span; if it is written, it is known if the process dies before its end."""
        if os.getpid() != self.pid:
            self.forget()
        ids = span.context[:2]
        if 0 in ids:
            return
        entry = _OpenSpan()
        entry.sequence = sequence = self._next()
        entry.stamps, entry.transforms = stamps, transforms
        entry.began_ns = time.monotonic_ns()
        # Before all else: whatever comes, the end is ours, and passes through its transforms.
        self._open[ids] = entry
        record: Record | None
        entry.record = record = build_start_record(
            span, self.process, sequence, self._resource_of(span), stamps
        )
        if is_written and (transforms or global_transforms):
            record, _ = apply_transforms({**record}, transforms)
        if is_written and record:
            entry.line = format_line(record)
            self._append_line(entry.line, 0, may_wait=True)

    def ended(self, span: "ReadableSpan", body: Mapping[str, str]) -> None:
        """Keep an ended span. One that began in a parent process, or before us, is only counted."""
        if os.getpid() != self.pid:
            self.forget()
        ids = span.context[:2]
        entry = self._open.pop(ids, None)
        if entry is None:
            self.count_unstored(n.INVALID_ID if 0 in ids else n.FOREIGN)
        else:
            self._keep_record(span, body, entry)

    def stamps_of(self, trace_id: int, span_id: int) -> Mapping[str, AttributeValue] | None:
        """Return the stamps of a span that has not ended, as they were given; None of others."""
        entry = self._open.get((trace_id, span_id))
        return None if entry is None else entry.stamps

    def dismissed(self, span: "ReadableSpan") -> None:
        """Forget a started span that was not written: it is none of those that are counted."""
        self._open.pop(span.context[:2], None)

    def exported(
        self,
        span: "ReadableSpan",
        body: Mapping[str, str],
        stamps: Mapping[str, AttributeValue] = _NO_STAMPS,
        transforms: Sequence[Transform] = (),
    ) -> None:
        """Keep an ended span whose start we did not see, as an exporter gets it."""
        self._forget_if_forked()
        if not span.context.is_valid:
            self.count_unstored(n.INVALID_ID)
            return
        entry = _OpenSpan()
        entry.sequence, entry.transforms = self._next(), transforms
        entry.stamps = stamps
        self._keep_record(span, body, entry)

    def add(self, span: Span) -> None:
        """Keep a span that is complete already, such as one received or made by hand."""
        self._forget_if_forked()
        if not (_is_id(span.trace_id) and _is_id(span.span_id)):
            self.count_unstored(n.INVALID_ID)
            return
        spans = 0 if span.end_ns is None else 1
        try:
            record = build_record(span)
            if global_transforms and not self._transform_record(record, ()):
                return
            line = format_line(record)
        except BaseException:
            self.count_unstored(n.FAULT, spans)
            raise
        self._append_line(line, spans)
        if span.events:
            self._keep_evaluations(span)

    def add_all(self, spans: Iterable[Span]) -> None:
        """Keep spans that somebody else holds until we have them: with few writes, or not at all.

        OSError if the disk refuses some; they are neither held in memory nor counted.
        """
        self._forget_if_forked()
        lines: list[bytes] = []
        size, ended, dropped = 0, 0, 0
        for span in with_evaluations(spans):
            record = build_record(span)
            if global_transforms:
                result, is_failed = apply_transforms(record, ())
                if result is None:
                    dropped += span.end_ns is not None
                    continue
                record = result
                if is_failed:
                    self._note_count(n.TRANSFORM_FAILED, 1)
            lines.append(format_line(record))
            size += len(lines[-1])
            ended += span.end_ns is not None
            if size >= CHUNK_BYTES:
                self._write_now(b"".join(lines), ended)
                lines, size, ended = [], 0, 0
        if lines:
            self._write_now(b"".join(lines), ended)
        if dropped:  # not before: where the disk refused the others, all of them come again
            self.count_unstored(n.TRANSFORM, dropped)

    def records(self, since: tuple[int, int], *mentions: str) -> list[Record] | None:
        """Return this process's parsed lines since a position, starts without their end among them.

        Only lines that hold one of the ``mentions`` are parsed. None if a segment was settled and
        gone.
        """
        self._forget_if_forked()
        index, offset = since
        texts = [mention.encode("utf-8", "replace") for mention in mentions]
        # What waits for the disk is read here; what is written meanwhile comes twice.
        pending = [line for line, _ in self._waiting.copy()]
        lines = self.lines[offset:] if self.layout is None else pending
        in_memory = [parse_line(line) for line in lines if any(text in line for text in texts)]
        on_disk: list[Record] = []
        try:
            for number, path in enumerate(self.paths[index:]):
                on_disk += read_records(path, texts, 0 if number else offset)
        except FileNotFoundError:
            return None
        return [record for record in on_disk + in_memory if "span_id" in record]

    def _keep_record(self, span: "ReadableSpan", body: Mapping[str, str], entry: _OpenSpan) -> None:
        try:
            stamps = entry.stamps
            otel_resource = self._resource_of(span)
            record = entry.record or build_start_record(
                span, self.process, entry.sequence, otel_resource, stamps
            )
            record["otel_resource"] = otel_resource  # a processor's copy may have another one
            complete_record(record, span, stamps, body, self._next())
            if entry.began_ns is not None and record["end_ns"] < record["start_ns"]:
                # The wall clock was set back meanwhile.
                record["end_ns"] = record["start_ns"] + time.monotonic_ns() - entry.began_ns
            if (entry.transforms or global_transforms) and not self._transform_record(
                record, entry.transforms
            ):
                return
            line = format_line(record)
        except BaseException:  # a fault of ours, or Ctrl-C
            self.count_unstored(n.FAULT)
            raise
        self._append_line(line, spans=1)
        if record["events"]:
            self._keep_evaluations(build_span(parse_line(line)))

    def _keep_evaluations(self, span: Span) -> None:
        for reward in evaluations_of(span):
            self.add(reward)

    def _transform_record(self, record: Record, transforms: Sequence[Transform]) -> bool:
        drop = build_drop_record(record)
        result, is_failed = apply_transforms(record, transforms)
        if result is None:
            self._note_unstored(n.TRANSFORM, 1)
            self._append_line(format_control_line(**drop), spans=0)
            return False
        if is_failed:
            self._note_count(n.TRANSFORM_FAILED, 1)
        record.clear()
        record.update(result)
        return True

    def _resource_of(self, span: "ReadableSpan") -> orjson.Fragment:
        resource, cached = span.resource, self._resource
        if cached is None or cached[0] is not resource:
            cached = self._resource = (
                resource,
                json_fragment(scrub_attributes({**resource.attributes})),
            )
        return cached[1]


def _is_id(text: str) -> bool:
    """Return whether a hand-made span may have this id; OpenTelemetry's must not be zeros."""
    return 0 < len(text) <= _LONGEST_ID


_writers: "weakref.WeakSet[SpanWriter]" = weakref.WeakSet()
writers_by_catalogue: dict[Path, SpanWriter] = {}
_registry = BoundedLock(_PATIENCE_S)  # guards writers_by_catalogue: one writer a store and process


def writer_for(layout: Layout) -> SpanWriter:
    """This process's one writer of a store; makes the store if it is not there.

    Raises:
        StoreError: The store cannot be made.
    """
    writer = writers_by_catalogue.get(layout.catalogue)
    if writer is not None:
        return writer
    with _registry.alone():
        writer = writers_by_catalogue.get(layout.catalogue)
        if writer is None:
            layout.create()
            add_catalogue(layout)
            add_named_transforms(config.TRANSFORMS.read())
            writer = writers_by_catalogue.setdefault(layout.catalogue, SpanWriter(layout))
        return writer


def writer_of_open(trace_id: int, span_id: int) -> SpanWriter | None:
    """Return the writer of this process that keeps a span which has not ended yet."""
    return next((writer for writer in list(_writers) if (trace_id, span_id) in writer._open), None)


def flush_all() -> bool:
    """Write what waits in memory for any store; whether nothing waits any more."""
    results = [writer.flush() for writer in list(writers_by_catalogue.values())]
    return all(results)


def seal_all() -> None:
    """Close every segment of this process, as it is about to end."""
    for writer in list(writers_by_catalogue.values()):
        writer.seal()


def _forget_all() -> None:
    global _registry
    _registry = BoundedLock(_PATIENCE_S)
    for writer in list(_writers):
        writer.forget()


os.register_at_fork(after_in_child=_forget_all)
