"""Spans as OTLP's JSON, for the few that a program sends to a store on another machine itself.

Source: OTLP 1.x, "JSON Protobuf Encoding".
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

from lightning_otel.store.values import json_of, plain
from lightning_otel.types import Span

_KINDS: Final = {"INTERNAL": 1, "SERVER": 2, "CLIENT": 3, "PRODUCER": 4, "CONSUMER": 5}
_STATUSES: Final = {"UNSET": 0, "OK": 1, "ERROR": 2}
_INT64: Final = range(-(1 << 63), 1 << 63)


def request_of(parts: Iterable[bytes]) -> bytes:
    """A trace request of spans as :func:`resource_spans` gives them."""
    return b'{"resourceSpans":[' + b",".join(parts) + b"]}"


def resource_spans(span: Span) -> bytes:
    """A span with its resource and scope; one that has not ended as if it took no time."""
    found = {
        "resource": {"attributes": _attributes(span.otel_resource)},
        "scopeSpans": [{"scope": {"name": span.scope}, "spans": [_span(span)]}],
    }
    return json_of(found).encode()


def _span(span: Span) -> dict[str, Any]:
    return {
        "traceId": span.trace_id,
        "spanId": span.span_id,
        "parentSpanId": span.parent_span_id or "",
        "name": span.name,
        "kind": _KINDS.get(span.kind, 0),
        "startTimeUnixNano": str(span.start_ns),
        "endTimeUnixNano": str(span.start_ns if span.end_ns is None else span.end_ns),
        "attributes": _attributes(span.attributes),
        "status": {"code": _STATUSES.get(span.status, 0), "message": span.status_message},
        "events": [
            {
                "name": event.name,
                "timeUnixNano": str(event.time_ns),
                "attributes": _attributes(event.attributes),
            }
            for event in span.events
        ],
        "links": [
            {
                "traceId": link.trace_id,
                "spanId": link.span_id,
                "attributes": _attributes(link.attributes),
            }
            for link in span.links
        ],
    }


def _attributes(attributes: Mapping[str, Any]) -> list[dict[str, Any]]:
    return _pairs(plain(dict(attributes)))


def _pairs(attributes: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in attributes.items()]


def _value(value: Any) -> dict[str, Any]:
    """OTLP's form of a plain value; an integer beyond 64 bits is its digits."""
    if value is None:
        return {}
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)} if value in _INT64 else {"stringValue": str(value)}
    if isinstance(value, float) and math.isfinite(value):
        return {"doubleValue": value}
    if isinstance(value, dict):
        return {"kvlistValue": {"values": _pairs(value)}}
    if isinstance(value, list):
        return {"arrayValue": {"values": [_value(item) for item in value]}}
    return {"stringValue": value}
