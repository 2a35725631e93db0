"""Checks that make a received span fit to be kept, whatever form it came in."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson

from lightning_otel import conventions as c
from lightning_otel.receivers.limits import Limits
from lightning_otel.types import Event, Link, Span

KINDS: Final = ("INTERNAL", "INTERNAL", "SERVER", "CLIENT", "PRODUCER", "CONSUMER")
"""By OTLP's number; an unspecified or unknown kind is INTERNAL."""
STATUSES: Final = ("UNSET", "OK", "ERROR")
TIMES: Final = range(1, 1 << 62)
"""Nanoseconds that a span may start or end at: after 1970 began, until the year 2116."""
TRACE_ID_BYTES: Final = 16
SPAN_ID_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class Rejected:
    """A span that cannot be kept, and why."""

    reason: str


class UnfitError(ValueError):
    """A span cannot be kept; the message is the reason."""


class Resource:
    """A resource, how its request came, and what the spans made under it may hold."""

    def __init__(self, attributes: dict[str, Any], came: str, limits: Limits) -> None:
        self._attributes = attributes
        self._process = process_of(attributes)
        self._came = came
        self._limits = limits

    def span(
        self,
        *,
        ids: tuple[bytes, bytes, bytes],
        name: str,
        times: tuple[int, int],
        kind: int,
        status: tuple[int, str],
        attributes: dict[str, Any],
        events: tuple[Event, ...],
        links: Sequence[Link | None],
        dropped: tuple[int, int, int],
        scope: str,
    ) -> Span:
        """Return a span of OTLP's fields; kind and status are its numbers, ``links`` may lack some.

        Raises:
            UnfitError: It cannot be kept.
        """
        number = len(attributes)
        if number > self._limits.attributes:
            raise UnfitError(f"more than {self._limits.attributes} attributes")
        attributes[c.RECEIVED] = self._came
        start_ns, end_ns = fit_times(*times, attributes)
        kept = tuple(link for link in links if link is not None) if links else ()
        if any(dropped) or len(kept) < len(links):
            note_left_out(attributes, "attributes", number, dropped[0])
            note_left_out(attributes, "events", len(events), dropped[1])
            note_left_out(attributes, "links", len(kept), dropped[2] + len(links) - len(kept))
        trace_id, span_id, parent_id = ids
        return Span(
            trace_id=id_of(trace_id, TRACE_ID_BYTES, "trace id"),
            span_id=id_of(span_id, SPAN_ID_BYTES, "span id"),
            parent_span_id=parent_of(parent_id) if parent_id else None,
            name=name,
            start_ns=start_ns,
            end_ns=end_ns,
            kind=named(kind, KINDS),
            status=named(status[0], STATUSES),
            status_message=status[1],
            attributes=attributes,
            events=events,
            links=kept,
            otel_resource=self._attributes,
            scope=scope,
            process=self._process,
        )


def event_of(name: str, time_ns: int, attributes: dict[str, Any]) -> Event:
    """Return an event; its time is 0 where that is none."""
    return Event(name, time_ns if time_ns in TIMES else 0, attributes)


def link_of(trace_id: bytes, span_id: bytes, attributes: dict[str, Any]) -> Link | None:
    """Return the link; None for one whose ids are none. Ids of zeros are allowed in a link."""
    if len(trace_id) != TRACE_ID_BYTES or len(span_id) != SPAN_ID_BYTES:
        return None
    return Link(trace_id.hex(), span_id.hex(), attributes)


def id_of(found: bytes, size: int, noun: str) -> str:
    """An id as lower-case hex.

    Raises:
        UnfitError: It has another size, or is all zeros, which means none.
    """
    if len(found) != size:
        raise UnfitError(f"{noun} is not {size} bytes long")
    if not any(found):
        raise UnfitError(f"{noun} is all zeros")
    return found.hex()


def parent_of(found: bytes) -> str | None:
    """The parent's id; None for a root, whose parent is empty or all zeros."""
    return id_of(found, SPAN_ID_BYTES, "parent span id") if any(found) else None


def fit_times(start_ns: int, end_ns: int, attributes: dict[str, Any]) -> tuple[int, int]:
    """Times that a span can have; if they are others than those sent, the span says so.

    One out of range becomes the other one. Where both are they are clamped, and an end before the
    start becomes the start.

    Raises:
        UnfitError: Both are missing.
    """
    if start_ns in TIMES and end_ns in TIMES and start_ns <= end_ns:
        return start_ns, end_ns
    if not start_ns and not end_ns:
        raise UnfitError("start and end time are missing")
    attributes[c.SENT_TIMES] = f"[{start_ns}, {end_ns}]"
    if start_ns not in TIMES:
        start_ns = end_ns if end_ns in TIMES else min(max(start_ns, TIMES[0]), TIMES[-1])
    return start_ns, max(start_ns, end_ns) if end_ns in TIMES else start_ns


def named(numbered: int, names: tuple[str, ...]) -> str:
    """The name of an enumeration's number; the first for one that is unknown."""
    return names[numbered] if 0 <= numbered < len(names) else names[0]


def process_of(otel_resource: Mapping[str, Any]) -> str:
    """Return the process that made a span, by its resource; empty if unknown."""
    instance = otel_resource.get("service.instance.id")
    if isinstance(instance, str) and instance:
        return instance
    host, number = otel_resource.get("host.name"), otel_resource.get("process.pid")
    return f"{host}-{number}" if isinstance(host, str) and isinstance(number, int) else ""


def note_left_out(attributes: dict[str, Any], noun: str, kept: int, left_out: int) -> None:
    """Note on a span how many attributes, events or links its sender or we left out."""
    if left_out > 0:
        note = cut_note(attributes)
        # What was cut before this, as on a copy of ours, says it in more detail.
        note.setdefault(noun, {"length": kept + left_out, "kept": kept})
        attributes[c.CUT] = orjson.dumps(note).decode()


def cut_note(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a span's own note of what was cut from it."""
    try:
        note = orjson.loads(attributes.get(c.CUT, ""))
    except (TypeError, ValueError):
        return {}
    return note if isinstance(note, dict) else {}
