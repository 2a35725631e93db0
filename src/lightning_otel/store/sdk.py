"""Spans of the OpenTelemetry SDK as records; only its public attributes are touched."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from lightning_otel import conventions as c
from lightning_otel.store.schema import Record, record_of
from lightning_otel.store.values import json_of, text_of, text_or_none, time_of

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import Event, ReadableSpan
    from opentelemetry.trace import Link

_NO_STAMPS: Final[Mapping[str, Any]] = MappingProxyType({})
_KNOWN_AT_START: Final = (
    ("operation", c.OPERATION),
    ("agent", c.AGENT_NAME),
    ("model", c.REQUEST_MODEL),
    ("rollout_id", c.ROLLOUT_ID),
    ("attempt_id", c.ATTEMPT_ID),
)
"""Hot columns of a started span, which nearly always are text or absent."""


def identity_of(
    span: "ReadableSpan", *, process: str, sequence: int, otel_resource: object
) -> Record:
    """The columns of a span that stay as they are from its start to its end.

    Args:
        span: The span.
        process: Id of this process.
        sequence: Position of the span's start in the process.
        otel_resource: Its resource's attributes as JSON.
    """
    context, parent, scope = span.context, span.parent, span.instrumentation_scope
    return {
        "trace_id": format(context.trace_id, "032x"),
        "span_id": format(context.span_id, "016x"),
        "parent_span_id": format(parent.span_id, "016x") if parent is not None else None,
        "kind": getattr(span.kind, "name", "INTERNAL"),
        "start_ns": time_of(span.start_time),
        "scope": text_of(scope.name) if scope is not None else "",
        "process": process,
        "sequence": sequence,
        "otel_resource": otel_resource,
    }


def start_record(
    span: "ReadableSpan", identity: Record, stamps: Mapping[str, Any] = _NO_STAMPS
) -> Record:
    """The record of a span that just started.

    Written by hand, not by :func:`record_of`: it carries little and is written for every span.

    Args:
        span: The span.
        identity: As :func:`identity_of` gave it.
        stamps: Attributes for the record alone, where the span has none of that name.
    """
    attributes = {**stamps, **copied(span.attributes)}
    record: Record = {
        "record": "start",
        **identity,
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
    span: "ReadableSpan",
    body: Mapping[str, str],
    identity: Record,
    end_sequence: int,
    stamps: Mapping[str, Any] = _NO_STAMPS,
) -> Record:
    """The record of an ended span.

    Args:
        span: The span.
        body: Content that is kept beside it.
        identity: As :func:`identity_of` gave it.
        end_sequence: Position of its end in the process.
        stamps: Attributes for the record alone, where the span has none of that name.
    """
    status = span.status
    attributes = {**stamps, **copied(span.attributes)}
    if span.dropped_attributes or span.dropped_events or span.dropped_links:
        attributes[c.CUT] = json_of(_dropped_by_sdk(span))
    return record_of(
        identity,
        name=span.name,
        end_ns=span.end_time or 0,
        status=status.status_code.name,
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
