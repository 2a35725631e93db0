"""``export``: data out, in the format of whoever reads it."""

import json
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

import click

from lightning_otel.cli import Guessing
from lightning_otel.cli.funnel import document, left_out_file, lines
from lightning_otel.cli.maintain import give_waiting
from lightning_otel.cli.options import Agent, rollout_id_of, rollout_option, when_options
from lightning_otel.cli.output import (
    count_noun,
    json_text,
    print_json,
    size,
    store_option,
    suggest,
    talk,
)
from lightning_otel.errors import ConfigError
from lightning_otel.types import CaptureLevel, Credit, Estimator

if TYPE_CHECKING:
    from lightning_otel.dataset import Store
    from lightning_otel.dataset.export import FileKind
    from lightning_otel.formats.format import Format

_JSON_COLUMNS: Final = frozenset(
    {"observation", "action", "next_observation", "rewards", "tools", "resources", "sampling"}
)
_STDOUT: Final = "-"
_SPANS: Final = "spans"


class _Formats(Guessing):
    """A group whose commands are ``spans`` and every format; ``--format X`` names one as well."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take ``--format X`` before anything else for the command ``X``."""
        if args and args[0].startswith("--format"):
            name, mark, value = args[0].partition("=")
            if name == "--format" and (mark or len(args) > 1):
                args = [value, *args[1:]] if mark else args[1:]
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The formats that are installed."""
        from lightning_otel import formats

        return [_SPANS, *formats.names()]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of a format."""
        from lightning_otel import formats

        if cmd_name == _SPANS:
            return spans
        return (
            _make_command(cmd_name, formats.get(cmd_name)) if cmd_name in formats.names() else None
        )


@click.group(cls=_Formats)
def export() -> None:
    """Write spans, or rows that a trainer reads: export --format FORMAT OUT.

    OUT ends in .jsonl or .parquet, or is a folder that Hugging Face's datasets reads.
    """


_output_argument = click.argument("out", required=False)
_output_option = click.option(
    "-o", "--output", metavar="OUT", help="The same as OUT; - is stdout, the default."
)


def _kind_option(*kinds: str) -> Callable[[Any], Any]:
    return click.option(
        "--as",
        "--format",
        "kind",
        type=click.Choice(kinds),
        metavar="KIND",
        help=f"{', '.join(kinds)}; else as OUT is named.",
    )


_SELECTING: Final = (
    "since", "until", "mode", "resource_version", "rewarded", "min_reward", "max_reward", "capture",
    "received",
)  # fmt: skip


def _add_selection_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that say which steps are wanted."""
    for option in reversed((
        click.option("--agents", type=Agent(), metavar="PATTERN", multiple=True,
                     help="Only agents like this; !… leaves out."),
        when_options,
        click.option("--mode", help="Only steps taken in it, such as train."),
        click.option("--resource-version", metavar="NAME", help="Only steps of this version."),
        click.option("--rewarded/--no-rewarded", default=None,
                     help="Only steps with a reward, or only those without."),
        click.option("--min-reward", type=float, help="Only steps with at least this reward."),
        click.option("--max-reward", type=float, help="Only steps with at most this reward."),
        click.option("--capture", type=click.Choice(get_args(CaptureLevel)),
                     help="Only steps captured like this."),
        click.option("--received/--no-received", default=True,
                     help="Whether spans from elsewhere count."),
    )):  # fmt: skip
        command = option(command)
    return command


@click.command(short_help="Spans, one a line, as the SDK prints them.")
@_output_argument
@_output_option
@_kind_option("jsonl", "parquet")
@rollout_option
@store_option
def spans(
    out: str | None,
    output: str | None,
    kind: "FileKind | None",
    rollout: str | None,
    store: str | None,
) -> None:
    """Spans, one a line in the shape of the SDK's ReadableSpan.to_json()."""
    from lightning_otel.cli.spans import sdk_json
    from lightning_otel.dataset import Store

    place = _choose_place(out, output)
    found = _choose_kind(place, kind)
    if found == "folder":
        raise ConfigError(f"spans are written to a file, not to {place}; end it in .jsonl")
    is_parquet = found == "parquet"
    opened = Store(store)
    table = opened.spans(rollout_id=_rollout_id(opened, rollout))
    if is_parquet:
        _check_writable(place)
        table.to_parquet(place)
        talk(f"spans → {place} ({size(Path(place).stat().st_size)})")
        return
    count = _write_lines(place, map(sdk_json, table))
    talk(f"{count_noun(count, 'span')} → {_place_name(place)}")


def _make_command(name: str, made: "Format") -> click.Command:
    """The command that exports one format, with its options."""
    options = [
        click.Option([f"--{option.replace('_', '-')}"], type=_type_of(default), default=default,
                     show_default=default is not None, help="Of this format; see docs/exports.md.")
        for option, default in made.options().items()
    ]  # fmt: skip

    @_output_argument
    @_output_option
    @_kind_option("jsonl", "parquet", "folder")
    @rollout_option
    @_add_selection_options
    @click.option("--adapter", metavar="NAME", help="Another adapter; see docs/transitions.md.")
    @click.option(
        "--credit", type=click.Choice(get_args(Credit)), default="previous", metavar="RULE",
        help=", ".join(get_args(Credit)),
    )  # fmt: skip
    @click.option("--gamma", type=float, default=0.99, show_default=True, help="For discounted.")
    @click.option(
        "--advantage", type=click.Choice(get_args(Estimator)), metavar="RULE",
        help=f"{', '.join(get_args(Estimator))}; by default none.",
    )  # fmt: skip
    @click.option("--incomplete", is_flag=True, help="Also of rollouts whose process died in them.")
    @click.option("--dry-run", is_flag=True, help="Print the funnel and write nothing.")
    @click.option("--left-out", metavar="FILE", help="Write there what is in no row, and why.")
    @click.option("--json", "as_json", is_flag=True, help="The funnel as one JSON document.")
    @store_option
    def run(**given: Any) -> None:
        _run_export(name, made, given)

    summary = f"For {made.used_by}; needs {made.needs}." if made.used_by else "Registered."
    found = click.command(name, help=summary, short_help=summary)(run)
    found.params += options
    return found


def _type_of(default: object) -> type:
    return float if default is None or isinstance(default, float) else type(default)


def _run_export(name: str, made: "Format", given: Mapping[str, Any]) -> None:
    from lightning_otel.dataset import Store

    place = _choose_place(given["out"], given["output"])
    is_dry_run, as_json = given["dry_run"], given["as_json"]
    kind = _choose_kind(place, None if place == _STDOUT and is_dry_run else given["kind"])
    if as_json and place == _STDOUT and not is_dry_run:
        raise ConfigError("--json would stand among the rows on stdout; name a file for them")
    opened = Store(given["store"])
    rollout_id = _rollout_id(opened, given["rollout"])
    if not is_dry_run:
        give_waiting(opened)
    options = {option: given[option] for option in made.options()}
    with (
        _show_progress(opened, is_quiet=place == _STDOUT and not is_dry_run) as progress,
        left_out_file(given["left_out"]) as left_out,
    ):
        done = opened.export(
            name,
            None if is_dry_run else _print_row if place == _STDOUT else place,
            kind=kind,
            credit=given["credit"],
            gamma=given["gamma"],
            advantage=given["advantage"],
            adapter=given["adapter"],
            include_incomplete=given["incomplete"],
            left_out=left_out,
            progress=progress,
            rollout_id=rollout_id,
            agents=given["agents"] or None,
            **{name: given[name] for name in _SELECTING},
            **options,
        )
    is_selected = bool(rollout_id or given["agents"] or given["since"] or given["until"])
    if as_json:
        print_json(document(done, made, is_dry_run=is_dry_run, is_selected=is_selected))
        return
    say = click.echo if is_dry_run else talk
    where = "nowhere (dry run)" if is_dry_run else _place_name(place)
    for line in lines(done, made, where, is_selected=is_selected):
        say(line)
    if not done.rows:
        suggest("stats", given["store"])
    elif is_dry_run:
        suggest(_in_earnest(name, place), None)
    elif place != _STDOUT:
        suggest("plot", given["store"])


def _in_earnest(name: str, place: str) -> str:
    """This command without ``--dry-run``: the rows that were counted, and no others."""
    given = [each for each in sys.argv[1:] if each not in ("--dry-run", "--json")]
    return shlex.join([*given, *(["-o", f"{name}.jsonl"] if place == _STDOUT else [])])


@contextmanager
def _show_progress(opened: "Store", *, is_quiet: bool) -> "Iterator[Callable[[int], None] | None]":
    """A bar on a terminal's stderr, gone when all is done."""
    if is_quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    (row,) = opened.sql("SELECT count(DISTINCT rollout_id) AS rollouts FROM rollouts").dicts()
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("rollouts", total=row["rollouts"])
        yield lambda done: bar.update(task, completed=done)


def _print_row(row: Mapping[str, Any]) -> None:
    sys.stdout.write(json_text(row) + "\n")


def parsed(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row whose JSON columns are values, not texts."""
    return {
        name: json.loads(value) if name in _JSON_COLUMNS and isinstance(value, str) else value
        for name, value in row.items()
    }


def _rollout_id(opened: "Store", target: str | None) -> str | None:
    """The rollout that an id or the beginning of one stands for; None where none is named."""
    opened.connect()  # a store that cannot be read is refused before any file is opened for writing
    return rollout_id_of(opened, target)


def _choose_place(out: str | None, output: str | None) -> str:
    if out is not None and output is not None:
        raise ConfigError(f"two places to write to, {out} and {output}; name one")
    return out or output or _STDOUT


def _choose_kind(place: str, kind: "FileKind | None") -> "FileKind":
    """Return the file's kind: as named, else by the place's suffix."""
    from lightning_otel.dataset.export import kind_of

    if place != _STDOUT:
        return kind_of(place, kind)
    if kind not in (None, "jsonl"):
        raise ConfigError(f"{kind.capitalize()} cannot be written to stdout; name a file with -o")
    return "jsonl"


def _place_name(place: str) -> str:
    return "stdout" if place == _STDOUT else place


def _check_writable(output: str) -> None:
    """Refuse a place where no file can be made.

    Raises:
        ConfigError: It cannot be opened.
    """
    try:
        # What a store holds is the user's alone, and so is what is written of it.
        os.close(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600))
    except OSError as exc:
        raise ConfigError(f"cannot write {output}: {exc.strerror}; name a place with -o") from exc


def _write_lines(output: str, rows: Iterable[Mapping[str, Any]]) -> int:
    if output == _STDOUT:
        return _write_each(sys.stdout, rows)
    _check_writable(output)
    with Path(output).open("w", encoding="utf-8") as file:
        return _write_each(file, rows)


def _write_each(file: Any, rows: Iterable[Mapping[str, Any]]) -> int:
    count = 0
    for row in rows:
        file.write(json_text(row) + "\n")
        count += 1
    file.flush()
    return count
