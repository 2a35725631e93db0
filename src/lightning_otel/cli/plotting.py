"""``plot``: curves of rollouts and training runs, in the terminal, as a picture or as JSON."""

import sys
from collections.abc import Sequence
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any, get_args

import click

from lightning_otel.cli.output import (
    has_colours,
    print_json,
    store_option,
    styled,
    suggest,
    talk,
)
from lightning_otel.plot.curves import Axis

if TYPE_CHECKING:
    from lightning_otel.plot import Chart

_WIDTH = 80
_HEIGHT = 8


@click.command()
@click.argument("metrics", nargs=-1, metavar="[METRIC]...")
@click.option("--by", type=click.Choice(get_args(Axis)), help="What lies along the curves.")
@click.option("--run", "runs", multiple=True, metavar="ID", help="What this training run logged.")
@click.option("--mode", help="Only rollouts of this mode, such as val.")
@click.option("--since", metavar="TIME", help="Only rollouts that began then or later.")
@click.option("--until", metavar="TIME", help="Only rollouts that began before.")
@click.option(
    "--success", type=float, default=0.5, show_default=True,
    help="The reward from which on a rollout has succeeded.",
)  # fmt: skip
@click.option("--window", type=click.IntRange(min=1), help="Values in the moving mean.")
@click.option("--output", "-o", metavar="FILE", help="Write a picture: FILE.svg or FILE.html.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
@store_option
def plot(
    metrics: Sequence[str], output: str | None, as_json: bool, store: str | None, **asked: Any
) -> None:
    """Draw reward, success_rate, length, tokens, duration, or what training runs logged (loss).

    By default the usual ones, over rollouts in the order they began, with their moving mean.
    """
    from lightning_otel.plot import plot_training_metrics

    if output is not None and as_json:
        raise click.UsageError("--output writes a picture and prints nothing; give it alone")
    found = plot_training_metrics(store, metrics, output, **asked)
    if as_json:
        print_json([chart.as_json() for chart in found])
        return
    if output is not None:
        points = sum(len(series.points) for chart in found for series in chart.series)
        talk(f"{len(found)} curve{'' if len(found) == 1 else 's'}, {points} points → {output}")
        return
    print_charts(found)
    if not any(chart.series for chart in found):
        suggest("run -- python your_agent.py", store)


def print_charts(charts: "Sequence[Chart]", height: int = _HEIGHT) -> None:
    """Charts on stdout: as wide as the terminal; elsewhere 80 cells, without colour."""
    from lightning_otel.plot import Look, chart_lines

    is_terminal, is_coloured = sys.stdout.isatty(), has_colours()
    width = get_terminal_size().columns if is_terminal else _WIDTH
    look = Look(width, height, is_braille=_can_print("⣿└┤"), has_dots=is_coloured)
    for number, chart in enumerate(charts):
        if number:
            click.echo()
        for line in chart_lines(chart, look):
            click.echo(styled(line, None, is_coloured=is_coloured).rstrip())


def _can_print(text: str) -> bool:
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
