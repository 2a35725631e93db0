"""A process that sends what it keeps, from its own segments: its end waits for no endpoint."""

import logging
import os
import threading
import time
from typing import Final

from opentelemetry.context import Context
from opentelemetry.sdk.trace import Span, SpanProcessor

from lightning_otel import capture, config
from lightning_otel.exporters.forwarding import Forwarder
from lightning_otel.exporters.forwarding.senders import sender_for
from lightning_otel.store.follow import Follower
from lightning_otel.store.layout import Layout
from lightning_otel.store.writer import SpanWriter

log = logging.getLogger(__name__)

_EARLIER_NS: Final = 1_000_000_000
"""How long before the first span that is begun another one may have started."""
PREFIX: Final = "process-"
"""Begins the name of the position of a process that sends its own spans."""


class ForwardingProcessor(SpanProcessor):
    """Sends what this process keeps, from its segments; what is not delivered waits there."""

    def __init__(self) -> None:
        self._begun: dict[tuple[int, SpanWriter], Forwarder | None] = {}
        self._lock = threading.Lock()  # guards it: spans start in any thread
        self._is_over = False

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Begin to send with the first span that a store gets of this process."""
        frame = capture.current_frame(parent_context)
        writer = frame.sink if frame is not None else None
        if isinstance(writer, SpanWriter) and (os.getpid(), writer) not in self._begun:
            with self._lock:
                if (os.getpid(), writer) in self._begun:
                    return
                since_ns = (span.start_time or time.time_ns()) - _EARLIER_NS
                forwarder = capture.guard_call(self._begin_forwarding, writer, since_ns)
                self._begun[os.getpid(), writer] = forwarder

    def shutdown(self) -> None:
        """Send the rest, unless the endpoint keeps silent."""
        self._is_over = True
        for (pid, writer), forwarder in list(self._begun.items()):
            if pid == os.getpid() and forwarder is not None:
                capture.guard_call(_finish_forwarding, forwarder, writer)

    def _begin_forwarding(self, writer: SpanWriter, since_ns: int) -> Forwarder | None:
        endpoint = config.otlp_endpoint()
        if endpoint is None or writer.layout is None or self._is_over:
            return None
        writer.layout.create()
        sender = sender_for(endpoint)  # first: it may refuse, and a follower begins a position
        forwarder = Forwarder(
            follow_process(writer.layout, PREFIX + writer.process, since_ns),
            sender,
            with_content=config.content().is_exported,
            on_error=_log_error,
        )
        forwarder.start()
        return forwarder


def _log_error(last_error: str) -> None:
    if last_error:
        log.warning("no span can be sent by OTLP, they are all kept here: %s", last_error)


def _finish_forwarding(forwarder: Forwarder, writer: SpanWriter) -> None:
    if not forwarder.finish(is_whole=True):
        log.warning(
            "spans were not sent by OTLP: %s; send them with: lightning-otel export otlp --name %s",
            forwarder.why,
            PREFIX + writer.process,
        )


def follow_process(layout: Layout, name: str, since_ns: int = 0) -> Follower:
    """Follow what the process that a position is named after recorded."""
    process = name.removeprefix(PREFIX)
    return Follower(layout, name, since_ns=since_ns, select=lambda span: span.process == process)
