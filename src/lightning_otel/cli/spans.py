"""A span in the JSON shape of the SDK's ``ReadableSpan.to_json()``, and what that leaves out.

Source: ``opentelemetry.sdk.trace.ReadableSpan.to_json``; values it would raise on (bytes) are kept
in the store's text form.
"""

from datetime import UTC, datetime
from typing import Any

from lightning_otel.receivers.documents import OURS
from lightning_otel.types import Span


def sdk_json(span: Span) -> dict[str, Any]:
    """The span as the SDK would print it."""
    status: dict[str, Any] = {"status_code": span.status}
    if span.status_message:
        status["description"] = span.status_message
    return {
        "name": span.name,
        "context": _span_context(span.trace_id, span.span_id),
        "kind": f"SpanKind.{span.kind}",
        "parent_id": f"0x{span.parent_span_id}" if span.parent_span_id else None,
        "start_time": _iso_time(span.start_ns),
        "end_time": _iso_time(span.end_ns) if span.end_ns is not None else None,
        "status": status,
        "attributes": dict(span.attributes),
        "events": [
            {
                "name": event.name,
                "timestamp": _iso_time(event.time_ns),
                "attributes": dict(event.attributes),
            }
            for event in span.events
        ],
        "links": [
            {
                "context": _span_context(link.trace_id, link.span_id),
                "attributes": dict(link.attributes),
            }
            for link in span.links
        ],
        "resource": {"attributes": dict(span.otel_resource), "schema_url": ""},
        OURS: {
            "scope": span.scope,
            "start_ns": span.start_ns,
            "end_ns": span.end_ns,
            "events_ns": [event.time_ns for event in span.events],
            "process": span.process,
            "sequence": span.sequence,
            "end_sequence": span.end_sequence,
        },
    }


def _span_context(trace_id: str, span_id: str) -> dict[str, str]:
    return {"trace_id": f"0x{trace_id}", "span_id": f"0x{span_id}", "trace_state": "[]"}


def _iso_time(time_ns: int) -> str:
    # Through a float, as the SDK does it: so both print the same microsecond.
    return datetime.fromtimestamp(time_ns / 1e9, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
