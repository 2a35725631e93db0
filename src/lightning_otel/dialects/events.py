"""Server-sent events, and JSON objects, of the bytes of an answer."""

import json
from collections.abc import Collection, Mapping
from typing import Any, TypeAlias

import orjson

Json: TypeAlias = Mapping[str, Any]


def read_events(body: bytes) -> list[Json]:
    """The JSON objects in a body of server-sent events; the closing ``[DONE]`` as ``done``.

    Source: the event stream format of the HTML standard, section 9.2.6; an event of several data
    lines is joined by newlines.
    """
    texts: list[bytes] = []
    data: list[bytes] = []
    is_done = False
    for line in (*body.splitlines(), b""):
        if line.startswith(b"data:"):
            data.append(line[5:])
        elif data and not line:
            text = data[0] if len(data) == 1 else b"\n".join(data)
            data.clear()
            if text.lstrip(b" ").startswith(b"[DONE]"):
                is_done = True
            else:
                texts.append(text)
    try:
        # One call for all: a call for each costs half as much again.
        values: list[Any] = orjson.loads(b"[%s]" % b",".join(texts))
    except ValueError:
        values = [parse_object(text) for text in texts]
    events: list[Json] = [event for event in values if isinstance(event, dict)]
    return [*events, {"done": True}] if is_done else events


def is_ended(body: bytes, end_marks: Collection[str]) -> bool:
    """Return whether the last event of a body came whole, and is of a type that ends the stream."""
    text = body.replace(b"\r\n", b"\n")
    last = text.rstrip(b"\n")
    lines = last[last.rfind(b"\n\n") + 1 :].strip(b"\n").split(b"\n")
    if lines[-1].strip() == b"data: [DONE]":
        return "[DONE]" in end_marks
    if not text.endswith(b"\n\n"):
        return False
    types = [line[6:].strip().decode() for line in lines if line.startswith(b"event:")]
    return any(mark in types or _says_type(lines[-1], mark) for mark in end_marks)


def _says_type(line: bytes, mark: str) -> bool:
    event = parse_object(line[5:]) if line.startswith(b"data:") else None
    return event is not None and event.get("type") == mark


def parse_object(data: bytes) -> Json | None:
    """Return the JSON object in a text; None if there is none."""
    value = parse_value(data)
    return value if isinstance(value, dict) else None


def parse_value(data: bytes) -> Any:
    """Return the value of a JSON text; None if it is none."""
    try:
        return orjson.loads(data)
    except ValueError:
        # What orjson refuses and the client accepts, such as an escaped lone surrogate or NaN.
        try:
            return json.loads(data)
        except ValueError:
            return None
