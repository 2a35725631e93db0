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

from lightning_otel import conventions as c
from lightning_otel.receivers.limits import DEFAULT_LIMITS, Limits
from lightning_otel.receivers.spans import (
    KINDS,
    SPAN_ID_BYTES,
    STATUSES,
    TIMES,
    TRACE_ID_BYTES,
    Rejected,
    UnfitError,
    fit_times,
    id_of,
    named,
    note_left_out,
    parent_of,
    process_of,
)
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
        under = _Under(in_resource.resource, came, limits)
        for in_scope in in_resource.scope_spans:
            scope = in_scope.scope.name
            for span in in_scope.spans:
                yield under.span(span, scope)


def _each_by_itself(
    found: Iterable[RawSpan], came: str, limits: Limits
) -> Iterator[Span | Rejected]:
    for raw in found:
        try:
            under = _Under(Resource.FromString(raw.resource), came, limits)
            scope = InstrumentationScope.FromString(raw.scope).name
        except _UNDECODABLE:
            yield Rejected("resource or scope cannot be decoded")
            continue
        try:
            span = OtlpSpan.FromString(raw.span)
        except _UNDECODABLE:
            yield Rejected("span cannot be decoded: malformed, or nested too deep")
            continue
        yield under.span(span, scope)


class _Under:
    """Makes spans of what stands under one resource."""

    def __init__(self, resource: Resource, came: str, limits: Limits) -> None:
        self._otel_resource = _attributes(resource.attributes)
        self._process = process_of(self._otel_resource)
        self._came = came
        self._limits = limits

    def span(self, found: OtlpSpan, scope: str) -> Span | Rejected:
        """The span; one that cannot be kept is rejected."""
        try:
            return self._span(found, scope)
        except UnfitError as exc:
            return Rejected(str(exc))

    def _span(self, found: OtlpSpan, scope: str) -> Span:
        number = len(found.attributes)
        if number > self._limits.attributes:
            raise UnfitError(f"more than {self._limits.attributes} attributes")
        attributes = _attributes(found.attributes)
        attributes[c.RECEIVED] = self._came
        sent = found.start_time_unix_nano, found.end_time_unix_nano
        start_ns, end_ns = fit_times(*sent, attributes)
        raw_events, raw_links = found.events, found.links
        events = tuple(map(_event, raw_events)) if raw_events else ()
        links = tuple(filter(None, map(_link, raw_links))) if raw_links else ()
        if left_out := found.dropped_attributes_count:
            note_left_out(attributes, "attributes", number, left_out)
        if left_out := found.dropped_events_count:
            note_left_out(attributes, "events", len(events), left_out)
        if left_out := found.dropped_links_count + len(raw_links) - len(links):
            note_left_out(attributes, "links", len(links), left_out)
        code, message = "UNSET", ""
        if found.HasField("status"):
            code, message = named(found.status.code, STATUSES), found.status.message
        parent = found.parent_span_id
        return Span(
            trace_id=id_of(found.trace_id, TRACE_ID_BYTES, "trace id"),
            span_id=id_of(found.span_id, SPAN_ID_BYTES, "span id"),
            parent_span_id=parent_of(parent) if parent else None,
            name=found.name,
            start_ns=start_ns,
            end_ns=end_ns,
            kind=named(found.kind, KINDS),
            status=code,
            status_message=message,
            attributes=attributes,
            events=events,
            links=links,
            otel_resource=self._otel_resource,
            scope=scope,
            process=self._process,
        )


def _event(found: OtlpSpan.Event) -> Event:
    time_ns = found.time_unix_nano
    return Event(found.name, time_ns if time_ns in TIMES else 0, _attributes(found.attributes))


def _link(found: OtlpSpan.Link) -> Link | None:
    """The link; None for one whose ids are none. Ids of zeros are allowed in a link."""
    if len(found.trace_id) != TRACE_ID_BYTES or len(found.span_id) != SPAN_ID_BYTES:
        return None
    return Link(found.trace_id.hex(), found.span_id.hex(), _attributes(found.attributes))


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
