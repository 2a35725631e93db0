"""``export duckdb``, ``lake`` and ``otlp``: spans into a database, a lake, or to an endpoint."""

import functools
import hashlib
import re
from pathlib import Path
from urllib.parse import urlsplit

import click

from lightning_otel import config
from lightning_otel.cli.maintain import settle_pending_feedback
from lightning_otel.cli.options import SignalStop, find_rollout_id, rollout_option, store_option
from lightning_otel.cli.output import count_noun, format_size, print_note, suggest
from lightning_otel.dataset import Store
from lightning_otel.errors import ConfigError, LightningOtelError, NotFoundError
from lightning_otel.exporters.forwarding import Forwarder
from lightning_otel.exporters.forwarding.phoenix import Annotations, PhoenixSender, is_reward
from lightning_otel.exporters.forwarding.process import PREFIX, follow_process
from lightning_otel.exporters.forwarding.senders import sender_for
from lightning_otel.store.follow import Follower
from lightning_otel.store.layout import Layout
from lightning_otel.types import Span
from lightning_otel.types.conventions import SPAN_ROLLOUT

_NOT_DELIVERED = 1
_MOST_COUNTED = 100_000
"""Spans or rewards not delivered that are counted."""
_SORTS = ("OTLP", "span"), ("Phoenix", "reward")
"""The endpoint that takes spans, and the one for rewards."""


@click.command(short_help="The whole store in one DuckDB file.")
@click.argument("out")
@store_option
def duckdb(out: str, store: str | None) -> None:
    """Write the whole store into one self-contained DuckDB database with real tables.

    OUT is its path; or a clickhouse:// URL, into whose table the missing spans are loaded.
    """
    opened = Store(store)
    settle_pending_feedback(opened)
    count = opened.pack(out)
    if "://" in out:
        print_note(f"{count_noun(count, 'new span')} → {Store(out).name}")
        return
    print_note(f"{count_noun(count, 'span')} → {out} ({format_size(Path(out).stat().st_size)})")
    print_note(f"→ duckdb {out} 'SELECT * FROM rollouts'")


@click.command(short_help="Settled spans, into a lake of many machines.")
@click.argument("place", metavar="[LAKE]", required=False)
@click.option("--all", "is_rest_included", is_flag=True,
              help="Include spans too few to fill a file of their own.")  # fmt: skip
@store_option
def lake(place: str | None, is_rest_included: bool, store: str | None) -> None:
    """Copy settled spans into a lake, each exactly once: export lake LAKE.

    LAKE is a URL such as ducklake:postgres://user@host/db?data=s3://bucket/prefix. Without it the
    store itself must be a lake (--store or LIGHTNING_OTEL_STORE), and what was recorded here for it
    is copied there. Run it again after an interruption, or every few minutes.
    """
    opened = Store(store)
    to = Store(place) if place is not None else opened
    settle_pending_feedback(opened.local)
    result = opened.local.publish(to, is_rest_included=is_rest_included)
    files = count_noun(result.files, "file")
    print_note(f"{count_noun(result.spans, 'span')} in {files} → {to.name}")
    if result.waiting:
        print_note(f"{count_noun(result.waiting, 'span')} wait for more; --all publishes them now")
    suggest("stats", place if place is not None else store)


@click.command(short_help="Stored and new spans, to an OTLP endpoint.")
@click.option(
    "--to",
    "url",
    metavar="URL",
    help="Such as http://127.0.0.1:4318 [default: what OTEL_EXPORTER_OTLP_ENDPOINT names].",
)
@rollout_option
@click.option("--name", help="Name of the saved position [default: the endpoint].")
@click.option("--once", is_flag=True, help="Stop after the spans stored so far.")
@click.option("--phoenix", is_flag=True, help="Send rewards as annotations, too, to Phoenix.")
@store_option
def otlp(
    url: str | None, rollout: str | None, name: str | None, once: bool, phoenix: bool,
    store: str | None,
) -> int:  # fmt: skip
    """Send stored and new spans to an OTLP endpoint, oldest first.

    The position is saved on disk: started again, it continues there. While the endpoint is down, it
    is retried with growing pauses, at least once a minute. Messages and other content stay here
    unless LIGHTNING_OTEL_EXPORT_CONTENT=1. Ends with Ctrl-C.
    """
    endpoint = config.otlp_endpoint(url)
    if endpoint is None:
        raise ConfigError("no endpoint is named; name one with --to http://127.0.0.1:4318")
    sender = sender_for(endpoint)
    opened = Store(store)
    annotator = PhoenixSender(endpoint) if phoenix else None
    sources = [functools.partial(_open_follower, opened, rollout, name, endpoint.url)]
    followers = [sources[0]()]
    is_allowed = config.content().is_exported
    note = "" if is_allowed else ", without what was said (LIGHTNING_OTEL_EXPORT_CONTENT=1 adds it)"
    forwarders = [Forwarder(followers[0], sender, with_content=is_allowed, on_error=_print_error)]
    if annotator is not None:
        annotations = Annotations(opened, with_content=is_allowed)
        sources.append(functools.partial(_follow_rewards, opened, followers[0].name, rollout))
        followers.append(sources[1]())
        forwarders.append(
            Forwarder(
                followers[1], annotator, with_content=is_allowed, on_error=_print_error,
                encode=annotations.encode,
            )
        )  # fmt: skip
    with SignalStop() as stop:
        print_note(f"⚡ {opened.name} → {endpoint.url}{note}")
        are_done = _run_forwarders(forwarders, stop, is_once=once)
    for place, (one, is_done) in enumerate(zip(forwarders, are_done, strict=True)):
        pending = 0 if is_done else None
        if once and not is_done:
            followers[place].close()  # the forwarder may still wait for an answer
            pending = len(sources[place]().batch(_MOST_COUNTED))
        tell_forwarding(one, pending, sort=_SORTS[place])
    for one in forwarders:
        if one.error is not None:
            raise one.error
    is_whole = all(are_done) and not any(one.rejected for one in forwarders)
    return 0 if is_whole or not once else _NOT_DELIVERED


def _run_forwarders(forwarders: list[Forwarder], stop: SignalStop, *, is_once: bool) -> list[bool]:
    """Run all until stopped; once, one after the other, as annotations need their spans."""
    for group in [[one] for one in forwarders] if is_once else [forwarders]:
        for one in group:
            one.start(is_once=is_once)
        while all(one.is_running for one in group) and not stop.wait(0.02):
            pass
    return [one.finish() for one in forwarders]


def _follow_rewards(opened: Store, name: str | None, rollout: str | None) -> Follower:
    rollout_id = find_rollout_id(opened, rollout)
    if opened.layout is None:
        raise ConfigError("rewards are sent of a store on disk; name one with --store")

    def is_wanted(span: Span) -> bool:
        return is_reward(span) and rollout_id in (None, span.rollout_id)

    return Follower(opened.layout, f"{name}-phoenix", select=is_wanted)


def _open_follower(opened: Store, rollout: str | None, name: str | None, url: str) -> Follower:
    if rollout is None and name is not None and opened.layout and name.startswith(PREFIX):
        return follow_process(opened.layout, name)
    if rollout is None:
        host = re.sub(r"[^A-Za-z0-9.-]", "-", urlsplit(url).netloc.rpartition("@")[2])[:60]
        return opened.follow(name or f"otlp-{host}-{hashlib.sha256(url.encode()).hexdigest()[:8]}")
    if name is not None:
        raise ConfigError("--name does not go with --rollout, whose position is its own")
    rollout_id = find_rollout_id(opened, rollout)
    rows = list(
        opened.sql(
            "SELECT DISTINCT trace_id FROM spans WHERE rollout_id = ? AND name = ?",
            [rollout_id, SPAN_ROLLOUT],
        )
    )
    if opened.layout is None:
        raise NotFoundError(f"no rollout {rollout!r}")
    traces = tuple(str(row["trace_id"]) for row in rows)
    return follower_of_run(opened.layout, rollout_id, traces, since_ns=0)


def _print_error(last_error: str) -> None:
    print_note(f"  waiting: {last_error}" if last_error else "  it takes spans again")


def tell_forwarding(
    forwarder: Forwarder, pending: int | None, *, is_quiet: bool = False,
    sort: tuple[str, str] = _SORTS[0],
) -> None:  # fmt: skip
    """Say what became of the spans, of which some may wait; None if it is not known how many."""
    if is_quiet and not pending and not forwarder.rejected:
        return
    text = f"  {sort[0]}: {count_noun(forwarder.delivered, sort[1])} delivered"
    for reason, number in forwarder.rejected.most_common():
        text += f", {number} REJECTED: {reason}"
    if pending or pending is None:
        more = "+" if pending == _MOST_COUNTED else ""
        text += f", {pending or 'some'}{more} NOT delivered: {forwarder.why}"
    print_note(text)


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
        print_note(f"no span is sent by OTLP: {exc}")
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
    return Follower(layout, name, since_ns=since_ns, select=is_ours)
