"""``config``, ``doctor``, ``completion``: how this machine is set up, and if all is in place."""

import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Final

import click

from lightning_otel import config as read
from lightning_otel.cli import SuggestingGroup
from lightning_otel.cli.options import Form, format_option
from lightning_otel.cli.output import (
    count_noun,
    print_data,
    print_note,
    print_rows,
    print_table,
    printable,
    store_option,
    suggest,
)  # fmt: skip

_COLUMNS: Final = ("name", "value", "source", "meaning")
_FAULT: Final = ("level", "name", "text", "remedy")
_SIGNS: Final = {"ok": "✓", "note": "!", "problem": "✗"}
_PROGRAM: Final = "lightning-otel"
_SHELLS: Final = {
    "bash": ("~/.bashrc", 'eval "$(lightning-otel completion bash)"'),
    "zsh": ("~/.zshrc", 'eval "$(lightning-otel completion zsh)"'),
    "fish": (
        "~/.config/fish/completions/lightning-otel.fish", "lightning-otel completion fish | source",
    ),
}  # fmt: skip


@click.group(cls=SuggestingGroup, invoke_without_command=True)
@format_option
@store_option
@click.pass_context
def config(ctx: click.Context, form: Form | None, store: str | None) -> None:
    """List the settings: the value of each, where it comes from, and what it does.

    Settings are environment variables. An option of a command, such as --store, overrides its
    variable for that command.
    """
    if ctx.invoked_subcommand is not None:
        return
    rows = read.list_settings()
    if ctx.get_parameter_source("store") is click.core.ParameterSource.COMMANDLINE:
        (row,) = (row for row in rows if row["name"] == read.STORE.name)
        row |= {"value": str(store), "source": "--store"}
    if form is None and sys.stdout.isatty():
        print_table(rows, _COLUMNS, ("value", "source", "meaning"))
    else:
        print_rows(rows, _COLUMNS, form=form)
    if faults := list(find_faults()):
        print_note(f"{count_noun(len(faults), 'problem')} with what is set")
    suggest("config check" if faults else "doctor", None)


@config.command()
@format_option
def check(form: Form | None) -> int:
    """Check the environment variables: misspelled names, invalid values.

    The exit code is 1 if there is a problem.
    """
    faults = [dict(zip(_FAULT, ("problem", *each), strict=True)) for each in find_faults()]
    if not print_data(form, faults, _FAULT):
        for each in faults:
            _print_finding(each["level"], f"{each['name']}: {each['text']}", each["remedy"])
        click.echo(count_noun(len(faults), "problem") if faults else "nothing wrong")
    return 1 if faults else 0


def find_faults() -> Iterator[tuple[str, str, str]]:
    """Yield the variables that do not do what whoever set them may think, with text and remedy."""
    from difflib import get_close_matches

    for name in read.unknown_variables():
        near = get_close_matches(name, read.OURS, n=1)
        guess = f"did you mean {near[0]}?" if near else "see: lightning-otel config"
        yield name, "nothing reads a variable of this name", guess
    for name, wanted in read.invalid_values():
        yield name, f"its value is not {wanted}, so the default counts", f"unset {name}"


def _print_finding(level: str, text: str, remedy: str) -> None:
    click.echo(f"{_SIGNS[level]} {printable(text)}")
    if remedy:
        click.echo(f"    {printable(remedy)}")


@click.command()
@format_option
@click.option("--repair", "is_repair", is_flag=True, help="First recover what can be recovered.")
@store_option
def doctor(form: Form | None, is_repair: bool, store: str | None) -> int:
    """Check versions, instrumentors, settings and the store; exits with 1 if a check fails."""
    from lightning_otel.dataset import Store
    from lightning_otel.views.doctor import examine

    opened = Store(store)
    gone = 0
    for note in opened.repair() if is_repair else ():
        gone += note.gone
        there = note.rows - note.gone
        print_note(f"{note.name}: {there} of {note.rows} spans are there, {note.gone} are gone")
    findings = examine(opened)
    problems = sum(finding.level == "problem" for finding in findings)
    code = 1 if problems or gone else 0
    if print_data(form, list(map(asdict, findings))):
        return code
    for each in findings:
        _print_finding(each.level, f"{each.text} [{each.code}]", each.remedy)
    if problems or not gone:
        click.echo(count_noun(problems, "problem") if problems else "nothing wrong")
    if gone:
        click.echo(f"repaired, but {count_noun(gone, 'span')} could not be got back")
    if any(finding.level != "ok" for finding in findings):
        print_note("what each [code] means: docs/settings.md")
    return code


@click.command()
@click.argument("shell", type=click.Choice(list(_SHELLS)))
def completion(shell: str) -> None:
    """Print a shell completion script; it completes commands, options, ids and agents.

    bash needs 4.4 or later.
    """
    from click.shell_completion import get_completion_class

    from lightning_otel.cli import cli

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(cli, {}, _PROGRAM, "_LIGHTNING_OTEL_COMPLETE").source())
    place, line = _SHELLS[shell]
    print_note(f"→ into {place}: {line}")
