"""``drift``: how far a tokenizer's ids are from those the engine worked with."""

from typing import TYPE_CHECKING, Any

import click

from lightning_otel.cli.options import Form, rollout_id_of, rollout_option, rows_options
from lightning_otel.cli.output import (
    count_noun,
    print_json,
    print_rows,
    store_option,
    suggest,
    talk,
)

if TYPE_CHECKING:
    from lightning_otel.adapter.drift import Drift

_COLUMNS = ("model", "template", "part", "count", "exact", "prefix", "length", "why")
_KEYS = (
    "model", "template", "part", "count", "exact", "exact_rate", "prefix_share", "length_delta",
    "causes",
)  # fmt: skip


@click.command()
@click.option(
    "--tokenizer",
    "source",
    required=True,
    metavar="PATH_OR_NAME",
    help="Folder of the engine's tokenizer, or a model's name.",
)
@rollout_option
@rows_options
@store_option
def drift(source: str, rollout: str | None, form: Form | None, store: str | None) -> None:
    """Re-encode what was recorded, and say how much of it comes back otherwise, and why.

    Each prompt is rendered anew from its messages by the chat template, and each response encoded
    anew from its text; both are compared with the engine's own token ids. Nothing is changed.
    """
    from lightning_otel.adapter.drift import measure
    from lightning_otel.dataset import Store
    from lightning_otel.tokenizing import load_tokenizer

    opened = Store(store)
    opened.connect()  # a store that cannot be read is refused before a tokenizer is fetched
    tokenizer = load_tokenizer(source)
    rollout_id = rollout_id_of(opened, rollout)
    found = measure(opened.transitions(rollout_id=rollout_id), tokenizer)
    rows = [_make_row(each) for each in found.parts]
    if form == "json":
        print_json({"drift": rows, "skipped": found.skipped})
    elif form is not None:
        print_rows(rows, _KEYS, form=form)
    else:
        print_rows([_make_shown_row(each) for each in found.parts], _COLUMNS)
    if found.skipped:
        talk(f"{count_noun(found.skipped, 'transition')} without token ids to compare with")
    if found.parts:
        suggest("stats", store)
    else:
        talk("nothing was compared: → lightning-otel run --enable-retokenization-fix")


def _make_row(each: "Drift") -> dict[str, Any]:
    return {name: getattr(each, name) for name in _KEYS}


def _make_shown_row(each: "Drift") -> dict[str, Any]:
    """A row for people."""
    return {
        **_make_row(each),
        "exact": f"{each.exact} ({each.exact_rate:.0%})",
        "prefix": f"{each.prefix_share:.0%}",
        "length": f"{each.length_delta:+.1f}",
        "why": ", ".join(f"{count} × {cause}" for cause, count in each.causes.items()),
    }
