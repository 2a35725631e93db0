"""Pictures in characters: heights, lengths, curves in blocks and in ASCII."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.plot.made import chart_of, series_of
from tests.test_picture import ATTACKS

from lightning_otel.markup import width_of
from lightning_otel.plot import Chart, bar, chart_lines
from lightning_otel.plot.characters import sparkline


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


def drawn(chart: Chart, width: int = 40, *, is_ascii: bool = False) -> list[str]:
    """A chart's lines."""
    return list(chart_lines(chart, width, is_ascii=is_ascii))


def test_a_curve_goes_from_its_first_to_its_last_value() -> None:
    """A rising line in eighths of a character: its scale at the left, its axis below."""
    assert drawn(chart_of([0.0, 0.5, 1.0]), 24) == [
        "reward  3 values  0 -> 1",
        "  1 ┤                ▁▅█",
        "    │              ▂▅███",
        "    │            ▃▇█████",
        "    │         ▁▄▇███████",
        "0.5 ┤       ▁▅██████████",
        "    │     ▃▆████████████",
        "    │   ▃▇██████████████",
        "  0 ┤▁▅█████████████████",
        "    └───────────────────",
        "     1                 3",
        "     rollout, in the or…",
    ]


def test_runs_are_drawn_with_marks_and_names() -> None:
    """Several lines have a mark each, which their names below tell, whatever can be printed."""
    chart = chart_of([1.0, 2.0, 3.0], [3.0, 1.0])

    plain, found = drawn(chart, 30, is_ascii=True), drawn(chart, 30)

    assert found[1][3:] == "++                     ****"
    assert found[-2:] == [" * run-1  1 -> 3", " + run-2  3 -> 1"]
    assert [line.translate(str.maketrans("│┤└─", "|++-")) for line in found] == plain
    "\n".join(drawn(chart_of([1.0, 2.0]), is_ascii=True)).encode("ascii")


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
    found = drawn(chart_of(values), 60)

    assert found[0] == words
    assert any(re.search("[▁-█]", line) for line in found[1:9]) == bool(values)


@given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=30),
    st.integers(1, 120),
    st.booleans(),
)
def test_no_line_is_longer_than_the_terminal_is_wide(
    values: list[float], width: int, is_ascii: bool
) -> None:
    """Whatever is drawn, it fits; a terminal narrower than 24 cells is taken for one of 24."""
    for lines in ([values], [values, values[::-1]]):
        found = drawn(chart_of(*lines), width, is_ascii=is_ascii)

        assert max(map(width_of, found)) <= max(24, width)


@pytest.mark.parametrize("attack", ATTACKS, ids=range(len(ATTACKS)))
def test_no_name_moves_the_cursor(attack: str) -> None:
    """Titles, runs, versions and notes are one line of harmless text each."""
    lines = (series_of([1.0, 2.0], attack, attack), series_of([2.0], attack, attack))
    chart = Chart(attack, attack, "version", lines, (attack,))

    text = "\n".join(drawn(chart, 100))

    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\u2066\u061c\u200f\u2028]", text)
    assert text.count("\n") == 14
    text.encode("utf-8")
