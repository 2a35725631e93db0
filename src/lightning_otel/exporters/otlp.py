"""Spans out by OTLP, through the SDK's own exporters; content stays here unless it may leave."""

import atexit
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

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

log = logging.getLogger(__name__)

_BATCH = 256
_BLOCK_BYTES = 16 << 20  # more than the longest record
_SAYS_NO_REASON = (
    "Shutdown in progress",
    "Exporter already",
    "Failed to export spans batch due to",
)


class OtlpExporter(SpanExporter):
    """The SDK's OTLP exporter, which retries for seconds, until it is told to hurry.

    Attributes:
        inner: The SDK's exporter.
        complaint: What it last said of the collector; empty if nothing.
    """

    def __init__(self, inner: SpanExporter, *, is_quiet: bool = False) -> None:
        """Wrap an exporter.

        Args:
            inner: The SDK's exporter.
            is_quiet: Whether the caller says itself that a collector refuses.
        """
        self.inner = inner
        self.complaint = ""
        self._is_quiet = is_quiet
        self._is_failing = False
        self._is_hurried = False
        self._ear = _Ear(self._hear)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send a batch."""
        result = self.inner.export(spans)
        self._is_failing = result is not SpanExportResult.SUCCESS
        return result

    def hurry(self) -> None:
        """From now on try once and do not wait to try again, for the program wants to end."""
        self._is_hurried = True
        if self._is_failing:
            self._stop()

    def shutdown(self) -> None:
        """Send no more."""
        self._stop()
        self._ear.close()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Nothing is ever pending."""
        return True

    def _stop(self) -> None:
        # Ends the wait for a next try; a request that is under way goes on.
        inner, self.inner = self.inner, _CLOSED
        inner.shutdown()

    def _hear(self, message: str) -> None:
        """Note what the SDK logs before it waits to try again, or when it gives up."""
        self._is_failing = True
        if not message.startswith(_SAYS_NO_REASON):
            if not self.complaint and not self._is_quiet:
                log.warning("no span can be sent by OTLP, they are all kept here: %s", message)
            self.complaint = message.removeprefix("Transient error ")
            self.complaint = self.complaint.partition(" encountered while ")[0]
        if self._is_hurried:
            self._stop()


class _Closed(SpanExporter):
    """Takes no spans."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Refuse."""
        return SpanExportResult.FAILURE

    def shutdown(self) -> None:
        """Nothing is open."""


_CLOSED = _Closed()


class _Ear(logging.Handler):
    """Hears what the SDK's exporters log; nothing else tells that one waits to try again."""

    def __init__(self, hear: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._hear = hear
        self._logger = logging.getLogger("opentelemetry.exporter.otlp")
        self._logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Hand the message on."""
        self._hear(record.getMessage())

    def close(self) -> None:
        """Hear no more."""
        self._logger.removeHandler(self)
        super().close()


def otlp_exporter(*, is_quiet: bool = False) -> OtlpExporter:
    """An exporter for the protocol and endpoint the user's environment names.

    Args:
        is_quiet: Whether the caller says itself that a collector refuses.
    """
    if config.otlp_protocol() == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc

        exporter = OtlpExporter(Grpc(), is_quiet=is_quiet)
    else:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http

        exporter = OtlpExporter(Http(), is_quiet=is_quiet)
    # Before the provider's own exit hook, which was registered earlier.
    atexit.register(exporter.hurry)
    return exporter


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
        attributes=_allowed(span.attributes, with_content=with_content),
        events=[
            SdkEvent(
                event.name, _allowed(event.attributes, with_content=with_content), event.time_ns
            )
            for event in span.events
        ],
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


def _allowed(attributes: Mapping[str, Any], *, with_content: bool) -> dict[str, Any]:
    return {
        key: value
        for key, value in _values(attributes).items()
        if with_content or key not in CONTENT_KEYS
    }


def _values(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in attributes.items() if value is not None}


class Forwarder:
    """Sends the spans of one run from the segments that hold them, as they grow.

    What a refusing collector did not take is offered again at the next poll, for as long as the
    caller polls; an ended span is offered until it was delivered, and then never again.
    """

    def __init__(
        self,
        layout: Layout,
        rollout_id: str,
        trace_id: str,
        exporter: SpanExporter,
        earlier: Iterable[str] = (),
    ) -> None:
        """Begin to follow a run.

        Args:
            layout: The store's paths.
            rollout_id: The run's rollout.
            trace_id: The run's trace, in which rollouts that the program names itself stand too.
            exporter: Sends the spans; another one may be put in its place between polls.
            earlier: Names of segments from before the run, which hold none of it.
        """
        self._layout = layout
        self._rollout_id = rollout_id
        self._trace_id = trace_id
        self.exporter = exporter
        self._known = set(earlier)
        self._followed: list[_Followed] = []
        self.delivered = 0

    def poll(self) -> bool:
        """Send what was written since the last poll; whether the collector took all of it."""
        self._open_new()
        return all(self._send(segment) for segment in self._followed)

    def waiting(self) -> int:
        """How many ended spans were not delivered so far."""
        self._open_new()
        found = 0
        for segment in self._followed:
            offset = segment.offset
            while block := segment.read(offset):
                found += len(self._spans_in(block))
                offset += len(block)
        return found

    def close(self) -> None:
        """Let go of the segments."""
        for segment in self._followed:
            segment.file.close()
        self._followed.clear()

    def _open_new(self) -> None:
        for path in self._layout.segments():
            if path.name in self._known:
                continue
            try:
                # Held open: a settler may pack and unlink the segment before it was sent.
                self._followed.append(_Followed(path.open("rb")))
            except OSError:
                continue
            self._known.add(path.name)

    def _send(self, segment: "_Followed") -> bool:
        while block := segment.read(segment.offset):
            found = self._spans_in(block)
            done = forward([span for span, _ in found], self.exporter)
            self.delivered += done
            if done < len(found):
                segment.offset += found[done - 1][1] if done else 0
                return False
            segment.offset += len(block)
        return True

    def _spans_in(self, block: bytes) -> list[tuple[Span, int]]:
        """The run's ended spans among whole lines, each with where its line ends."""
        found = []
        position = 0
        mentions = (self._rollout_id.encode(), self._trace_id.encode())
        for line in block.splitlines(keepends=True):
            position += len(line)
            if b'"record":"span"' not in line or not any(text in line for text in mentions):
                continue
            try:
                span = span_of(orjson.loads(line))
            except (ValueError, KeyError):
                continue  # a damaged line, which the settler counts
            if self._trace_id == span.trace_id or self._rollout_id == span.rollout_id:
                found.append((span, position))
        return found


@dataclass(slots=True)
class _Followed:
    """A segment being read, and how much of it was delivered."""

    file: BinaryIO
    offset: int = 0

    def read(self, offset: int) -> bytes:
        """Whole lines from an offset on; empty at the end."""
        self.file.seek(offset)
        data = self.file.read(_BLOCK_BYTES)
        return data[: data.rfind(b"\n") + 1]
