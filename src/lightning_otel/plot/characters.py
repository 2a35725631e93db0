"""Curves in characters, for the terminal: braille dots, or plain marks where there are none."""

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple, TypeAlias

from lightning_otel.markup import one_line, width_of
from lightning_otel.plot.curves import (
    Chart,
    Series,
    axis_labels,
    axis_title,
    labels,
    number,
    share,
    ticks,
)

Line: TypeAlias = list[tuple[str, str]]
"""Pieces of text, each with its style; empty for none."""

_LEVELS: Final = "▁▂▃▄▅▆▇█"
_EIGHTHS: Final = " ▏▎▍▌▋▊▉"
_DOTS: Final = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_COLOURS: Final = ("cyan", "yellow", "magenta", "green", "blue", "red")
NARROWEST: Final = 24
_NAME: Final = 40


def sparkline(values: Iterable[float], low: float = 0.0, high: float = 1.0) -> str:
    """One character a value, its height between the bounds; values beyond them are clipped."""
    span = (high / 2 - low / 2) or 0.5  # halves, as the whole may be beyond any number
    steps = len(_LEVELS) - 1
    return "".join(
        _LEVELS[round(steps * min(1.0, max(0.0, (value / 2 - low / 2) / span)))] for value in values
    )


def bar(part: float, width: int = 24) -> str:
    """A bar of a share, 0 to 1, drawn to an eighth of a character."""
    eighths = round(min(1.0, max(0.0, part)) * width * 8)
    whole, rest = divmod(eighths, 8)
    return "█" * whole + (_EIGHTHS[rest] if rest else "")


class Look(NamedTuple):
    """How a chart is drawn.

    Attributes:
        width: Cells of a line.
        height: Lines of the curves themselves.
        is_braille: Eight dots a character; without, one ASCII mark.
        has_dots: Also the values, beside their moving mean: only colours tell them apart.
    """

    width: int = 80
    height: int = 8
    is_braille: bool = True
    has_dots: bool = False


def chart_lines(chart: Chart, look: Look) -> Iterator[Line]:
    """A chart as lines of text, none longer than the width; without values it says so.

    Args:
        chart: What to draw.
        look: How.
    """
    width = max(NARROWEST, look.width)
    for line in _lines(chart, look._replace(width=width)):
        yield _cut(line, width)


def _lines(chart: Chart, look: Look) -> Iterator[Line]:
    yield [(one_line(chart.title), "bold"), *_summary(chart)]
    if chart.series:
        yield from _plot(chart, look)
    if len(chart.series) > 1:
        for rank, series in enumerate(chart.series):
            mark = "──" if look.is_braille else "--"
            style = _COLOURS[rank % len(_COLOURS)]
            yield [(f"  {mark} {one_line(series.name, _NAME)}", style), *_told(series)]
    for note in chart.notes:
        yield [(f"  {one_line(note)}", "dim")]


def _summary(chart: Chart) -> Line:
    if not chart.series:
        return [(": nothing to draw", "")]
    count = sum(series.count for series in chart.series)
    counted = f"  {count:,} value{'' if count == 1 else 's'}"
    return [(counted, "dim"), *(_told(chart.series[0]) if len(chart.series) == 1 else ())]


def _told(series: Series) -> Line:
    """From where to where the moving mean went, from the first that is of enough values."""
    points = series.points
    first = next((each for each in points if each.mean_count >= series.window), points[-1])
    what = f"mean of {series.window:,}: " if series.window > 1 else ""
    # A file's lines need no arrow that its reader may not have.
    if len(points) == 1:
        return [(f"  {number(first.mean)}", "")]
    return [(f"  {what}{number(first.mean)} -> {number(points[-1].mean)}", "")]


def _plot(chart: Chart, look: Look) -> Iterator[Line]:
    low, high = chart.bounds()
    marks = ticks(low, high, max(2, look.height // 2)) or [low, high]
    names = labels(marks)
    gutter = max(map(len, names))
    width = max(8, look.width - gutter - 2)
    rows = {
        min(look.height - 1, int((1 - share(value, low, high)) * look.height)): name
        for value, name in zip(marks, names, strict=True)
    }
    canvas = _drawn(
        chart, _Canvas(width, look.height, is_braille=look.is_braille), has_dots=look.has_dots
    )
    edge, tick = ("│", "┤") if look.is_braille else ("|", "+")
    for row, pieces in enumerate(canvas.lines()):
        name = rows.get(row, "")
        yield [(f"{name:>{gutter}} {tick if name else edge}", "dim"), *pieces]
    foot = "└" + "─" * width if look.is_braille else "+" + "-" * width
    yield [(f"{'':>{gutter}} {foot}", "dim")]
    yield [(f"{'':>{gutter + 2}}{_axis(chart, width)}", "dim")]
    yield [(f"{'':>{gutter + 2}}{axis_title(chart.axis)}", "dim")]


def _axis(chart: Chart, width: int) -> str:
    """The first and the last place of the axis at its ends, and one between where it fits."""
    points = [point.x for series in chart.series for point in series.points]
    first, last = min(points), max(points)
    names = [one_line(name, width // 2 - 1) for name in axis_labels(chart, sorted({first, last}))]
    if len(names) == 1:
        return " " * max(0, (width - width_of(names[0])) // 2) + names[0]
    return names[0] + " " * (width - width_of(names[0]) - width_of(names[1])) + names[1]


class _Canvas:
    """Characters that dots are put on, each with the style of what was put last."""

    def __init__(self, width: int, height: int, *, is_braille: bool) -> None:
        self._is_braille = is_braille
        self.across, self.down = (2 * width, 4 * height) if is_braille else (width, height)
        self._bits = [[0] * width for _ in range(height)]
        self._styles = [[""] * width for _ in range(height)]

    def dot(self, x: int, y: int, style: str) -> None:
        """A dot, counted from the left and from the top."""
        row, column, bit = y, x, 0x2A if style != "dim" else 0x2E
        if self._is_braille:
            row, column, bit = y // 4, x // 2, _DOTS[x % 2][y % 4]
        if self._is_braille:
            self._bits[row][column] |= bit
        else:
            self._bits[row][column] = bit
        self._styles[row][column] = style

    def line(self, x: int, y: int, to_x: int, to_y: int, style: str) -> None:
        """Dots from one place to another, without a gap."""
        steps = max(abs(to_x - x), abs(to_y - y), 1)
        for step in range(steps + 1):
            self.dot(
                x + round((to_x - x) * step / steps), y + round((to_y - y) * step / steps), style
            )

    def lines(self) -> Iterator[Line]:
        """What was drawn, from the top."""
        base = 0x2800 if self._is_braille else 0
        for bits, styles in zip(self._bits, self._styles, strict=True):
            line: Line = []
            for bit, style in zip(bits, styles, strict=True):
                text = chr(base + bit) if bit else " "
                if line and line[-1][1] == style:
                    line[-1] = (line[-1][0] + text, style)
                else:
                    line.append((text, style))
            yield line


def _drawn(chart: Chart, canvas: _Canvas, *, has_dots: bool) -> _Canvas:
    low, high = chart.bounds()
    start, end = chart.reach()

    def place(x: float, y: float) -> tuple[int, int]:
        return (
            round(share(x, start, end) * (canvas.across - 1)),
            round((1 - share(y, low, high)) * (canvas.down - 1)),
        )

    if has_dots:
        for series in chart.series:
            for point in series.points:
                canvas.dot(*place(point.x, point.value), "dim")
    for rank, series in enumerate(chart.series):
        style = _COLOURS[rank % len(_COLOURS)]
        before = place(series.points[0].x, series.points[0].mean)
        for point in series.points:
            here = place(point.x, point.mean)
            canvas.line(*before, *here, style)
            before = here
    return canvas


def _cut(line: Line, width: int) -> Line:
    """The pieces that fit; the last of them shortened."""
    kept: Line = []
    for text, style in line:
        room = width - sum(width_of(held) for held, _ in kept)
        if room <= 0:
            break
        kept.append((one_line(text, room), style))
    return kept
