"""``reward``: a person's or a script's judgement, given after the fact."""

import math

import click

from lightning_otel.cli.options import Id
from lightning_otel.cli.output import store_option, suggest, talk
from lightning_otel.errors import ConfigError, StoreError


# A negative number looks like an option.
@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("target", metavar="ID", type=Id())
@click.argument("value", type=float)
@click.option("--name", default="primary", help="Name of the reward.", show_default=True)
@store_option
def reward(target: str, value: float, name: str, store: str | None) -> None:
    """Give a reward to a rollout, trace, span or response, by a prefix of its id or @last."""
    from lightning_otel.dataset import Store
    from lightning_otel.emitters import reward_span
    from lightning_otel.views.outlines import outline_of

    if not math.isfinite(value):
        raise ConfigError(f"a reward of {value} cannot be trained on; give a finite number")
    opened = Store(store)
    noun, whole = opened.find(target)
    rollout_id = opened.rollout_of(noun, whole)
    links = {"span": "span_id", "response": "response_id"}
    link = {links[noun]: whole} if noun in links else {}
    given = reward_span({name: value}, rollout_id=rollout_id, **link)
    opened.add([given])
    if opened.layout is not None and opened.writer().position()[1] == 0:
        raise StoreError(
            f"{opened.name} refuses the reward; is it writable, and the disk not full?"
        )
    talk(f"{name} = {value:g} on {noun} {whole}")
    for node in outline_of(opened.source, "rollout", rollout_id).nodes:
        if node.span.span_id == given.span_id and node.left_out:
            talk(f"  it is kept and counts for no step: {node.left_out}")
    suggest(f"show {rollout_id} --transitions", store)
