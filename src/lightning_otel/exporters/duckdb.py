"""Spans into a DuckDB store: a processor that keeps each at once, and an exporter for batches.

Neither imports DuckDB: they append to this process's segment, which readers query as it grows.
"""

import logging
from collections.abc import Sequence

from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from lightning_otel import capture, config, debugging
from lightning_otel.errors import StoreError
from lightning_otel.store.layout import Layout
from lightning_otel.store.sdk import copied
from lightning_otel.store.writer import flush_all, seal_all, writer_for, writer_if_any

log = logging.getLogger(__name__)


class LightningSpanProcessor(SpanProcessor):
    """Hands each span to the sink of the frame it started in; one serves the whole process."""

    def __init__(self) -> None:
        self._sinks: dict[tuple[int, int], capture.SpanSink] = {}

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Stamp the span and note that it started."""
        capture.guarded(self._start, span, parent_context)

    def on_end(self, span: ReadableSpan) -> None:
        """Keep the span, durably, before ``end()`` returns."""
        capture.guarded(self._finish, span)

    def shutdown(self) -> None:
        """Write what waits for a slow disk, and seal the process's segments."""
        capture.guarded(seal_all)

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Write what waits in memory, if a disk was slow or full; else nothing is ever pending."""
        return bool(capture.guarded(flush_all))

    def _start(self, span: Span, parent_context: Context | None) -> None:
        frame = capture.current_frame(parent_context)
        context = span.context
        if frame is None or frame.sink is None or not context.trace_flags.sampled:
            if debugging.is_on and frame is not None:
                why = "nothing is to be kept" if frame.sink is None else "it is not sampled"
                debugging.tell(f"missed  {span.name}: {why}")
            return
        own = copied(span.attributes)
        if not frame.stamps.keys() <= own.keys():
            missing = {key: value for key, value in frame.stamps.items() if key not in own}
            span.set_attributes(missing)
        self._sinks[context.trace_id, context.span_id] = frame.sink
        frame.sink.started(span)

    def _finish(self, span: ReadableSpan) -> None:
        context = span.context
        sink = self._sinks.pop((context.trace_id, context.span_id), None)
        if sink is not None:
            sink.ended(span, capture.take_body())
            if debugging.is_on:
                debugging.tell_kept(span)


class DuckDBSpanExporter(SpanExporter):
    """Appends batches to a store, for pipelines that are built around an exporter.

    Behind a ``BatchSpanProcessor`` the spans in its queue die with the process; the processor above
    loses none, so wherever it is at work this exporter stands back.
    """

    def __init__(self, path: str | None = None) -> None:
        """Name the store; it is made with the first batch.

        Args:
            path: ``X.duckdb`` or a folder; by default the store the settings name.
        """
        self._layout = Layout(path or config.store_path())
        self._is_failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Append the batch; FAILURE, with one warning, where the store cannot be made."""
        if capture.is_recording() or not config.is_collect_enabled():
            return SpanExportResult.SUCCESS
        try:
            writer = writer_for(self._layout)
        except StoreError as exc:
            if not self._is_failing:
                log.warning("%d spans were not stored: %s", len(spans), exc)
            self._is_failing = True
            return SpanExportResult.FAILURE
        for span in spans:
            capture.guarded(writer.exported, span)
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Seal the segment, so that it can be settled at once."""
        writer = writer_if_any(self._layout)
        if writer is not None:
            capture.guarded(writer.seal)

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Write what waits in memory, as the disk was slow or full; else nothing is pending."""
        writer = writer_if_any(self._layout)
        return writer is None or bool(capture.guarded(writer.flush))
