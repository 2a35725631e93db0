"""Checks that make a received span fit to be kept, and readers of fields that others wrote."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import orjson

from lightning_otel import conventions as c
from lightning_otel.receivers import Limits
from lightning_otel.types import Event, Link, Span

Object: TypeAlias = Mapping[str, Any]

KINDS: Final = ("INTERNAL", "INTERNAL", "SERVER", "CLIENT", "PRODUCER", "CONSUMER")
"""By OTLP's number; an unspecified or unknown kind is INTERNAL."""
STATUSES: Final = ("UNSET", "OK", "ERROR")
TIMES: Final = range(1, 1 << 62)
"""Nanoseconds that a span may start or end at: after 1970 began, until the year 2116."""
TRACE_ID_BYTES: Final = 16
SPAN_ID_BYTES: Final = 8


class UnfitError(ValueError):
    """A span cannot be kept; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The resource of received spans, how they came, and what each may hold."""

    otel_resource: dict[str, Any]
    came: str
    limits: Limits

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
        if number > self.limits.attributes:
            raise UnfitError(f"more than {self.limits.attributes} attributes")
        attributes[c.RECEIVED] = self.came
        start_ns, end_ns = fit_times(*times, attributes)
        kept = tuple(link for link in links if link is not None)
        if any(dropped) or len(kept) < len(links):
            lost_links = dropped[2] + len(links) - len(kept)
            _note_cut(attributes, "attributes", number, dropped[0])
            _note_cut(attributes, "events", len(events), dropped[1])
            _note_cut(attributes, "links", len(kept), lost_links)
        return Span(
            trace_id=id_of(ids[0], TRACE_ID_BYTES, "trace id"),
            span_id=id_of(ids[1], SPAN_ID_BYTES, "span id"),
            parent_span_id=parent_of(ids[2]),
            name=name,
            start_ns=start_ns,
            end_ns=end_ns,
            kind=KINDS[kind] if 0 <= kind < len(KINDS) else KINDS[0],
            status=STATUSES[status[0]] if 0 <= status[0] < len(STATUSES) else STATUSES[0],
            status_message=status[1],
            attributes=attributes,
            events=events,
            links=kept,
            otel_resource=self.otel_resource,
            scope=scope,
            process=process_of(self.otel_resource),
        )


def event_of(name: str, time_ns: int, attributes: Object) -> Event:
    """Return an event; its time is 0 where that is none."""
    return Event(name, time_ns if time_ns in TIMES else 0, attributes)


def link_of(trace_id: bytes, span_id: bytes, attributes: Object) -> Link | None:
    """Return the link; None for one whose ids are none. Ids of zeros are allowed in a link."""
    if len(trace_id) != TRACE_ID_BYTES or len(span_id) != SPAN_ID_BYTES:
        return None
    return Link(trace_id.hex(), span_id.hex(), attributes)


def id_of(found: bytes, size: int, noun: str) -> str:
    """Return an id as lower-case hex; one of another size, or of zeros, is unfit."""
    if len(found) != size:
        raise UnfitError(f"{noun} is not {size} bytes long")
    if not any(found):
        raise UnfitError(f"{noun} is all zeros")
    return found.hex()


def parent_of(found: bytes) -> str | None:
    """Return the parent's id; None for a root, whose parent is empty or all zeros."""
    return id_of(found, SPAN_ID_BYTES, "parent span id") if any(found) else None


def fit_times(start_ns: int, end_ns: int, attributes: dict[str, Any]) -> tuple[int, int]:
    """Return times that a span can have; where they are others than sent, note those on the span.

    One out of range becomes the other one. Where both are they are clamped, and an end before the
    start becomes the start. A span without any time is unfit.
    """
    if start_ns in TIMES and end_ns in TIMES and start_ns <= end_ns:
        return start_ns, end_ns
    if not start_ns and not end_ns:
        raise UnfitError("start and end time are missing")
    attributes[c.SENT_TIMES] = f"[{start_ns}, {end_ns}]"
    if start_ns not in TIMES:
        start_ns = end_ns if end_ns in TIMES else min(max(start_ns, TIMES[0]), TIMES[-1])
    return start_ns, max(start_ns, end_ns) if end_ns in TIMES else start_ns


def process_of(otel_resource: Object) -> str:
    """Return the process that made a span, by its resource; empty if unknown."""
    instance = otel_resource.get("service.instance.id")
    if isinstance(instance, str) and instance:
        return instance
    host, number = otel_resource.get("host.name"), otel_resource.get("process.pid")
    return f"{host}-{number}" if isinstance(host, str) and isinstance(number, int) else ""


def _note_cut(attributes: dict[str, Any], noun: str, kept: int, left_out: int) -> None:
    """Note on a span how many attributes, events or links its sender or we left out."""
    if left_out <= 0:
        return
    try:
        note = orjson.loads(attributes.get(c.CUT, ""))
    except (TypeError, ValueError):
        note = None
    # What was cut before this, as on a copy of ours, says it in more detail.
    cut = {noun: {"length": kept + left_out, "kept": kept}} | (
        note if isinstance(note, dict) else {}
    )
    attributes[c.CUT] = orjson.dumps(cut).decode()


def integer(content: object, noun: str) -> int:
    """Return a 64-bit integer, which may come as text; 0 where there is none."""
    if content is None or content == "":
        return 0
    if isinstance(content, str) and len(content) <= 20 and content.lstrip("-").isdecimal():
        content = int(content) if content.rfind("-") <= 0 else content
    elif isinstance(content, float) and content.is_integer():
        content = int(content)
    if type(content) is not int or not -(1 << 63) <= content < 1 << 64:
        raise UnfitError(f"{noun} is no 64-bit integer")
    return content


def id_bytes(content: object) -> bytes:
    """Return an id, which comes as hex of either case; empty where there is none."""
    try:
        return bytes.fromhex(text(content).removeprefix("0x"))
    except ValueError as exc:
        raise UnfitError("id is not hex") from exc


def text(content: object) -> str:
    """Return a text; empty where there is none."""
    if not isinstance(content, str | None):
        raise UnfitError("a text is none")
    return content or ""


def as_object(content: object) -> Object:
    """Return an object; empty where there is none."""
    if not isinstance(content, dict | None):
        raise UnfitError("an object is none")
    return content or {}


def inner(found: Object, key: str) -> Object:
    """Return the object under a key; empty where none is."""
    content = found.get(key)
    return content if isinstance(content, dict) else {}


def items(found: Object, key: str) -> list[Any]:
    """Return the list under a key; empty where none is."""
    content = found.get(key)
    return content if isinstance(content, list) else []


def objects(found: Object, key: str) -> list[Object]:
    """Return the objects in the list under a key."""
    return [item for item in items(found, key) if isinstance(item, dict)]
