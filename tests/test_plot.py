"""Pictures in characters: heights, lengths, means."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_otel.plot import bar, running_mean, sparkline

NUMBERS = st.lists(st.floats(-1e6, 1e6), max_size=40)


@pytest.mark.parametrize(
    ("values", "picture"),
    [
        ([], ""),
        ([0.0, 0.5, 1.0], "▁▅█"),
        ([-7.0, 8.0], "▁█"),
        ([n / 7 for n in range(8)], "▁▂▃▄▅▆▇█"),
    ],
)
def test_sparkline_draws_a_character_a_value(values: list[float], picture: str) -> None:
    """Each value is as high as it lies between nought and one; beyond them it is clipped."""
    assert sparkline(values) == picture


def test_sparkline_draws_between_given_bounds() -> None:
    """Other bounds can be given, even bounds that are the same."""
    assert sparkline([-1.0, 0.0, 1.0], low=-1.0, high=1.0) == "▁▅█"
    assert sparkline([2.0, 3.0], low=2.0, high=2.0) == "▁█"


@given(NUMBERS)
def test_sparkline_is_as_long_as_its_values_and_never_falls_where_they_rise(
    values: list[float],
) -> None:
    """One character a value, in the order of the values."""
    picture = sparkline(sorted(values), low=-10.0, high=10.0)

    assert len(picture) == len(values)
    assert list(picture) == sorted(picture)


@pytest.mark.parametrize(
    ("share", "width", "picture"),
    [
        (0.0, 4, ""),
        (1.0, 4, "████"),
        (0.5, 4, "██"),
        (0.5, 1, "▌"),
        (0.28125, 4, "█▏"),
        (-1.0, 4, ""),
        (2.0, 4, "████"),
    ],
)
def test_bar_is_as_long_as_the_share(share: float, width: int, picture: str) -> None:
    """A share is drawn to an eighth of a character, and clipped to the width."""
    assert bar(share, width) == picture


@given(st.floats(0, 1), st.integers(1, 60))
def test_bar_is_never_longer_than_its_width(share: float, width: int) -> None:
    """Whatever the share, the bar fits."""
    assert len(bar(share, width)) <= width


def test_running_mean_is_the_mean_so_far() -> None:
    """Each entry is the mean of the values up to it."""
    assert running_mean([]) == []
    assert running_mean([1.0, 0.0, 0.5, 0.5]) == [1.0, 0.5, 0.5, 0.5]


@given(NUMBERS.filter(bool))
def test_running_mean_ends_with_the_mean_of_all(values: list[float]) -> None:
    """The last entry is the mean of everything."""
    assert running_mean(values)[-1] == pytest.approx(sum(values) / len(values), abs=1e-6)
