"""``follow``: spans on stdout as they end, from a position of one's own."""

import sys

import click

from lightning_otel.cli.output import json_text, store_option
from lightning_otel.cli.tail import Stop


@click.command()
@click.argument("name")
@click.option("--once", is_flag=True, help="End when all there is was printed.")
@store_option
def follow(name: str, once: bool, store: str | None) -> None:
    """Print each ended span once, as one line of JSON, and go on as they come.

    NAME is the consumer's: started again under it, it goes on where it was. A span counts as
    delivered when its line was written and flushed. Ends with Ctrl-C. It is for programs; to look
    on yourself, use tail.
    """
    from lightning_otel.cli.spans import sdk_json
    from lightning_otel.dataset import Store

    opened = Store(store)
    with Stop() as stop, opened.follow(name, idle_s=0 if once else None) as follower:
        stop.follower = follower
        for span in follower:
            click.echo(json_text(sdk_json(span)))
            sys.stdout.flush()
