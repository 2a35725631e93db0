"""OTLP's JSON as spans.

Protobuf's own JSON reader takes the hex ids for base64, so the mapping is ours; what it does not
name is ignored, as the specification asks.
Source: OTLP 1.x, "JSON Protobuf Encoding": ids in hex, enumerations as numbers, 64-bit integers as
decimal text or numbers, keys in lowerCamelCase.
"""

import json
import math
import re
from collections.abc import Iterator
from typing import Any, Final

import orjson

from lightning_otel.errors import ReceiveError
from lightning_otel.receivers import DEFAULT_LIMITS, Limits, Rejected
from lightning_otel.receivers.spans import (
    KINDS,
    STATUSES,
    Object,
    Origin,
    UnfitError,
    as_object,
    event_of,
    id_bytes,
    inner,
    integer,
    items,
    link_of,
    objects,
    text,
)
from lightning_otel.types import Span

_MAX_DEPTH: Final = 200
"""Objects and lists within one value; deeper ones are taken by no other reader either."""
_VALUES_PER_MESSAGE: Final = 2
_NUMBERS: Final = {
    "SPAN_KIND_UNSPECIFIED": 0,
    **{f"SPAN_KIND_{name}": number for number, name in enumerate(KINDS) if number},
    **{f"STATUS_CODE_{name}": number for number, name in enumerate(STATUSES)},
}
"""Enumerations by name, as some senders write them."""
# Possessive, and an open text runs to the end: linear whatever the body.
_TEXT: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)


def spans_in(body: bytes, came: str, limits: Limits = DEFAULT_LIMITS) -> Iterator[Span | Rejected]:
    """Return the spans of a trace request in JSON, one by one.

    Args:
        body: The JSON, not compressed.
        came: How it came, which each span says.
        limits: What it may hold.

    Raises:
        TooLargeError: It holds more; nothing was decoded.
        ReceiveError: It is no such JSON.
    """
    check(body, limits)
    request = loaded(body)
    if not isinstance(request, dict):
        raise ReceiveError("the body is no JSON object; see the OTLP specification")
    return spans_of(request, came, limits)


def check(body: bytes, limits: Limits) -> None:
    """Refuse JSON of more objects, lists and values than it may have, without decoding it.

    Raises:
        TooLargeError: It has more.
    """
    # Texts may hold JSON too: left out where they matter, which takes longer than decoding.
    if _has_too_many(body, limits) and _has_too_many(_TEXT.sub(b"", body), limits):
        raise limits.too_many()


def _has_too_many(body: bytes, limits: Limits) -> bool:
    containers = body.count(b"{") + body.count(b"[")
    return containers > limits.messages or body.count(b",") > limits.messages * _VALUES_PER_MESSAGE


def loaded(body: bytes) -> Any:
    """Return what JSON says; a NaN or a text that is none refuses nothing else.

    Raises:
        ReceiveError: It is no JSON, or nested too deep.
    """
    try:
        return orjson.loads(body)
    except ValueError as exc:
        reason = str(exc)
    try:
        return json.loads(body.decode("utf-8", "replace"))
    except (ValueError, RecursionError) as exc:
        raise ReceiveError(f"the body is no JSON ({reason}); see the OTLP specification") from exc


def spans_of(request: Object, came: str, limits: Limits) -> Iterator[Span | Rejected]:
    """Yield the spans of a trace request whose JSON was read; what is no span is rejected."""
    for in_resource in objects(request, "resourceSpans"):
        origin, reason = None, ""
        try:
            origin = Origin(_read_attributes(inner(in_resource, "resource")), came, limits)
        except UnfitError as exc:
            reason = f"resource cannot be read: {exc}"
        for in_scope in objects(in_resource, "scopeSpans"):
            scope = inner(in_scope, "scope").get("name")
            for span in items(in_scope, "spans"):
                try:
                    if origin is None or not isinstance(span, dict):
                        raise UnfitError(reason or "span is no JSON object")
                    yield _read_span(span, scope if isinstance(scope, str) else "", origin)
                except UnfitError as exc:
                    yield Rejected(str(exc))


def _read_span(found: Object, scope: str, origin: Origin) -> Span:
    status = inner(found, "status")
    return origin.span(
        ids=(
            id_bytes(found.get("traceId")),
            id_bytes(found.get("spanId")),
            id_bytes(found.get("parentSpanId")),
        ),
        name=text(found.get("name")),
        times=(
            integer(found.get("startTimeUnixNano"), "start time"),
            integer(found.get("endTimeUnixNano"), "end time"),
        ),
        kind=_read_enumeration(found.get("kind"), "kind"),
        status=(_read_enumeration(status.get("code"), "status"), text(status.get("message"))),
        attributes=_read_attributes(found),
        events=tuple(
            event_of(
                text(each.get("name")),
                integer(each.get("timeUnixNano"), "time of an event"),
                _read_attributes(each),
            )
            for each in objects(found, "events")
        ),
        links=[
            link_of(
                id_bytes(each.get("traceId")), id_bytes(each.get("spanId")), _read_attributes(each)
            )
            for each in objects(found, "links")
        ],
        dropped=(
            integer(found.get("droppedAttributesCount"), "dropped attributes"),
            integer(found.get("droppedEventsCount"), "dropped events"),
            integer(found.get("droppedLinksCount"), "dropped links"),
        ),
        scope=scope,
    )


def _read_attributes(found: Object, key: str = "attributes", depth: int = 0) -> dict[str, Any]:
    return {
        text(pair.get("key")): _read_value(pair.get("value"), depth) for pair in objects(found, key)
    }


def _read_value(found: object, depth: int) -> Any:
    """Return the value of an attribute; None for none, and for one of an unknown kind."""
    if found is None:
        return None
    if not isinstance(found, dict) or depth > _MAX_DEPTH:
        raise UnfitError("attribute value is not one of OTLP's, or nested too deep")
    for kind, content in found.items():
        if kind in ("stringValue", "bytesValue"):
            return text(content)
        if kind == "intValue":
            return integer(content, "integer attribute")
        if kind == "boolValue":
            return content is True or content == "true"
        if kind == "doubleValue":
            return _read_double(content)
        if kind == "arrayValue":
            return [_read_value(item, depth + 1) for item in items(as_object(content), "values")]
        if kind == "kvlistValue":
            return _read_attributes(as_object(content), "values", depth + 1)
    return None


def _read_double(content: object) -> float:
    if isinstance(content, (int, float)) or content in ("NaN", "Infinity", "-Infinity"):
        try:
            return float(content)
        except OverflowError:
            return math.inf
    raise UnfitError("double attribute is no number")


def _read_enumeration(content: object, noun: str) -> int:
    return integer(_NUMBERS.get(content, content) if isinstance(content, str) else content, noun)
