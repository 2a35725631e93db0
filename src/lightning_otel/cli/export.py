"""``export`` and ``pack``: data out, as lines, Parquet or one database."""

import json
import sys
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click

from lightning_otel.cli.output import plain, store_option, talk
from lightning_otel.errors import ConfigError

_CREDITS = ("next", "last", "sibling", "discounted")

_output_option = click.option(
    "-o",
    "--output",
    default="-",
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
_rollout_option = click.option("--rollout", metavar="ID", help="Only this rollout.")


@click.group()
def export() -> None:
    """Write spans or triplets as JSON lines or Parquet."""


@export.command()
@_output_option
@_format_option
@_rollout_option
@store_option
def spans(output: str, kind: str | None, rollout: str | None, store: str | None) -> None:
    """Spans, one a line in the shape of the SDK's ReadableSpan.to_json()."""
    from lightning_otel.cli.spans import sdk_json
    from lightning_otel.store import Store

    table = Store(store).spans(rollout_id=rollout)
    if _kind(kind, output) == "parquet":
        table.to_parquet(_file(output))
        talk(f"spans → {output}")
        return
    count = _write_lines(output, map(sdk_json, table))
    talk(f"{count} spans → {output}")


@export.command()
@_output_option
@_format_option
@_rollout_option
@click.option("--agents", metavar="GLOB", help="Only agents whose name matches.")
@click.option("--credit", type=click.Choice(_CREDITS), default="next", show_default=True)
@click.option("--gamma", type=float, default=0.99, show_default=True, help="For discounted.")
@store_option
def triplets(
    output: str,
    kind: str | None,
    rollout: str | None,
    agents: str | None,
    credit: Any,
    gamma: float,
    store: str | None,
) -> None:
    """Transitions (observation, action, reward, next observation, done), one a line."""
    from lightning_otel.store import Store

    opened = Store(store)
    table = opened.transitions(agents=agents, credit=credit, gamma=gamma, rollout_id=rollout)
    if _kind(kind, output) == "parquet":
        table.to_parquet(_file(output))
    else:
        _write_lines(output, map(_parsed, table.dicts()))
    report = opened.report(credit=credit, gamma=gamma, rollout_id=rollout)
    talk(
        f"{report.transitions} transitions ({report.rewarded} rewarded, {report.exact} exact) "
        f"from {report.calls} calls in {report.rollouts} rollouts → {output}"
    )
    for reason, count in report.reasons().items():
        talk(f"  left out: {count} × {reason}")


def _parsed(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row whose JSON columns are values, not texts."""
    texts = ("observation", "action", "next_observation", "rewards", "tools")
    return {
        name: json.loads(value) if name in texts and isinstance(value, str) else value
        for name, value in row.items()
    }


def _kind(kind: str | None, output: str) -> str:
    return kind or ("parquet" if output.endswith(".parquet") else "jsonl")


def _file(output: str) -> Path:
    if output == "-":
        raise ConfigError("Parquet cannot be written to stdout; name a file with -o")
    return Path(output)


def _write_lines(output: str, rows: Iterable[Mapping[str, Any]]) -> int:
    count = 0
    opened = nullcontext(sys.stdout) if output == "-" else Path(output).open("w", encoding="utf-8")
    with opened as file:
        for row in rows:
            file.write(json.dumps(plain(row), ensure_ascii=False) + "\n")
            count += 1
    return count


@click.command()
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path))
@store_option
def pack(out: Path, store: str | None) -> None:
    """Write everything into one self-contained DuckDB database with real tables."""
    from lightning_otel.store import Store

    count = Store(store).pack(out)
    talk(f"{count} spans → {out} ({out.stat().st_size / 1e6:.1f} MB)")
    talk(f"→ duckdb {out} 'SELECT * FROM rollouts'")
