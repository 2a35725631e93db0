"""Spans into a DuckDB store: a processor that keeps each at once, and an exporter for batches.

Both append to this process's segment, which readers query as it grows, without DuckDB.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from lightning_otel import capture, config, debugging
from lightning_otel.capture.frameworks import find_framework
from lightning_otel.capture.rollouts import find_rollout
from lightning_otel.errors import StoreError
from lightning_otel.redact.content import strip_content
from lightning_otel.store.layout import Layout
from lightning_otel.store.transforms import Transform
from lightning_otel.store.writer import (
    SpanWriter,
    flush_all,
    seal_all,
    writer_for,
    writer_of_open,
    writers_by_catalogue,
)
from lightning_otel.types import conventions as c

log = logging.getLogger(__name__)


class FrameSpanProcessor(SpanProcessor):
    """Hands each span to the sink of the frame it started in; one serves the whole process.

    Attributes:
        stamps: What it adds to each span's record.
    """

    def __init__(self, stamps: Mapping[str, Any] | None = None) -> None:
        self.stamps = stamps or {}

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Note that the span started."""
        try:
            frame, context = capture.current_frame(parent_context), span.context
            if frame is None or frame.sink is None or not context[3] & 1:
                if debugging.is_on and frame is not None:
                    debugging.log(f"missed  {span.name}: it is not sampled")
                if capture.process.exporters:
                    find_rollout(span, _exported_rollout)
                return
            state = capture.state_of(context)
            if state.sink is None:
                state.sink, stamps = frame.sink, frame.stamps
                if self.stamps:
                    stamps = {**self.stamps, **stamps}
                if frame.process_stamps:
                    stamps = {**find_rollout(span, frame.process_stamps), **stamps}
                is_call = (span.attributes or {}).get(c.OPERATION) in c.CALL_OPERATIONS
                if is_call and (framework := find_framework()):
                    stamps = {c.FRAMEWORK: framework, **stamps}
                if capture.process.exporters:
                    state.stamps = stamps
                # What another program does besides is its own; attributes may still come.
                state.is_doubtful = c.EXECUTED in stamps and not _is_of_agents(span)
                transforms = (*_own_transforms(), *frame.transforms)
                frame.sink.started(span, stamps, transforms, is_written=not state.is_doubtful)
        except Exception:  # noqa: BLE001  # capture never raises into the traced program
            capture.note_fault()

    def on_end(self, span: ReadableSpan) -> None:
        """Keep the span, durably, before ``end()`` returns."""
        try:
            context = span.context
            state = capture.state_of(context)
            # A processor of the program's may hand on a copy, which knows nothing of the original.
            sink = state.sink or writer_of_open(context.trace_id, context.span_id)
            if sink is None or state.is_kept:
                return
            state.is_kept = True
            if state.is_doubtful and not _is_of_agents(span):
                sink.dismissed(span)
                return
            sink.ended(span, state.body)
            if debugging.is_on:
                debugging.log_kept(span)
        except Exception:  # noqa: BLE001  # as above
            capture.note_fault()

    def shutdown(self) -> None:
        """Write what waits in memory, and seal the segments."""
        capture.guard_call(seal_all)

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Hands each span to the sink of the frame it started in, with its ``stamps``."""
        return bool(capture.guard_call(flush_all))


_exported_rollout: Final = capture.begin_rollout()
"""Stamps, for exporters, of what the process does outside any recording and request."""


_AGENT_KEYS: Final = (
    "gen_ai.", "mcp.", "llm.", "openinference.", "traceloop.", "agentlightning.", "lightning.",
)  # fmt: skip
_AGENT_SCOPES: Final = ("autogen", "litellm", "openinference.", "mcp")


def _is_of_agents(span: ReadableSpan) -> bool:
    scope = span.instrumentation_scope.name if span.instrumentation_scope is not None else ""
    return (
        scope == c.SCOPE
        or scope.startswith(_AGENT_SCOPES)
        or any(key.startswith(_AGENT_KEYS) for key in span.attributes or ())
    )


class LightningSpanProcessor(FrameSpanProcessor):
    """Keeps every span of a user's provider, with message content, as it ends.

    ``provider.add_span_processor(LightningSpanProcessor())`` loses no span at ``kill -9``, where a
    :class:`DuckDBSpanExporter` behind a ``BatchSpanProcessor`` loses those in its queue.
    """

    def __init__(self, store: str | os.PathLike[str] | None = None) -> None:
        """Record into ``X.duckdb`` or a folder; by default the store the settings name."""
        super().__init__()
        self._frame: capture.Frame | None = None
        if config.is_enabled():
            capture.guard_call(self._begin_writer, Layout(store or config.STORE.read()))

    def _begin_writer(self, layout: Layout) -> None:
        try:
            writer = writer_for(layout)
        except StoreError as exc:
            log.warning("nothing is recorded: %s", exc)
            return
        asks_for_ids = config.RETOKENIZATION_FIX.read()
        rollout = capture.begin_rollout()
        self._frame = capture.Frame(writer, asks_for_ids=asks_for_ids, process_stamps=rollout)
        capture.process.frame = self._frame

    def shutdown(self) -> None:
        """Record no more."""
        if self._frame is not None and capture.process.frame is self._frame:
            capture.process.frame = None
        super().shutdown()


class DuckDBSpanExporter(SpanExporter):
    """Appends batches to a store, for pipelines that are built around an exporter.

    Content that instrumentors keep off the span comes into this store alone. Behind a
    ``BatchSpanProcessor`` queued spans die with the process. A :class:`LightningSpanProcessor`
    loses none, and what it keeps in the same store this exporter passes over.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        """Export into ``X.duckdb`` or a folder; by default the store the settings name."""
        self._layout = Layout(path or config.STORE.read())
        self._is_failing = False
        self._is_over = False
        capture.process.exporters += 1
        capture.process.watch_starts = _watch_starts

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Append the batch; FAILURE, with one warning, where the store cannot be made."""
        if not config.is_enabled():
            return SpanExportResult.SUCCESS
        try:
            writer = writer_for(self._layout)
        except StoreError as exc:
            if not self._is_failing:
                log.warning("%d spans were not stored: %s", len(spans), exc)
            self._is_failing = True
            return SpanExportResult.FAILURE
        capture.watch_starts()
        for span in reversed(spans):  # parents first
            capture.guard_call(find_rollout, span, _exported_rollout)
        for span in spans:
            capture.guard_call(_export_span, span, writer)
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Seal the segment, so that it can be settled at once."""
        if not self._is_over:
            self._is_over = True
            capture.process.exporters -= 1
        writer = writers_by_catalogue.get(self._layout.catalogue)
        if writer is not None:
            capture.guard_call(writer.seal)

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Write what waits in memory, if a disk was full; else, or if it hangs, do nothing."""
        writer = writers_by_catalogue.get(self._layout.catalogue)
        return writer is None or bool(capture.guard_call(writer.flush))


def _export_span(span: ReadableSpan, writer: SpanWriter) -> None:
    state = capture.state_of(span.context)
    if state.sink is not writer:
        stamps = state.stamps or find_rollout(span, _exported_rollout)
        writer.exported(span, state.body, stamps, _own_transforms())


def _watch_starts() -> None:
    """Be told of spans as they start: a request's parts end, and are exported, before it does."""
    add = getattr(trace.get_tracer_provider(), "add_span_processor", None)
    if add is not None:
        capture.process.watch_starts = None
        add(FrameSpanProcessor())


def _own_transforms() -> Sequence[Transform]:
    return () if capture.process.content.is_kept else (strip_content,)
