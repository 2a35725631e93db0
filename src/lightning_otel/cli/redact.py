"""``redact``: content out of what is stored, for good, with a record that it was done."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import click

from lightning_otel.cli.options import Form, Id, rows_options
from lightning_otel.cli.output import (
    count_noun,
    print_json,
    print_rows,
    progress_bar,
    store_option,
    suggest,
    talk,
)
from lightning_otel.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_otel.dataset import Store
    from lightning_otel.store.redact import Redacted

_WAIT_S: Final = 300.0
_REASONS: Final = {
    "pattern": "matched a pattern",
    "key": "stood under a key",
    "secret": "had the shape of a secret",
    "whole": "were all that was said",
    "tokens": "spelt a text that changed: token ids and logprobs",
}
_COLUMNS: Final = (
    "redaction_id", "began_ns", "user", "reason", "rules", "spans", "rollouts", "state",
)  # fmt: skip
_TIMES: Final = ("began_ns", "ended_ns")
_UNDONE: Final = 1


@click.command()
@click.option("--pattern", "patterns", multiple=True, metavar="REGEX",
              help="Mask what it matches in any text: a regular expression.")  # fmt: skip
@click.option("--key", "keys", multiple=True, metavar="KEY",
              help="Mask what stands under an attribute or field; a glob names some.")  # fmt: skip
@click.option("--secrets", is_flag=True, help="Mask API keys and tokens of known shapes.")
@click.option("--id", "ids", type=Id(), multiple=True, metavar="ID",
              help="Only in this rollout, trace or span; alone, all said in it.")  # fmt: skip
@click.option("--reason", default="", help="Why, which is kept with the record.")
@click.option("--dry-run", "is_dry_run", is_flag=True, help="Only count.")
@click.option("--yes", "is_sure", is_flag=True, help="Do not ask.")
@click.option("--no-wait", is_flag=True,
              help="Do not wait a minute for the old files to be unlinked.")  # fmt: skip
@click.option("--list", "is_list", is_flag=True, help="List the redactions there were.")
@rows_options
@store_option
def redact(
    ids: Sequence[str],
    is_dry_run: bool,
    is_sure: bool,
    no_wait: bool,
    is_list: bool,
    form: Form | None,
    store: str | None,
    **rules: Any,
) -> int:
    """Mask content in stored spans, in every file, and keep a record that it was done.

    What was masked cannot be had back. Spans, ids, times, counts and rewards stay; token ids that
    spell a masked text go. Whole rollouts go with compact --rollout. Databases made by pack,
    exports, lakes and backups are not reached. Exits with 1 if something could not be done yet.
    """
    from lightning_otel.dataset import Store

    opened = Store(store)
    if is_list:
        _list_redactions(opened, form)
        return 0
    found = {**rules, "ids": ids}
    if not is_dry_run and not is_sure:
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise ConfigError("what is redacted cannot be had back; add --yes, or try --dry-run")
        with progress_bar("reading") as progress:
            told = opened.redact(**found, is_dry_run=True, progress=progress)
        for line in _word_results(told, is_dry_run=True):
            talk(line)
        if not told.spans and not told.open_spans:
            return 0
        click.confirm("Mask it? It cannot be had back", err=True, abort=True)
    with progress_bar("reading") as progress, _tell_wait(is_quiet=no_wait or is_dry_run) as waiting:
        done = opened.redact(
            **found,
            is_dry_run=is_dry_run,
            wait_s=0 if no_wait else _WAIT_S,
            progress=progress,
            waiting=waiting,
        )
    if form == "json":
        print_json({**asdict(done), "dry_run": is_dry_run})
    elif form is not None:
        row = {**asdict(done), "dry_run": is_dry_run}
        print_rows([row], list(row), form=form)
    else:
        for line in _word_results(done, is_dry_run=is_dry_run):
            click.echo(line)
    if is_dry_run:
        return 0
    suggest("redact --list", store)
    return _UNDONE if _is_undone(done) or not (done.is_gone or no_wait) else 0


def _is_undone(done: "Redacted") -> bool:
    return bool(done.open_spans or done.left or done.aside)


def _word_results(done: "Redacted", *, is_dry_run: bool) -> Iterator[str]:
    would = "would be " if is_dry_run else ""
    yield (
        f"redacted   {count_noun(done.spans, 'span')} of {count_noun(done.rollouts, 'rollout')} "
        f"{would}changed"
    )
    for reason, count in sorted(done.values.items()):
        yield f"values     {count} {_REASONS.get(reason, reason)}"
    if done.files:
        yield f"files      {count_noun(done.files, 'file')} written anew"
    if done.in_ids:
        yield (
            f"in ids     {done.in_ids} × an id holds it, and stays: it tells what belongs "
            "together; to have the rollout gone: compact --rollout ID"
        )
    if done.open_spans:
        yield (
            f"not yet    {count_noun(done.open_spans, 'span')} that a living process holds open; "
            "do it again when it has written on, or ended"
        )
    if done.left:
        yield f"left       {count_noun(done.left, 'file')}: too wide for the memory allowed"
    if done.aside:
        yield (
            f"unknown    {count_noun(done.aside, 'damaged part')} in quarantine cannot be looked "
            "into; remove them if they may hold it"
        )
    if done.published:
        yield f"elsewhere  {count_noun(done.published, 'span')} may stand in a lake as they were"
    if is_dry_run:
        yield "nothing was changed"
    elif done.is_gone:
        yield "gone       no file of the store holds it any more"
    else:
        yield "waiting    the old files go with the next redact (in a minute) or compact (in two)"


def _list_redactions(opened: "Store", form: Form | None) -> None:
    from lightning_otel.store.redact import redactions

    if opened.layout is None:
        raise ConfigError("redact needs a store on this disk; name one with --store")
    opened.layout.require()
    found = redactions(opened.layout)
    if form is not None:
        names = list(dict.fromkeys(name for each in found for name in each))
        print_rows(found, names, form=form, times=_TIMES)
    elif found:
        print_rows([_make_row(each) for each in found], _COLUMNS, times=_TIMES)
    if not found:
        talk("nothing was redacted here")


def _make_row(each: dict[str, Any]) -> dict[str, Any]:
    rules = [f"{each['patterns']} × pattern"] if each["patterns"] else []
    rules += [f"key {key}" for key in each["keys"]]
    rules += ["secrets"] if each["secrets"] else []
    return {
        **each,
        "rules": ", ".join(rules) or "all that was said",
        "state": "done" if "ended_ns" in each else "broken off: do it again",
    }


@contextmanager
def _tell_wait(*, is_quiet: bool) -> Iterator["Callable[[float], None] | None"]:
    """Says once that the old files are waited for."""
    told: list[float] = []

    def tell(left_s: float) -> None:
        if not told and not is_quiet:
            told.append(left_s)
            talk(
                f"masked; the old files are unlinked in {left_s:.0f} s, when nobody reads them any "
                "more (Ctrl-C leaves that to the next redact or compact)"
            )

    yield tell
