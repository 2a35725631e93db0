"""Spans out by OTLP from the program itself, through the SDK's own exporters.

Where the store is followed instead, ``forwarding`` sends.
"""

import atexit
import logging
from collections.abc import Callable, Sequence

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from lightning_otel import config

log = logging.getLogger(__name__)

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
