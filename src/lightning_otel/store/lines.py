"""A span's record as one line of JSON, of bounded length whatever stands in it."""

import hashlib
import zlib
from collections.abc import Mapping
from math import isfinite
from typing import Any, Final

import orjson

from lightning_otel import conventions as c
from lightning_otel.store.schema import BODY_COLUMNS, NARROW_COLUMNS, Record
from lightning_otel.store.values import json_of, make_plain, repaired

MAX_RECORD_BYTES: Final = 8 << 20
"""A longer line would abort every reader's query."""
_CUT_TO: Final = (1 << 20, 1 << 16, 1 << 12, 1 << 8)
_MAX_RESOURCE: Final = 1 << 16
RESERVED_BYTES: Final = 1024
"""Length of a reserved line: the longest counts that there are fit."""
START: Final = b'{"record":"start"'
"""Beginning of a started span's line."""
_CHECK: Final = b',"crc":"'
_CHECK_BYTES: Final = len(_CHECK) + len('00000000"}')
_SIMPLE: Final = frozenset({str, int, bool})
_MOST_SIMPLE: Final = 128
"""Attributes, as the SDK limits them; the texts of more are summed up before they are written."""
_Text = tuple[dict[str, Any], str, str, str]
"""Where a text stands, under which key, how the note on what was cut calls it, and the text."""


def line_of(record: Record) -> bytes:
    """Return the record as one line of JSON of at most 8 MiB; the record is consumed.

    What is too large is cut, and the attribute ``lightning.cut`` says how much there was.
    """
    if not record.get("events") and not record.get("links") and _is_simple(record["attributes"]):
        try:
            line = checked_line(orjson.dumps(record))
            if len(line) <= MAX_RECORD_BYTES:
                return line
        except (TypeError, ValueError):  # a text to be repaired, or an integer beyond 64 bits
            pass
    return _long_line_of(record)


def _is_simple(attributes: dict[str, Any]) -> bool:
    """Say whether JSON knows every value, as on nearly every span of the SDK."""
    if len(attributes) > _MOST_SIMPLE:
        return False
    kinds = set(map(type, attributes.values()))
    if kinds <= _SIMPLE:
        return True
    for value in attributes.values():
        kind = type(value)
        if kind is tuple:
            if not set(map(type, value)) <= _SIMPLE:
                return False
        elif kind not in _SIMPLE and not (kind is float and isfinite(value)):
            return False
    return True


def _long_line_of(record: Record) -> bytes:
    """Return the line of any record: each value made plain, and cut where it is too long."""
    size = make_plain(record["attributes"])
    for column in BODY_COLUMNS:
        if column in record:
            size += len(record[column])
    for item in (*record.get("events", ()), *record.get("links", ())):
        size += make_plain(item["attributes"])
    if size <= MAX_RECORD_BYTES:
        line = _dumped(record)
        if len(line) <= MAX_RECORD_BYTES:
            return line
    return _cut_line(record)


def parsed(line: bytes) -> Record:
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


def checked_line(text: bytes) -> bytes:
    """Return a JSON object as a line that ends with the CRC-32 of all before it."""
    body = text[:-1]
    return body + b',"crc":"%08x"}\n' % zlib.crc32(body)


def is_corrupt(line: bytes) -> bool:
    """Say whether a line, without its end, is not as its CRC-32 says; older lines have none."""
    body = line[:-_CHECK_BYTES]
    if line[len(body) : len(body) + len(_CHECK)] != _CHECK:
        return False
    return line[len(body) + len(_CHECK) :] != b'%08x"}' % zlib.crc32(body)


def control_line(record: str, **fields: Any) -> bytes:
    """A line that is no span: a seal, or a count of spans lost."""
    return checked_line(orjson.dumps({"record": record, **fields}))


def reserved_line(counts: Mapping[str, int]) -> bytes:
    """Return a count's line that is as long as any other, so that one may replace another."""
    text = orjson.dumps({"record": "count", "counts": counts})
    return checked_line(text[:-1].ljust(RESERVED_BYTES - _CHECK_BYTES - 1) + text[-1:])


def _cut_line(record: Record) -> bytes:
    """The line of a record too long to be whole: long texts cut, or all but the narrow columns."""
    texts = _texts(record)
    lengths = [len(text) for _, _, _, text in texts]
    for limit in _CUT_TO:
        if sum([min(length, limit) for length in lengths]) > MAX_RECORD_BYTES:
            continue
        _cut(record, texts, limit)
        line = _dumped(record)
        if len(line) <= MAX_RECORD_BYTES:
            return line
    return _skeleton(repaired(record))


def _dumped(record: Record) -> bytes:
    # To repair a record costs ten times what writing it does, and hardly any needs it.
    try:
        return checked_line(orjson.dumps(record))
    except (TypeError, ValueError):
        return checked_line(orjson.dumps(repaired(record)))


def _texts(record: Record) -> list[_Text]:
    """All that can be cut: texts, and lists and objects as their JSON."""
    found = [
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
                text = value if isinstance(value, str) else json_of(value)
                found.append((holder, key, prefix + key, text))
    return found


def _cut(record: Record, texts: list[_Text], limit: int) -> None:
    """Cut every text longer than the limit, keeping its length and the kept part's hash."""
    note = _note_of(record)
    for holder, key, name, text in texts:
        if len(text) > limit:
            holder[key] = kept = text[:limit]
            digest = hashlib.sha256(kept.encode("utf-8", "replace")).hexdigest()
            length = note.get(name, {}).get("length", len(text))
            note[name] = {"length": length, "kept": limit, "sha256": digest}
    if note:
        record["attributes"][c.CUT] = _json_of_note(note)


def _json_of_note(note: dict[str, Any]) -> str:
    try:
        return orjson.dumps(note).decode()
    except (TypeError, ValueError):  # a key of the span's that is no text
        return json_of(note)


def _note_of(record: Record) -> dict[str, Any]:
    """What was cut so far: here, or of the span this one is a copy of."""
    try:
        note = orjson.loads(record["attributes"].get(c.CUT, ""))
    except ValueError:
        return {}
    return note if isinstance(note, dict) else {}


def _skeleton(record: Record) -> bytes:
    """What is left of a span with more attributes or events than a line can hold."""
    resource = orjson.dumps(record["otel_resource"])
    kept: Record = {
        **{column: record.get(column) for column in ("record", *NARROW_COLUMNS)},
        "attributes": {c.CUT: json_of(_counts_of(record))},
        "events": [],
        "links": [],
        "otel_resource": orjson.Fragment(resource if len(resource) <= _MAX_RESOURCE else b"{}"),
    }
    return checked_line(orjson.dumps(kept))


def _counts_of(record: Record) -> dict[str, Any]:
    names = ("attributes", "events", "links")
    return {name: {"length": len(record.get(name, ())), "kept": 0} for name in names}
