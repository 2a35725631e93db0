"""Traces as Jaeger's page and its query API write them, as spans.

Source: ``model/json/model.go`` of Jaeger: times in microseconds, attributes as typed tags; the keys
of OpenTelemetry's mapping to Jaeger, such as ``span.kind`` and ``otel.status_code``.
"""

from collections.abc import Mapping
from typing import Any, Final

from lightning_otel.messages import object_of, objects
from lightning_otel.receivers import RequestLimits, otlp
from lightning_otel.receivers.otlp import (
    KINDS,
    STATUSES,
    DecodedAttributes,
    InvalidSpanError,
    Object,
    read_integer,
    text,
)
from lightning_otel.types import Span

MARKS: Final = ("traceID", "spanID", "operationName", "startTime")
_NS: Final = 1000
_KIND, _CODE, _MESSAGE = "span.kind", "otel.status_code", "otel.status_description"
_SCOPES: Final = ("otel.scope.name", "otel.library.name")
_CHILD: Final = "CHILD_OF"


def open_trace(document: Object) -> Object:
    """Return a trace with the process in each of its spans; anything else as it is."""
    processes, spans = document.get("processes"), document.get("spans")
    if not isinstance(processes, dict) or not isinstance(spans, list):
        return document
    opened = [
        {**span, "process": processes.get(str(span.get("processID")))}
        if isinstance(span, dict)
        else span
        for span in spans
    ]
    return {"spans": opened}


def read_span(record: Object, came: str, limits: RequestLimits) -> Span:
    """Return a span of Jaeger's.

    Raises:
        InvalidSpanError: It cannot be kept.
    """
    attributes = _read_tags(record.get("tags"))
    process = object_of(record.get("process"))
    name = process.get("serviceName")
    otel_resource = {**({"service.name": name} if name else {}), **_read_tags(process.get("tags"))}
    start = read_integer(record.get("startTime"), "start time")
    length = read_integer(record.get("duration"), "duration")
    trace, span = text(record.get("traceID")), text(record.get("spanID"))
    links = objects(record.get("references"))
    parents = [entry.get("spanID") for entry in links if entry.get("refType") == _CHILD]
    parent = next(iter(parents), record.get("parentSpanID"))
    kind, code = str(attributes.pop(_KIND, "")).upper(), str(attributes.pop(_CODE, "")).upper()
    if code not in STATUSES:
        code = "ERROR" if attributes.get("error") in (True, "true") else "UNSET"
    message = attributes.pop(_MESSAGE, None)
    fields = {
        # Leading zeros are left out.
        "traceId": trace.zfill(2 * otlp.TRACE_ID_BYTES),
        "spanId": span.zfill(2 * otlp.SPAN_ID_BYTES),
        "parentSpanId": text(parent).zfill(2 * otlp.SPAN_ID_BYTES),
        "name": record.get("operationName"),
        "kind": KINDS.index(kind) if kind in KINDS else 0,
        "startTimeUnixNano": start * _NS,
        "endTimeUnixNano": (start + length) * _NS,
        "status": {"code": STATUSES.index(code), "message": message},
        "attributes": DecodedAttributes(attributes),
        "events": [_read_log(entry) for entry in objects(record.get("logs"))],
    }
    scope = next((entry for key in _SCOPES if (entry := attributes.get(key))), "")
    return otlp.read_span(fields, otel_resource, scope, came, limits)


def _read_log(record: Object) -> Mapping[str, Any]:
    fields = _read_tags(record.get("fields"))
    time = read_integer(record.get("timestamp"), "time of an event")
    name = fields.pop("event", None) or fields.pop("name", None)
    attributes = DecodedAttributes(fields)
    return {"name": str(name or ""), "timeUnixNano": time * _NS, "attributes": attributes}


def _read_tags(record: object) -> dict[str, Any]:
    tags: dict[str, Any] = {}
    for tag in objects(record):
        key, kind, value = tag.get("key"), tag.get("type"), tag.get("value")
        if not isinstance(key, str):
            raise InvalidSpanError("the key of a tag is no text")
        if kind == "int64":
            value = read_integer(value, f"tag {key}")
        elif kind == "float64" and isinstance(value, str):
            value = float(value) if value.replace(".", "", 1).lstrip("-").isdigit() else value
        tags[key] = value
    return tags
