"""``publish``: what this machine recorded into a lake that many machines share."""

import click

from lightning_otel.cli.output import count_noun, store_option, suggest, talk
from lightning_otel.cli.waiting import give_waiting


@click.command()
@click.argument("lake", required=False)
@click.option(
    "--all", "is_rest_included", is_flag=True,
    help="Also spans that are too few for a file of their own yet.",
)  # fmt: skip
@store_option
def publish(lake: str | None, is_rest_included: bool, store: str | None) -> None:
    """Put settled spans into a lake, each exactly once: lightning-otel publish LAKE.

    LAKE is a URL such as ducklake:postgres://user@host/db?data=s3://bucket/prefix. Without it the
    store itself must be a lake (--store or LIGHTNING_OTEL_STORE): what was recorded here for it
    goes there. Run it again whenever it was interrupted, or every few minutes.
    """
    from lightning_otel.dataset import Store

    opened = Store(store)
    to = Store(lake) if lake is not None else opened
    give_waiting(opened.local)
    done = opened.local.publish(to, is_rest_included=is_rest_included)
    talk(f"{count_noun(done.spans, 'span')} in {count_noun(done.files, 'file')} → {to.name}")
    if done.waiting:
        talk(f"{count_noun(done.waiting, 'span')} wait for more; --all publishes them now")
    suggest("stats", lake if lake is not None else store)
