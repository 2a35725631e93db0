"""The SDK's spans taken as they are, by what they show publicly: nothing of the SDK is imported."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from lightning_otel.types import Event, Link, Span


class ReadableSpan(Protocol):
    """The part of the SDK's span that is read."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def context(self) -> Any:
        """Its trace id and span id."""

    @property
    def parent(self) -> Any:
        """The context of its parent, or None."""

    @property
    def attributes(self) -> Mapping[str, Any] | None:
        """Its attributes."""


def span_of(given: Span | ReadableSpan) -> Span:
    """The span, or what the SDK's says as one of ours."""
    if isinstance(given, Span):
        return given
    found: Any = given
    context, parent, status = found.context, found.parent, found.status
    return Span(
        trace_id=format(context.trace_id, "032x"),
        span_id=format(context.span_id, "016x"),
        parent_span_id=format(parent.span_id, "016x") if parent is not None else None,
        name=found.name,
        start_ns=found.start_time or 0,
        end_ns=found.end_time,
        kind=found.kind.name,
        status=status.status_code.name,
        status_message=status.description or "",
        attributes=_read_attributes(found.attributes),
        events=tuple(_read_events(found.events)),
        links=tuple(_read_links(found.links)),
        otel_resource=_read_attributes(found.resource.attributes),
        scope=found.instrumentation_scope.name if found.instrumentation_scope else "",
    )


def _read_attributes(found: Mapping[str, Any] | None) -> dict[str, Any]:
    # The SDK keeps lists as tuples; ours, which were JSON once, are lists.
    return {k: list(v) if isinstance(v, tuple) else v for k, v in (found or {}).items()}


def _read_events(found: Sequence[Any]) -> Iterable[Event]:
    for event in found:
        yield Event(event.name, event.timestamp, _read_attributes(event.attributes))


def _read_links(found: Sequence[Any]) -> Iterable[Link]:
    for link in found:
        yield Link(
            format(link.context.trace_id, "032x"),
            format(link.context.span_id, "016x"),
            _read_attributes(link.attributes),
        )
