"""A store's spans sent from a thread of its own: beside a program, or from within it."""

import logging
import os
import threading
import time

from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor

from lightning_otel import capture, config
from lightning_otel.errors import LightningOtelError
from lightning_otel.forwarding import Forwarder
from lightning_otel.forwarding.sending import sender_for
from lightning_otel.store.follow import Follower
from lightning_otel.store.layout import Layout
from lightning_otel.store.writer import SpanWriter

log = logging.getLogger(__name__)

_GRACE_S = 0.08
"""How long the end waits for an answer of an endpoint that has not given one lately."""
_SILENT_S = 1.0
"""How long it waits for one of an endpoint that has."""
_LAST_CHANCE_S = 5.0
_EARLIER_NS = 1_000_000_000
"""How long before the first span that is begun another one may have started."""


class Background:
    """Forwards from a thread of its own; a program that runs beside it waits for nothing.

    Attributes:
        forwarder: Sends, and counts.
        error: Why it ended before its time.
    """

    def __init__(self, forwarder: Forwarder, follower: Follower) -> None:
        """Begin to send."""
        self.forwarder = forwarder
        self._follower = follower
        self._is_done = False
        self.error: LightningOtelError | None = None
        self._thread = threading.Thread(target=self._run_thread, daemon=True)
        self._thread.start()

    def _run_thread(self) -> None:
        try:
            self.forwarder.probe()
            self._is_done = self.forwarder.run()
        except LightningOtelError as exc:
            self.error = exc

    @property
    def is_at_work(self) -> bool:
        """Return whether it has not come to its end."""
        return self._thread.is_alive()

    def finish(self, *, is_whole: bool = False) -> bool:
        """Send the rest, without waiting for an endpoint that refuses; return whether all went.

        Args:
            is_whole: Whether nothing more can come once all is delivered: then the position is
                taken away.
        """
        began = time.monotonic()
        self.forwarder.hurry()
        while self._thread.is_alive() and time.monotonic() - began < _LAST_CHANCE_S:
            patience_s = _SILENT_S if self.forwarder.is_answering else _GRACE_S
            if self.forwarder.silent_s > patience_s:
                break
            self._thread.join(0.005)
        if not self._thread.is_alive():
            self._follower.close(is_done=self._is_done and is_whole)
        return self._is_done

    @property
    def why(self) -> str:
        """Return why something was not delivered."""
        silent = "the endpoint does not answer in time"
        return str(self.error or "") or self.forwarder.complaint or silent


class ForwardingProcessor(SpanProcessor):
    """Sends what this process keeps, from its segments: its end waits for no endpoint.

    What is not delivered waits in the store, under a position of the process's own.
    """

    def __init__(self) -> None:
        self._begun: dict[tuple[int, SpanWriter], Background | None] = {}
        self._lock = threading.Lock()  # guards it: spans start in any thread
        self._is_over = False

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Begin to send with the first span that a store gets of this process."""
        frame = capture.current_frame(parent_context)
        sink = frame.sink if frame is not None else None
        writer = getattr(sink, "writer", sink)
        if isinstance(writer, SpanWriter) and (os.getpid(), writer) not in self._begun:
            with self._lock:
                if (os.getpid(), writer) in self._begun:
                    return
                since_ns = (span.start_time or time.time_ns()) - _EARLIER_NS
                begun = capture.guarded(self._begin_background, writer, since_ns)
                self._begun[os.getpid(), writer] = begun

    def on_end(self, span: ReadableSpan) -> None:
        """Do nothing: the span is read from its segment."""

    def shutdown(self) -> None:
        """Send the rest, unless the endpoint keeps silent."""
        self._is_over = True
        for (pid, writer), forwarding in list(self._begun.items()):
            if pid == os.getpid() and forwarding is not None:
                capture.guarded(_finish_forwarding, forwarding, writer)

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Do nothing: what is to be sent is in the store."""
        return True

    def _begin_background(self, writer: SpanWriter, since_ns: int) -> Background | None:
        endpoint = config.otlp_endpoint()
        if endpoint is None or writer.layout is None or self._is_over:
            return None
        writer.layout.create()
        sender = sender_for(endpoint)
        follower = follower_of_process(writer.layout, name_of(writer), since_ns)
        is_allowed = config.content().is_exported
        forwarder = Forwarder(
            follower, sender, with_content=is_allowed, on_complaint=_log_complaint
        )
        return Background(forwarder, follower)


def _log_complaint(complaint: str) -> None:
    if complaint:
        log.warning("no span can be sent by OTLP, they are all kept here: %s", complaint)


def _finish_forwarding(forwarding: Background, writer: SpanWriter) -> None:
    if not forwarding.finish(is_whole=True):
        log.warning(
            "spans were not sent by OTLP: %s; send them with: lightning-otel forward --name %s",
            forwarding.why,
            name_of(writer),
        )


_PROCESS = "process-"


def name_of(writer: SpanWriter) -> str:
    """Name the position of a process that sends its own spans."""
    return f"{_PROCESS}{writer.process}"


def is_of_process(name: str) -> bool:
    """Return whether a position is that of a process that sent its own spans."""
    return name.startswith(_PROCESS)


def follower_of_process(layout: Layout, name: str, since_ns: int = 0) -> Follower:
    """Follow what one process recorded.

    Args:
        layout: The store's paths.
        name: The position's name, which says the process.
        since_ns: When it began to record.
    """
    process = name.removeprefix(_PROCESS)
    return Follower(layout, name, since_ns=since_ns, select=lambda span: span.process == process)
