"""Spans with their events and links."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from lightning_otel.types import conventions as c

Message: TypeAlias = Mapping[str, Any]
"""One chat message as the GenAI conventions write it: ``{"role": …, "parts": [{"type": …}]}``."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened inside a span at one instant."""

    name: str
    time_ns: int
    attributes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Link:
    """A reference from one span to another, possibly in another trace."""

    trace_id: str
    span_id: str
    attributes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Span:
    """One timed operation, as OpenTelemetry defines it.

    Attributes:
        kind: ``INTERNAL``, ``CLIENT``, ``SERVER``, ``PRODUCER`` or ``CONSUMER``.
        end_ns: None on a span that started and never ended (it is *incomplete*).
        status: ``UNSET``, ``OK`` or ``ERROR``.
        otel_resource: Attributes of OpenTelemetry's resource (the process, not our resource).
        scope: Name of the instrumentation scope.
        process: Id of the process that recorded the span; empty if it is not known.
        sequence: Position of the start among all starts and ends of its process; -1 if unknown.
        end_sequence: Position of the end; -1 if unknown.
    """

    trace_id: str
    span_id: str
    parent_span_id: str | None
    name: str
    start_ns: int
    end_ns: int | None
    kind: str = "INTERNAL"
    status: str = "UNSET"
    status_message: str = ""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    events: tuple[Event, ...] = ()
    links: tuple[Link, ...] = ()
    otel_resource: Mapping[str, Any] = field(default_factory=dict)
    scope: str = ""
    process: str = ""
    sequence: int = -1
    end_sequence: int = -1

    @property
    def is_incomplete(self) -> bool:
        """True if the span started and never ended."""
        return self.end_ns is None

    @property
    def operation(self) -> str | None:
        """The GenAI operation name, such as ``chat`` or ``execute_tool``."""
        return self.attributes.get(c.OPERATION)

    @property
    def rollout_id(self) -> str:
        """The rollout the span belongs to: its attribute, else its trace."""
        value = self.attributes.get(c.ROLLOUT_ID)
        return value if value and isinstance(value, str) else self.trace_id

    @property
    def attempt_id(self) -> str:
        """The attempt the span belongs to; ``1`` where none is named."""
        value = self.attributes.get(c.ATTEMPT_ID)
        return value if value and isinstance(value, str) else "1"
