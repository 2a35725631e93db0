"""``export``: data out, in the format of whoever reads it."""

import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from lightning_otel.cli import SuggestingGroup
from lightning_otel.cli.maintain import settle_pending_feedback
from lightning_otel.cli.options import (
    filter_options,
    find_rollout_id,
    rollout_option,
    store_option,
)
from lightning_otel.cli.output import (
    count_noun,
    format_size,
    json_text,
    print_json,
    print_line,
    print_note,
    progress_bar,
    suggest,
)  # fmt: skip
from lightning_otel.dataset import Store
from lightning_otel.errors import ConfigError, NotFoundError
from lightning_otel.views.options import TRANSITIONS, list_format_options, make_keywords

if TYPE_CHECKING:
    from lightning_otel.dataset.export import Exported, FileKind
    from lightning_otel.dataset.formats.format import Format, LeftOut

_COUNTS: Final = (
    "rollouts", "calls", "transitions", "exact", "inexact", "notes", "rewards", "rewards_placed",
    "rewarded",
)  # fmt: skip
_STDOUT: Final = "-"
_NO_ROWS: Final = 3
_SPANS: Final = "spans"
_DESTINATIONS: Final = ("duckdb", "lake", "otlp")


class _Formats(SuggestingGroup):
    """A group whose commands are formats and places; ``--format X`` names one as well."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take ``--format X`` before anything else for the command ``X``."""
        if args and args[0].startswith("--format"):
            name, mark, value = args[0].partition("=")
            if name == "--format" and (mark or len(args) > 1):
                args = [value, *args[1:]] if mark else args[1:]
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        from lightning_otel.dataset import formats

        return [*formats.names(), _SPANS, *_DESTINATIONS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        from lightning_otel.dataset import formats

        if cmd_name == _SPANS:
            return spans
        if cmd_name in _DESTINATIONS:
            from lightning_otel.cli import destinations

            command: click.Command = getattr(destinations, cmd_name)
            return command
        is_known = cmd_name in formats.names()
        return _make_command(cmd_name, formats.get(cmd_name)) if is_known else None


@click.group(cls=_Formats)
def export() -> None:
    """Write training data, spans, or the whole store: export sft OUT.

    OUT ends in .jsonl or .parquet, or is a folder that Hugging Face's datasets reads.
    """


def _output_options(*kinds: str) -> Callable[[Any], Any]:
    """Return the argument and options that say where rows go, and in which form."""
    options = (
        click.argument("out", required=False),
        click.option("-o", "--output", metavar="OUT",
                     help="The same as OUT; - is stdout, the default."),
        click.option("--as", "--format", "kind", type=click.Choice(kinds), metavar="KIND",
                     help=f"{', '.join(kinds)}; else as OUT is named."),
    )  # fmt: skip
    return lambda command: _decorate(command, options)


def _decorate(command: Any, options: Iterable[Callable[[Any], Any]]) -> Any:
    for option in reversed(tuple(options)):
        command = option(command)
    return command


_MAKING: Final = (
    filter_options(TRANSITIONS),
    click.option("--dry-run", "is_dry_run", is_flag=True,
                 help="Print the counts and write nothing."),
    click.option("--left-out", "left_path", metavar="FILE",
                 help="Write the steps left out, and why, to FILE."),
    click.option("--json", "as_json", is_flag=True, help="Print the counts as one JSON document."),
    click.option("--certificate", "certificate", is_flag=True,
                 help="Write a certificate as well; see: verify."),
    click.option("--split", type=float, metavar="SHARE",
                 help="Write this share of tasks to a file of validation, such as 0.1."),
    click.option("--seed", type=int, default=0, metavar="N", help="Divide the tasks otherwise."),
    store_option,
)  # fmt: skip


@click.command(short_help="Spans, one a line, as the SDK prints them.")
@_output_options("jsonl", "parquet")
@rollout_option
@store_option
def spans(
    out: str | None, output: str | None, kind: "FileKind | None", rollout: str | None,
    store: str | None,
) -> None:  # fmt: skip
    """Spans, one a line in the shape of the SDK's ReadableSpan.to_json()."""
    from lightning_otel.cli.spans import sdk_json
    from lightning_otel.dataset.census import TRAIN
    from lightning_otel.dataset.export import check_place, save_rows

    place = _choose_place(out, output)
    found = _choose_kind(place, kind)
    if found == "folder":
        raise ConfigError(f"spans are written to a file, not to {place}; end it in .jsonl")
    opened = Store(store)
    _require_readable(opened)
    table = opened.spans(rollout_id=find_rollout_id(opened, rollout))
    if next(iter(table), None) is None:
        raise NotFoundError("no span to export; record some: lightning-otel run -- python agent.py")
    if found == "parquet":
        check_place(Path(place), found)
        table.to_parquet(place)
        print_note(f"spans → {place} ({format_size(Path(place).stat().st_size)})")
        return
    rows = {TRAIN: map(sdk_json, table)}
    count = save_rows(rows, _print_row if place == _STDOUT else place, found, {})
    print_note(f"{count_noun(count, 'span')} → {_place_name(place)}")


def _make_command(name: str, made: "Format") -> click.Command:

    def run(**given: Any) -> int:
        return _run_export(name, made, **given)

    options = filter_options(list_format_options(made))
    run = _decorate(run, (_output_options("jsonl", "parquet", "folder"), *_MAKING, options))
    needs = "" if made.needs in ("", "nothing") else f"; needs {made.needs}"
    summary = f"For {made.used_by}{needs}." if made.used_by else "Registered by a package."
    return click.command(name, help=summary, short_help=summary)(run)


def _run_export(
    name: str, made: "Format", *, out: str | None, output: str | None, kind: "FileKind | None",
    is_dry_run: bool, as_json: bool, left_path: str | None, certificate: bool, split: float | None,
    seed: int, store: str | None, **options: Any,
) -> int:  # fmt: skip

    place = _choose_place(out, output)
    is_rows = place == _STDOUT and not is_dry_run
    chosen = _choose_kind(place, None if place == _STDOUT and is_dry_run else kind)
    if as_json and is_rows:
        raise ConfigError("--json would stand among the rows on stdout; name a file for them")
    opened = Store(store)
    _require_readable(opened)
    keywords = make_keywords(opened, options)
    if not is_dry_run:
        settle_pending_feedback(opened)
    with (
        _show_progress(opened, is_quiet=is_rows) as progress,
        _open_left_out(left_path) as left_out,
    ):
        done = opened.export(
            name,
            None if is_dry_run else _print_row if place == _STDOUT else place,
            kind=chosen,
            left_out=left_out,
            progress=progress,
            certificate=certificate and not is_dry_run,
            split=split,
            seed=seed,
            **keywords,
        )
    is_selected = bool(keywords.keys() & {"rollout_id", "agents", "since", "until"})
    why_empty = None if done.rows else _explain_empty(done, made, is_selected=is_selected)
    code = _NO_ROWS if why_empty and not is_dry_run else 0
    if as_json:
        print_json(_describe(done, why_empty, is_dry_run=is_dry_run))
        return code
    say = print_line if is_dry_run else print_note
    for line in _word_funnel(done, "nowhere (dry run)" if is_dry_run else _place_name(place)):
        say(line)
    if why_empty:
        say(f"nothing to train on: {why_empty}")
        suggest("stats", store)
    elif is_dry_run:
        # This command without --dry-run: the rows that were counted, and no others.
        given = [each for each in sys.argv[1:] if each not in ("--dry-run", "--json")]
        suggest(shlex.join([*given, *(["-o", f"{name}.jsonl"] * (place == _STDOUT))]), None)
    elif place != _STDOUT:
        suggest("plot", store)
    return code


def _word_funnel(done: "Exported", place: str) -> Iterator[str]:
    report = done.report
    yield f"rollouts   {report.rollouts}"
    lost = sum(each.noun == "call" for each in report.dropped)
    yield f"calls      {report.calls}: {report.transitions} are transitions, {lost} left out"
    yield f"tokens     {report.exact} of {report.transitions} transitions have exact token ids"
    yield (
        f"rewards    {report.rewards}: {report.rewards_placed} placed; "
        f"{report.rewarded} of {report.transitions} transitions have one"
    )
    in_rows = "an unknown number" if done.in_rows is None else done.in_rows
    out = sum(done.left_out.values())
    yield f"answers    {done.steps}: {in_rows} in rows, {out} left out"
    yield f"rows       {done.rows} of {done.format} → {place}"
    if done.tasks:
        sides = (f"{count_noun(n, 'task')} {side}" for side, n in done.tasks.items())
        yield f"split      {', '.join(sides)}"
    for words, reasons in (
        ("left out", report.reasons()), ("not exact", report.inexact), ("note", report.notes),
    ):  # fmt: skip
        yield from (f"  {words}: {number} × {reason}" for reason, number in reasons.items())
    for words, steps in (("in no row", done.left_out), ("in a row without", done.partial)):
        for reason, number in steps.items():
            first = done.span_ids[reason]
            yield f"  {words}: {count_noun(number, 'step')}: {reason} (first: span {first})"


def _explain_empty(done: "Exported", made: "Format", *, is_selected: bool) -> str:
    if not done.report.spans and is_selected:
        return "no step matches this agent, rollout or time; see: lightning-otel ls"
    if not done.report.spans:
        return "the store has no spans here; record some: lightning-otel run -- python agent.py"
    if not done.report.calls:
        return "no model was called; see what is captured: lightning-otel doctor"
    if not done.report.transitions:
        return "every call was left out; see the reasons: lightning-otel stats"
    if done.left_out:
        return f"it needs {made.needs or 'more'}. Most steps have {next(iter(done.left_out))}"
    return "no step matches the filters; see: lightning-otel ls"


def _describe(done: "Exported", why_empty: str | None, *, is_dry_run: bool) -> dict[str, Any]:
    return {
        "dry_run": is_dry_run,
        "format": done.format,
        **{name: getattr(done.report, name) for name in _COUNTS},
        "rows": done.rows,
        "left_out": {**done.report.reasons(), **done.left_out},
        "partial": done.partial,
        "steps": done.steps,
        "in_rows": done.in_rows,
        "steps_left_out": sum(done.left_out.values()),
        "tasks": done.tasks,
        "span_ids": done.span_ids,
        "why_empty": why_empty,
    }


@contextmanager
def _open_left_out(path: str | None) -> "Iterator[Callable[[LeftOut], None] | None]":
    if path is None:
        yield None
        return
    from lightning_otel.store.files import private_file

    with private_file(path) as made, made.open("w", encoding="utf-8") as file:

        def write(left: "LeftOut") -> None:
            names = ("rollout_id", "attempt_id", "agent", "trace_id", "span_id")
            step = {name: getattr(left.step, name) for name in names}
            found = {**step, "reason": left.reason, "is_row_written": left.is_row_written}
            file.write(json_text(found) + "\n")

        yield write


@contextmanager
def _show_progress(opened: Store, *, is_quiet: bool) -> "Iterator[Callable[[int], None] | None]":
    with progress_bar("rollouts", is_quiet=is_quiet) as advance:
        if advance is None:
            yield None
            return
        (row,) = opened.sql("SELECT count(DISTINCT rollout_id) AS rollouts FROM rollouts").dicts()
        yield lambda done: advance(done, row["rollouts"])


def _print_row(row: Mapping[str, Any]) -> None:
    sys.stdout.write(json_text(row) + "\n")


def _require_readable(opened: Store) -> None:
    """Refuse a store that cannot be read, before any file is opened for writing."""
    opened.source.connect(("spans",)).close()


def _choose_place(out: str | None, output: str | None) -> str:
    if out is not None and output is not None:
        raise ConfigError(f"two places to write to, {out} and {output}; name one")
    return out or output or _STDOUT


def _choose_kind(place: str, kind: "FileKind | None") -> "FileKind":
    from lightning_otel.dataset.export import kind_of

    if place != _STDOUT:
        return kind_of(place, kind)
    if kind not in (None, "jsonl"):
        raise ConfigError(f"{kind.capitalize()} cannot be written to stdout; name a file with -o")
    return "jsonl"


def _place_name(place: str) -> str:
    return "stdout" if place == _STDOUT else place
