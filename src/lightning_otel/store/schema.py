"""The columns of a stored span, and a span's way into a record and back.

A record is one JSON object whose fields are the store's columns. Hot columns are typed copies of
attributes, of a foreign convention as its reader has them. No DuckDB: the traced process uses it.
"""

from collections.abc import Mapping
from typing import Any, Final

import orjson

from lightning_otel.adapter import readers
from lightning_otel.adapter.attributes import to_number
from lightning_otel.types import Event, Link, Span
from lightning_otel.types import conventions as c
from lightning_otel.types.transitions import fast_constructor
from lightning_otel.types.values import name_text, text_or_none, time_of

BODY_COLUMNS: Final = {
    "input_messages": c.INPUT_MESSAGES,
    "output_messages": c.OUTPUT_MESSAGES,
    "system_instructions": c.SYSTEM_INSTRUCTIONS,
    "tool_definitions": c.TOOL_DEFINITIONS,
    "prompt_token_ids": c.PROMPT_TOKEN_IDS,
    "response_token_ids": c.RESPONSE_TOKEN_IDS,
    "response_logprobs": c.RESPONSE_LOGPROBS,
}

NARROW_COLUMNS: Final = {
    "trace_id": "VARCHAR",
    "span_id": "VARCHAR",
    "parent_span_id": "VARCHAR",
    "name": "VARCHAR",
    "kind": "VARCHAR",
    "start_ns": "BIGINT",
    "end_ns": "BIGINT",
    "status": "VARCHAR",
    "status_message": "VARCHAR",
    "operation": "VARCHAR",
    "agent": "VARCHAR",
    "provider": "VARCHAR",
    "model": "VARCHAR",
    "response_id": "VARCHAR",
    "input_tokens": "BIGINT",
    "output_tokens": "BIGINT",
    "rollout_id": "VARCHAR",
    "attempt_id": "VARCHAR",
    "reward": "DOUBLE",
    "process": "VARCHAR",
    "sequence": "BIGINT",
    "end_sequence": "BIGINT",
    "scope": "VARCHAR",
}
WIDE_COLUMNS: Final = {
    "attributes": "JSON",
    "events": "JSON",
    "links": "JSON",
    "otel_resource": "JSON",
    **dict.fromkeys(BODY_COLUMNS, "VARCHAR"),
}
COLUMNS: Final = {**NARROW_COLUMNS, **WIDE_COLUMNS}
"""Every column of the ``spans`` view and its type, in order."""

SPAN_COLUMNS: Final = tuple(
    name
    for name in COLUMNS
    if name not in ("agent", "provider", "model", "response_id", "input_tokens", "output_tokens",
                    "rollout_id", "attempt_id", "reward")
)  # fmt: skip
"""The columns that a span is built of, and ``operation``; the others repeat its attributes."""
_HOT_TEXTS: Final = (
    c.OPERATION, c.AGENT_NAME, c.PROVIDER, c.RESPONSE_ID, c.RESPONSE_MODEL, c.REQUEST_MODEL,
    c.ROLLOUT_ID, c.ATTEMPT_ID,
)  # fmt: skip
_HOT_NUMBERS: Final = (c.INPUT_TOKENS, c.OUTPUT_TOKENS, c.REWARD_VALUE)
_BODY_KEYS: Final = {key: column for column, key in BODY_COLUMNS.items()}
_TEXTS: Final = frozenset({str, type(None)})
_INT64: Final = range(-(1 << 63), 1 << 63)

Record = dict[str, Any]


def set_hot_columns(
    record: Record, name: str, scope: str, attributes: dict[str, Any], otel_resource: object
) -> None:
    """Set a span's hot columns and message bodies; the latter are taken out of the attributes.

    A hot column of the wrong type stays empty: DuckDB would step over the whole line.
    """
    summary: Mapping[str, Any] = attributes
    if scope != c.SCOPE:
        resource = otel_resource if isinstance(otel_resource, Mapping) else {}
        summary = readers.summary(name, scope, attributes, resource)
    texts = list(map(summary.get, _HOT_TEXTS))
    if not _TEXTS.issuperset(map(type, texts)):
        texts = list(map(text_or_none, texts))
    record["operation"], record["agent"], record["provider"], record["response_id"] = texts[:4]
    if name == c.SPAN_ROLLOUT and texts[0] in c.CALL_OPERATIONS:
        record["operation"] = None  # of a call within it, as the adapter's is_call says
    record["model"] = texts[4] or texts[5]
    record["rollout_id"], record["attempt_id"] = texts[6] or None, texts[7] or None
    sent, received, reward = map(summary.get, _HOT_NUMBERS)
    record["input_tokens"] = sent if type(sent) is int and sent in _INT64 else None
    record["output_tokens"] = received if type(received) is int and received in _INT64 else None
    record["reward"] = None if reward is None else to_number(reward)
    for key in list(filter(_BODY_KEYS.__contains__, attributes)):
        # On the span of a foreign shape, it stays where any shape can be.
        if type(attributes[key]) is str:
            record[_BODY_KEYS[key]] = attributes.pop(key)


def build_span(record: Mapping[str, Any]) -> Span:
    """The span a record (a parsed line, or a row of the view) stands for."""
    attributes = _read_object(record.get("attributes"))
    for column, key in BODY_COLUMNS.items():
        text = record.get(column)
        if text is not None:
            attributes[key] = text
    # Lists, as most are empty, and a generator is not made for nothing.
    events = [
        Event(item["name"], item["time_ns"], item["attributes"])
        for item in _read_list(record.get("events"))
    ]
    links = [
        Link(item["trace_id"], item["span_id"], item["attributes"])
        for item in _read_list(record.get("links"))
    ]
    # By position, in the order of the fields, as spans are many.
    span: Span = fast_constructor(Span)(
        record["trace_id"], record["span_id"], record["parent_span_id"], record["name"],
        record["start_ns"], record["end_ns"], record["kind"], record["status"],
        record["status_message"] or "", attributes, tuple(events), tuple(links),
        _read_object(record.get("otel_resource")), record["scope"] or "",
        record["process"] or "", record["sequence"], record["end_sequence"],
    )  # fmt: skip
    return span


def build_record(span: Span) -> Record:
    """The record of a span of ours: the inverse of :func:`build_span`."""
    name, scope, resource = name_text(span.name), name_text(span.scope), dict(span.otel_resource)
    attributes = dict(span.attributes)
    record: Record = {
        "record": "span",
        "trace_id": span.trace_id,
        "span_id": span.span_id,
        "parent_span_id": span.parent_span_id,
        "kind": span.kind,
        "start_ns": time_of(span.start_ns),
        "scope": scope,
        "process": span.process,
        "sequence": span.sequence,
        "name": name,
        "end_ns": None if span.end_ns is None else time_of(span.end_ns),
        "status": span.status,
        "status_message": name_text(span.status_message),
        "end_sequence": span.end_sequence,
        "attributes": attributes,
        "events": [
            {"name": event.name, "time_ns": event.time_ns, "attributes": dict(event.attributes)}
            for event in span.events
        ],
        "links": [
            {"trace_id": link.trace_id, "span_id": link.span_id,
             "attributes": dict(link.attributes)}
            for link in span.links
        ],
        "otel_resource": resource,
    }  # fmt: skip
    set_hot_columns(record, name, scope, attributes, resource)
    return record


def _read_object(value: Any) -> dict[str, Any]:
    if type(value) is str:
        return orjson.loads(value) or {}
    return dict(value) if value else {}


def _read_list(value: Any) -> list[Any]:
    if type(value) is str:
        return orjson.loads(value) if len(value) > 2 else []
    return value or []
