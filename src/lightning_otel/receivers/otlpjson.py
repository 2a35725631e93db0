"""OTLP's JSON as spans.

Protobuf's own JSON reader takes the hex ids for base64, so the mapping is ours; what it does not
name is ignored, as the specification asks.
Source: OTLP 1.x, "JSON Protobuf Encoding": ids in hex, enumerations as numbers, 64-bit integers as
decimal text or numbers, keys in lowerCamelCase.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import orjson

from lightning_otel.errors import ReceiveError
from lightning_otel.receivers.fields import (
    Object,
    as_object,
    id_bytes,
    inner,
    integer,
    items,
    objects,
    text,
)
from lightning_otel.receivers.limits import DEFAULT_LIMITS, Limits, too_many
from lightning_otel.receivers.spans import (
    KINDS,
    STATUSES,
    Rejected,
    Resource,
    UnfitError,
    event_of,
    link_of,
)
from lightning_otel.types import Event, Link, Span

_DEPTH: Final = 200
"""Objects and lists within one value; deeper ones are taken by no other reader either."""
_VALUES_PER_MESSAGE: Final = 2
_NO_NUMBERS: Final = frozenset({"NaN", "Infinity", "-Infinity"})
_KIND_NUMBERS: Final = {
    f"SPAN_KIND_{name}": number for number, name in enumerate(KINDS) if number
} | {"SPAN_KIND_UNSPECIFIED": 0}
_STATUS_NUMBERS: Final = {f"STATUS_CODE_{name}": number for number, name in enumerate(STATUSES)}
# Possessive, and an open text runs to the end: linear whatever the body.
_TEXT: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)


def spans_in(body: bytes, came: str, limits: Limits = DEFAULT_LIMITS) -> Iterator[Span | Rejected]:
    """The spans of a trace request in JSON, one by one.

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
    most = limits.messages * _VALUES_PER_MESSAGE
    if _is_within(body, limits.messages, most):
        return
    # Texts may hold JSON too: counted without them.
    if not _is_within(_TEXT.sub(b"", body), limits.messages, most):
        raise too_many(limits)


def _is_within(body: bytes, containers: int, values: int) -> bool:
    return body.count(b"{") + body.count(b"[") <= containers and body.count(b",") <= values


def loaded(body: bytes) -> Any:
    """What JSON says; a NaN, half a surrogate pair or no UTF-8 in one text refuses nothing else.

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
    """The spans of a trace request whose JSON was read; what is no span is rejected."""
    for in_resource in objects(request, "resourceSpans"):
        try:
            resource = Resource(_attributes(inner(in_resource, "resource")), came, limits)
        except UnfitError as exc:
            reason = f"resource cannot be read: {exc}"
            for in_scope in objects(in_resource, "scopeSpans"):
                yield from (Rejected(reason) for _ in items(in_scope, "spans"))
            continue
        for in_scope in objects(in_resource, "scopeSpans"):
            scope = inner(in_scope, "scope").get("name")
            for span in items(in_scope, "spans"):
                yield _span(span, scope if isinstance(scope, str) else "", resource)


def _span(found: object, scope: str, resource: Resource) -> Span | Rejected:
    """Return the span; what cannot be kept is rejected."""
    if not isinstance(found, dict):
        return Rejected("span is no JSON object")
    status = inner(found, "status")
    try:
        start_ns = integer(found.get("startTimeUnixNano"), "start time")
        end_ns = integer(found.get("endTimeUnixNano"), "end time")
        left_out = [
            integer(found.get(f"dropped{name.capitalize()}Count"), f"dropped {name}")
            for name in ("attributes", "events", "links")
        ]
        return resource.span(
            ids=(
                id_bytes(found.get("traceId")),
                id_bytes(found.get("spanId")),
                id_bytes(found.get("parentSpanId")),
            ),
            name=text(found.get("name")),
            times=(start_ns, end_ns),
            kind=_number(found.get("kind"), _KIND_NUMBERS, "kind"),
            status=(
                _number(status.get("code"), _STATUS_NUMBERS, "status"),
                text(status.get("message")),
            ),
            attributes=_attributes(found),
            events=tuple(map(_event, objects(found, "events"))),
            links=tuple(map(_link, objects(found, "links"))),
            dropped=(left_out[0], left_out[1], left_out[2]),
            scope=scope,
        )
    except UnfitError as exc:
        return Rejected(str(exc))


def _event(found: Object) -> Event:
    time_ns = integer(found.get("timeUnixNano"), "time of an event")
    return event_of(text(found.get("name")), time_ns, _attributes(found))


def _link(found: Object) -> Link | None:
    ids = id_bytes(found.get("traceId")), id_bytes(found.get("spanId"))
    return link_of(*ids, _attributes(found))


def _attributes(found: Object) -> dict[str, Any]:
    pairs = objects(found, "attributes")
    return {text(pair.get("key")): _value(pair.get("value"), 0) for pair in pairs}


def _value(found: object, depth: int) -> Any:
    """What an attribute holds; of a kind that is not known, or with none, it is None."""
    if found is None:
        return None
    if not isinstance(found, dict) or depth > _DEPTH:
        raise UnfitError("attribute value is not one of OTLP's, or nested too deep")
    for kind, content in found.items():
        if kind == "stringValue" or kind == "bytesValue":
            return text(content)
        if kind == "intValue":
            return integer(content, "integer attribute")
        if kind == "boolValue":
            return content is True or content == "true"
        if kind == "doubleValue":
            return _double(content)
        if kind == "arrayValue":
            return [_value(item, depth + 1) for item in items(as_object(content), "values")]
        if kind == "kvlistValue":
            pairs = objects(as_object(content), "values")
            return {text(pair.get("key")): _value(pair.get("value"), depth + 1) for pair in pairs}
    return None


def _double(content: object) -> float:
    is_named = isinstance(content, str) and content in _NO_NUMBERS
    if isinstance(content, (int, float)) or is_named:
        try:
            return float(content)  # type: ignore[arg-type]  # a number, or the name of one
        except OverflowError:
            return math.inf
    raise UnfitError("double attribute is no number")


def _number(content: object, numbers: Mapping[str, int], noun: str) -> int:
    """An enumeration's number; some senders write its name."""
    if isinstance(content, str) and content in numbers:
        return numbers[content]
    return integer(content, noun)
