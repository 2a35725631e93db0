"""Read spans from OTLP's JSON objects; protobuf and other tools' documents are converted to these.

A field that cannot be kept rejects its span alone; unknown fields are ignored, as OTLP requires.
Source: OTLP 1.x, "JSON Protobuf Encoding": ids in hex, enumerations as numbers, 64-bit integers as
decimal text or numbers, keys in lowerCamelCase.
"""

import hashlib
import json
import math
import re
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeAlias

import orjson

from lightning_otel.adapter.interop import from_conventions
from lightning_otel.errors import ReceiveError
from lightning_otel.messages import object_of, objects
from lightning_otel.receivers import DEFAULT_LIMITS, Rejected, RequestLimits
from lightning_otel.types import Event, Link, Span
from lightning_otel.types import conventions as c
from lightning_otel.types.values import parse_json

Object: TypeAlias = Mapping[str, Any]

KINDS: Final = ("INTERNAL", "INTERNAL", "SERVER", "CLIENT", "PRODUCER", "CONSUMER")
"""By OTLP's number; an unspecified or unknown kind is INTERNAL."""
STATUSES: Final = ("UNSET", "OK", "ERROR")
TIMES: Final = range(1, 1 << 62)
"""Nanoseconds that a span may start or end at: after 1970 began, until the year 2116."""
TRACE_ID_BYTES: Final = 16
SPAN_ID_BYTES: Final = 8
_MAX_DEPTH: Final = 200
"""Objects and lists within one value; deeper ones are taken by no other reader either."""
_MARKS: Final = (c.CUT, c.RECEIVED, c.REDACTED, c.SENT_TIMES)
"""What a store says of a span that it holds, and not of what was recorded."""
_COUNTED: Final = ("attributes", "events", "links")
_VALUES_PER_MESSAGE: Final = 2
_NUMBERS: Final = {
    "SPAN_KIND_UNSPECIFIED": 0,
    **{f"SPAN_KIND_{name}": number for number, name in enumerate(KINDS) if number},
    **{f"STATUS_CODE_{name}": number for number, name in enumerate(STATUSES)},
}
"""Enumerations by name, as some senders write them."""
# Possessive, and an open text runs to the end: linear whatever the body.
_TEXT: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)


class InvalidSpanError(ValueError):
    """A span cannot be kept; the message is the reason."""


class DecodedAttributes(dict[str, Any]):
    """Attributes whose values are plain already, as no sender's JSON gives them."""


def decode_spans(
    body: bytes, came: str, limits: RequestLimits = DEFAULT_LIMITS
) -> Iterator[Span | Rejected]:
    """Return the spans of a trace request in JSON, one by one; ``came`` is noted on each.

    Raises:
        TooLargeError: It exceeds the limits; nothing was decoded.
        ReceiveError: It is no such JSON.
    """
    return decode_request(load_request(body, limits), came, limits)


def load_request(body: bytes, limits: RequestLimits) -> Object:
    """Return a request in JSON, as :func:`load_json` does; one that is no object is refused."""
    request = load_json(body, limits)
    if not isinstance(request, dict):
        raise ReceiveError("the body is no JSON object; see the OTLP specification")
    return request


def load_json(body: bytes, limits: RequestLimits = DEFAULT_LIMITS) -> Any:
    """Return what JSON says; a NaN or a text that is none refuses nothing else.

    Raises:
        TooLargeError: It has more objects, lists and values than it may; nothing was decoded.
        ReceiveError: It is no JSON, or nested too deep.
    """
    body = body.removeprefix(BOM_UTF8)
    # Texts may hold JSON too: left out where they matter, which takes longer than decoding.
    if _has_too_many(body, limits) and _has_too_many(_TEXT.sub(b"", body), limits):
        raise limits.too_many()
    try:
        return orjson.loads(body)
    except ValueError as exc:
        reason = str(exc)
    try:
        return json.loads(body.decode("utf-8", "replace"))
    except (ValueError, RecursionError) as exc:
        raise ReceiveError(f"the body is no JSON ({reason}); see the OTLP specification") from exc


def _has_too_many(body: bytes, limits: RequestLimits) -> bool:
    containers = body.count(b"{") + body.count(b"[")
    return containers > limits.messages or body.count(b",") > limits.messages * _VALUES_PER_MESSAGE


def decode_request(request: Object, came: str, limits: RequestLimits) -> Iterator[Span | Rejected]:
    """Yield the spans of a trace request; what is no span is rejected."""
    for in_resource in objects(request.get("resourceSpans")):
        otel_resource, unread = None, ""
        try:
            otel_resource = read_attributes(object_of(in_resource.get("resource")))
        except InvalidSpanError as exc:
            unread = f"resource cannot be read: {exc}"
        for in_scope in objects(in_resource.get("scopeSpans")):
            scope = object_of(in_scope.get("scope")).get("name")
            for span in _items(in_scope, "spans"):
                try:
                    if otel_resource is None or not isinstance(span, dict):
                        raise InvalidSpanError(unread or "span is no JSON object")
                    yield read_span(span, otel_resource, scope, came, limits)
                except InvalidSpanError as exc:
                    yield Rejected(str(exc))


def read_span(
    record: Object, otel_resource: dict[str, Any], scope: object, came: str, limits: RequestLimits
) -> Span:
    """Return a span of OTLP's fields; attributes may be :class:`DecodedAttributes`, and ids bytes.

    Raises:
        InvalidSpanError: It cannot be kept.
    """
    attributes, status = read_attributes(record), object_of(record.get("status"))
    number = len(attributes)
    if number > limits.attributes:
        raise InvalidSpanError(f"more than {limits.attributes} attributes")
    mark_received(attributes, came)
    start_ns, end_ns = _fit_times(
        read_integer(record.get("startTimeUnixNano"), "start time"),
        read_integer(record.get("endTimeUnixNano"), "end time"),
        attributes,
    )
    events = [_read_event(event) for event in objects(record.get("events"))]
    links = [_read_link(link) for link in objects(record.get("links"))]
    valid_links = [link for link in links if link is not None]
    for noun, items, lost in (
        ("attributes", number, 0),
        ("events", len(events), 0),
        ("links", len(valid_links), len(links) - len(valid_links)),
    ):
        lost += read_integer(record.get(f"dropped{noun.title()}Count"), f"dropped {noun}")
        if lost > 0:
            _note_cut(attributes, noun, items, lost)
    kind = _read_enumeration(record.get("kind"), "kind")
    code = _read_enumeration(status.get("code"), "status")
    span = Span(
        trace_id=_read_id(record.get("traceId"), TRACE_ID_BYTES, "trace id"),
        span_id=_read_id(record.get("spanId"), SPAN_ID_BYTES, "span id"),
        parent_span_id=_read_parent(record.get("parentSpanId")),
        name=text(record.get("name")),
        start_ns=start_ns,
        end_ns=end_ns,
        kind=KINDS[kind] if 0 <= kind < len(KINDS) else KINDS[0],
        status=STATUSES[code] if 0 <= code < len(STATUSES) else STATUSES[0],
        status_message=text(status.get("message")),
        attributes=attributes,
        events=tuple(events),
        links=tuple(valid_links),
        otel_resource=otel_resource,
        scope=scope if isinstance(scope, str) else "",
        process=_find_process(otel_resource),
    )
    return from_conventions(span)


def mark_received(attributes: dict[str, Any], came: str) -> None:
    """Note on a span how it came; distrust marks of ours that its sender set.

    They stay as ``sent.lightning.…``; notes of a cut that agree with the span stay as they are.
    """
    cut = parse_json(attributes.get(c.CUT))
    notes = cut if isinstance(cut, dict) else {}
    agreed = {name: note for name, note in notes.items() if _is_cut(attributes, name, note)}
    for key in _MARKS:
        if key in attributes and (key != c.CUT or not agreed or agreed != cut):
            attributes[f"sent.{key}"] = attributes.pop(key)
    if agreed:
        attributes[c.CUT] = orjson.dumps(agreed).decode()
    attributes[c.RECEIVED] = came


def _is_cut(attributes: Object, name: str, note: object) -> bool:
    if not isinstance(note, dict) or not note.keys() <= {"length", "kept", "sha256"}:
        return False
    length, size, text = note.get("length"), note.get("kept"), attributes.get(name)
    if type(length) is not int or type(size) is not int or not 0 <= size < length < 1 << 63:
        return False
    if name in _COUNTED:
        return "sha256" not in note
    if not isinstance(text, str) or len(text) != size:
        return False
    digest = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()
    return bool(note.get("sha256", digest) == digest)


def _read_event(record: Object) -> Event:
    time_ns = read_integer(record.get("timeUnixNano"), "time of an event")
    name = text(record.get("name"))
    return Event(name, time_ns if time_ns in TIMES else 0, read_attributes(record))


def _read_link(record: Object) -> Link | None:
    """Return a link; None for one whose ids are none. Ids of zeros are allowed in a link."""
    trace_id, span_id = read_id_bytes(record.get("traceId")), read_id_bytes(record.get("spanId"))
    if len(trace_id) != TRACE_ID_BYTES or len(span_id) != SPAN_ID_BYTES:
        return None
    return Link(trace_id.hex(), span_id.hex(), read_attributes(record))


def _read_id(content: object, size: int, noun: str) -> str:
    """Return an id as lower-case hex; one of another size, or of zeros, is unfit."""
    raw_id = read_id_bytes(content)
    if len(raw_id) != size:
        raise InvalidSpanError(f"{noun} is not {size} bytes long")
    if not any(raw_id):
        raise InvalidSpanError(f"{noun} is all zeros")
    return raw_id.hex()


def _read_parent(content: object) -> str | None:
    """Return the parent's id; None for a root, whose parent is empty or all zeros."""
    is_root = not any(read_id_bytes(content))
    return None if is_root else _read_id(content, SPAN_ID_BYTES, "parent span id")


def _fit_times(start_ns: int, end_ns: int, attributes: dict[str, Any]) -> tuple[int, int | None]:
    """Return times that a span can have, and note the sent ones where they differ."""
    if start_ns in TIMES and (not end_ns or (end_ns in TIMES and start_ns <= end_ns)):
        return start_ns, end_ns or None
    if not start_ns and not end_ns:
        raise InvalidSpanError("start and end time are missing")
    attributes[c.SENT_TIMES] = f"[{start_ns}, {end_ns}]"
    if start_ns not in TIMES:
        start_ns = end_ns if end_ns in TIMES else min(max(start_ns, TIMES[0]), TIMES[-1])
    return start_ns, max(start_ns, end_ns) if end_ns in TIMES else start_ns


def _find_process(otel_resource: Object) -> str:
    instance = otel_resource.get("service.instance.id")
    if isinstance(instance, str) and instance:
        return instance
    host, number = otel_resource.get("host.name"), otel_resource.get("process.pid")
    return f"{host}-{number}" if isinstance(host, str) and isinstance(number, int) else ""


def _note_cut(attributes: dict[str, Any], noun: str, count: int, lost: int) -> None:
    note = parse_json(attributes.get(c.CUT))
    # What was cut before this, as on a copy of ours, says it in more detail.
    cut = {noun: {"length": count + lost, "kept": count}} | (note if isinstance(note, dict) else {})
    attributes[c.CUT] = orjson.dumps(cut).decode()


def read_attributes(record: Object, key: str = "attributes", depth: int = 0) -> dict[str, Any]:
    """Return the attributes under a key.

    Raises:
        InvalidSpanError: One is none of OTLP's.
    """
    content = record.get(key)
    if type(content) is DecodedAttributes:
        return dict(content)
    return {
        text(pair.get("key")): read_value(pair.get("value"), depth) for pair in objects(content)
    }


def read_value(value: object, depth: int = 0) -> Any:
    """Return the value of an attribute; None for none, and for one of an unknown kind."""
    if value is None:
        return None
    if not isinstance(value, dict) or depth > _MAX_DEPTH:
        raise InvalidSpanError("attribute value is not one of OTLP's, or nested too deep")
    for kind, content in value.items():
        if kind in ("stringValue", "bytesValue"):
            return text(content)
        if kind == "intValue":
            return read_integer(content, "integer attribute")
        if kind == "boolValue":
            return content is True or content == "true"
        if kind == "doubleValue":
            return _read_double(content)
        if kind == "arrayValue":
            return [read_value(item, depth + 1) for item in _items(as_object(content), "values")]
        if kind == "kvlistValue":
            return read_attributes(as_object(content), "values", depth + 1)
    return None


def _read_double(content: object) -> float:
    if isinstance(content, (int, float)) or content in ("NaN", "Infinity", "-Infinity"):
        try:
            return float(content)
        except OverflowError:
            return math.inf
    raise InvalidSpanError("double attribute is no number")


def _read_enumeration(content: object, noun: str) -> int:
    return read_integer(
        _NUMBERS.get(content, content) if isinstance(content, str) else content, noun
    )


def read_integer(content: object, noun: str) -> int:
    """Return a 64-bit integer, which may come as text; 0 where there is none."""
    if content is None or content == "":
        return 0
    if isinstance(content, str) and len(content) <= 20 and content.lstrip("-").isdecimal():
        content = int(content) if content.rfind("-") <= 0 else content
    elif isinstance(content, float) and content.is_integer():
        content = int(content)
    if type(content) is not int or not -(1 << 63) <= content < 1 << 64:
        raise InvalidSpanError(f"{noun} is no 64-bit integer")
    return content


def read_id_bytes(content: object) -> bytes:
    """Return an id, which may come as hex of either case; empty where there is none."""
    if isinstance(content, bytes):
        return content
    try:
        return bytes.fromhex(text(content).removeprefix("0x"))
    except ValueError as exc:
        raise InvalidSpanError("id is not hex") from exc


def text(content: object) -> str:
    """Return a text; empty where there is none."""
    if not isinstance(content, str | None):
        raise InvalidSpanError("a text is none")
    return content or ""


def as_object(content: object) -> Object:
    """Return an object; empty where there is none."""
    if not isinstance(content, dict | None):
        raise InvalidSpanError("an object is none")
    return content or {}


def _items(record: Object, key: str) -> list[Any]:
    content = record.get(key)
    return content if isinstance(content, list) else []
