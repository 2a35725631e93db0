"""Pictures in characters: heights, lengths, curves in braille and in ASCII."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.plot.made import chart_of, series_of
from tests.test_picture import ATTACKS

from lightning_otel.markup import width_of
from lightning_otel.plot import Chart, Look, bar, chart_lines, sparkline

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


def drawn(chart: Chart, look: Look | None = None) -> list[str]:
    """A chart's lines, without their styles."""
    lines = chart_lines(chart, look or Look(width=40, height=4))
    return ["".join(text for text, _ in line).rstrip() for line in lines]


def test_a_curve_goes_from_its_first_to_its_last_value() -> None:
    """A rising line in braille: its scale at the left, its axis below."""
    assert drawn(chart_of([0.0, 0.5, 1.0])) == [
        "reward  3 values  0 -> 1",
        "1 ┤                            ⢀⣀⣀⠤⠤⠔⠒⠊⠉",
        "  │                   ⢀⣀⡠⠤⠤⠒⠒⠊⠉⠁",
        "  │         ⣀⣀⣀⠤⠤⠔⠒⠒⠉⠉⠁",
        "0 ┤⣀⡠⠤⠤⠒⠒⠊⠉⠉",
        "  └─────────────────────────────────────",
        "   1                                   3",
        "   rollout, in the order they began",
    ]


def test_runs_are_drawn_in_ascii_with_their_names() -> None:
    """Where there is no braille a mark a character; several lines are named below."""
    found = drawn(chart_of([1.0, 2.0, 3.0], [3.0, 1.0]), Look(30, 4, is_braille=False))

    assert found[1:6] == [
        "  |+++                    ****",
        "  |   ++++          ******",
        "2 +       ++++******",
        "  |*******    +++",
        "  +---------------------------",
    ]
    assert found[-2:] == [" *-- run-1  1 -> 3", " +-- run-2  3 -> 1"]


def test_lines_are_told_apart_without_colour() -> None:
    """In braille each has its digit at its end, beside the other where they meet."""
    found = drawn(chart_of([0.0, 0.5, 1.0], [1.0, 1.0, 1.0]))

    assert found[1] == "1 ┤⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉2⠉⠉⠉⠉⠉⠉⠉⠉⠉⢉⣉⣉⠭⠭⠝⠛⠋1"
    assert found[-2:] == [" 1── run-1  0 -> 1", " 2── run-2  1 -> 1"]


def test_values_are_dots_beside_their_mean() -> None:
    """Dots are dim, and the mean lies over them."""
    lines = list(chart_lines(chart_of([0.0, 1.0, 0.0]), Look(30, 4, has_dots=True)))

    styles = {style for line in lines[1:5] for text, style in line[1:] if text.strip()}
    assert styles == {"cyan"}
    assert len(lines) == 8


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([], "reward: nothing to draw"),
        ([5.0], "reward  1 value  5"),
        ([2.0] * 50, "reward  50 values  2 -> 2"),
        ([-1.0, -3.0], "reward  2 values  -1 -> -3"),
        ([1.7e308, -1.7e308], "reward  2 values  1.7e+308 -> -1.7e+308"),
        ([0.0, 5e-324], "reward  2 values  0 -> 4.941e-324"),
        ([1e15, 1e15 + 1], "reward  2 values  1e+15 -> 1e+15"),
    ],
)
def test_any_values_are_drawn(values: list[float], words: str) -> None:
    """None, one, equal, negative, huge, tiny and near values all have a picture."""
    found = drawn(chart_of(values), Look(60, 6))

    assert found[0] == words
    assert any(re.search("[⠀-⣿]", line) for line in found[1:7]) == bool(values)


@given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=30),
    st.integers(1, 120),
    st.integers(1, 12),
    st.booleans(),
)
def test_no_line_is_longer_than_the_terminal_is_wide(
    values: list[float], width: int, height: int, is_braille: bool
) -> None:
    """Whatever is drawn, it fits; a terminal narrower than 24 cells is taken for one of 24."""
    look = Look(width, height, is_braille=is_braille, has_dots=True)

    found = drawn(chart_of(values, values[::-1]), look)

    assert max(map(width_of, found)) <= max(24, width)


@pytest.mark.parametrize("attack", ATTACKS, ids=range(len(ATTACKS)))
def test_no_name_moves_the_cursor(attack: str) -> None:
    """Titles, runs, versions and notes are one line of harmless text each."""
    lines = (series_of([1.0, 2.0], attack, attack), series_of([2.0], attack, attack))
    chart = Chart(attack, attack, "version", lines, (attack,))

    text = "\n".join(drawn(chart, Look(100)))

    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\u2066\u061c\u200f\u2028]", text)
    assert text.count("\n") == 14
    text.encode("utf-8")
