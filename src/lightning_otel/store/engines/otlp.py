"""Spans of ours as OTLP protobuf; content stays here unless it may leave.

Half a surrogate pair would spoil a whole request: every text is repaired.

Source: opentelemetry-proto, ``trace/v1/trace.proto`` and ``common/v1/common.proto``.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import (
    AnyValue,
    ArrayValue,
    InstrumentationScope,
    KeyValue,
    KeyValueList,
)
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1 import trace_pb2

from lightning_otel.redact.content import strip_content
from lightning_otel.types import Span
from lightning_otel.types.values import repair_text

_KINDS: Final = {"INTERNAL": 1, "SERVER": 2, "CLIENT": 3, "PRODUCER": 4, "CONSUMER": 5}
_STATUSES: Final = {"UNSET": 0, "OK": 1, "ERROR": 2}
_FLAGS: Final = 0x100
"""That it is known whether the parent is remote, as the SDK writes it."""
_INT64: Final = range(-(1 << 63), 1 << 63)
_UINT64: Final = range(1 << 64)
_MAX_DEPTH: Final = 64


class UnsendableError(ValueError):
    """A span that OTLP has no form for."""


def encode_request(spans: Iterable[Span], *, with_content: bool) -> bytes:
    """Return one export request; a span that has not ended has no end time there.

    Raises:
        UnsendableError: A span's ids or times are none of OTLP's.
    """
    request = ExportTraceServiceRequest()
    resources: dict[str, trace_pb2.ResourceSpans] = {}
    scopes: dict[tuple[str, str], trace_pb2.ScopeSpans] = {}
    for span in spans:
        key = repr(span.otel_resource)
        if key not in resources:
            attributes = _encode_attributes(span.otel_resource)
            resources[key] = request.resource_spans.add(resource=Resource(attributes=attributes))
        if (key, span.scope) not in scopes:
            scopes[key, span.scope] = resources[key].scope_spans.add(
                scope=InstrumentationScope(name=repair_text(span.scope))
            )
        scopes[key, span.scope].spans.append(encode_span(span, with_content=with_content))
    return bytes(request.SerializeToString())


def encode_span(span: Span, *, with_content: bool) -> trace_pb2.Span:
    """Return a span's message; UnsendableError if its ids or times are none of OTLP's."""
    span = span if with_content else strip_content(span)
    end_ns = span.end_ns or 0
    if span.start_ns not in _UINT64 or end_ns not in _UINT64:
        raise UnsendableError(f"times {span.start_ns} and {span.end_ns} are not OTLP's")
    return trace_pb2.Span(
        trace_id=_encode_id(span.trace_id, 16),
        span_id=_encode_id(span.span_id, 8),
        parent_span_id=_encode_id(span.parent_span_id, 8) if span.parent_span_id else b"",
        name=repair_text(span.name),
        kind=_KINDS.get(span.kind, 0),  # type: ignore[arg-type]  # the stubs want the enum
        start_time_unix_nano=span.start_ns,
        end_time_unix_nano=end_ns,
        attributes=_encode_attributes(span.attributes),
        events=[
            trace_pb2.Span.Event(
                name=repair_text(event.name),
                time_unix_nano=max(0, event.time_ns),
                attributes=_encode_attributes(event.attributes),
            )
            for event in span.events
        ],
        links=[
            trace_pb2.Span.Link(
                trace_id=_encode_id(link.trace_id, 16),
                span_id=_encode_id(link.span_id, 8),
                attributes=_encode_attributes(link.attributes),
                flags=_FLAGS,
            )
            for link in span.links
        ],
        status=trace_pb2.Status(
            code=_STATUSES.get(span.status, 0),  # type: ignore[arg-type]  # the stubs want the enum
            message=repair_text(span.status_message),
        ),
        flags=_FLAGS,
    )


def _encode_id(text: str, size: int) -> bytes:
    try:
        data = bytes.fromhex(text)
    except ValueError:
        data = b""
    if len(data) != size or not any(data):
        raise UnsendableError(f"{text[:40]!r} is no id of {size} bytes")
    return data


def _encode_attributes(attributes: Mapping[str, Any]) -> list[KeyValue]:
    return [
        KeyValue(key=repair_text(key), value=_encode_value(value, _MAX_DEPTH))
        for key, value in attributes.items()
    ]


def _encode_value(value: Any, depth: int) -> AnyValue:
    if value is None:
        return AnyValue()
    if isinstance(value, bool):
        return AnyValue(bool_value=value)
    if isinstance(value, int) and value in _INT64:
        return AnyValue(int_value=value)
    if isinstance(value, float):
        return AnyValue(double_value=value)
    if isinstance(value, Mapping) and depth:
        return AnyValue(
            kvlist_value=KeyValueList(
                values=[
                    KeyValue(key=repair_text(str(key)), value=_encode_value(item, depth - 1))
                    for key, item in value.items()
                ]
            )
        )
    if isinstance(value, (list, tuple)) and depth:
        return AnyValue(
            array_value=ArrayValue(values=[_encode_value(item, depth - 1) for item in value])
        )
    return AnyValue(string_value=repair_text(value if isinstance(value, str) else str(value)))
