"""Spans out by OTLP, through the SDK's own exporters; content stays here unless it may leave."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event as SdkEvent
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link as SdkLink
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from lightning_otel import config
from lightning_otel.conventions import CONTENT_KEYS
from lightning_otel.store.layout import Layout
from lightning_otel.store.schema import span_of
from lightning_otel.types import Span

_BATCH = 256
_POLL_BYTES = 16 << 20  # more than the longest record


def otlp_exporter() -> SpanExporter:
    """The SDK's OTLP exporter for the protocol and endpoint the user's environment names."""
    if config.otlp_protocol() == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc

        return Grpc()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http

    return Http()


def forward(spans: Sequence[Span], exporter: SpanExporter) -> int:
    """Send ended spans, oldest first, and stop at the first refusal.

    Returns:
        How many were delivered.
    """
    is_allowed = config.content().is_exported
    for start in range(0, len(spans), _BATCH):
        batch = [
            readable_span(span, with_content=is_allowed) for span in spans[start : start + _BATCH]
        ]
        if exporter.export(batch) is not SpanExportResult.SUCCESS:
            return start
    return len(spans)


def readable_span(span: Span, *, with_content: bool) -> ReadableSpan:
    """The SDK's form of a span of ours.

    Args:
        span: An ended span.
        with_content: Whether messages, token ids and other content stay on it.
    """
    parent = _context(span.trace_id, span.parent_span_id) if span.parent_span_id else None
    return ReadableSpan(
        name=span.name,
        context=_context(span.trace_id, span.span_id),
        parent=parent,
        resource=Resource(_values(span.otel_resource)),
        attributes={
            key: value
            for key, value in _values(span.attributes).items()
            if with_content or key not in CONTENT_KEYS
        },
        events=[SdkEvent(e.name, _values(e.attributes), e.time_ns) for e in span.events],
        links=[SdkLink(_context(k.trace_id, k.span_id), _values(k.attributes)) for k in span.links],
        kind=SpanKind[span.kind],
        status=Status(StatusCode[span.status], span.status_message or None)
        if span.status == "ERROR"
        else Status(StatusCode[span.status]),
        start_time=span.start_ns,
        end_time=span.end_ns,
        instrumentation_scope=InstrumentationScope(span.scope),
    )


def _context(trace_id: str, span_id: str) -> SpanContext:
    return SpanContext(
        int(trace_id, 16), int(span_id, 16), is_remote=False, trace_flags=TraceFlags(1)
    )


def _values(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in attributes.items() if value is not None}


class Forwarder:
    """Sends one rollout's spans from the segments that hold them, as they grow.

    What a refusing collector did not take is offered again at the next poll, for as long as the
    caller polls; an ended span is offered until it was delivered, and then never again.
    """

    def __init__(
        self, layout: Layout, rollout_id: str, exporter: SpanExporter, earlier: set[str]
    ) -> None:
        """Begin to follow a rollout.

        Args:
            layout: The store's paths.
            rollout_id: Whose spans to send.
            exporter: Sends them.
            earlier: Names of segments that were there before the rollout, which hold none of it.
        """
        self._layout = layout
        self._rollout_id = rollout_id
        self._mention = rollout_id.encode()
        self._exporter = exporter
        self._known = earlier
        self._offsets: dict[str, int] = {}
        self.delivered = 0

    def poll(self) -> int:
        """Send what was written since the last poll.

        Returns:
            How many spans are still waiting, because the collector did not take them.
        """
        waiting = 0
        for path in self._layout.segments():
            if path.name not in self._known:
                waiting += self._send(path)
        return waiting

    def _send(self, path: Path) -> int:
        offset = self._offsets.get(path.name, 0)
        try:
            with path.open("rb") as file:
                file.seek(offset)
                data = file.read(_POLL_BYTES)
        except FileNotFoundError:
            return 0
        spans: list[Span] = []
        ends: list[int] = []
        end = data.rfind(b"\n") + 1
        position = offset
        for line in data[:end].splitlines(keepends=True):
            position += len(line)
            if self._mention in line and b'"record":"span"' in line:
                span = span_of(orjson.loads(line))
                if span.rollout_id == self._rollout_id:
                    spans.append(span)
                    ends.append(position)
        done = forward(spans, self._exporter)
        self.delivered += done
        if done < len(spans):
            self._offsets[path.name] = ends[done - 1] if done else offset
            return len(spans) - done
        self._offsets[path.name] = position
        return self._send(path) if end and len(data) == _POLL_BYTES else 0
