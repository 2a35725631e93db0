"""Content by its origin: text of a model, a tool, a message or an exception, wherever it stands.

Without permission it is not sent or stored. What stays: ids, times, numbers, rewards, models, names
that the program's source gives, and types of exceptions.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import orjson

from lightning_otel.types import Event, Link, Span
from lightning_otel.types import conventions as c

_FOREIGN: Final = orjson.loads(Path(__file__).with_name("content.json").read_bytes())
"""Other conventions' keys: their spans stand in our store, and leave by our forwarding."""
_KEYS: Final = c.CONTENT_KEYS.union(*(family["keys"] for family in _FOREIGN["conventions"]))
_PREFIXES: Final = tuple(
    prefix for family in _FOREIGN["conventions"] for prefix in family["prefixes"]
)
_TYPES: Final = (c.ERROR_TYPE, c.EXCEPTION_TYPE)
_TYPE_NAME: Final = re.compile(r"[\w.:<>-]{1,256}")
_OTHER: Final = "_OTHER"
"""What ``error.type`` says where no type is known. Source: OpenTelemetry, ``error.type``."""
_OWN_WORDS: Final = {c.MARK_NAME: ("started", "finished", "failed")}
"""Values that are ours, under keys of content."""


def strip_content(span: Span) -> Span:
    """Return a span without content: also a transform, for where it must not be stored."""
    operation = span.attributes.get(c.OPERATION)
    return replace(
        span,
        # A task without a name is named after its description.
        name=c.EXECUTE_TASK if operation == c.EXECUTE_TASK else span.name,
        status_message="",
        attributes=_strip_attributes(span.attributes),
        events=tuple(_strip_event(event) for event in span.events),
        links=tuple(
            Link(link.trace_id, link.span_id, _strip_attributes(link.attributes))
            for link in span.links
        ),
    )


def _strip_event(event: Event) -> Event:
    is_message = event.name.startswith("gen_ai.") and event.name != c.EVENT_EVALUATION
    remaining = {} if is_message else _strip_attributes(event.attributes)
    return Event(event.name, event.time_ns, remaining)


def _strip_attributes(attributes: Mapping[str, Any]) -> dict[str, Any]:
    remaining = {key: value for key, value in attributes.items() if not _is_content(key, value)}
    for key in remaining.keys() & _TYPES:
        if not _TYPE_NAME.fullmatch(str(remaining[key])):  # a sentence, which may quote anything
            remaining[key] = _OTHER
    return remaining


def _is_content(key: str, value: Any) -> bool:
    if key not in _KEYS:
        return key.startswith(_PREFIXES)
    return value not in _OWN_WORDS.get(key, ())
