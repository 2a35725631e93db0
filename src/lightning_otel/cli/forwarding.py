"""Spans on their way to an OTLP endpoint, from a thread beside a program or by themselves."""

import hashlib
import json
import re
import threading
import time
from collections import Counter
from urllib.parse import urlsplit

from lightning_otel import config
from lightning_otel.cli.output import counted, talk
from lightning_otel.errors import LightningOtelError
from lightning_otel.forwarding import Forwarder
from lightning_otel.forwarding.sending import sender_for
from lightning_otel.store.follow import Follower
from lightning_otel.store.layout import Layout
from lightning_otel.types import Span

_GRACE_S = 0.08
"""How long the end waits for an answer of an endpoint that has not given one lately."""
_SILENT_S = 1.0
"""How long it waits for one of an endpoint that has."""
_LAST_CHANCE_S = 5.0


class Forwarding:
    """Forwards from a thread of its own; a program that runs beside it waits for nothing.

    Attributes:
        error: Why it ended before its time.
        is_whole: Whether nothing more can come once all is delivered: then the position is taken
            away.
    """

    is_whole = False

    def __init__(self, forwarder: Forwarder, follower: Follower) -> None:
        """Begin to send."""
        self._forwarder = forwarder
        self._follower = follower
        self._is_done = False
        self.error: LightningOtelError | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._forwarder.probe()
            self._is_done = self._forwarder.run()
        except LightningOtelError as exc:
            self.error = exc

    @property
    def is_at_work(self) -> bool:
        """Whether it has not come to its end."""
        return self._thread.is_alive()

    def finish(self) -> bool:
        """Send the rest, without waiting for an endpoint that refuses; whether all of it went."""
        began = time.monotonic()
        self._forwarder.hurry()
        while self._thread.is_alive() and time.monotonic() - began < _LAST_CHANCE_S:
            patience_s = _SILENT_S if self._forwarder.is_answering else _GRACE_S
            if self._forwarder.silent_s > patience_s:
                break
            self._thread.join(0.005)
        if not self._thread.is_alive():
            self._follower.close(is_done=self._is_done and self.is_whole)
        return self._is_done

    @property
    def delivered(self) -> int:
        """Spans delivered."""
        return self._forwarder.delivered

    @property
    def rejected(self) -> Counter[str]:
        """Spans the endpoint will never take, by reason."""
        return self._forwarder.rejected

    def tell(self, waiting: int | None, *, is_quiet: bool = False) -> None:
        """Say what became of the spans.

        Args:
            waiting: How many were not delivered; None if that is not known.
            is_quiet: Whether to say only what was not delivered.
        """
        if is_quiet and not waiting and not self.rejected:
            return
        text = f"  OTLP: {counted(self.delivered, 'span')} delivered"
        for reason, number in self.rejected.most_common():
            text += f", {number} REJECTED: {reason}"
        if waiting or waiting is None:
            silent = "the endpoint does not answer in time"
            why = str(self.error or "") or self._forwarder.complaint or silent
            text += f", {waiting or 'some'} NOT delivered: {why}"
        talk(text)


class RunForwarding(Forwarding):
    """Forwards one run."""

    is_whole = True


def start_forwarding(
    layout: Layout, rollout_id: str, trace_id: str, since_ns: int
) -> Forwarding | None:
    """Begin to send a run's spans if the environment asks for it and no outer run does."""
    from lightning_otel.provider import wants_otlp

    if not wants_otlp():
        return None
    if config.is_run_child() and Layout(config.store_path()).catalogue == layout.catalogue:
        return None  # the outer run follows the same trace in the same store
    try:
        return _started_for_run(layout, rollout_id, trace_id, since_ns)
    except LightningOtelError as exc:
        talk(f"no span is sent by OTLP: {exc}")
        return None


def _started_for_run(
    layout: Layout, rollout_id: str, trace_id: str, since_ns: int
) -> Forwarding | None:
    endpoint = config.otlp_endpoint()
    if endpoint is None:
        return None
    sender = sender_for(endpoint)
    follower = follower_of_run(layout, rollout_id, (trace_id,), since_ns)
    is_allowed = config.content().is_exported
    return RunForwarding(Forwarder(follower, sender, with_content=is_allowed), follower)


def follower_of_run(
    layout: Layout, rollout_id: str, trace_ids: tuple[str, ...], since_ns: int
) -> Follower:
    """Follows one rollout, and what the traces hold that it began.

    Args:
        layout: The store's paths.
        rollout_id: The rollout.
        trace_ids: Its traces, in which rollouts that the program names itself stand too.
        since_ns: When it began.
    """

    def is_ours(span: Span) -> bool:
        return span.trace_id in trace_ids or span.rollout_id == rollout_id

    name = f"run-{hashlib.sha256(rollout_id.encode('utf-8', 'replace')).hexdigest()[:24]}"
    as_written = json.dumps(rollout_id, ensure_ascii=False)[1:-1]
    mentions = [text.encode("utf-8", "replace") for text in (as_written, *trace_ids)]
    return Follower(layout, name, since_ns=since_ns, select=is_ours, mentions=mentions)


def name_for(url: str) -> str:
    """The consumer that forwards a whole store to an endpoint."""
    host = re.sub(r"[^A-Za-z0-9.-]", "-", urlsplit(url).netloc.rpartition("@")[2])[:60]
    return f"otlp-{host}-{hashlib.sha256(url.encode()).hexdigest()[:8]}"
