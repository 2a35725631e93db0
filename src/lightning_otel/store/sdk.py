"""Spans of the OpenTelemetry SDK as records; only its public attributes are touched."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from lightning_otel import conventions as c
from lightning_otel.store.schema import Record, record_of
from lightning_otel.store.values import json_of, text_of, text_or_none, time_of

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import Event, ReadableSpan
    from opentelemetry.trace import Link

_KNOWN_AT_START: Final = (
    ("operation", c.OPERATION),
    ("agent", c.AGENT_NAME),
    ("model", c.REQUEST_MODEL),
    ("rollout_id", c.ROLLOUT_ID),
    ("attempt_id", c.ATTEMPT_ID),
)
"""Hot columns of a started span, which nearly always are text or absent."""


def start_record(
    span: "ReadableSpan",
    process: str,
    sequence: int,
    otel_resource: object,
    stamps: Mapping[str, Any],
) -> Record:
    """Return the record of a span that just started.

    Args:
        span: The span.
        process: Id of this process.
        sequence: Position of the span's start in the process.
        otel_resource: Its resource's attributes as JSON.
        stamps: Attributes for the record alone, where the span has none of that name.
    """
    context, parent, scope = span.context, span.parent, span.instrumentation_scope
    attributes = copied(span.attributes)
    if stamps:
        attributes = {**stamps, **attributes}
    record: Record = {
        "record": "start",
        "trace_id": f"{context.trace_id:032x}",
        "span_id": f"{context.span_id:016x}",
        "parent_span_id": f"{parent.span_id:016x}" if parent is not None else None,
        "kind": getattr(span.kind, "_name_", "INTERNAL"),
        "start_ns": time_of(span.start_time),
        "scope": text_of(scope.name) if scope is not None else "",
        "process": process,
        "sequence": sequence,
        "otel_resource": otel_resource,
        "name": text_of(span.name),
        "end_ns": None,
        "status": "UNSET",
        "status_message": "",
        "end_sequence": -1,
        "attributes": attributes,
        "events": [],
    }
    for column, key in _KNOWN_AT_START:
        text = attributes.get(key)
        record[column] = text if text is None or type(text) is str else text_or_none(text)
    return record


def end_record(
    start: Record,
    span: "ReadableSpan",
    body: Mapping[str, str],
    end_sequence: int,
    stamps: Mapping[str, Any],
) -> Record:
    """Return the record of an ended span.

    Args:
        start: Its record at the start, whose ids and place it keeps.
        span: The span.
        body: Content that is kept beside it.
        end_sequence: Position of its end in the process.
        stamps: Attributes for the record alone, where the span has none of that name.
    """
    status = span.status
    attributes = copied(span.attributes)
    if stamps:
        attributes = {**stamps, **attributes}
    if span.dropped_attributes or span.dropped_events or span.dropped_links:
        attributes[c.CUT] = json_of(_dropped_by_sdk(span))
    return record_of(
        start,
        name=span.name,
        end_ns=span.end_time or 0,
        status=status.status_code._name_,
        status_message=status.description or "",
        attributes=attributes,
        events=[_event(event) for event in span.events],
        links=[_link(link) for link in span.links],
        end_sequence=end_sequence,
        body=body,
    )


def _event(event: "Event") -> Record:
    return {
        "name": text_of(event.name),
        "time_ns": time_of(event.timestamp),
        "attributes": copied(event.attributes),
    }


def _link(link: "Link") -> Record:
    return {
        "trace_id": format(link.context.trace_id, "032x"),
        "span_id": format(link.context.span_id, "016x"),
        "attributes": copied(link.attributes),
    }


def copied(attributes: Any) -> dict[str, Any]:
    """The attributes of a span, event or link as a dict of one's own."""
    # Ten times as fast as dict(), which asks the SDK's mapping for one key after the other.
    try:
        found = attributes.copy()
    except AttributeError:
        found = attributes or ()
    return found if type(found) is dict else dict(found)


def _dropped_by_sdk(span: "ReadableSpan") -> dict[str, Any]:
    """What the SDK's own limits took away, as the note on what was cut says it."""
    found = {}
    for name, kept, dropped in (
        ("attributes", span.attributes, span.dropped_attributes),
        ("events", span.events, span.dropped_events),
        ("links", span.links, span.dropped_links),
    ):
        if dropped:
            found[name] = {"length": len(kept or ()) + dropped, "kept": len(kept or ())}
    return found
