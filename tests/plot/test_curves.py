"""Scales: bounds, ticks and labels of any numbers."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.plot.made import START_NS, chart_of

from lightning_otel.plot.curves import labels, moment, share, ticks, widened

FINITE = st.floats(allow_nan=False, allow_infinity=False)


@pytest.mark.parametrize(
    ("low", "high", "found"),
    [
        (0.0, 1.0, [0.0, 0.5, 1.0]),
        (-0.3, 0.3, [-0.2, 0.0, 0.2]),
        (3.0, 97.0, [20.0, 40.0, 60.0, 80.0]),
        (-1e308, 1e308, [-1e308, 0.0, 1e308]),
    ],
)
def test_ticks_are_round(low: float, high: float, found: list[float]) -> None:
    """One, two or five of a power of ten, as many as fit."""
    assert ticks(low, high, 4) == pytest.approx(found)


@given(FINITE, FINITE, st.integers(2, 9))
def test_ticks_are_few_and_finite(one: float, other: float, most: int) -> None:
    """Never more than asked for, whatever the bounds."""
    low, high = widened(min(one, other), max(one, other))

    found = ticks(low, high, most)

    assert len(found) <= max(2, most)
    assert all(map(math.isfinite, found))
    assert all(0 <= share(value, low, high) <= 1 for value in found)


@given(FINITE, FINITE, FINITE)
def test_a_share_lies_between_nought_and_one(one: float, other: float, value: float) -> None:
    """Bounds are apart, and nothing overflows between them."""
    low, high = widened(min(one, other), max(one, other))

    assert low < high
    assert 0 <= share(value, low, high) <= 1


def test_labels_differ_where_the_numbers_do() -> None:
    """As short as can be."""
    assert labels([0.0, 0.5, 1.0]) == ["0", "0.5", "1"]
    assert labels([100000.0, 100001.0]) == ["100000", "100001"]
    assert labels([1e20, 2e20]) == ["1e+20", "2e+20"]
    assert labels([0.1 + 0.2, 0.3]) == ["0.30000000000000004", "0.3"]


@pytest.mark.parametrize(
    ("span_s", "text"),
    [(60, "22:13:20"), (3600, "22:13"), (3 * 86_400, "11-14 22:13"), (90 * 86_400, "2023-11-14")],
)
def test_moments_are_told_as_exactly_as_needed(span_s: float, text: str) -> None:
    """In the world's time, and times no calendar has do no harm."""
    assert moment(START_NS, span_s) == text
    assert moment(-5, span_s)
    assert moment(1e30, span_s)


def test_bounds_of_nothing_and_of_one_value_are_apart() -> None:
    """A scale never has the length nought."""
    assert chart_of([]).bounds() == (0.0, 1.0)
    assert chart_of([3.0]).bounds() == (2.5, 3.5)
    assert chart_of([1.7e308]).bounds()[1] < math.inf
    assert chart_of([3.0]).reach() == (0, 2)
