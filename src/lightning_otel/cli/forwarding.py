"""Spans on their way to an OTLP endpoint, from a thread beside a program or by themselves."""

import hashlib
import json
import re
from urllib.parse import urlsplit

from lightning_otel import config
from lightning_otel.cli.output import count_noun, talk
from lightning_otel.errors import LightningOtelError
from lightning_otel.forwarding import Forwarder
from lightning_otel.forwarding.sending import sender_for
from lightning_otel.store.follow import Follower
from lightning_otel.store.layout import Layout
from lightning_otel.types import Span


def tell_forwarding(forwarder: Forwarder, waiting: int | None, *, is_quiet: bool = False) -> None:
    """Say what became of the spans, of which some may wait; None if it is not known how many."""
    if is_quiet and not waiting and not forwarder.rejected:
        return
    text = f"  OTLP: {count_noun(forwarder.delivered, 'span')} delivered"
    for reason, number in forwarder.rejected.most_common():
        text += f", {number} REJECTED: {reason}"
    if waiting or waiting is None:
        text += f", {waiting or 'some'} NOT delivered: {forwarder.why}"
    talk(text)


def start_forwarding(
    layout: Layout, rollout_id: str, trace_id: str, since_ns: int
) -> Forwarder | None:
    """Begin to send a run's spans, unless an outer run does."""
    if config.RUN.read() and Layout(config.STORE.read()).catalogue == layout.catalogue:
        return None  # the outer run follows the same trace in the same store
    endpoint = config.otlp_endpoint()
    if endpoint is None:
        return None
    try:
        sender = sender_for(endpoint)
        follower = follower_of_run(layout, rollout_id, (trace_id,), since_ns)
    except LightningOtelError as exc:
        talk(f"no span is sent by OTLP: {exc}")
        return None
    forwarder = Forwarder(follower, sender, with_content=config.content().is_exported)
    forwarder.start()
    return forwarder


def follower_of_run(
    layout: Layout, rollout_id: str, trace_ids: tuple[str, ...], since_ns: int
) -> Follower:
    """Follow a rollout and its traces, in which rollouts that the program names stand too."""

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
