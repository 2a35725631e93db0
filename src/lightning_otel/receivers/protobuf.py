"""OTLP's protobuf as spans.

Source: ``opentelemetry/proto/trace/v1/trace.proto`` of OTLP 1.x.
"""

import base64
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]  # no stubs
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span as OtlpSpan

from lightning_otel.receivers.limits import DEFAULT_LIMITS, Limits
from lightning_otel.receivers.spans import Rejected, UnfitError, event_of, link_of
from lightning_otel.receivers.spans import Resource as Shared
from lightning_otel.receivers.wire import RawSpan, check, mend_text, raw_spans
from lightning_otel.types import Event, Link, Span

if TYPE_CHECKING:
    from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

# Of the decoder; a pure Python one recurses.
_UNDECODABLE: Final = (DecodeError, RecursionError)


def spans_in(body: bytes, came: str, limits: Limits = DEFAULT_LIMITS) -> Iterator[Span | Rejected]:
    """The spans of an ``ExportTraceServiceRequest``, one by one.

    The decoder refuses the whole for one invalid character: then texts are mended. Where it still
    does, as for one value that is nested too deep, the spans are decoded one by one.

    Args:
        body: The message, not compressed.
        came: How it came, which each span says.
        limits: What it may hold.

    Raises:
        TooLargeError: It holds more; nothing was decoded.
        ReceiveError: It is no such message.
    """
    check(body, limits)
    try:
        return _spans(ExportTraceServiceRequest.FromString(body), came, limits)
    except _UNDECODABLE:
        body = mend_text(body)
    try:
        return _spans(ExportTraceServiceRequest.FromString(body), came, limits)
    except _UNDECODABLE:
        return _each_by_itself(raw_spans(body), came, limits)


def _spans(
    request: ExportTraceServiceRequest, came: str, limits: Limits
) -> Iterator[Span | Rejected]:
    for in_resource in request.resource_spans:
        shared = Shared(_attributes(in_resource.resource.attributes), came, limits)
        for in_scope in in_resource.scope_spans:
            scope = in_scope.scope.name
            for span in in_scope.spans:
                yield _span(span, scope, shared)


def _each_by_itself(
    found: Iterable[RawSpan], came: str, limits: Limits
) -> Iterator[Span | Rejected]:
    for raw in found:
        try:
            resource = Resource.FromString(raw.resource)
            shared = Shared(_attributes(resource.attributes), came, limits)
            scope = InstrumentationScope.FromString(raw.scope).name
        except _UNDECODABLE:
            yield Rejected("resource or scope cannot be decoded")
            continue
        try:
            span = OtlpSpan.FromString(raw.span)
        except _UNDECODABLE:
            yield Rejected("span cannot be decoded: malformed, or nested too deep")
            continue
        yield _span(span, scope, shared)


def _span(found: OtlpSpan, scope: str, shared: Shared) -> Span | Rejected:
    """Return the span; one that cannot be kept is rejected."""
    status = found.status if found.HasField("status") else None
    try:
        return shared.span(
            ids=(found.trace_id, found.span_id, found.parent_span_id),
            name=found.name,
            times=(found.start_time_unix_nano, found.end_time_unix_nano),
            kind=found.kind,
            status=(status.code, status.message) if status is not None else (0, ""),
            attributes=_attributes(found.attributes),
            events=tuple(map(_event, found.events)),
            links=tuple(map(_link, found.links)),
            dropped=(
                found.dropped_attributes_count,
                found.dropped_events_count,
                found.dropped_links_count,
            ),
            scope=scope,
        )
    except UnfitError as exc:
        return Rejected(str(exc))


def _event(found: OtlpSpan.Event) -> Event:
    return event_of(found.name, found.time_unix_nano, _attributes(found.attributes))


def _link(found: OtlpSpan.Link) -> Link | None:
    return link_of(found.trace_id, found.span_id, _attributes(found.attributes))


def _attributes(found: "Iterable[KeyValue]") -> dict[str, Any]:
    return {pair.key: pair.value.string_value or _value(pair.value) for pair in found}


def _value(found: "AnyValue") -> Any:
    """What an attribute holds, of any depth the decoder takes; bytes as base64."""
    kind = found.WhichOneof("value")
    if kind is None:
        return None
    if kind == "array_value":
        return [_value(item) for item in found.array_value.values]
    if kind == "kvlist_value":
        return {pair.key: _value(pair.value) for pair in found.kvlist_value.values}
    if kind == "bytes_value":
        return base64.b64encode(found.bytes_value).decode("ascii")
    return getattr(found, kind)
