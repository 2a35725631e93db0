"""Spans as the SDK prints them, which is how ``export spans`` writes them, too.

What the SDK does not print stands under one key of ours: scope, times in nanoseconds, and where the
span stands among those of its process.
Source: ``opentelemetry.sdk.trace.ReadableSpan.to_json``.
"""

from datetime import UTC, datetime, timedelta
from typing import Any, Final

from lightning_otel import conventions as c
from lightning_otel.receivers import Rejected
from lightning_otel.receivers.spans import (
    KINDS,
    SPAN_ID_BYTES,
    STATUSES,
    TIMES,
    TRACE_ID_BYTES,
    Object,
    UnfitError,
    as_object,
    event_of,
    fit_times,
    id_bytes,
    id_of,
    inner,
    integer,
    objects,
    parent_of,
    process_of,
    text,
)
from lightning_otel.types import Link, Span

OURS: Final = "lightning_otel"
"""The key under which stands what the SDK does not print."""
_FORM: Final = "%Y-%m-%dT%H:%M:%S.%fZ"
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def is_printed_span(document: Object) -> bool:
    """Return whether an object is a span as the SDK prints it."""
    return "trace_id" in inner(document, "context") and "start_time" in document


def span_of(document: Object, came: str) -> Span | Rejected:
    """Return the span; one that cannot be kept is rejected. One that never ended stays so."""
    try:
        return _read_span(document, came)
    except UnfitError as exc:
        return Rejected(str(exc))


def _read_span(found: Object, came: str) -> Span:
    context, status, ours = (inner(found, key) for key in ("context", "status", OURS))
    otel_resource = inner(inner(found, "resource"), "attributes")
    attributes = {**as_object(found.get("attributes")), c.RECEIVED: came}
    end_ns = _read_time(found.get("end_time"), ours.get("end_ns"))
    start_ns = _read_time(found.get("start_time"), ours.get("start_ns"))
    events, times_ns = objects(found, "events"), ours.get("events_ns")
    if not isinstance(times_ns, list) or len(times_ns) != len(events):
        times_ns = [None] * len(events)
    start_ns, last_ns = fit_times(start_ns, end_ns or start_ns, attributes)
    kind, code = text(found.get("kind")).rpartition(".")[2], status.get("status_code")
    return Span(
        trace_id=id_of(id_bytes(context.get("trace_id")), TRACE_ID_BYTES, "trace id"),
        span_id=id_of(id_bytes(context.get("span_id")), SPAN_ID_BYTES, "span id"),
        parent_span_id=parent_of(id_bytes(found.get("parent_id"))),
        name=text(found.get("name")),
        start_ns=start_ns,
        end_ns=last_ns if end_ns else None,
        kind=kind if kind in KINDS else "INTERNAL",
        status=code if code in STATUSES else "UNSET",
        status_message=text(status.get("description")),
        attributes=attributes,
        events=tuple(
            event_of(
                text(each.get("name")),
                _read_time(each.get("timestamp"), exact),
                inner(each, "attributes"),
            )
            for each, exact in zip(events, times_ns, strict=True)
        ),
        links=tuple(
            Link(
                id_bytes(inner(each, "context").get("trace_id")).hex(),
                id_bytes(inner(each, "context").get("span_id")).hex(),
                inner(each, "attributes"),
            )
            for each in objects(found, "links")
        ),
        otel_resource=otel_resource,
        scope=text(ours.get("scope")),
        process=text(ours.get("process")) or process_of(otel_resource),
        sequence=_read_position(ours.get("sequence")),
        end_sequence=_read_position(ours.get("end_sequence")),
    )


def _read_time(printed: object, exact: Any) -> int:
    """Return nanoseconds; 0 for none."""
    if exact is not None:
        return integer(exact, "time")
    try:
        found = datetime.strptime(text(printed), _FORM) if printed else _EPOCH
    except ValueError as exc:
        raise UnfitError("time is none of the SDK's") from exc
    return (found.replace(tzinfo=UTC) - _EPOCH) // timedelta(microseconds=1) * 1000


def _read_position(content: object) -> int:
    """Return the place of a start or end among those of its process; -1 for none."""
    found = -1 if content is None else integer(content, "sequence")
    return found if found in TIMES or not found else -1
