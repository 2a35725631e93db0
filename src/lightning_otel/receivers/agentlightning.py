"""Spans that Agent Lightning 0.3 stored, in the forms in which they can lie in a file.

Its store lives in memory or in MongoDB; a file comes from ``mongoexport`` of the ``spans``
collection (a document a line), from the answer of ``GET /v1/agl/spans`` (a page of ``items``), or
from ``Span.model_dump_json()``. They are the same object but for the envelope.
Source: ``agentlightning/types/tracer.py`` and ``store/collection/mongo.py`` of v0.3.0.
"""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from lightning_otel import conventions as c
from lightning_otel.receivers import Rejected, sdkjson
from lightning_otel.receivers.spans import (
    SPAN_ID_BYTES,
    TRACE_ID_BYTES,
    Object,
    UnfitError,
    id_bytes,
    inner,
    objects,
    text,
)
from lightning_otel.types import Span

_OWN_FIELDS: Final = ("rollout_id", "attempt_id", "sequence_id", "span_id")
_SCOPE: Final = re.compile(r"InstrumentationScope\(([^,]*),")
"""How Python printed what pydantic has no type for."""
_SECONDS_UNTIL: Final = 1e12
"""A time above is in nanoseconds already, as there."""
_EXTENDED: Final[Mapping[str, Callable[[str], Any]]] = {
    "$numberLong": lambda text: int(text[:20]),
    "$numberInt": lambda text: int(text[:20]),
    "$numberDouble": float,
    "$oid": str,
}


def is_stored_span(document: Object) -> bool:
    """Return whether an object is a span of such a store."""
    return all(field in document for field in _OWN_FIELDS)


def span_of(document: Object, came: str) -> Span | Rejected:
    """Return the span; one that cannot be kept is rejected. One that never ended stays so."""
    try:
        return sdkjson.span_of(_to_printed(_relax_value(document)), came)
    except UnfitError as exc:
        return Rejected(str(exc))
    except RecursionError:
        return Rejected("attribute value is nested too deep")


def _to_printed(found: Object) -> Object:
    """Return the span as the SDK prints it, which differs in ids, times, resource and scope."""
    ids = zip((c.ROLLOUT_ID, c.ATTEMPT_ID, c.SEQUENCE_ID), _OWN_FIELDS, strict=False)
    named = {key: found[field] for key, field in ids if found[field] not in (None, "")}
    scope = _SCOPE.match(str(found.get("instrumentation_scope")))
    return {
        "context": _read_ids(found),
        "parent_id": _read_id(found.get("parent_id"), SPAN_ID_BYTES),
        "name": found.get("name"),
        "kind": str(found.get("kind")),
        "status": found.get("status"),
        "attributes": found.get("attributes"),
        "events": objects(found, "events"),
        "links": [
            {**link, "context": _read_ids(inner(link, "context"))}
            for link in objects(found, "links")
        ],
        "resource": {"attributes": {**inner(inner(found, "resource"), "attributes"), **named}},
        sdkjson.OURS: {
            "start_ns": _read_time(found.get("start_time")),
            "end_ns": _read_time(found.get("end_time")),
            "events_ns": [_read_time(event.get("timestamp")) for event in objects(found, "events")],
            "scope": scope[1].strip() if scope else "",
        },
    }


def _read_ids(found: Object) -> Object:
    return {
        "trace_id": _read_id(found.get("trace_id"), TRACE_ID_BYTES),
        "span_id": _read_id(found.get("span_id"), SPAN_ID_BYTES),
    }


def _read_id(content: object, size: int) -> str:
    """Return an id; its Weave tracer writes UUIDs, of which a span keeps the random half."""
    found = id_bytes(text(content).replace("-", ""))
    return (found[-size:] if len(found) == TRACE_ID_BYTES else found).hex()


def _read_time(sent: object) -> int:
    """Return the nanoseconds of a time in seconds, exact to 0.2 microseconds; 0 for none."""
    if sent is None:
        return 0
    if isinstance(sent, bool) or not isinstance(sent, (int, float)) or not math.isfinite(sent):
        raise UnfitError("time is no number")
    if sent > _SECONDS_UNTIL:
        return round(sent)
    whole = math.floor(sent)  # apart: their product would be rounded to 256 ns once more
    return whole * 1_000_000_000 + round((sent - whole) * 1_000_000_000)


def _relax_value(value: Any) -> Any:
    """Return the plain values of MongoDB's extended JSON, such as ``{"$numberLong": "17"}``."""
    if isinstance(value, list):
        return [_relax_value(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind, content = next(iter(value.items()), ("", None))
    if len(value) > 1 or kind not in _EXTENDED or not isinstance(content, str):
        return {key: _relax_value(item) for key, item in value.items()}
    try:
        return _EXTENDED[kind](content)
    except ValueError as exc:
        raise UnfitError(f"{kind} is no number") from exc
