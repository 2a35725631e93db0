"""Spans that Agent Lightning 0.3 stored, in the forms in which they can lie in a file.

Its store lives in memory or in MongoDB; a file comes from ``mongoexport`` of the ``spans``
collection (a document a line), from the answer of ``GET /v1/agl/spans`` (a page of ``items``), or
from ``Span.model_dump_json()``. They are the same object but for the envelope.
Source: ``agentlightning/types/tracer.py`` and ``store/collection/mongo.py`` of v0.3.0.
"""

import math
import re
from typing import Any, Final

from lightning_otel import conventions as c
from lightning_otel.receivers.fields import Object, as_object, id_bytes, inner, objects, text
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
    parent_of,
    process_of,
)
from lightning_otel.types import Event, Link, Span

_OWN_FIELDS: Final = ("rollout_id", "attempt_id", "sequence_id", "span_id")
_SCOPE: Final = re.compile(r"InstrumentationScope\(([^,]*),")
"""How Python printed what pydantic has no type for."""
_SECONDS_UNTIL: Final = 1e12
"""A time above is in nanoseconds already, as there."""
_EXTENDED: Final = ("$numberLong", "$numberInt", "$numberDouble", "$oid")


def is_stored_span(document: Object) -> bool:
    """Whether an object is a span of such a store."""
    return all(field in document for field in _OWN_FIELDS)


def span_of(document: Object, came: str) -> Span | Rejected:
    """The span; one that cannot be kept is rejected. One that never ended stays so."""
    try:
        return _span(_relaxed(document), came)
    except UnfitError as exc:
        return Rejected(str(exc))
    except RecursionError:
        return Rejected("attribute value is nested too deep")


def _span(found: Object, came: str) -> Span:
    otel_resource = dict(inner(inner(found, "resource"), "attributes"))
    for key, field in (
        (c.ROLLOUT_ID, "rollout_id"),
        (c.ATTEMPT_ID, "attempt_id"),
        (c.SEQUENCE_ID, "sequence_id"),
    ):
        if found[field] not in (None, ""):
            otel_resource[key] = found[field]
    start_ns = _time(found.get("start_time"))
    end_ns = _time(found.get("end_time")) or None
    attributes = {**as_object(found.get("attributes")), c.RECEIVED: came}
    start_ns, last_ns = fit_times(start_ns, end_ns or start_ns, attributes)
    status = inner(found, "status")
    code = status.get("status_code")
    return Span(
        trace_id=id_of(_id(found.get("trace_id"), TRACE_ID_BYTES), TRACE_ID_BYTES, "trace id"),
        span_id=id_of(_id(found.get("span_id"), SPAN_ID_BYTES), SPAN_ID_BYTES, "span id"),
        parent_span_id=parent_of(_id(found.get("parent_id"), SPAN_ID_BYTES)),
        name=text(found.get("name")),
        start_ns=start_ns,
        end_ns=last_ns if end_ns else None,
        kind=_kind(found.get("kind")),
        status=code if code in STATUSES else "UNSET",
        status_message=text(status.get("description")),
        attributes=attributes,
        events=tuple(map(_event, objects(found, "events"))),
        links=tuple(map(_link, objects(found, "links"))),
        otel_resource=otel_resource,
        scope=_scope(found.get("instrumentation_scope")),
        process=process_of(otel_resource),
    )


def _event(found: Object) -> Event:
    time_ns = _time(found.get("timestamp"))
    return Event(
        text(found.get("name")), time_ns if time_ns in TIMES else 0, inner(found, "attributes")
    )


def _link(found: Object) -> Link:
    context = inner(found, "context")
    return Link(
        _id(context.get("trace_id"), TRACE_ID_BYTES).hex(),
        _id(context.get("span_id"), SPAN_ID_BYTES).hex(),
        inner(found, "attributes"),
    )


def _id(content: object, size: int) -> bytes:
    """An id; its Weave tracer writes UUIDs, of which a span keeps the half that is random."""
    found = id_bytes(text(content).replace("-", ""))
    return found[-size:] if len(found) == TRACE_ID_BYTES else found


def _time(content: object) -> int:
    """Nanoseconds of a time in seconds; 0 for none. Of its own it is exact to 0.2 microseconds."""
    if content is None:
        return 0
    if isinstance(content, bool) or not isinstance(content, (int, float)):
        raise UnfitError("time is no number")
    if not math.isfinite(content):
        raise UnfitError("time is no number")
    if content > _SECONDS_UNTIL:
        return round(content)
    whole = math.floor(content)  # apart: their product would be rounded to 256 ns once more
    return whole * 1_000_000_000 + round((content - whole) * 1_000_000_000)


def _kind(content: object) -> str:
    """The kind, which it keeps as Python printed it: ``SpanKind.CLIENT``, or the number."""
    name = str(content).rpartition(".")[2]
    return name if name in KINDS else "INTERNAL"


def _scope(content: object) -> str:
    found = _SCOPE.match(content) if isinstance(content, str) else None
    return found[1].strip() if found else ""


def _relaxed(value: Any) -> Any:
    """The plain values of MongoDB's extended JSON, such as ``{"$numberLong": "17"}``.

    Raises:
        UnfitError: One is not what it says.
        RecursionError: It is nested too deep.
    """
    if isinstance(value, list):
        return [_relaxed(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((kind, content),) = value.items()
        if kind in _EXTENDED and isinstance(content, str):
            return _number(kind, content)
    return {key: _relaxed(item) for key, item in value.items()}


def _number(kind: str, content: str) -> object:
    try:
        if kind == "$numberDouble":
            return float(content)
        return content if kind == "$oid" else int(content[:20])
    except ValueError as exc:
        raise UnfitError(f"{kind} is no number") from exc
