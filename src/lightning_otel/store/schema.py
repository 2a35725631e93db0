"""The columns of a stored span, and a span's way into a line and back.

One JSON object a line, whose fields are the store's columns; so DuckDB reads segments as they are.
Hot columns are typed and copied from the attributes, which always hold them too. Nothing in here
imports DuckDB.
"""

import base64
import hashlib
import math
from collections.abc import Mapping
from typing import Any, Final

import orjson

from lightning_otel import conventions as c
from lightning_otel.types import Event, Link, Span

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

MAX_RECORD_BYTES: Final = 8 << 20
"""A longer line would abort every reader's query."""
_CUT_TO: Final = (1 << 20, 1 << 16, 1 << 12)
_MAX_DEPTH: Final = 40
_INT64: Final = range(-(1 << 63), 1 << 63)
_JSON_INTS: Final = range(-(1 << 63), 1 << 64)
_DUMP: Final = orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS

Record = dict[str, Any]


def text_or_none(value: object) -> str | None:
    """The value if it is text: a hot column of another type would lose the whole line."""
    return value if type(value) is str else None


def _integer(value: object) -> int | None:
    return value if type(value) is int and value in _INT64 else None


def _number(value: object) -> float | None:
    # A bool is no reward, and a NaN or infinity has no JSON.
    if type(value) is int or type(value) is float:
        return float(value) if math.isfinite(value) else None
    return None


def record_of(
    *,
    trace_id: str,
    span_id: str,
    parent_span_id: str | None,
    name: str,
    kind: str,
    start_ns: int,
    end_ns: int | None,
    status: str,
    status_message: str,
    attributes: dict[str, Any],
    events: list[Record],
    links: list[Record],
    otel_resource: object,
    scope: str,
    process: str,
    sequence: int,
    end_sequence: int,
    body: Mapping[str, str],
) -> Record:
    """The columns of one span; ``attributes`` is consumed.

    A hot column of the wrong type stays empty: DuckDB would step over the whole line.
    """
    get = attributes.get
    record: Record = {
        "record": "start" if end_ns is None else "span",
        "trace_id": trace_id,
        "span_id": span_id,
        "parent_span_id": parent_span_id,
        "name": name,
        "kind": kind,
        "start_ns": start_ns,
        "end_ns": end_ns,
        "status": status,
        "status_message": status_message,
        "operation": text_or_none(get(c.OPERATION)),
        "agent": text_or_none(get(c.AGENT_NAME)),
        "provider": text_or_none(get(c.PROVIDER)),
        "model": text_or_none(get(c.RESPONSE_MODEL)) or text_or_none(get(c.REQUEST_MODEL)),
        "response_id": text_or_none(get(c.RESPONSE_ID)),
        "input_tokens": _integer(get(c.INPUT_TOKENS)),
        "output_tokens": _integer(get(c.OUTPUT_TOKENS)),
        "rollout_id": text_or_none(get(c.ROLLOUT_ID)),
        "attempt_id": text_or_none(get(c.ATTEMPT_ID)),
        "reward": _number(get(c.REWARD_VALUE)),
        "process": process,
        "sequence": sequence,
        "end_sequence": end_sequence,
        "scope": scope,
    }
    for column, key in BODY_COLUMNS.items():
        on_span = attributes.pop(key, None)
        text = body.get(key, on_span)
        if type(text) is str:
            record[column] = text
        elif text is not None:
            attributes[key] = text  # of a foreign shape: kept where any shape can be
    record["attributes"] = attributes
    record["events"] = events
    record["links"] = links
    record["otel_resource"] = otel_resource
    return record


def line_of(record: Record) -> bytes:
    """The record as one line of JSON of at most 8 MiB, whatever stands in it.

    Values JSON does not know take a text form: bytes become base64, NaN and infinities their names,
    integers beyond 64 bits their digits; invalid text is repaired.
    """
    attributes = record["attributes"]
    size = 0
    for key, value in attributes.items():
        kind = type(value)
        if kind is str:
            size += len(value)
        elif kind is float and not math.isfinite(value):
            attributes[key] = _name_of(value)
        elif kind is not int and kind is not bool and kind is not float:
            attributes[key] = value = _plain(value, 0)
            size += len(value) if type(value) is str else 0
    for column in BODY_COLUMNS:
        text = record.get(column)
        if text is not None:
            size += len(text)
    if size > MAX_RECORD_BYTES:
        _cut(record, _CUT_TO[0])
    try:
        line = orjson.dumps(record, option=_DUMP)
    except (TypeError, ValueError):
        line = orjson.dumps(_repaired(record), option=_DUMP)
    for limit in _CUT_TO:
        if len(line) <= MAX_RECORD_BYTES:
            break
        record = _repaired(record)
        _cut(record, limit)
        line = orjson.dumps(record, option=_DUMP)
    return line if len(line) <= MAX_RECORD_BYTES else _skeleton(record)


def fragment_of(attributes: Mapping[str, Any]) -> orjson.Fragment:
    """Attributes as ready JSON, for what stands on every span of a process."""
    return orjson.Fragment(orjson.dumps(_valid(_plain(attributes, 0))))


def _name_of(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _plain(value: object, depth: int) -> Any:
    """A value made of what JSON knows, of bounded depth, never calling into the value itself."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value) if value in _JSON_INTS else int.__repr__(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else _name_of(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return base64.b64encode(value).decode("ascii")
    if depth >= _MAX_DEPTH:
        return f"<{type(value).__name__} nested too deep>"
    if isinstance(value, Mapping):
        return {str(key): _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, depth + 1) for item in value]
    return f"<{type(value).__name__}>"


def _valid(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, dict):
        return {_valid(key): _valid(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_valid(item) for item in value]
    return value


def _repaired(record: Record) -> Record:
    whole = {key: value for key, value in record.items() if not isinstance(value, orjson.Fragment)}
    fragments = {key: value for key, value in record.items() if isinstance(value, orjson.Fragment)}
    return {**_valid(_plain(whole, 0)), **fragments}


def _cut(record: Record, limit: int) -> None:
    """Cut every text longer than the limit, keeping its length and the kept part's hash."""
    cut: dict[str, Any] = {}
    for holder, key, name in _texts(record):
        text = holder[key]
        if len(text) > limit:
            kept = text[:limit]
            digest = hashlib.sha256(kept.encode("utf-8", "replace")).hexdigest()
            holder[key] = kept
            cut[name] = {"length": len(text), "kept": limit, "sha256": digest}
    if cut:
        earlier = record["attributes"].get(c.CUT)
        whole = {**cut, **(orjson.loads(earlier) if earlier else {})}
        record["attributes"][c.CUT] = orjson.dumps(whole).decode()


def _texts(record: Record) -> list[tuple[dict[str, Any], str, str]]:
    found = [
        (record, column, key)
        for column, key in BODY_COLUMNS.items()
        if isinstance(record.get(column), str)
    ]
    holders = [record["attributes"], *(event["attributes"] for event in record["events"])]
    for holder in holders:
        found += [(holder, key, str(key)) for key, value in holder.items() if type(value) is str]
    found += [(record, key, key) for key in ("name", "status_message")]
    return found


def _skeleton(record: Record) -> bytes:
    """What is left of a span with more attributes or events than a line can hold."""
    counts = {name: len(record[name]) for name in ("attributes", "events", "links")}
    kept = {
        **{column: record[column] for column in NARROW_COLUMNS},
        "record": record["record"],
        "attributes": {c.CUT: orjson.dumps(counts).decode()},
        "events": [],
        "links": [],
        "otel_resource": record["otel_resource"],
    }
    return orjson.dumps(kept, option=_DUMP)


def span_of(record: Mapping[str, Any]) -> Span:
    """The span a record (a parsed line, or a row of the view) stands for."""
    attributes = _object(record.get("attributes"))
    for column, key in BODY_COLUMNS.items():
        text = record.get(column)
        if text is not None:
            attributes[key] = text
    return Span(
        trace_id=record["trace_id"],
        span_id=record["span_id"],
        parent_span_id=record["parent_span_id"],
        name=record["name"],
        start_ns=record["start_ns"],
        end_ns=record["end_ns"],
        kind=record["kind"],
        status=record["status"],
        status_message=record["status_message"] or "",
        attributes=attributes,
        events=tuple(
            Event(item["name"], item["time_ns"], item["attributes"])
            for item in _list(record.get("events"))
        ),
        links=tuple(
            Link(item["trace_id"], item["span_id"], item["attributes"])
            for item in _list(record.get("links"))
        ),
        otel_resource=_object(record.get("otel_resource")),
        scope=record["scope"] or "",
        process=record["process"] or "",
        sequence=record["sequence"],
        end_sequence=record["end_sequence"],
    )


def record_of_span(span: Span) -> Record:
    """The record of a span of ours: the inverse of :func:`span_of`."""
    return record_of(
        trace_id=span.trace_id,
        span_id=span.span_id,
        parent_span_id=span.parent_span_id,
        name=span.name,
        kind=span.kind,
        start_ns=span.start_ns,
        end_ns=span.end_ns,
        status=span.status,
        status_message=span.status_message,
        attributes=dict(span.attributes),
        events=[
            {"name": event.name, "time_ns": event.time_ns, "attributes": dict(event.attributes)}
            for event in span.events
        ],
        links=[
            {
                "trace_id": link.trace_id,
                "span_id": link.span_id,
                "attributes": dict(link.attributes),
            }
            for link in span.links
        ],
        otel_resource=dict(span.otel_resource),
        scope=span.scope,
        process=span.process,
        sequence=span.sequence,
        end_sequence=span.end_sequence,
        body={},
    )


def _object(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        value = orjson.loads(value)
    return dict(value) if value else {}


def _list(value: Any) -> list[Any]:
    if isinstance(value, str):
        return orjson.loads(value) if len(value) > 2 else []
    return value or []
