"""Curves as data: charts of series of points, and the scales that they are drawn on."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby, pairwise
from operator import itemgetter
from statistics import median
from typing import Any, Final, Literal, TypeAlias

Axis: TypeAlias = Literal["rollout", "time", "step", "version"]
"""Axis of a chart: rollouts in the order they began, the time they began at, steps of a training
run, or versions of resources in the order they first acted."""
Split: TypeAlias = Literal["agent"]
"""A line each, instead of one."""
Value: TypeAlias = tuple[int, float, float]
"""A value of a curve: the number of its bin, its place on the axis, and itself."""

MOST_POINTS: Final = 400
"""Points of a chart's lines, however many values there are."""
_GAP: Final = 10
"""A line has a gap where it lacks a value for so many times the usual distance of its bins."""
_SCALE: Final = float(2**-40)
"""Part of each value that is summed: sums of huge ones would be infinite. No digit changes."""

_LARGEST: Final = 1.7e308
_LEAST: Final = 1e-300
_LATEST_S: Final = 253_402_300_799
"""The last second of the year 9999, which is as far as dates go."""
_DAYS: Final = 2 * 86_400


@dataclass(frozen=True, slots=True)
class Point:
    """Neighbouring values as one.

    Attributes:
        x: The number of the rollout from 1, Unix nanoseconds, the step, or the number of the
            version from 1; of several the last.
        value: Their mean.
        low: The least of them.
        high: The greatest of them.
        count: The number of them.
        mean: The moving mean, up to and with the last of them.
        mean_count: The number of values of that mean.
        error: The standard error of ``value``; None where it is not known.
        label: A text for the axis instead of the number.
        is_apart: No value for long before it: the line begins anew.
    """

    x: float
    value: float
    low: float
    high: float
    count: int
    mean: float
    mean_count: int
    error: float | None = None
    label: str = ""
    is_apart: bool = False

    @property
    def interval(self) -> tuple[float, float]:
        """Return the value less and plus its standard error."""
        error = self.error or 0.0
        return max(-_LARGEST, self.value - error), min(_LARGEST, self.value + error)


@dataclass(frozen=True, slots=True)
class Series:
    """The points of one line, at least one, from left to right.

    Attributes:
        name: The run or version; empty if there is one line only.
        window: Values in a moving mean, as soon as there are so many; 1 is none.
    """

    name: str
    points: tuple[Point, ...]
    window: int = 1

    @property
    def count(self) -> int:
        """Return the number of values that the points stand for."""
        return sum(point.count for point in self.points)

    @property
    def pieces(self) -> list[tuple[Point, ...]]:
        """Return the points of each stretch without a gap."""
        starts = [place for place, point in enumerate(self.points) if point.is_apart]
        ends = pairwise([0, *starts, len(self.points)])
        return [self.points[start:end] for start, end in ends]


@dataclass(frozen=True, slots=True)
class Chart:
    """One metric over one axis; ``notes`` tell of missing values, and the reason."""

    metric: str
    title: str
    axis: Axis
    series: tuple[Series, ...]
    notes: tuple[str, ...] = ()

    @property
    def has_band(self) -> bool:
        """Return whether a picture shows least and greatest values; several bands hide another."""
        return self.axis != "version" and len(self.series) == 1

    def bounds(self, *, has_dots: bool = True) -> tuple[float, float]:
        """Return the ends of the scale of what is drawn, apart where it is one value.

        A picture has dots and bands, too; characters have lines alone. Versions have intervals.
        """
        values = [
            value
            for series in self.series
            for point in series.points
            for value in self._list_drawn(point, has_dots=has_dots)
        ]
        return widened(min(values, default=0.0), max(values, default=1.0))

    def _list_drawn(self, point: Point, *, has_dots: bool) -> tuple[float, ...]:
        if self.axis == "version":
            return point.interval
        if not has_dots:
            return (point.mean,)
        return (point.mean, *((point.low, point.high) if self.has_band else (point.value,)))

    def reach(self) -> tuple[float, float]:
        """Return the ends of the axis; apart where there is but one point."""
        places = [point.x for series in self.series for point in series.points]
        low, high = min(places, default=0.0), max(places, default=1.0)
        precision = max(1.0, abs(low) * 1e-9)  # of a time in ns, 1 is less than its precision
        return (low, high) if low < high else (low - precision, low + precision)

    def as_json(self) -> dict[str, Any]:
        """Return the chart for programs, with all that is known of each point."""
        return {
            "metric": self.metric,
            "title": self.title,
            "axis": self.axis,
            "notes": list(self.notes),
            "series": [
                {
                    "name": series.name,
                    "count": series.count,
                    "window": series.window,
                    "points": [_point_json(point, self.axis) for point in series.points],
                }
                for series in self.series
            ],
        }


def _point_json(point: Point, axis: Axis) -> dict[str, Any]:
    fields: dict[str, Any] = {
        ("start_ns" if axis == "time" else axis): point.label or int(point.x),
        "value": point.value,
        "low": point.low,
        "high": point.high,
        "count": point.count,
    }
    if axis == "version":
        return {**fields, "error": point.error}
    return {**fields, "mean": point.mean, "mean_count": point.mean_count}


def make_series(name: str, values: Sequence[Value], window: int) -> Series:
    """Make a line of values in their order, each bin a point with the moving mean at its end."""
    points, numbers = [], list[float]()
    steps = [latter[0] - former[0] for former, latter in pairwise(values) if latter[0] > former[0]]
    distances, longest = iter([0, *steps]), _GAP * median(steps or [0])
    for _, group in groupby(values, itemgetter(0)):
        members = list(group)
        ys = [value for _, _, value in members]
        numbers += ys
        tail = numbers[-window:]
        points.append(
            Point(members[-1][1], mean_of(ys), min(ys), max(ys), len(ys), mean_of(tail), len(tail),
                  is_apart=next(distances) > longest)
        )  # fmt: skip
    return Series(name, tuple(points), window)


def mean_of(values: Sequence[float]) -> float:
    """Return the mean of values, however large their sum."""
    return math.fsum(map(_SCALE.__mul__, values)) / len(values) / _SCALE


def standard_error(values: Sequence[float]) -> float | None:
    """Return the standard error of a mean; None of a single value."""
    if len(values) < 2:
        return None
    mean = mean_of(values) * _SCALE
    spread = math.hypot(*(value * _SCALE - mean for value in values))
    return spread / math.sqrt(len(values) * (len(values) - 1)) / _SCALE


def widened(low: float, high: float) -> tuple[float, float]:
    """Return bounds that are apart enough for a scale, around the same middle."""
    if high / 2 - low / 2 > _LEAST:
        return low, high
    margin = abs(low) * 0.1
    margin = margin if margin > _LEAST else 0.5
    return max(-_LARGEST, low - margin), min(_LARGEST, high + margin)


def share(value: float, low: float, high: float) -> float:
    """Return the place of a value between bounds that are apart, 0 to 1; others are clipped."""
    # Halves, as the distance of two numbers may be larger than any number.
    fraction = (value / 2 - low / 2) / (high / 2 - low / 2)
    return min(1.0, max(0.0, fraction))


def ticks(low: float, high: float, most: int) -> list[float]:
    """Return round numbers between bounds that are apart: 1, 2 or 5 times a power of ten."""
    exponent = math.floor(math.log10(high / 2 - low / 2)) - 2
    for power in range(max(-307, exponent), 309):
        for digit in (1.0, 2.0, 5.0):
            step = float(f"{digit:g}e{power}")
            if math.isinf(step):
                break
            first, last = math.ceil(low / step), math.floor(high / step)
            if last - first < most:
                return [number * step for number in range(first, last + 1)]
    return [low, high]


def labels(values: Sequence[float]) -> list[str]:
    """Return numbers as texts that are as short as can be and still differ."""
    for digits in range(3, 17):
        texts = [_round_digits(value, digits) for value in values]
        if len(set(texts)) == len(set(values)):
            return texts
    return [repr(value) for value in values]


def _round_digits(value: float, digits: int) -> str:
    text = f"{value + 0.0:.{digits}g}"
    # Whole numbers as people write them, as far as they are short.
    return f"{value:.0f}" if "e" in text and value.is_integer() and abs(value) < 1e6 else text


def number(value: float) -> str:
    """Return a value in few digits."""
    return f"{value:.4g}"


def axis_labels(chart: Chart, places: Sequence[float]) -> list[str]:
    """Return the labels of places on the axis."""
    if chart.axis == "version":
        labels = {point.x: point.label for series in chart.series for point in series.points}
        return [labels.get(place, "") for place in places]
    if chart.axis == "time":
        low, high = chart.reach()
        return [moment(place, high / 1e9 - low / 1e9) for place in places]
    return [f"{place:.0f}" for place in places]


def moment(time_ns: float, span_s: float) -> str:
    """Return a time, UTC, as exactly as an axis of so many seconds needs it."""
    instant = datetime.fromtimestamp(min(_LATEST_S, max(0.0, time_ns / 1e9)), UTC)
    form = "%Y-%m-%d" if span_s > _DAYS * 4 else "%m-%d %H:%M" if span_s > _DAYS else "%H:%M"
    return instant.strftime(form if span_s > 600 else "%H:%M:%S")


def axis_title(axis: Axis) -> str:
    """Return an axis in words."""
    return {
        "rollout": "rollout, in the order they began",
        "time": "time the rollout began, UTC",
        "step": "step of the training run",
        "version": "resource version, in the order they first acted",
    }[axis]
