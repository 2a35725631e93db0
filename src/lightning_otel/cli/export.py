"""``export`` and ``pack``: data out, as lines, Parquet or one database."""

import json
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from lightning_otel.cli import Guessing
from lightning_otel.cli.output import counted, json_text, size, store_option, talk
from lightning_otel.errors import ConfigError
from lightning_otel.types import Credit, Estimator

if TYPE_CHECKING:
    from lightning_otel.store import Store

_JSON_COLUMNS = frozenset(
    {"observation", "action", "next_observation", "rewards", "tools", "resources", "sampling"}
)
_STDOUT = "-"

_output_option = click.option(
    "-o",
    "--output",
    default=_STDOUT,
    metavar="FILE",
    help="File to write; - is stdout.",
    show_default=True,
)
_format_option = click.option(
    "--format",
    "kind",
    type=click.Choice(["jsonl", "parquet"]),
    help="By default what the file's ending says, else jsonl.",
)
_rollout_option = click.option("--rollout", metavar="ID", help="Only this one; a prefix or @last.")


@click.group(cls=Guessing)
def export() -> None:
    """Write spans or triplets as JSON lines or Parquet."""


@export.command(short_help="Spans, one a line, as the SDK prints them.")
@_output_option
@_format_option
@_rollout_option
@store_option
def spans(output: str, kind: str | None, rollout: str | None, store: str | None) -> None:
    """Spans, one a line in the shape of the SDK's ReadableSpan.to_json()."""
    from lightning_otel.cli.spans import sdk_json
    from lightning_otel.store import Store

    is_parquet = _is_parquet(kind, output)
    opened = Store(store)
    table = opened.spans(rollout_id=_rollout_id(opened, rollout))
    if is_parquet:
        _write_parquet(table, output)
        talk(f"spans → {output} ({size(Path(output).stat().st_size)})")
        return
    count = _write_lines(output, map(sdk_json, table))
    talk(f"{counted(count, 'span')} → {_place(output)}")


@export.command(short_help="Transitions, one a line, ready for a trainer.")
@_output_option
@_format_option
@_rollout_option
@click.option("--agents", metavar="GLOB", help="Only agents whose name matches.")
@click.option(
    "--credit", type=click.Choice(get_args(Credit)), default="next", show_default=True,
    help="How rewards without a link reach a call.",
)  # fmt: skip
@click.option("--gamma", type=float, default=0.99, show_default=True, help="For discounted.")
@click.option(
    "--advantage", type=click.Choice(get_args(Estimator)),
    help="Compare each rollout with others of its task; by default no.",
)  # fmt: skip
@click.option("--incomplete", is_flag=True, help="Also of rollouts whose process died in them.")
@store_option
def triplets(
    output: str,
    kind: str | None,
    rollout: str | None,
    agents: str | None,
    credit: Any,
    gamma: float,
    advantage: Any,
    incomplete: bool,
    store: str | None,
) -> None:
    """Transitions (observation, action, reward, next observation, done), one a line."""
    from lightning_otel.store import Store

    is_parquet = _is_parquet(kind, output)
    opened = Store(store)
    rollout_id = _rollout_id(opened, rollout)
    table = opened.transitions(
        agents=agents,
        credit=credit,
        gamma=gamma,
        advantage=advantage,
        rollout_id=rollout_id,
        include_incomplete=incomplete,
    )
    if is_parquet:
        _write_parquet(table, output)
        talk(f"transitions → {output} ({size(Path(output).stat().st_size)})")
    else:
        count = _write_lines(output, map(parsed, table.dicts()))
        talk(f"{counted(count, 'transition')} → {_place(output)}")
    report = table.report()
    which = " (all agents)" if agents else ""
    talk(
        f"from {counted(report.calls, 'call')} in {counted(report.rollouts, 'rollout')}{which}: "
        f"{report.rewarded} rewarded, {report.exact} with exact token ids"
    )
    for reason, number in report.reasons().items():
        talk(f"  left out: {number} × {reason}")
    for reason, number in report.inexact.items():
        talk(f"  not exact: {number} × {reason}")
    for reason, number in report.notes.items():
        talk(f"  note: {number} × {reason}")


def parsed(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row whose JSON columns are values, not texts."""
    return {
        name: json.loads(value) if name in _JSON_COLUMNS and isinstance(value, str) else value
        for name, value in row.items()
    }


def _rollout_id(opened: "Store", target: str | None) -> str | None:
    """The rollout that an id or the beginning of one stands for; None where none is named."""
    opened.connect()  # a store that cannot be read is refused before any file is opened for writing
    if target is None:
        return None
    noun, whole = opened.find(target)
    return whole if noun == "rollout" else opened.rollout_of(noun, whole)


def _is_parquet(kind: str | None, output: str) -> bool:
    if (kind or ("parquet" if output.endswith(".parquet") else "jsonl")) == "jsonl":
        return False
    if output == _STDOUT:
        raise ConfigError("Parquet cannot be written to stdout; name a file with -o")
    return True


def _place(output: str) -> str:
    return "stdout" if output == _STDOUT else output


def _write_parquet(table: Any, output: str) -> None:
    _check_writable(output)
    table.to_parquet(output)


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


@click.command()
@click.argument("out")
@store_option
def pack(out: str, store: str | None) -> None:
    """Write everything into one self-contained DuckDB database with real tables.

    OUT is its path; or a clickhouse:// URL, into whose table the spans it lacks are loaded.
    """
    from lightning_otel.store import Store

    count = Store(store).pack(out)
    if "://" in out:
        talk(f"{counted(count, 'new span')} → {Store(out).name}")
        return
    talk(f"{counted(count, 'span')} → {out} ({size(Path(out).stat().st_size)})")
    talk(f"→ duckdb {out} 'SELECT * FROM rollouts'")
