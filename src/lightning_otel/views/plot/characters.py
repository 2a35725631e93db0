"""Pictures in characters: a small chart, a bar, a sparkline."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Final

from lightning_otel.types.text import count_noun, one_line, width_of
from lightning_otel.views.plot.curves import (
    Chart,
    Series,
    axis_labels,
    axis_title,
    labels,
    number,
    share,
    ticks,
)

_LEVELS: Final = "▁▂▃▄▅▆▇█"
_EIGHTHS: Final = " ▏▎▍▌▋▊▉"
_MARKS: Final = "*+xo#@"
"""Marks of the lines of a chart that has several, or of any where blocks cannot be printed."""
_HEIGHT: Final = 8
NARROWEST: Final = 24


def sparkline(values: Iterable[float], low: float = 0.0, high: float = 1.0) -> str:
    """Draw one character a value, its height between bounds that are apart; others are clipped."""
    return "".join(_LEVELS[round(7 * share(value, low, high))] for value in values)


def bar(part: float, width: int = 24) -> str:
    """Draw a share, 0 to 1, to an eighth of a character."""
    whole, eighths = divmod(round(min(1.0, max(0.0, part)) * width * 8), 8)
    return "█" * whole + (_EIGHTHS[eighths] if eighths else "")


def chart_lines(chart: Chart, width: int = 80, *, is_ascii: bool = False) -> Iterator[str]:
    """Draw a chart as lines of at most ``width`` cells, itself at least 24."""
    width = max(NARROWEST, width)
    return (
        one_line(line, width).rstrip() for line in _chart_lines(chart, width, is_ascii=is_ascii)
    )


def _chart_lines(chart: Chart, width: int, *, is_ascii: bool) -> Iterator[str]:
    is_one = len(chart.series) == 1
    if not chart.series:
        yield f"{one_line(chart.title)}: nothing to draw"
    else:
        count = sum(series.count for series in chart.series)
        course = _word_course(chart.series[0]) if is_one else ""
        yield f"{one_line(chart.title)}  {count_noun(count, 'value')}{course}"
        yield from _plot_lines(chart, width, is_ascii=is_ascii)
    for rank, series in enumerate(() if is_one else chart.series):
        yield f" {_series_mark(rank)} {one_line(series.name, 40)}{_word_course(series)}"
    for note in chart.notes:
        yield f"  {note}"


def _series_mark(rank: int) -> str:
    return _MARKS[rank % len(_MARKS)]


def _word_course(series: Series) -> str:
    points = series.points
    first = next((point for point in points if point.mean_count >= series.window), points[-1])
    if len(points) == 1:
        return f"  {number(first.mean)}"
    window = f"mean of {series.window:,}: " if series.window > 1 else ""
    return f"  {window}{number(first.mean)} -> {number(points[-1].mean)}"


def _plot_lines(chart: Chart, width: int, *, is_ascii: bool) -> Iterator[str]:
    low, high = chart.bounds(has_dots=False)
    marks = ticks(low, high, _HEIGHT // 2) or [low, high]
    names = labels(marks)
    gutter = max(map(len, names))
    across = max(8, width - gutter - 2)
    places = {
        _row_of(share(value, low, high)): name for value, name in zip(marks, names, strict=True)
    }
    heights = [_curve_heights(series, chart, across) for series in chart.series]
    is_filled = len(heights) == 1 and not is_ascii and chart.axis != "version"
    intervals = _list_intervals(chart, across)
    edge, tick, corner, line = "|++-" if is_ascii else "│┤└─"
    for row in range(_HEIGHT):
        cells = [" "] * across
        for column, top, bottom in intervals:
            if top <= row <= bottom:
                cells[column] = edge
        for rank, curve in enumerate(heights):
            for column, height in curve.items():
                if is_filled:
                    level = round(height * (8 * _HEIGHT - 1)) - 8 * (_HEIGHT - 1 - row)
                    cells[column] = " " if level < 0 else _LEVELS[min(7, level)]
                elif _row_of(height) == row:
                    cells[column] = _series_mark(rank)
        name = places.get(row, "")
        yield f"{name:>{gutter}} {tick if name else edge}{''.join(cells)}"
    yield f"{'':>{gutter}} {corner}{line * across}"
    yield f"{'':>{gutter + 2}}{_axis_ends(chart, across)}"
    yield f"{'':>{gutter + 2}}{axis_title(chart.axis)}"


def _list_intervals(chart: Chart, width: int) -> list[tuple[int, int, int]]:
    if chart.axis != "version":
        return []
    scale, (start, end) = chart.bounds(has_dots=False), chart.reach()
    intervals = []
    for point in (point for series in chart.series for point in series.points):
        bottom, top = (_row_of(share(value, *scale)) for value in point.interval)
        intervals.append((round(share(point.x, start, end) * (width - 1)), top, bottom))
    return intervals


def _row_of(height: float) -> int:
    return min(_HEIGHT - 1, int((1 - height) * _HEIGHT))


def _curve_heights(series: Series, chart: Chart, width: int) -> Mapping[int, float]:
    """Return the height of the moving mean by column, 0 to 1; only a line's own gaps have none."""
    low, high = chart.bounds(has_dots=False)
    start, end = chart.reach()
    heights: dict[int, float] = {}
    if chart.axis == "version":  # no way leads from one to the next
        return {
            round(share(point.x, start, end) * (width - 1)): share(point.value, low, high)
            for point in series.points
        }
    for piece in series.pieces:
        places = [
            (round(share(point.x, start, end) * (width - 1)), share(point.mean, low, high))
            for point in piece
        ]
        heights |= places[:1]
        for (x, y), (to_x, to_y) in pairwise(places):
            for column in range(x, to_x + 1):
                heights[column] = y + (to_y - y) * (column - x) / (to_x - x) if to_x > x else to_y
    return heights


def _axis_ends(chart: Chart, width: int) -> str:
    points = [point.x for series in chart.series for point in series.points]
    places = sorted({min(points), max(points)})
    names = [one_line(name, width // 2 - 1) for name in axis_labels(chart, places)]
    if len(names) == 1:
        return " " * max(0, (width - width_of(names[0])) // 2) + names[0]
    return names[0] + " " * (width - width_of(names[0]) - width_of(names[1])) + names[1]
