"""How commands print: tables for people, lines for pipes, JSON for machines; nothing is cut there."""

import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")

store_option = click.option(
    "--store",
    metavar="PATH",
    envvar="LIGHTNING_OTEL_STORE",
    help="Store to use [default: .lightning/traces.duckdb].",
)


def json_options(function: F) -> F:
    """Adds ``--json`` and ``--jsonl``."""
    function = click.option("--jsonl", "as_jsonl", is_flag=True, help="One JSON object a line.")(
        function
    )
    return click.option("--json", "as_json", is_flag=True, help="One JSON document.")(function)


def shown(value: object, width: int | None = None) -> str:
    """A value as text that cannot move the cursor or colour the screen, cut to a width."""
    text = "" if value is None else value if isinstance(value, str) else str(value)
    text = _CONTROL.sub(lambda found: "�" if found[0] not in "\t\n\r" else " ", text)
    return text if width is None or len(text) <= width else text[: width - 1] + "…"


def plain(value: Any) -> Any:
    """A value as JSON can hold it."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (str, int, float, bool)) or value is None:
        return value
    if isinstance(value, Iterable):
        return [plain(item) for item in value]
    return str(value)


def print_json(value: object) -> None:
    """One JSON document on stdout."""
    click.echo(json.dumps(plain(value), ensure_ascii=False, indent=2))


def print_rows(
    rows: Sequence[Mapping[str, Any]],
    columns: Sequence[str],
    *,
    as_json: bool = False,
    as_jsonl: bool = False,
    as_table: bool = False,
    widths: Mapping[str, int] | None = None,
) -> None:
    """Rows on stdout: a table on a terminal, tab-separated lines in a pipe, or JSON if asked for.

    Args:
        rows: Values by column.
        columns: Which to print, in order.
        as_json: One array.
        as_jsonl: One object a line.
        as_table: A table even in a pipe.
        widths: Most characters of a column in a table.
    """
    if as_json:
        print_json(rows)
    elif as_jsonl:
        for row in rows:
            click.echo(json.dumps(plain(row), ensure_ascii=False))
    elif not sys.stdout.isatty() and not as_table:
        click.echo("\t".join(columns))
        for row in rows:
            click.echo("\t".join(shown(row.get(name)) for name in columns))
    else:
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for name in columns:
            is_number = all(isinstance(row.get(name), (int, float, type(None))) for row in rows)
            table.add_column(name.upper(), justify="right" if is_number and rows else "left")
        for row in rows:
            cells = [shown(row.get(name), (widths or {}).get(name)) for name in columns]
            table.add_row(*map(Text, cells))
        Console().print(table)


def talk(text: str) -> None:
    """A line for the person, on stderr."""
    click.echo(text, err=True)


def ago(start_ns: int) -> str:
    """How long ago a time was, in one unit."""
    seconds = max(0.0, time.time() - start_ns / 1e9)
    for limit, unit, size in ((120, "s", 1), (7200, "min", 60), (172_800, "h", 3600)):
        if seconds < limit:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds / 86_400:.0f} d ago"
