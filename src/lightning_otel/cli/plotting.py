"""``plot``: curves of rollouts and training runs, in the terminal, as a picture or as JSON."""

import sys
from collections.abc import Iterator, Sequence
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any, get_args

import click

from lightning_otel.cli.options import Form, rows_options, when_options
from lightning_otel.cli.output import (
    print_json,
    print_rows,
    store_option,
    suggest,
    talk,
)
from lightning_otel.plot.curves import Axis

if TYPE_CHECKING:
    from lightning_otel.plot import Chart

_WIDTH = 80
_COLUMNS = ("metric", "series", "value")


@click.command()
@click.argument("metrics", nargs=-1, metavar="[METRIC]...")
@click.option("--by", type=click.Choice(get_args(Axis)), help="What lies along the curves.")
@click.option(
    "--run",
    "runs",
    multiple=True,
    metavar="ID",
    help="What this training run logged; a prefix, or @last.",
)
@click.option("--mode", help="Only rollouts of this mode, such as val.")
@when_options
@click.option(
    "--success", type=float, default=0.5, show_default=True,
    help="The reward from which on a rollout has succeeded.",
)  # fmt: skip
@click.option("--window", type=click.IntRange(min=1), help="Values in the moving mean.")
@click.option("--output", "-o", metavar="FILE", help="Write a picture: FILE.svg or .png.")
@rows_options
@store_option
def plot(
    metrics: Sequence[str], output: str | None, form: Form | None, store: str | None, **asked: Any
) -> None:
    """Draw reward, success_rate, length, tokens, duration, or what training runs logged (loss).

    By default the usual ones, over rollouts in the order they began, with their moving mean.
    """
    from lightning_otel.plot import plot_training_metrics

    if output is not None and form:
        raise click.UsageError("--output writes a picture and prints nothing; give it alone")
    found = plot_training_metrics(store, metrics, output, **asked)
    if form == "json":
        print_json([chart.as_json() for chart in found])
        return
    if form is not None:
        rows = list(_list_points(found))
        columns = dict.fromkeys(name for row in rows for name in row)
        print_rows(rows, list(columns) or _COLUMNS, form=form, times=("start_ns",))
        return
    if output is not None:
        points = sum(len(series.points) for chart in found for series in chart.series)
        talk(f"{len(found)} curve{'' if len(found) == 1 else 's'}, {points} points → {output}")
        return
    print_charts(found)
    is_any = any(chart.series for chart in found)
    suggest("analyze @last" if is_any else "run -- python your_agent.py", store)


def _list_points(charts: "Sequence[Chart]") -> Iterator[dict[str, Any]]:
    """A row a point."""
    for chart in charts:
        told = chart.as_json()
        for series in told["series"]:
            for point in series["points"]:
                yield {"metric": told["metric"], "series": series["name"], **point}


def print_charts(charts: "Sequence[Chart]") -> None:
    """Print charts as wide as the terminal; elsewhere 80 cells."""
    from lightning_otel.plot import chart_lines

    width = get_terminal_size().columns if sys.stdout.isatty() else _WIDTH
    is_ascii = not _can_print("▁█└┤")
    for number, chart in enumerate(charts):
        if number:
            click.echo()
        for line in chart_lines(chart, width, is_ascii=is_ascii):
            click.echo(line)


def _can_print(text: str) -> bool:
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
