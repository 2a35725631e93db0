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

from lightning_otel import conventions as c
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
            under = _Under(in_resource, came, limits)
        except UnfitError as exc:
            reason = f"resource cannot be read: {exc}"
            for in_scope in objects(in_resource, "scopeSpans"):
                yield from (Rejected(reason) for _ in items(in_scope, "spans"))
            continue
        for in_scope in objects(in_resource, "scopeSpans"):
            scope = inner(in_scope, "scope").get("name")
            for span in items(in_scope, "spans"):
                yield under.span(span, scope if isinstance(scope, str) else "")


class _Under:
    """Makes spans of what stands under one resource."""

    def __init__(self, in_resource: Object, came: str, limits: Limits) -> None:
        self._otel_resource = _attributes(inner(in_resource, "resource"))
        self._process = process_of(self._otel_resource)
        self._came = came
        self._limits = limits

    def span(self, found: object, scope: str) -> Span | Rejected:
        """The span; what cannot be kept is rejected."""
        if not isinstance(found, dict):
            return Rejected("span is no JSON object")
        try:
            return self._span(found, scope)
        except UnfitError as exc:
            return Rejected(str(exc))

    def _span(self, found: Object, scope: str) -> Span:
        start_ns = integer(found.get("startTimeUnixNano"), "start time")
        end_ns = integer(found.get("endTimeUnixNano"), "end time")
        attributes = _attributes(found)
        if len(attributes) > self._limits.attributes:
            raise UnfitError(f"more than {self._limits.attributes} attributes")
        events = tuple(map(_event, objects(found, "events")))
        sent = objects(found, "links")
        links = tuple(link for each in sent if (link := _link(each)) is not None)
        status = inner(found, "status")
        attributes[c.RECEIVED] = self._came
        start_ns, end_ns = fit_times(start_ns, end_ns, attributes)
        for name, kept, unfit in (
            ("attributes", len(attributes) - 1, 0),
            ("events", len(events), 0),
            ("links", len(links), len(sent) - len(links)),
        ):
            dropped = found.get(f"dropped{name.capitalize()}Count")
            note_left_out(attributes, name, kept, unfit + integer(dropped, f"dropped {name}"))
        return Span(
            trace_id=id_of(id_bytes(found.get("traceId")), TRACE_ID_BYTES, "trace id"),
            span_id=id_of(id_bytes(found.get("spanId")), SPAN_ID_BYTES, "span id"),
            parent_span_id=parent_of(id_bytes(found.get("parentSpanId"))),
            name=text(found.get("name")),
            start_ns=start_ns,
            end_ns=end_ns,
            kind=named(_number(found.get("kind"), _KIND_NUMBERS, "kind"), KINDS),
            status=named(_number(status.get("code"), _STATUS_NUMBERS, "status"), STATUSES),
            status_message=text(status.get("message")),
            attributes=attributes,
            events=events,
            links=links,
            otel_resource=self._otel_resource,
            scope=scope,
            process=self._process,
        )


def _event(found: Object) -> Event:
    time_ns = integer(found.get("timeUnixNano"), "time of an event")
    return Event(text(found.get("name")), time_ns if time_ns in TIMES else 0, _attributes(found))


def _link(found: Object) -> Link | None:
    """The link; None for one whose ids are none. Ids of zeros are allowed in a link."""
    trace_id, span_id = id_bytes(found.get("traceId")), id_bytes(found.get("spanId"))
    if len(trace_id) != TRACE_ID_BYTES or len(span_id) != SPAN_ID_BYTES:
        return None
    return Link(trace_id.hex(), span_id.hex(), _attributes(found))


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
