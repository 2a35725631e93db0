"""``selections``: filters saved as data sets, in versions."""

from typing import Any, Final

import click

from lightning_otel.cli import SuggestingGroup
from lightning_otel.cli.options import Form, filter_options, format_option, store_option
from lightning_otel.cli.output import count_noun, print_aged, print_line, print_note, suggest
from lightning_otel.dataset import Store
from lightning_otel.dataset.selections import (
    SelectionDiff,
    list_newest,
    list_versions,
    read_version,
)
from lightning_otel.views.options import TRANSITIONS, make_keywords

_FILTERS: Final = {name: each for name, each in TRANSITIONS.items() if name != "selection"}


@click.group(cls=SuggestingGroup)
def selections() -> None:
    """Save filters as data sets whose steps and rewards stay; compare their versions."""


@selections.command()
@click.argument("name")
@filter_options(_FILTERS)
@store_option
def save(name: str, store: str | None, **options: Any) -> None:
    """Save what a filter selects now as the next version of NAME.

    Without options these are the ones of the version before.
    """
    opened = Store(store)
    keywords = make_keywords(opened, options)
    if not keywords and name in list_versions(opened):
        keywords = dict(read_version(opened, name).options)
    version = opened.save_selection(name, **keywords)
    print_line(f"{version}: {count_noun(len(version.steps), 'step')}")
    suggest(f"export sft {name}.jsonl --selection {version} --certificate", store)


@selections.command("list")
@format_option
@store_option
def list_selections(form: Form | None, store: str | None) -> None:
    """List the selections with their newest versions."""
    rows = [
        {"name": version.name, "version": version.version, "rollouts": len(version.rollouts),
         "steps": len(version.steps), "options": version.options, "created_ns": version.created_ns}
        for version in list_newest(Store(store))
    ]  # fmt: skip
    print_aged(rows, ("name", "version", "rollouts", "steps", "options", "created_ns"), form)
    if not rows:
        print_note("no selection was saved yet")
        suggest("selections save good --min-reward 0.5", store)


@selections.command()
@click.argument("a", metavar="NAME@1")
@click.argument("b", metavar="NAME@2")
@store_option
def diff(a: str, b: str, store: str | None) -> None:
    """Compare two versions: steps added and gone, and rewards that changed."""
    opened = Store(store)
    difference = SelectionDiff.of(read_version(opened, a), read_version(opened, b))
    for sign, span_ids in (("-", difference.gone), ("+", difference.added)):
        for span_id in span_ids:
            print_line(f"{sign} {span_id}")
    for span_id, (before, after) in difference.changed.items():
        print_line(f"~ {span_id} {before} → {after}")
    print_note(str(difference))
