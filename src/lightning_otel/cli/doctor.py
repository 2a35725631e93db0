"""``doctor``, ``completion``: how this machine is set up, and if all is in place."""

import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

import click

from lightning_otel import config
from lightning_otel.cli.options import (
    Form,
    find_rollout_id,
    format_option,
    rollout_option,
    store_option,
)
from lightning_otel.cli.output import (
    count_noun,
    print_data,
    print_note,
    print_rows,
    print_table,
    printable,
    suggest,
)  # fmt: skip
from lightning_otel.dataset import Store

if TYPE_CHECKING:
    from lightning_otel.views.doctor import Check

_COLUMNS: Final = ("name", "value", "source", "meaning")
_DRIFT_COLUMNS: Final = (
    "model", "template", "part", "count", "exact", "prefix", "length", "why",
)  # fmt: skip
_DRIFT_KEYS: Final = (
    "model", "template", "part", "count", "exact", "exact_rate", "prefix_share", "length_delta",
    "causes",
)  # fmt: skip
_WARNINGS: Final = ("no-calls", "unnamed-agents")
"""Notes on what is hardly ever meant so."""
_SIGNS: Final = {"ok": "✓", "note": "!", "problem": "✗"}
_PROGRAM: Final = "lightning-otel"
_SHELLS: Final = {
    "bash": ("~/.bashrc", 'eval "$(lightning-otel completion bash)"'),
    "zsh": ("~/.zshrc", 'eval "$(lightning-otel completion zsh)"'),
    "fish": (
        "~/.config/fish/completions/lightning-otel.fish", "lightning-otel completion fish | source",
    ),
}  # fmt: skip


@click.command()
@click.option("--repair", "is_repair", is_flag=True, help="First recover what can be recovered.")
@click.option("--settings", "is_settings", is_flag=True,
              help="List the environment variables: value, source and meaning.")  # fmt: skip
@click.option("--tokenizer", metavar="PATH_OR_NAME",
              help="Compare a tokenizer's ids with the recorded ones; "
              "an engine's folder, or a model's name.")  # fmt: skip
@rollout_option
@format_option
@store_option
def doctor(
    is_repair: bool, is_settings: bool, tokenizer: str | None, rollout: str | None,
    form: Form | None, store: str | None,
) -> int:  # fmt: skip
    """Check versions, instrumentors, settings and the store; exits with 1 if a check fails.

    With --tokenizer, each prompt is rendered again from its messages with the chat template, and
    each response encoded again from its text; both are compared with the engine's own token ids,
    and differences are explained. Nothing is changed.
    """
    if rollout is not None and tokenizer is None:
        raise click.UsageError("--rollout belongs to --tokenizer")
    if is_settings:
        _list_settings(form, store)
        return 0
    if tokenizer is not None:
        _measure_drift(tokenizer, rollout, form, store)
        return 0
    return _examine(form, store, is_repair=is_repair)


def _list_settings(form: Form | None, store: str | None) -> None:
    rows = config.list_settings()
    if store not in (None, config.STORE.read()):
        (row,) = (row for row in rows if row["name"] == config.STORE.name)
        row |= {"value": str(store), "source": "--store"}
    if form is None and sys.stdout.isatty():
        print_table(rows, _COLUMNS, ("value", "source", "meaning"))
    else:
        print_rows(rows, _COLUMNS, form=form)
    if faults := sum(1 for _ in _check_variables()):
        print_note(f"{count_noun(faults, 'problem')} with what is set")
    suggest("doctor", None)


def _check_variables() -> "Iterator[Check]":
    from difflib import get_close_matches

    from lightning_otel.views.doctor import problem

    for name in config.unknown_variables():
        if name in config.FORMER:
            yield problem("setting", f"{name} is gone: {config.FORMER[name]}", f"unset {name}")
            continue
        matches = get_close_matches(name, config.OURS, n=1)
        guess = (
            f"did you mean {matches[0]}?" if matches else "see: lightning-otel doctor --settings"
        )
        yield problem("setting", f"{name}: nothing reads a variable of this name", guess)
    for name, domain in config.invalid_values():
        text = f"{name}: its value is not {domain}, so the default counts"
        yield problem("setting", text, f"unset {name}")


def _examine(form: Form | None, store: str | None, *, is_repair: bool) -> int:
    from lightning_otel.views.doctor import examine

    opened = Store(store)
    gone = 0
    for note in opened.repair() if is_repair else ():
        gone += note.gone
        readable = note.rows - note.gone
        print_note(f"{note.name}: {readable} of {note.rows} spans are there, {note.gone} are gone")
    findings = [*_check_variables(), *examine(opened)]
    problems = sum(finding.level == "problem" for finding in findings)
    code = 1 if problems or gone else 0
    if print_data(form, list(map(asdict, findings))):
        return code
    for result in findings:
        click.echo(f"{_SIGNS[result.level]} {printable(result.text)} [{result.code}]")
        if result.remedy:
            click.echo(f"    {printable(result.remedy)}")
    if problems or not gone:
        warnings = sum(finding.code in _WARNINGS for finding in findings)
        calm = f"no problem, {count_noun(warnings, 'warning')}" if warnings else "nothing wrong"
        click.echo(count_noun(problems, "problem") if problems else calm)
    if gone:
        click.echo(f"repaired, but {count_noun(gone, 'span')} could not be got back")
    if any(finding.level != "ok" for finding in findings):
        print_note("what each [code] means: docs/settings.md")
    return code


def _measure_drift(source: str, rollout: str | None, form: Form | None, store: str | None) -> None:
    from lightning_otel.adapter.drift import measure
    from lightning_otel.dataset.tokenizers import load_tokenizer

    opened = Store(store)
    opened.connect()  # a store that cannot be read is refused before a tokenizer is fetched
    tokenizer = load_tokenizer(source)
    rollout_id = find_rollout_id(opened, rollout)
    drifts = measure(opened.transitions(rollout_id=rollout_id), tokenizer)
    rows = [{name: getattr(part, name) for name in _DRIFT_KEYS} for part in drifts.parts]
    document = {"drift": rows, "skipped": drifts.skipped}
    if not print_data(form, rows, _DRIFT_KEYS, document=document):
        for row in rows:
            row["exact"] = f"{row['exact']} ({row['exact_rate']:.0%})"
            row["prefix"] = f"{row['prefix_share']:.0%}"
            row["length"] = f"{row['length_delta']:+.1f}"
            row["why"] = ", ".join(f"{count} × {cause}" for cause, count in row["causes"].items())
        print_rows(rows, _DRIFT_COLUMNS)
    if drifts.skipped:
        print_note(f"{count_noun(drifts.skipped, 'transition')} without token ids to compare with")
    if drifts.parts:
        suggest("stats", store)
    else:
        print_note("nothing was compared: → lightning-otel run --enable-retokenization-fix")


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
