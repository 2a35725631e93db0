"""Curves as data: charts of series of points, and the scales that they are drawn on.

Belongs here: what terminal, SVG and HTML share. Nothing is read, and nothing is drawn.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Literal, TypeAlias

Axis: TypeAlias = Literal["rollout", "time", "step", "version"]
"""What lies along a chart: the rollouts in the order they began, the time they began at, the steps
of a training run, or the versions of resources in the order they first acted."""

_LARGEST: Final = 1.7e308
_LEAST: Final = 1e-300
_LATEST_S: Final = 253_402_300_799
"""The last second of the year 9999, which is as far as dates go."""
_DAYS: Final = 2 * 86_400


@dataclass(frozen=True, slots=True)
class Point:
    """Values that lie side by side, as one.

    Attributes:
        x: Where they lie: the number of the rollout from 1, Unix nanoseconds, the step, or the
            number of the version from 1; of several the last.
        value: Their mean.
        low: The least of them.
        high: The greatest of them.
        count: How many they are.
        mean: The moving mean, up to and with the last of them.
        mean_count: How many values that is the mean of.
        error: The standard error of ``value``; None where it is not known.
        label: What stands at the axis instead of the number.
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


@dataclass(frozen=True, slots=True)
class Series:
    """The points of one line, from left to right.

    Attributes:
        name: Which run it is of; empty if there is but one line.
        points: At least one.
        window: How many values a moving mean is of, as soon as there are so many; 1 is none.
    """

    name: str
    points: tuple[Point, ...]
    window: int = 1

    @property
    def count(self) -> int:
        """How many values the points are made of."""
        return sum(point.count for point in self.points)


@dataclass(frozen=True, slots=True)
class Chart:
    """One metric over one axis.

    Attributes:
        metric: Its name, as it is asked for.
        title: What is measured, in words.
        axis: What lies along it.
        series: The lines; none if there was no value.
        notes: What is not in it, and why.
    """

    metric: str
    title: str
    axis: Axis
    series: tuple[Series, ...]
    notes: tuple[str, ...] = ()

    def bounds(self) -> tuple[float, float]:
        """The least and the greatest value; apart where there is but one."""
        points = [point for series in self.series for point in series.points]
        return widened(
            min((point.low for point in points), default=0.0),
            max((point.high for point in points), default=1.0),
        )

    def reach(self) -> tuple[float, float]:
        """Where the axis begins and ends; apart where there is but one point."""
        places = [point.x for series in self.series for point in series.points]
        low, high = min(places, default=0.0), max(places, default=1.0)
        apart = max(1.0, abs(low) * 1e-9)  # of a time in ns, 1 is less than its precision
        return (low, high) if low < high else (low - apart, low + apart)

    def as_json(self) -> dict[str, Any]:
        """The chart for programs: all that is known of each point."""
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
    found: dict[str, Any] = {
        ("start_ns" if axis == "time" else axis): point.label or int(point.x),
        "value": point.value,
        "low": point.low,
        "high": point.high,
        "count": point.count,
    }
    if axis == "version":
        return {**found, "error": point.error}
    return {**found, "mean": point.mean, "mean_count": point.mean_count}


def widened(low: float, high: float) -> tuple[float, float]:
    """Bounds that are apart; around the same middle if they were not, or too little for a scale."""
    if high / 2 - low / 2 > _LEAST:
        return low, high
    apart = max(abs(low) * 0.1, 0.5)
    return max(-_LARGEST, low - apart), min(_LARGEST, high + apart)


def share(value: float, low: float, high: float) -> float:
    """Where a value lies between bounds that are apart, from 0 to 1; values beyond are clipped."""
    # Halves, as the distance of two numbers may be larger than any number.
    found = (value / 2 - low / 2) / (high / 2 - low / 2)
    return min(1.0, max(0.0, found))


def ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers between bounds that are apart: one, two or five of some power of ten."""
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
    """Numbers as texts that are as short as can be and still differ."""
    for digits in range(3, 17):
        found = [_told(value, digits) for value in values]
        if len(set(found)) == len(set(values)):
            return found
    return [repr(value) for value in values]


def _told(value: float, digits: int) -> str:
    found = f"{value + 0.0:.{digits}g}"
    # Whole numbers as people write them, as far as they are short.
    return f"{value:.0f}" if "e" in found and value.is_integer() and abs(value) < 1e6 else found


def number(value: float) -> str:
    """A value in few digits."""
    return f"{value:.4g}"


def axis_labels(chart: Chart, places: Sequence[float]) -> list[str]:
    """What stands at places of the axis."""
    if chart.axis == "version":
        named = {point.x: point.label for series in chart.series for point in series.points}
        return [named.get(place, "") for place in places]
    if chart.axis == "time":
        low, high = chart.reach()
        return [moment(place, high / 1e9 - low / 1e9) for place in places]
    return [f"{place:.0f}" for place in places]


def moment(time_ns: float, span_s: float) -> str:
    """A time of the world's clock, as exactly as it must be told within so many seconds."""
    found = datetime.fromtimestamp(min(_LATEST_S, max(0.0, time_ns / 1e9)), UTC)
    form = "%Y-%m-%d" if span_s > _DAYS * 4 else "%m-%d %H:%M" if span_s > _DAYS else "%H:%M"
    return found.strftime(form if span_s > 600 else "%H:%M:%S")


def axis_title(axis: Axis) -> str:
    """What lies along a chart, in words."""
    return {
        "rollout": "rollout, in the order they began",
        "time": "time the rollout began, UTC",
        "step": "step of the training run",
        "version": "resource version, in the order they first acted",
    }[axis]
