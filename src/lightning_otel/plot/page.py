"""Curves as one HTML page that holds all it shows: it runs nothing and asks nobody."""

from collections.abc import Iterator, Sequence
from typing import Final

from lightning_otel.markup import safe, table
from lightning_otel.plot.curves import Chart, axis_labels, number
from lightning_otel.plot.svg import svg

# Should anything ever slip through: a browser runs, loads and sends nothing from here.
_POLICY: Final = (
    "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
)
_STYLE: Final = """
:root{color-scheme:light dark}body{font:14px/1.5 system-ui,sans-serif;max-width:760px;
margin:2rem auto;padding:0 1rem}table{border-collapse:collapse;font-size:12px}
th,td{padding:2px 12px 2px 0}details{margin:.5rem 0 2rem}
"""
_COLUMNS: Final = ("series", "at", "values", "mean", "least", "greatest", "moving mean", "of")


def page(charts: Sequence[Chart], title: str = "Curves") -> str:
    """A page of charts, each with its numbers below it.

    Args:
        charts: What to show.
        title: Of the page.
    """
    shown = "".join(
        f"{svg([chart])}<details><summary>numbers</summary>"
        f"{table(_COLUMNS, _rows(chart))}</details>"
        for chart in charts
    )
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{safe(title, 200)}</title><style>{_STYLE}</style></head>"
        f"<body><h1>{safe(title, 200)}</h1>{shown or '<p>nothing to draw</p>'}</body></html>\n"
    )


def _rows(chart: Chart) -> Iterator[Sequence[object]]:
    for series in chart.series:
        places = axis_labels(chart, [point.x for point in series.points])
        for point, place in zip(series.points, places, strict=True):
            numbers = map(number, (point.value, point.low, point.high, point.mean))
            value, low, high, mean = numbers
            yield (series.name, place, point.count, value, low, high, mean, point.mean_count)
