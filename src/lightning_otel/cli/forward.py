"""``forward``: a store's spans to an OTLP endpoint, for as long as it takes."""

import signal
import time
from typing import TYPE_CHECKING

import click

from lightning_otel.cli.options import rollout_id_of, rollout_option
from lightning_otel.cli.output import store_option, talk
from lightning_otel.errors import ConfigError, NotFoundError

if TYPE_CHECKING:
    from lightning_otel.dataset import Store
    from lightning_otel.store.follow import Follower

_NOT_DELIVERED = 1


@click.command()
@click.option(
    "--to",
    "url",
    metavar="URL",
    help="Such as http://127.0.0.1:4318 [default: what OTEL_EXPORTER_OTLP_ENDPOINT names].",
)
@rollout_option
@click.option("--name", help="Name of the position; by default the endpoint's own.")
@click.option("--once", is_flag=True, help="End when all there is was offered.")
@store_option
def forward(
    url: str | None, rollout: str | None, name: str | None, once: bool, store: str | None
) -> int:
    """Send every ended span to an OTLP endpoint, old ones first, and go on as they come.

    What was delivered is remembered on disk: one that is started again goes on from there. While
    the endpoint is down it is tried ever more rarely, at least once a minute. Messages and other
    content stay here unless LIGHTNING_OTEL_EXPORT_CONTENT=1. Ends with Ctrl-C.
    """
    from lightning_otel import config
    from lightning_otel.cli.forwarding import tell_forwarding
    from lightning_otel.dataset import Store
    from lightning_otel.forwarding import Forwarder
    from lightning_otel.forwarding.sending import sender_for

    endpoint = config.otlp_endpoint(url)
    if endpoint is None:
        raise ConfigError("no endpoint is named; name one with --to http://127.0.0.1:4318")
    sender = sender_for(endpoint)
    opened = Store(store)
    follower = _open_follower(opened, rollout, name, endpoint.url)
    heard: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda heard_number, _: heard.append(heard_number))
    is_allowed = config.content().is_exported
    kept = "" if is_allowed else ", without what was said (LIGHTNING_OTEL_EXPORT_CONTENT=1 adds it)"
    talk(f"⚡ {opened.name} → {endpoint.url}{kept}")
    forwarder = Forwarder(follower, sender, with_content=is_allowed, on_complaint=_tell_complaint)
    forwarder.start(is_once=once)
    while forwarder.is_at_work and not heard:
        time.sleep(0.02)
    is_done = forwarder.finish()
    tell_forwarding(forwarder, 0 if is_done else None)
    if forwarder.error is not None:
        raise forwarder.error
    is_whole = is_done and not forwarder.rejected
    return 0 if is_whole or not once else _NOT_DELIVERED


def _open_follower(opened: "Store", rollout: str | None, name: str | None, url: str) -> "Follower":
    from lightning_otel.cli.forwarding import follower_of_run, name_for
    from lightning_otel.forwarding.process import PREFIX, follower_of_process

    if rollout is None and name is not None and opened.layout and name.startswith(PREFIX):
        return follower_of_process(opened.layout, name)
    if rollout is None:
        return opened.follow(name or name_for(url))
    if name is not None:
        raise ConfigError("--name does not go with --rollout, whose position is its own")
    rollout_id = rollout_id_of(opened, rollout)
    from lightning_otel.conventions import SPAN_ROLLOUT

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


def _tell_complaint(complaint: str) -> None:
    talk(f"  waiting: {complaint}" if complaint else "  it takes spans again")
