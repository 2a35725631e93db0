"""Spans out by OTLP, through the SDK's own exporters; content stays here unless it may leave."""

from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event as SdkEvent
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link as SdkLink
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from lightning_otel import config
from lightning_otel.conventions import CONTENT_KEYS
from lightning_otel.types import Span

_BATCH = 256


def otlp_exporter() -> SpanExporter:
    """The SDK's OTLP exporter for the protocol and endpoint the user's environment names."""
    if config.otlp_protocol() == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc

        return Grpc()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http

    return Http()


def forward(spans: Sequence[Span], exporter: SpanExporter) -> int:
    """Send ended spans, oldest first, and stop at the first refusal.

    Returns:
        How many were delivered.
    """
    is_allowed = config.content().is_exported
    for start in range(0, len(spans), _BATCH):
        batch = [
            readable_span(span, with_content=is_allowed) for span in spans[start : start + _BATCH]
        ]
        if exporter.export(batch) is not SpanExportResult.SUCCESS:
            return start
    return len(spans)


def readable_span(span: Span, *, with_content: bool) -> ReadableSpan:
    """The SDK's form of a span of ours.

    Args:
        span: An ended span.
        with_content: Whether messages, token ids and other content stay on it.
    """
    parent = _context(span.trace_id, span.parent_span_id) if span.parent_span_id else None
    return ReadableSpan(
        name=span.name,
        context=_context(span.trace_id, span.span_id),
        parent=parent,
        resource=Resource(_values(span.otel_resource)),
        attributes={
            key: value
            for key, value in _values(span.attributes).items()
            if with_content or key not in CONTENT_KEYS
        },
        events=[SdkEvent(e.name, _values(e.attributes), e.time_ns) for e in span.events],
        links=[SdkLink(_context(k.trace_id, k.span_id), _values(k.attributes)) for k in span.links],
        kind=SpanKind[span.kind],
        status=Status(StatusCode[span.status], span.status_message or None)
        if span.status == "ERROR"
        else Status(StatusCode[span.status]),
        start_time=span.start_ns,
        end_time=span.end_ns,
        instrumentation_scope=InstrumentationScope(span.scope),
    )


def _context(trace_id: str, span_id: str) -> SpanContext:
    return SpanContext(
        int(trace_id, 16), int(span_id, 16), is_remote=False, trace_flags=TraceFlags(1)
    )


def _values(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in attributes.items() if value is not None}
