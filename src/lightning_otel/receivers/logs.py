"""Log records of OTLP about model calls, as spans beside those that they belong to.

A record of an official instrumentation's event becomes a span without length below its call, whose
content the adapter joins with the call's; single messages are the events of one such span. Other
logs are not stored.

Source: OTLP 1.x, ``LogRecord``; the GenAI semantic conventions, events ``gen_ai.*``, of today
(``gen_ai.client.inference.operation.details``) and up to 1.36 (``gen_ai.user.message`` and others).
"""

from collections.abc import Iterable, Iterator, Mapping
from hashlib import sha256
from typing import Any, Final, NamedTuple

from lightning_otel.messages import object_of, objects
from lightning_otel.receivers import Rejected, RequestLimits, otlp
from lightning_otel.receivers.otlp import DecodedAttributes, InvalidSpanError, Object
from lightning_otel.types import Span
from lightning_otel.types import conventions as c

_EVENTS: Final = "gen_ai."
_MESSAGES: Final = frozenset(
    {
        "gen_ai.choice",
        *(f"gen_ai.{role}.message" for role in ("system", "user", "assistant", "tool")),
    }
)
_OTHER: Final = "the log record tells of no model call; only spans and GenAI events are kept"
_OUTSIDE: Final = "the log record belongs to no span; enable tracing beside logs"


class Log(NamedTuple):
    """A log record, whatever it was decoded from; ids are hex."""

    name: str
    time_ns: int
    trace_id: str
    span_id: str
    attributes: Mapping[str, Any]
    body: Any
    otel_resource: dict[str, Any]
    scope: str


def decode_logs(body: bytes, came: str, limits: RequestLimits) -> Iterator[Span | Rejected]:
    """Return spans of the records of a log request in JSON.

    Raises:
        TooLargeError: It holds more than it may; nothing was decoded.
        ReceiveError: It is no such JSON.
    """
    return read_logs(decode_request(otlp.load_request(body, limits)), came, limits)


def decode_request(request: Object) -> Iterator[Log | Rejected]:
    """Yield the records of a log request in JSON."""
    for in_resource in objects(request.get("resourceLogs")):
        for in_scope in objects(in_resource.get("scopeLogs")):
            scope = object_of(in_scope.get("scope")).get("name")
            for record in objects(in_scope.get("logRecords")):
                try:
                    otel_resource = otlp.read_attributes(object_of(in_resource.get("resource")))
                    attributes = otlp.read_attributes(record)
                    body = otlp.read_value(record.get("body"))
                    yield make_log(record, attributes, body, otel_resource, scope)
                except InvalidSpanError as exc:
                    yield Rejected(str(exc))


def make_log(
    record: Object, attributes: Mapping[str, Any], body: Any, otel_resource: dict[str, Any],
    scope: object,
) -> Log:  # fmt: skip
    """Return a record of decoded parts.

    Raises:
        InvalidSpanError: Its time or name is none.
    """
    times = (record.get("timeUnixNano"), record.get("observedTimeUnixNano"))
    sent = [otlp.read_integer(time, "time of a log record") for time in times]
    name = otlp.text(record.get("eventName") or attributes.get("event.name"))
    trace_id, span_id = (otlp.read_id_bytes(record.get(key)).hex() for key in ("traceId", "spanId"))
    scope = scope if isinstance(scope, str) else ""
    time_ns = sent[0] or sent[1]
    return Log(name, time_ns, trace_id, span_id, attributes, body, otel_resource, scope)


def read_logs(
    records: Iterable[Log | Rejected], came: str, limits: RequestLimits
) -> Iterator[Span | Rejected]:
    """Yield spans of the records that tell of model calls; others are rejected."""
    calls: dict[tuple[str, str, str], list[Log]] = {}
    for record in records:
        if isinstance(record, Rejected):
            yield record
        elif not record.name.startswith(_EVENTS):
            yield Rejected(_OTHER)
        elif not record.trace_id or not record.span_id:
            yield Rejected(_OUTSIDE)
        elif record.name in _MESSAGES:
            calls.setdefault((record.trace_id, record.span_id, record.scope), []).append(record)
        else:
            attributes = {**object_of(record.body), **record.attributes}
            yield _make_span(record, attributes, [], came, limits)
    for messages in calls.values():
        attributes = {c.OPERATION: c.CHAT, **messages[-1].attributes}
        yield _make_span(messages[-1], attributes, messages, came, limits)


def _make_span(
    record: Log,
    attributes: Mapping[str, Any],
    messages: list[Log],
    came: str,
    limits: RequestLimits,
) -> Span | Rejected:
    events = [
        {
            "name": message.name,
            "timeUnixNano": message.time_ns,
            "attributes": DecodedAttributes({**message.attributes, **object_of(message.body)}),
        }
        for message in messages
    ]
    place = f"{record.trace_id} {record.span_id} {record.name} {record.time_ns} {len(messages)}"
    fields = {
        "traceId": record.trace_id,
        "spanId": sha256(place.encode()).digest()[: otlp.SPAN_ID_BYTES],
        "parentSpanId": record.span_id,
        "name": record.name,
        "startTimeUnixNano": record.time_ns,
        "endTimeUnixNano": record.time_ns,
        "attributes": DecodedAttributes(attributes),
        "events": events,
    }
    # Another make than that of the call: it is another record of the same request.
    scope = f"{record.scope} (logs)"
    try:
        return otlp.read_span(fields, record.otel_resource, scope, came, limits)
    except InvalidSpanError as exc:
        return Rejected(str(exc))
