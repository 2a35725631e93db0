"""Curves in characters, for the terminal: braille dots, or plain marks where there are none."""

from collections.abc import Iterable, Iterator
from itertools import pairwise
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
_MARKS: Final = "*+xo#@"
"""What the lines of a chart are drawn with where there is no braille, by their rank."""
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
            mark = f"{_digit(rank)}──" if look.is_braille else f"{_mark(rank)}--"
            name = f" {mark} {one_line(series.name, _NAME)}"
            yield [(name, _colour(rank)), *_told(series)]
    for note in chart.notes:
        yield [(f"  {one_line(note)}", "dim")]


def _colour(rank: int) -> str:
    return _COLOURS[rank % len(_COLOURS)]


def _mark(rank: int) -> str:
    return _MARKS[rank % len(_MARKS)]


def _digit(rank: int) -> str:
    return str((rank + 1) % 10)


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
        self._marks = [[" "] * width for _ in range(height)]
        self._styles = [[""] * width for _ in range(height)]

    def dot(self, x: int, y: int, style: str, mark: str) -> None:
        """A dot, counted from the left and from the top; without braille the mark."""
        row, column = (y // 4, x // 2) if self._is_braille else (y, x)
        if self._is_braille:
            self._bits[row][column] |= _DOTS[x % 2][y % 4]
            mark = chr(0x2800 + self._bits[row][column])
        self._marks[row][column], self._styles[row][column] = mark, style

    def line(self, start: tuple[int, int], end: tuple[int, int], style: str, mark: str) -> None:
        """Dots from one place to another, without a gap."""
        (x, y), (to_x, to_y) = start, end
        steps = max(abs(to_x - x), abs(to_y - y), 1)
        for step in range(steps + 1):
            along, down = round((to_x - x) * step / steps), round((to_y - y) * step / steps)
            self.dot(x + along, y + down, style, mark)

    def name(self, places: Iterable[tuple[int, int]], style: str, digit: str) -> None:
        """Put a digit over a line, at the first of some places where no other digit stands."""
        for x, y in places if self._is_braille else ():
            row, column = y // 4, x // 2
            if not self._marks[row][column].isdigit():
                self._marks[row][column], self._styles[row][column] = digit, style
                return

    def lines(self) -> Iterator[Line]:
        """What was drawn, from the top."""
        for marks, styles in zip(self._marks, self._styles, strict=True):
            line: Line = []
            for text, style in zip(marks, styles, strict=True):
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
                canvas.dot(*place(point.x, point.value), "dim", ".")
    lines = [[place(point.x, point.mean) for point in series.points] for series in chart.series]
    for rank, line in enumerate(lines):
        for before, here in pairwise([line[0], *line]):
            canvas.line(before, here, _colour(rank), _mark(rank))
    if len(lines) > 1:  # colour alone must not tell them apart, and a file has none
        for rank, line in enumerate(lines):
            canvas.name(reversed(line), _colour(rank), _digit(rank))
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
