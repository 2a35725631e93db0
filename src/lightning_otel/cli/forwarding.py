"""A run's spans on their way to the user's OTLP endpoint, while the program runs and just after."""

import threading
import time
from collections.abc import Iterable

from lightning_otel import capture, config
from lightning_otel.cli.output import counted, talk
from lightning_otel.exporters.otlp import Forwarder, OtlpExporter, otlp_exporter
from lightning_otel.store.layout import Layout

_POLL_S = 1.0
_LAST_CHANCE_S = 5.0


class Forwarding:
    """Follows a run from a thread of its own; the program sends nothing and waits for nothing."""

    def __init__(self, forwarder: Forwarder, exporter: OtlpExporter) -> None:
        """Begin to send."""
        self._forwarder = forwarder
        self._exporter = exporter
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Send the rest, not waiting for a collector that refuses, and say what became of it."""
        deadline = time.monotonic() + _LAST_CHANCE_S
        self._stop.set()
        self._exporter.hurry()
        self._thread.join(_LAST_CHANCE_S)
        if not self._thread.is_alive():
            self._send_rest(deadline)
        waiting = self._forwarder.waiting()
        text = f"  OTLP: {counted(self._forwarder.delivered, 'span')} delivered"
        if waiting:
            reason = self._exporter.complaint or "the collector does not answer"
            text += f", {waiting} NOT delivered: {reason}"
        talk(text)
        self._forwarder.close()

    def _follow(self) -> None:
        while not self._stop.wait(_POLL_S):
            capture.guarded(self._forwarder.poll)

    def _send_rest(self, deadline: float) -> None:
        # A fresh exporter: the other one may have been hurried out of its retries.
        self._exporter = self._forwarder.exporter = otlp_exporter(is_quiet=True)
        self._exporter.hurry()
        last = threading.Thread(target=capture.guarded, args=(self._forwarder.poll,), daemon=True)
        last.start()
        last.join(max(0.0, deadline - time.monotonic()))
        self._exporter.shutdown()


def start_forwarding(
    layout: Layout, rollout_id: str, trace_id: str, earlier: Iterable[str]
) -> Forwarding | None:
    """Begin to send a run's spans if the environment asks for it and no outer run does."""
    from lightning_otel.provider import wants_otlp

    if not wants_otlp():
        return None
    if config.is_run_child() and Layout(config.store_path()).catalogue == layout.catalogue:
        return None  # the outer run follows the same trace in the same store
    exporter = capture.guarded(otlp_exporter, is_quiet=True)
    if exporter is None:
        return None
    return Forwarding(Forwarder(layout, rollout_id, trace_id, exporter, earlier), exporter)
