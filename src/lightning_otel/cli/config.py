"""``config``: every setting, its value, where that comes from and what it does."""

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import click

from lightning_otel.cli import Guessing
from lightning_otel.cli.options import Form, rows_options
from lightning_otel.cli.output import (
    count_noun,
    print_rows,
    print_table,
    store_option,
    suggest,
    talk,
)
from lightning_otel.config import STORE, list_settings

_COLUMNS: Final = ("name", "value", "source", "meaning")
_KEYS: Final = ("level", "name", "text", "remedy")


class Fault(NamedTuple):
    """A variable that does not do what whoever set it may think.

    Attributes:
        level: ``problem`` for one that is not read or not understood; ``note`` for one to look at.
    """

    level: str
    name: str
    text: str
    remedy: str


@click.group(cls=Guessing, invoke_without_command=True)
@rows_options
@store_option
@click.pass_context
def config(ctx: click.Context, form: Form | None, store: str | None) -> None:
    """Say what every setting is, where it comes from, and what it does.

    Settings are variables of the environment. What a command is given as an option, such as
    --store, counts before them and for that command alone.
    """
    if ctx.invoked_subcommand is not None:
        return
    import sys

    rows = list_settings()
    if ctx.get_parameter_source("store") is click.core.ParameterSource.COMMANDLINE:
        (row,) = (row for row in rows if row["name"] == STORE.name)
        row |= {"value": str(store), "source": "--store"}
    if form is None and sys.stdout.isatty():
        print_table(rows, _COLUMNS, ("value", "source", "meaning"))
    else:
        print_rows(rows, _COLUMNS, form=form)
    faults = [each for each in find_faults() if each.level == "problem"]
    if faults:
        talk(f"{count_noun(len(faults), 'problem')} with what is set")
    suggest("config check" if faults else "doctor", None)


@config.command()
@rows_options
def check(form: Form | None) -> int:
    """Check the variables that are set: misspelt names, values that are not understood.

    Exits with 1 if there is a problem.
    """
    faults = list(find_faults())
    problems = sum(each.level == "problem" for each in faults)
    if form is not None:
        rows: list[dict[str, Any]] = [each._asdict() for each in faults]
        print_rows(rows, _KEYS, form=form)
        return 1 if problems else 0
    for each in faults:
        click.echo(f"{'✗' if each.level == 'problem' else '!'} {each.name}: {each.text}")
        click.echo(f"    {each.remedy}")
    click.echo(count_noun(problems, "problem") if problems else "nothing wrong")
    return 1 if problems else 0


def find_faults() -> Iterator[Fault]:
    """Yield the faults of variables that are set."""
    from difflib import get_close_matches

    from lightning_otel import config as read

    for name in read.unknown_names():
        near = get_close_matches(name, read.OURS, n=1)
        guess = f"did you mean {near[0]}?" if near else "see: lightning-otel config"
        yield Fault("problem", name, "nothing reads a variable of this name", guess)
    for name, wanted in read.misunderstood():
        yield Fault(
            "problem", name, f"its value is not {wanted}, so the default counts", f"unset {name}"
        )
