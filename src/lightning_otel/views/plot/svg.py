"""Curves as SVG for light and dark ground; every text is escaped, and nothing is loaded or run."""

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from lightning_otel.types.html import escape, render_svg_text
from lightning_otel.types.text import count_noun
from lightning_otel.views.plot.curves import (
    Chart,
    Point,
    Series,
    axis_labels,
    axis_title,
    labels,
    number,
    share,
    ticks,
)

_WIDTH: Final = 720
_LEFT: Final = 84
_RIGHT: Final = 20
_TOP: Final = 58
_PLOT: Final = 220
_LINE: Final = 18
_LETTER: Final = 6.7
"""Width of a letter of a label."""
_SAMPLE: Final = 48
"""Length of a line's sample in the legend: its dashes tell it as well as its colour."""
COLOURS: Final = 6
_TOLD: Final = 400
"""Points of a chart that are told where the pointer rests; more would make the file too large."""
_STYLE: Final = """
svg.curve .bg{fill:#fff}svg.curve text{font:11px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',
monospace;fill:#1f2328}svg.curve .dim{fill:#656d76}svg.curve .big{font-size:13px;font-weight:600}
svg.curve .grid{stroke:#d0d7de;fill:none}svg.curve .mean{fill:none;stroke-width:2;
stroke-linejoin:round}svg.curve .whisker{stroke-width:1.2}svg.curve .dot{fill-opacity:.45}
svg.curve .band{fill-opacity:.12;stroke:none}
svg.curve .s0{stroke:#0969da;fill:#0969da}svg.curve .s1{stroke:#bc4c00;fill:#bc4c00}
svg.curve .s2{stroke:#8250df;fill:#8250df}svg.curve .s3{stroke:#1a7f37;fill:#1a7f37}
svg.curve .s4{stroke:#bf3989;fill:#bf3989}svg.curve .s5{stroke:#7d4e00;fill:#7d4e00}
svg.curve .dot{stroke:none}svg.curve .mean{fill:none}svg.curve .band{stroke:none}
svg.curve .mean.s1{stroke-dasharray:8 4}svg.curve .mean.s2{stroke-dasharray:2 3}
svg.curve .mean.s3{stroke-dasharray:10 3 2 3}svg.curve .mean.s4{stroke-dasharray:14 6}
svg.curve .mean.s5{stroke-dasharray:5 2}
@media(prefers-color-scheme:dark){svg.curve .bg{fill:#0d1117}svg.curve text{fill:#e6edf3}
svg.curve .dim{fill:#8d96a0}svg.curve .grid{stroke:#3d444d}
svg.curve .s0{stroke:#58a6ff;fill:#58a6ff}svg.curve .s1{stroke:#f0883e;fill:#f0883e}
svg.curve .s2{stroke:#bc8cff;fill:#bc8cff}svg.curve .s3{stroke:#56d364;fill:#56d364}
svg.curve .s4{stroke:#f778ba;fill:#f778ba}svg.curve .s5{stroke:#e3b341;fill:#e3b341}
svg.curve .dot{stroke:none}svg.curve .mean{fill:none}svg.curve .band{stroke:none}}
"""


def svg(charts: Sequence[Chart], *, is_styled: bool = True) -> str:
    """Draw charts one below the other; unstyled, the page colours ``svg.curve``."""
    heights = [_chart_height(chart) for chart in charts]
    height = sum(heights) or 60
    title = ", ".join(chart.title for chart in charts) or "nothing to draw"
    style = (' style="max-width:100%;height:auto"', f"<style>{_STYLE}</style>")
    style = style if is_styled else ("", "")
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="curve" role="img" width="{_WIDTH}" '
        f'height="{height}" viewBox="0 0 {_WIDTH} {height}"{style[0]}>'
        f"{style[1]}<title>{escape(title, 200)}</title>"
        f'<rect class="bg" width="{_WIDTH}" height="{height}" rx="6"/>'
    ]
    if not charts:
        parts.append(render_svg_text(14, 34, "nothing to draw", "dim"))
    top = 0
    for chart, size in zip(charts, heights, strict=True):
        parts += [f'<g transform="translate(0 {top})">', *_draw_chart(chart), "</g>"]
        top += size
    return "".join([*parts, "</svg>"])


def _chart_height(chart: Chart) -> int:
    plot = _PLOT + 52 if chart.series else 4
    return _TOP + plot + _LINE * (len(_legend_lines(chart)) + len(chart.notes))


class _PlotArea(NamedTuple):
    start: float
    end: float
    low: float
    high: float

    def x(self, value: float) -> float:
        return _LEFT + share(value, self.start, self.end) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        return _TOP + (1 - share(value, self.low, self.high)) * _PLOT


def _draw_chart(chart: Chart) -> Iterator[str]:
    yield render_svg_text(14, 24, chart.title, "big", 100)
    count = sum(series.count for series in chart.series)
    meaning = f"{count_noun(count, 'value')}{_word_meaning(chart)}" if count else "no values"
    yield render_svg_text(14, 42, meaning, "dim", 110)
    foot = _TOP
    if chart.series:
        place = _PlotArea(*chart.reach(), *chart.bounds())
        yield from _draw_scales(chart, place)
        few = sum(len(series.points) for series in chart.series) <= _TOLD
        for rank, series in enumerate(chart.series):
            yield from _draw_curve(chart, series, f"s{rank % COLOURS}", place, is_told=few)
        foot = _TOP + _PLOT + 52
    for rank, words in enumerate(_legend_lines(chart)):
        style = f"s{rank % COLOURS}"
        yield f'<path class="mean {style}" d="M{_LEFT} {foot + 4}h{_SAMPLE}"/>'
        yield f'<circle class="dot {style}" cx="{_LEFT + _SAMPLE / 2}" cy="{foot + 4}" r="4"/>'
        yield render_svg_text(_LEFT + _SAMPLE + 8, foot + 8, words, "", 84)
        foot += _LINE
    for note in chart.notes:
        yield render_svg_text(_LEFT, foot + 8, note, "dim", 92)
        foot += _LINE


def _word_meaning(chart: Chart) -> str:
    if chart.axis == "version":
        return " · mean of each version, with its standard error"
    windows = {series.window for series in chart.series} - {1}
    binned = any(point.count > 1 for series in chart.series for point in series.points)
    band = "; band: their least and greatest" if chart.has_band else ""
    dots = f" · dots: means of neighbours{band}" if binned else ""
    mean = f" · line: mean of the last {max(windows):,}" if len(windows) == 1 else ""
    return (" · line: moving mean" if len(windows) > 1 else mean) + dots


def _legend_lines(chart: Chart) -> list[str]:
    if len(chart.series) < 2:
        return []
    return [f"{series.name} · {series.count:,} values" for series in chart.series]


def _draw_scales(chart: Chart, place: _PlotArea) -> Iterator[str]:
    marks = ticks(place.low, place.high, 6) or [place.low, place.high]
    right, bottom = _WIDTH - _RIGHT, _TOP + _PLOT
    for value, name in zip(marks, labels(marks), strict=True):
        y = place.y(value)
        yield f'<path class="grid" d="M{_LEFT} {y:.1f}H{right}"/>'
        yield render_svg_text(_LEFT - 6, y + 4, name, "dim", 12, anchor="end")
    yield f'<path class="grid" d="M{_LEFT} {_TOP}V{bottom}H{right}"/>'
    places = _label_places(chart, place)
    most = max(14, int((right - _LEFT) / _LETTER / max(2, len(places))))
    for x, name in zip(places, axis_labels(chart, places), strict=True):
        at = place.x(x)
        # The end of a name tells versions apart; the first and the last label stay in the picture.
        text = name if len(name) <= most else f"…{name[1 - most :]}"
        half = len(text) * _LETTER / 2
        yield f'<path class="grid" d="M{at:.1f} {bottom}v5"/>'
        middle = min(max(at, half + 4), _WIDTH - half - 4)
        yield render_svg_text(middle, bottom + 18, text, "dim", most, anchor="middle")
    middle = (_LEFT + right) / 2
    yield render_svg_text(middle, bottom + 36, axis_title(chart.axis), "dim", 60, anchor="middle")


def _label_places(chart: Chart, place: _PlotArea) -> list[float]:
    points = sorted({point.x for series in chart.series for point in series.points})
    if chart.axis == "version" or len(points) <= 6:
        return points[:: max(1, -(-len(points) // 6))]
    if chart.axis == "time":
        return [place.start + (place.end - place.start) * part / 4 for part in range(5)]
    return [mark for mark in ticks(place.start, place.end, 7) if float(mark).is_integer()]


def _draw_curve(
    chart: Chart, series: Series, style: str, place: _PlotArea, *, is_told: bool
) -> Iterator[str]:
    points = series.points
    is_spread = any(point.low < point.high for point in points)
    if is_spread and chart.has_band:
        for piece in series.pieces:
            upper = [f"{place.x(point.x):.1f} {place.y(point.high):.1f}" for point in piece]
            lower = [
                f"{place.x(point.x):.1f} {place.y(point.low):.1f}" for point in reversed(piece)
            ]
            yield f'<path class="band {style}" d="M{"L".join([*upper, *lower])}Z"/>'
    size = 4 if chart.axis == "version" else 2.5
    names = axis_labels(chart, [point.x for point in points]) if is_told else [""] * len(points)
    for point, name in zip(points, names, strict=True):
        x, y = place.x(point.x), place.y(point.value)
        if point.error is not None:
            end, top = map(place.y, point.interval)
            yield f'<path class="whisker {style}" d="M{x:.1f} {top:.1f}V{end:.1f}"/>'
        title = (
            f"<title>{escape(_tooltip_text(chart, series, point, name), 200)}</title>"
            if is_told
            else ""
        )
        yield f'<circle class="dot {style}" cx="{x:.1f}" cy="{y:.1f}" r="{size}">{title}</circle>'
    if chart.axis == "version":  # no way leads from one to the next
        return
    lines = (
        "L".join(f"{place.x(point.x):.1f} {place.y(point.mean):.1f}" for point in piece)
        for piece in series.pieces
    )
    yield f'<path class="mean {style}" d="M{"M".join(lines)}"/>'


def _tooltip_text(chart: Chart, series: Series, point: Point, where: str) -> str:
    name = f"{series.name} · " if series.name else ""
    values = f"mean of {point.count:,}" if point.count > 1 else "1 value"
    error = f" ± {number(point.error)}" if point.error is not None else ""
    moving = ""
    if point.mean_count > 1 and chart.axis != "version":
        moving = f" · moving mean {number(point.mean)} of {point.mean_count:,}"
    return f"{name}{chart.axis} {where} · {number(point.value)}{error} ({values}){moving}"
