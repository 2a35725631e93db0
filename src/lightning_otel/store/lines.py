"""A span's record as one line of JSON, of bounded length whatever stands in it."""

import hashlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import orjson

from lightning_otel.redact.secrets import scrub, scrub_attributes, scrub_error
from lightning_otel.store.schema import BODY_COLUMNS, NARROW_COLUMNS, Record, set_hot_columns
from lightning_otel.types import conventions as c
from lightning_otel.types.values import (
    describe_exception,
    json_text,
    make_attributes_plain,
    name_text,
    parse_json,
    repair_text,
    text_or_none,
    time_of,
    write_json,
)

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

MAX_RECORD_BYTES: Final = 8 << 20
"""A longer line would abort every reader's query."""
_CUT_TO: Final = (1 << 20, 1 << 16, 1 << 12, 1 << 8)
_MAX_RESOURCE: Final = 1 << 16
RESERVED_BYTES: Final = 1024
"""Length of a reserved line: the longest counts that there are fit."""
_CHECK: Final = b',"crc":"'
_CHECK_BYTES: Final = len(_CHECK) + len('00000000"}')
_SIMPLE: Final = frozenset({str, int, bool})
_TEXTS: Final = frozenset({str, type(None)})
_START_TEXTS: Final = (
    c.OPERATION, c.AGENT_NAME, c.REQUEST_MODEL, c.ROLLOUT_ID, c.ATTEMPT_ID,
)  # fmt: skip
"""Attributes that a start's hot columns hold."""
_MOST_SIMPLE: Final = 128
"""Attributes, as the SDK limits them; the texts of more are summed up before they are written."""
_WORDS: Final = (c.INPUT_MESSAGES, c.OUTPUT_MESSAGES, c.SYSTEM_INSTRUCTIONS, c.TOOL_DEFINITIONS)
NO_BODY: Final[Mapping[str, str]] = MappingProxyType({})
_Text = tuple[dict[str, Any], str, str, str]
"""Where a text stands, under which key, how the note on what was cut calls it, and the text."""


def build_start_record(
    span: "ReadableSpan",
    process: str,
    sequence: int,
    otel_resource: object,
    stamps: Mapping[str, Any],
) -> Record:
    """Return the record of a span of the SDK that just started.

    Stamps are attributes for the record alone, where the span has none of that name.
    """
    context, parent, scope, name = span.context, span.parent, span.instrumentation_scope, span.name
    attributes = scrub_attributes(copy_attributes(span.attributes, stamps))
    texts = list(map(attributes.get, _START_TEXTS))
    if not _TEXTS.issuperset(map(type, texts)):
        texts = list(map(text_or_none, texts))
    operation, agent, model, rollout_id, attempt_id = texts
    return {
        "record": "start",
        "trace_id": f"{context[0]:032x}",
        "span_id": f"{context[1]:016x}",
        "parent_span_id": None if parent is None else f"{parent[1]:016x}",
        "kind": getattr(span.kind, "_name_", "INTERNAL"),
        "start_ns": time_of(span.start_time),
        "scope": "" if scope is None else name_text(scope.name),
        "process": process,
        "sequence": sequence,
        "name": scrub(name if type(name) is str else name_text(name)),
        "end_ns": None,
        "status": "UNSET",
        "status_message": "",
        "end_sequence": -1,
        "operation": operation,
        "agent": agent,
        "model": model,
        "rollout_id": rollout_id,
        "attempt_id": attempt_id,
        "attributes": attributes,
        "events": [],
        "otel_resource": otel_resource,
    }


def complete_record(
    record: Record,
    span: "ReadableSpan",
    stamps: Mapping[str, Any],
    body: Mapping[str, str],
    end_sequence: int,
) -> None:
    """Turn the record of a span's start into that of the whole span and its content."""
    name, status, events, links = span.name, span.status, span.events, span.links
    attributes = copy_attributes(span.attributes, stamps)
    record["attributes"] = attributes = scrub_attributes(attributes, record["attributes"])
    if body:
        attributes.update(body)
    if span.dropped_attributes or span.dropped_events or span.dropped_links:
        attributes[c.CUT] = json_text(_dropped_by_sdk(span))
    record["record"] = "span"
    if name is not record["name"]:
        record["name"] = name = scrub(name if type(name) is str else name_text(name))
    record["end_ns"] = time_of(span.end_time)
    record["status"] = status.status_code._name_
    if status.description:
        record["status_message"] = scrub_error(name_text(status.description))
    record["end_sequence"] = end_sequence
    stack = attributes.pop(c.EXCEPTION_STACKTRACE) if c.EXCEPTION_STACKTRACE in body else None
    if events:
        record["events"] = [
            {
                "name": scrub(name_text(event.name)),
                "time_ns": time_of(event.timestamp),
                "attributes": scrub_attributes(copy_attributes(event.attributes)),
            }
            for event in events
        ]
    if stack is not None:  # content, which is not on the span where others see it
        details = describe_exception(attributes.get(c.ERROR_TYPE), record["status_message"], stack)
        event = {"name": c.EVENT_EXCEPTION, "time_ns": record["end_ns"], "attributes": details}
        record["events"] = [*record["events"], event]
    record["links"] = links and [
        {
            "trace_id": f"{link.context.trace_id:032x}",
            "span_id": f"{link.context.span_id:016x}",
            "attributes": scrub_attributes(copy_attributes(link.attributes)),
        }
        for link in links
    ]
    set_hot_columns(record, name, record["scope"], attributes, record["otel_resource"])


def copy_attributes(attributes: Any, stamps: Mapping[str, Any] = NO_BODY) -> dict[str, Any]:
    """Return the attributes of a span, event or link as a dict of one's own, and its stamps."""
    # Ten times as fast as dict(), which asks the SDK's mapping for one key after the other.
    try:
        copy = attributes.copy()
    except AttributeError:
        copy = attributes or ()
    if type(copy) is not dict:
        copy = dict(copy)
    for key in stamps:
        if key not in copy:
            copy[key] = stamps[key]
    return copy


def _dropped_by_sdk(span: "ReadableSpan") -> dict[str, Any]:
    return {
        name: {"length": len(items or ()) + dropped, "kept": len(items or ())}
        for name, items, dropped in (
            ("attributes", span.attributes, span.dropped_attributes),
            ("events", span.events, span.dropped_events),
            ("links", span.links, span.dropped_links),
        )
        if dropped
    }


def format_line(record: Record) -> bytes:
    """Return a record, which is consumed, as one line of JSON of at most 8 MiB.

    What is too large is cut, and the attribute ``lightning.cut`` says how much there was.
    """
    attributes = record["attributes"]
    if len(attributes) > _MOST_SIMPLE or record.get("events") or record.get("links"):
        return _long_line_of(record)
    for value in attributes.values():
        kind = type(value)
        if kind not in _SIMPLE and not (
            (kind is tuple and _SIMPLE.issuperset(map(type, value)))
            or (kind is float and isfinite(value))
        ):
            return _long_line_of(record)
    try:
        body = orjson.dumps(record, None, orjson.OPT_PASSTHROUGH_SUBCLASS)[:-1]
    except (TypeError, ValueError):  # a text to be repaired, or an integer beyond 64 bits
        return _long_line_of(record)
    line = body + b',"crc":"%08x"}\n' % zlib.crc32(body)
    return line if len(line) <= MAX_RECORD_BYTES else _long_line_of(record)


def _long_line_of(record: Record) -> bytes:
    size = make_attributes_plain(record["attributes"])
    for column in BODY_COLUMNS:
        if column in record:
            size += len(record[column])
    for item in (*record.get("events", ()), *record.get("links", ())):
        size += make_attributes_plain(item["attributes"])
    if size <= MAX_RECORD_BYTES:
        line = append_checksum(write_json(record))
        if len(line) <= MAX_RECORD_BYTES:
            return line
    return _cut_line(record)


def parse_line(line: bytes) -> Record:
    """The record of a line; empty where it is torn or damaged, or no record at all."""
    line = line.rstrip()
    if is_corrupt(line):
        return {}
    try:
        record: Any = orjson.loads(line)
    except ValueError:  # its process is still writing it, or died of it
        return {}
    if not isinstance(record, dict):
        return {}
    record.pop("crc", None)
    return record


def read_records(path: Path, texts: Sequence[bytes] = (), offset: int = 0) -> Iterator[Record]:
    """Yield the records of a segment's lines, or of those that hold one of some texts."""
    with path.open("rb") as file:
        file.seek(offset)
        for line in file:
            if not texts or any(text in line for text in texts):
                yield parse_line(line)


def append_checksum(text: bytes) -> bytes:
    """Return a JSON object as a line that ends with the CRC-32 of all before it."""
    body = text[:-1]
    return body + b',"crc":"%08x"}\n' % zlib.crc32(body)


def is_sound(line: bytes) -> bool:
    """Return whether a whole line ends with the CRC-32 of all before it."""
    head = -_CHECK_BYTES - 1
    return line[head:] == b',"crc":"%08x"}\n' % zlib.crc32(line[:head])


def is_corrupt(line: bytes) -> bool:
    """Say whether a line, without its end, is not as its CRC-32 says; older lines have none."""
    body = line[:-_CHECK_BYTES]
    if line[len(body) : len(body) + len(_CHECK)] != _CHECK:
        return False
    return line[len(body) + len(_CHECK) :] != b'%08x"}' % zlib.crc32(body)


def format_control_line(record: str, **fields: Any) -> bytes:
    """A line that is no span: a seal, or a count of spans lost."""
    return append_checksum(orjson.dumps({"record": record, **fields}))


def format_reserved_line(counts: Mapping[str, int]) -> bytes:
    """Return a count's line that is as long as any other, so that one may replace another."""
    text = orjson.dumps({"record": "count", "counts": counts})
    return append_checksum(text[:-1].ljust(RESERVED_BYTES - _CHECK_BYTES - 1) + text[-1:])


def _cut_line(record: Record) -> bytes:
    record = {**record}  # a span's end goes on with that of its start
    texts = _list_texts(record)
    lengths = [len(text) for _, _, _, text in texts]
    for limit in _CUT_TO:
        if sum([min(length, limit) for length in lengths]) > MAX_RECORD_BYTES:
            continue
        _cut_texts(record, texts, limit)
        for item in (record, *record.get("events", ()), *record.get("links", ())):
            item["attributes"] = scrub_attributes(item["attributes"])
        for column, key in BODY_COLUMNS.items():
            if column in record and key in _WORDS:
                record[column] = scrub(record[column])
        line = append_checksum(write_json(record))
        if len(line) <= MAX_RECORD_BYTES:
            return line
    return _skeleton_line(repair_text(record))


def _list_texts(record: Record) -> list[_Text]:
    texts = [
        (record, column, BODY_COLUMNS.get(column, column), text)
        for column, text in record.items()
        if type(text) is str
    ]
    holders = {"": record["attributes"]}
    for name in ("events", "links"):
        for index, item in enumerate(record.get(name, ())):
            holders[f"{name}.{index}."] = item["attributes"]
    for prefix, holder in holders.items():
        for key, value in holder.items():
            if isinstance(value, (str, list, dict)):
                text = value if isinstance(value, str) else json_text(value)
                texts.append((holder, key, prefix + key, text))
    return texts


def _cut_texts(record: Record, texts: list[_Text], limit: int) -> None:
    attributes = record["attributes"]
    # Of what was cut before, or of the span that this one is a copy of.
    value = parse_json(attributes.get(c.CUT))
    note: dict[str, Any] = value if isinstance(value, dict) else {}
    for holder, key, name, text in texts:
        if len(text) > limit:
            holder[key] = prefix = scrub(text[:limit])
            digest = hashlib.sha256(prefix.encode("utf-8", "replace")).hexdigest()
            length = note.get(name, {}).get("length", len(text))
            note[name] = {"length": length, "kept": len(prefix), "sha256": digest}
    if note:
        attributes[c.CUT] = json_text(note)


def _skeleton_line(record: Record) -> bytes:
    """Return the rest of a span with more attributes or events than a line can hold."""
    resource = orjson.dumps(record["otel_resource"])
    note = {
        name: {"length": len(record.get(name, ())), "kept": 0}
        for name in ("attributes", "events", "links")
    }
    skeleton: Record = {
        **{column: record.get(column) for column in ("record", *NARROW_COLUMNS)},
        "attributes": {c.CUT: json_text(note)},
        "events": [],
        "links": [],
        "otel_resource": orjson.Fragment(resource if len(resource) <= _MAX_RESOURCE else b"{}"),
    }
    return append_checksum(orjson.dumps(skeleton))
