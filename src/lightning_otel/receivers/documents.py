"""Documents of a file of spans, whichever of the known forms each has.

A document is a line, or a whole file of JSON: a trace request of OTLP as a Collector's file
exporter writes it, a span as ``export spans`` and the SDK print it, a span or a page of spans of
Agent Lightning 0.3, or a list of those.

Spans of the last two become OTLP's own. What the SDK does not print stands under one key of ours.
Agent Lightning's come from ``mongoexport`` of the ``spans`` collection, from the answer of
``GET /v1/agl/spans``, or from ``Span.model_dump_json()``.
Source: ``opentelemetry.sdk.trace.ReadableSpan.to_json``; ``agentlightning/types/tracer.py`` and
``store/collection/mongo.py`` of Agent Lightning 0.3.0.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

import orjson

from lightning_otel.errors import ReceiveError
from lightning_otel.messages import object_of, objects
from lightning_otel.receivers import (
    Rejected,
    RequestLimits,
    atif,
    chats,
    jaeger,
    logs,
    otlp,
    platforms,
)
from lightning_otel.receivers.builder import IMPORTED, parse_time
from lightning_otel.receivers.otlp import (
    KINDS,
    SPAN_ID_BYTES,
    STATUSES,
    TIMES,
    TRACE_ID_BYTES,
    DecodedAttributes,
    InvalidSpanError,
    Object,
    as_object,
    read_id_bytes,
    read_integer,
    text,
)
from lightning_otel.types import Span
from lightning_otel.types import conventions as c

FILE_LIMITS: Final = RequestLimits(body_bytes=256 << 20, messages=5_000_000, attributes=5_000_000)
"""Of one document: a file that the user names is trusted further than a sender."""
OURS: Final = "lightning_otel"
"""The key under which stands what the SDK does not print."""
_RECORDED: Final = "the store recorded this attempt itself"
_UNKNOWN: Final = (
    "neither OTLP JSON nor a span of the SDK's, Agent Lightning 0.3 or another tool{guess}"
)
_OTHERS: Final = {
    "resourceMetrics": ("OTLP metrics", "send traces"),
    "conversations": ("ShareGPT's", "write its turns as messages with role and content"),
    "chosen": ("preferences", "write prompt and completion of the better answer"),
    "preferred_output": ("preferences", "write prompt and completion of the better answer"),
    "custom_id": ("half of a batch of requests", "put request and response into one row"),
    "localEndpoint": ("Zipkin's", "send it through a Collector, which writes OTLP JSON"),
    "op_name": ("Weave's", "export its spans by OTLP"),
    "trajectory": ("SWE-agent's", "record its runs with: lightning-otel run"),
    "samples": ("a log of Inspect", "write each sample's messages as a row"),
    "history": ("OpenHands'", "record its runs with: lightning-otel run"),
    "sessionId": ("a coding agent's", "only sessions of Claude Code and Codex are read"),
    "messages": ("messages without roles", "give each a role and content"),
}
"""By a field what a document that is not read seems to be, and what to do with it."""
_LISTS: Final = (
    "items", "data", "runs", "feedback", "observations", "scores", "spans", "annotations",
)  # fmt: skip
_MARKS: Final = ("resourceSpans", "resourceLogs", "schema_version")
_IDS: Final = {"traceId": "trace_id", "spanId": "span_id"}
_STORED_FIELDS: Final = ("rollout_id", "attempt_id", "sequence_id", "span_id")
"""Fields by which a span of Agent Lightning is known."""
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


def decode_spans(
    body: bytes, is_recorded: Callable[[Span], bool] = lambda span: False
) -> Iterator[Span | Rejected]:
    """Return the spans of a document, one by one.

    Args:
        body: The document.
        is_recorded: Whether the attempt of an ATIF document's span was recorded in the target
            store: its own spans are there, with other ids.

    Raises:
        TooLargeError: It is larger than a document may be.
        ReceiveError: It is no JSON, or of no known form.
    """
    document = otlp.load_json(body, FILE_LIMITS)
    items = document if isinstance(document, list) else [document]
    records = [record for item in items for part in _unfold(item) for record in _unfold(part)]
    if records == [document] and not _is_known(document):
        raise ReceiveError(_explain_unknown(document))
    return (span for record in records for span in _read_spans(record, is_recorded))


def _explain_unknown(document: object) -> str:
    kinds = (kind for field, kind in _OTHERS.items() if field in object_of(document))
    kind, hint = next(kinds, ("", ""))
    return _UNKNOWN.format(guess=f" (it seems to be {kind}: {hint})" if kind else "")


def _unfold(document: object) -> list[object]:
    if not isinstance(document, dict):
        return [document]
    if "resourceSpans" in object_of(document.get("result")):  # Jaeger's API of version 3
        return [document["result"]]
    document = jaeger.open_trace(platforms.open_trace(document))
    lists = [name for name in _LISTS if isinstance(document.get(name), list)]
    fields = {name: value for name, value in document.items() if name not in lists}
    alone = [fields] if _is_known(fields) or not lists else []
    return [*alone, *(record for name in lists for record in document[name])]


def _is_known(document: object) -> bool:
    if not isinstance(document, dict):
        return False
    is_printed = "trace_id" in object_of(document.get("context")) and "start_time" in document
    is_ours = is_printed or any(mark in document for mark in _MARKS) or _is_stored(document)
    is_theirs = all(mark in document for mark in jaeger.MARKS) or chats.is_chat(document)
    return is_ours or is_theirs or bool(platforms.find_tool(document))


def _is_stored(document: Object) -> bool:
    return all(field in document for field in _STORED_FIELDS)


def _read_spans(document: object, is_recorded: Callable[[Span], bool]) -> Iterator[Span | Rejected]:
    if not isinstance(document, dict) or not _is_known(document):
        yield Rejected(_explain_unknown(document))
        return
    try:
        if "resourceSpans" in document:
            yield from otlp.decode_request(document, IMPORTED, FILE_LIMITS)
        elif "resourceLogs" in document:
            yield from logs.read_logs(logs.decode_request(document), IMPORTED, FILE_LIMITS)
        elif "schema_version" in document:
            spans = atif.read_trajectory(document)
            first = next(spans)
            if is_recorded(first):
                yield Rejected(_RECORDED, is_known=True)
                return
            yield first
            yield from spans
        elif tool := platforms.find_tool(document):
            yield from platforms.read_record(document, tool)
        elif all(mark in document for mark in jaeger.MARKS):
            yield jaeger.read_span(document, IMPORTED, FILE_LIMITS)
        elif chats.is_chat(document):
            yield from chats.read_row(document)
        else:
            yield span_of(document, IMPORTED)
    except (InvalidSpanError, RecursionError, orjson.JSONEncodeError) as exc:
        yield Rejected(str(exc))


def span_of(document: Object, came: str) -> Span | Rejected:
    """Return a span that the SDK printed or Agent Lightning 0.3 stored, or its rejection."""
    try:
        is_stored = _is_stored(document)
        return _read_printed(_to_printed(_relax_value(document)) if is_stored else document, came)
    except InvalidSpanError as exc:
        return Rejected(str(exc))
    except RecursionError:
        return Rejected("attribute value is nested too deep")


def _read_printed(printed: Object, came: str) -> Span:
    context, status, ours = (object_of(printed.get(key)) for key in ("context", "status", OURS))
    start_ns = _read_printed_time(printed.get("start_time"), ours.get("start_ns"))
    end_ns = _read_printed_time(printed.get("end_time"), ours.get("end_ns"))
    events, times_ns = objects(printed.get("events")), ours.get("events_ns")
    if not isinstance(times_ns, list) or len(times_ns) != len(events):
        times_ns = [None] * len(events)
    kind, code = text(printed.get("kind")).rpartition(".")[2], status.get("status_code")
    fields = {
        **{key: context.get(name) for key, name in _IDS.items()},
        "parentSpanId": printed.get("parent_id"),
        "name": printed.get("name"),
        "startTimeUnixNano": start_ns,
        "endTimeUnixNano": end_ns,
        "kind": KINDS.index(kind) if kind in KINDS else 0,
        "status": {
            "code": STATUSES.index(code) if code in STATUSES else 0,
            "message": status.get("description"),
        },
        "attributes": DecodedAttributes(as_object(printed.get("attributes"))),
        "events": [
            {
                "name": event.get("name"),
                "timeUnixNano": _read_printed_time(event.get("timestamp"), exact),
                "attributes": DecodedAttributes(object_of(event.get("attributes"))),
            }
            for event, exact in zip(events, times_ns, strict=True)
        ],
        "links": [
            {
                **{key: object_of(link.get("context")).get(name) for key, name in _IDS.items()},
                "attributes": DecodedAttributes(object_of(link.get("attributes"))),
            }
            for link in objects(printed.get("links"))
        ],
    }
    otel_resource = dict(object_of(object_of(printed.get("resource")).get("attributes")))
    span = otlp.read_span(fields, otel_resource, text(ours.get("scope")), came, FILE_LIMITS)
    return replace(
        span,
        end_ns=span.end_ns if end_ns else None,
        process=text(ours.get("process")) or span.process,
        sequence=_read_position(ours.get("sequence")),
        end_sequence=_read_position(ours.get("end_sequence")),
    )


def _read_printed_time(printed: object, exact: object) -> int:
    return parse_time((text(printed) or None) if exact is None else exact)


def _read_position(content: object) -> int:
    position = -1 if content is None else read_integer(content, "sequence")
    return position if position in TIMES or not position else -1


def _to_printed(record: Object) -> Object:
    ids = zip((c.ROLLOUT_ID, c.ATTEMPT_ID, c.SEQUENCE_ID), _STORED_FIELDS, strict=False)
    names = {key: record[field] for key, field in ids if record[field] not in (None, "")}
    scope = _SCOPE.match(str(record.get("instrumentation_scope")))
    return {
        "context": _read_ids(record),
        "parent_id": _read_id(record.get("parent_id"), SPAN_ID_BYTES),
        "name": record.get("name"),
        "kind": str(record.get("kind")),
        "status": record.get("status"),
        "attributes": record.get("attributes"),
        "events": objects(record.get("events")),
        "links": [
            {**link, "context": _read_ids(object_of(link.get("context")))}
            for link in objects(record.get("links"))
        ],
        "resource": {
            "attributes": {
                **object_of(object_of(record.get("resource")).get("attributes")),
                **names,
            }
        },
        OURS: {
            "start_ns": _read_time(record.get("start_time")),
            "end_ns": _read_time(record.get("end_time")),
            "events_ns": [
                _read_time(event.get("timestamp")) for event in objects(record.get("events"))
            ],
            "scope": scope[1].strip() if scope else "",
        },
    }


def _read_ids(record: Object) -> Object:
    return {
        "trace_id": _read_id(record.get("trace_id"), TRACE_ID_BYTES),
        "span_id": _read_id(record.get("span_id"), SPAN_ID_BYTES),
    }


def _read_id(content: object, size: int) -> str:
    """Return an id; its Weave tracer writes UUIDs, of which a span keeps the random half."""
    raw_id = read_id_bytes(text(content).replace("-", ""))
    return (raw_id[-size:] if len(raw_id) == TRACE_ID_BYTES else raw_id).hex()


def _read_time(sent: object) -> int:
    """Return the nanoseconds of a time in seconds, exact to 0.2 microseconds; 0 for none."""
    if sent is None:
        return 0
    if isinstance(sent, bool) or not isinstance(sent, (int, float)) or not math.isfinite(sent):
        raise InvalidSpanError("time is no number")
    if sent > _SECONDS_UNTIL:
        return round(sent)
    whole = math.floor(sent)  # apart: their product would be rounded to 256 ns once more
    return whole * 1_000_000_000 + round((sent - whole) * 1_000_000_000)


def _relax_value(value: Any) -> Any:
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
        raise InvalidSpanError(f"{kind} is no number") from exc
