"""Output of commands: tables for people, whole lines for pipes, JSON for machines."""

import base64
import json
import logging
import math
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from shutil import get_terminal_size, which
from typing import TYPE_CHECKING, Any

import click

from lightning_otel.types.instants import utc_text
from lightning_otel.types.text import UNSAFE, csv_cell, format_age, format_duration, one_line
from lightning_otel.types.text import count_noun as count_noun
from lightning_otel.types.text import format_size as format_size

if TYPE_CHECKING:
    from lightning_otel.cli.options import Form

_NARROWEST = 8
_PATIENCE_S = 1.0


def printable(value: object) -> str:
    """A value as one line of text that cannot move the cursor or colour the screen."""
    if isinstance(value, (Mapping, list, tuple)):
        value = json.dumps(to_json_value(value), ensure_ascii=False)
    text = "" if value is None else value if isinstance(value, str) else str(value)
    return one_line(text)


def terminal_width() -> int | None:
    """Cells in a line of the terminal stdout is; None where it is a pipe or a file."""
    return get_terminal_size().columns if sys.stdout.isatty() else None


def to_json_value(value: Any) -> Any:
    """A value as JSON can hold it."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, (str, int)) or value is None:
        return value
    if isinstance(value, (bytes, bytearray, memoryview)):
        return base64.b64encode(value).decode("ascii")
    # A comprehension is a frame of its own: half the depth would be too much.
    if isinstance(value, Mapping):
        return dict(zip(map(str, value), map(to_json_value, value.values()), strict=True))
    if isinstance(value, Iterable):
        return [*map(to_json_value, value)]
    return str(value)


def json_text(value: object, indent: int | None = None) -> str:
    """A value as JSON in which nothing but the indentation is beyond the printable characters."""
    text = json.dumps(to_json_value(value), ensure_ascii=False, indent=indent)
    return UNSAFE.sub(
        lambda match: match[0] if match[0] == "\n" else f"\\u{ord(match[0]):04x}", text
    )


def print_json(value: object) -> None:
    """One JSON document on stdout."""
    click.echo(json_text(value, indent=2))


def print_rows(
    rows: Sequence[Mapping[str, Any]],
    columns: Sequence[str],
    *,
    form: "Form | None" = None,
    times: Collection[str] = (),
) -> None:
    """Print rows: a table on a terminal, tab-separated lines in a pipe, or as asked for.

    Args:
        rows: Values by column.
        columns: Which to print, in order.
        form: ``json`` is one array, ``jsonl`` one object a line, ``csv`` begins with the names.
        times: Columns of Unix nanoseconds, named ``…_ns``: these numbers in JSON, and elsewhere ISO
            8601 in UTC under the name without its unit.
    """
    if form in ("json", "jsonl"):
        records = [{name: row.get(name) for name in columns} for row in rows]
        if form == "json":
            print_json(records)
            return
        for item in records:
            click.echo(json_text(item))
        return
    names = {name: name.removesuffix("_ns") if name in times else name for name in columns}
    if times:
        rows = [
            {
                title: utc_text(row[name])
                if title != name and row.get(name) is not None
                else row.get(name)
                for name, title in names.items()
            }
            for row in rows
        ]
        columns = list(names.values())
    if form == "csv":
        _print_csv(rows, columns)
    elif not sys.stdout.isatty():
        click.echo("\t".join(columns))
        for row in rows:
            click.echo("\t".join(printable(row.get(name)) for name in columns))
    elif _fits_terminal(rows, columns):
        print_table(rows, columns)
    else:
        _print_records(rows, columns)


def print_aged(
    rows: Sequence[dict[str, Any]],
    columns: Sequence[str],
    form: "Form | None",
    more: Sequence[str] = (),
) -> None:
    """Print rows with ``created_ns``: on a terminal their age, else the time and more columns."""
    if form is None and sys.stdout.isatty():
        rows = [{**row, "age": format_age_since(row["created_ns"])} for row in rows]
        print_rows(rows, ["age" if name == "created_ns" else name for name in columns])
    else:
        print_rows(rows, (*columns, *more), form=form, times=("created_ns",))


def print_data(
    form: "Form | None",
    rows: Sequence[Mapping[str, Any]],
    columns: Sequence[str] = (),
    *,
    document: object = None,
    times: Collection[str] = (),
) -> bool:
    """Print data for programs, if a form is asked for, and return True if one is.

    The columns are by default those of the first row; ``document`` is all that ``json`` prints.
    """
    if form == "json" and document is not None:
        print_json(document)
    elif form is not None:
        print_rows(rows, columns or list(*rows[:1]), form=form, times=times)
    return form is not None


def line_printer(*, is_cut: bool = True) -> Callable[[Iterable[tuple[str, str]]], None]:
    """Return what prints a line of pieces, each a text with its style, cut to the terminal."""
    if not sys.stdout.isatty():
        return lambda pieces: click.echo("".join(text for text, _ in pieces))
    from rich.console import Console
    from rich.text import Text

    # Rich takes a dumb terminal for 80 cells wide unless it is given width and height.
    console = Console(highlight=False, width=terminal_width(), height=1)

    def print_line(pieces: Iterable[tuple[str, str]]) -> None:
        line = Text.assemble(*pieces, overflow="ellipsis", no_wrap=is_cut)
        console.print(line.plain if console.no_color else line, markup=False, emoji=False,
                      no_wrap=is_cut, overflow="ellipsis", soft_wrap=not is_cut)  # fmt: skip

    return print_line


def _print_csv(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """Print as RFC 4180 has it, but for line ends; what is no plain value stands as JSON."""
    import csv

    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow([csv_cell(name, name) for name in columns])
    for row in rows:
        writer.writerow([csv_cell(row.get(name), _format_cell(row.get(name))) for name in columns])


def _format_cell(value: object) -> str:
    if isinstance(value, (Mapping, list, tuple)):
        return json_text(value)
    text = "" if value is None else str(to_json_value(value))
    return UNSAFE.sub(lambda match: match[0] if match[0] in "\n\t" else "�", text)


def print_table(
    rows: Sequence[Mapping[str, Any]], columns: Sequence[str], texts: Sequence[str] = ()
) -> None:
    """A table, one line a row; its ``texts`` may be cut, and are left out where all are empty."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    columns = [name for name in columns if name not in texts or any(row.get(name) for row in rows)]
    for name in columns:
        is_text = name in texts
        table.add_column(
            name.upper(),
            justify="right" if _is_number(rows, name) else "left",
            no_wrap=not is_text,
            # A column that may shrink needs a bound, or it shrinks to nothing.
            min_width=min(_NARROWEST, _widest_cell(rows, name)) if is_text else None,
        )
    for row in rows:
        cells = [printable(row.get(name)) for name in columns]
        table.add_row(*(Text(cell, no_wrap=True, overflow="ellipsis") for cell in cells))
    Console().print(table)


def _is_number(rows: Sequence[Mapping[str, Any]], name: str) -> bool:
    values = [row.get(name) for row in rows]
    return any(value is not None for value in values) and all(
        value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))
        for value in values
    )


def _widest_cell(rows: Sequence[Mapping[str, Any]], name: str) -> int:
    return max([len(name), *(len(printable(row.get(name))) for row in rows)])


def _fits_terminal(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> bool:
    width = terminal_width() or 0
    return sum(_widest_cell(rows, name) + 2 for name in columns) - 2 <= width


def _print_records(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
    indent = max(len(name) for name in columns)
    for number, row in enumerate(rows, 1):
        click.echo(f"── {number} of {len(rows)}")
        for name in columns:
            click.echo(f"{name:<{indent}}  {printable(row.get(name))}")


def print_line(text: object) -> None:
    """A line on stdout, whatever is in it."""
    click.echo(printable(text))


def print_note(text: str) -> None:
    """A line for the person, on stderr."""
    click.echo(printable(text), err=True)


@contextmanager
def progress_bar(
    label: str, *, is_quiet: bool = False
) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on a terminal's stderr; call it with what is done, and of what."""
    if is_quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda count, total: bar.update(task, completed=count, total=total)


@contextmanager
def show_facts_bar() -> Iterator[None]:
    """A block in which a terminal shows how many facts are computed, if that takes long."""
    logger, began_s = logging.getLogger("lightning_otel.store.renewal"), time.monotonic()
    advances: list[Callable[[int, int], None] | None] = []
    with ExitStack() as bar:

        def show(record: logging.LogRecord) -> bool:
            count, total = (number for number in record.args or () if isinstance(number, int))
            if not advances and time.monotonic() - began_s > _PATIENCE_S:
                advances.append(bar.enter_context(progress_bar("facts")))
            for advance in filter(None, advances):
                advance(count, total)
            if count >= total:
                bar.close()
                advances.clear()
            return False

        logger.setLevel(logging.INFO)
        logger.addFilter(show)
        try:
            yield
        finally:
            logger.removeFilter(show)
            logger.setLevel(logging.NOTSET)


def format_leftover(size_bytes: int, wait_s: float) -> str:
    """Word the size of replaced files that are on the disk yet, and until when."""
    remainder = f"for {math.ceil(wait_s)} s more, as readers may have them open"
    until = remainder if wait_s else "until the next compact"
    return f"{format_size(size_bytes)} of old files on disk, {until}"


def suggest(command: str, store: str | None) -> None:
    """Name the command a person may want next, in the same store."""
    from lightning_otel import config

    option = "" if store in (None, config.STORE.read()) else f" --store {shlex.quote(str(store))}"
    # A password or token in a URL is not repeated: terminals are logged and pasted.
    print_note(re.sub(r"(://)[^/@\s']*@", r"\1…@", f"→ {program_command()} {command}{option}"))


def program_command() -> str:
    """Return the command that calls us at this terminal: an environment may not be activated."""
    if which("lightning-otel"):
        return "lightning-otel"
    script = Path(sys.executable).with_name("lightning-otel")
    if not script.exists():
        return f"{shlex.quote(sys.executable)} -m lightning_otel"
    try:
        relative = os.path.relpath(script)
    except FileNotFoundError:  # the working directory is gone
        relative = str(script)
    return shlex.quote(relative if len(relative) < len(str(script)) else str(script))


def format_ns(duration_ns: int) -> str:
    """A duration in the unit people would say it in."""
    return format_duration(duration_ns / 1e9)


def format_age_since(start_ns: int) -> str:
    """Word the time since then, in one unit."""
    return format_age(start_ns, time.time_ns())
