"""Curves as SVG: what they show, and that nothing in them can act."""

import re
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest
from tests.plot.made import chart_of, series_of
from tests.test_picture import ATTACKS, parsed, texts

from lightning_otel.plot import Chart, Curves, svg
from lightning_otel.plot.curves import Point, Series

CONTROL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\u2066\u061c\u200f\u2028]")


def test_a_chart_has_scales_titles_and_numbers() -> None:
    """Both axes are labelled, the line is drawn, and each point is told where the pointer rests."""
    root = parsed(svg([chart_of([0.0, 0.5, 1.0])]))

    said = texts(root)
    assert {"reward", "3 values", "0", "0.2", "1", "2", "3"} <= set(said)
    assert "rollout, in the order they began" in said
    told = [element.text for element in root.iter("{http://www.w3.org/2000/svg}title")]
    assert "rollout 2 · 0.5 (1 value)" in told
    lines = [e.get("d") for e in root.iter("{http://www.w3.org/2000/svg}path")]
    assert "M84.0 278.0L392.0 168.0L700.0 58.0" in lines


def test_bins_have_a_band_and_versions_whiskers() -> None:
    """What many values are drawn as says how far they lie apart."""
    one = Point(1, 0.5, 0.0, 1.0, 4, 0.5, 4, error=0.25, label="a@1")
    two = Point(2, 0.7, 0.5, 1.0, 4, 0.6, 8, error=0.1, label="a@2")
    plain = (replace(one, error=None), replace(two, error=None))
    binned = Chart("reward", "reward", "rollout", (Series("", plain, 8),))
    versions = Chart("reward", "reward", "version", (Series("", (one, two)),))

    pictures = [svg([binned]), svg([versions])]

    assert ["band s0" in picture for picture in pictures] == [True, False]
    assert ["whisker s0" in picture for picture in pictures] == [False, True]
    assert "mean of the last 8" in pictures[0]
    assert "version a@1 · 0.5 ± 0.25 (mean of 4)" in pictures[1]


@pytest.mark.parametrize(
    "values",
    [[], [1.0], [2.0] * 9, [-1.0, -5.0], [1.7e308, -1.7e308], [float(n) for n in range(5000)]],
    ids=["none", "one", "equal", "negative", "huge", "many"],
)
def test_any_values_are_drawn(values: list[float]) -> None:
    """Every picture is whole, of bounded size, and holds no number that is none."""
    drawn = svg([chart_of(values)])

    parsed(drawn)
    assert "nan" not in drawn.lower().replace("dominant", "")
    assert "inf" not in drawn
    assert len(drawn) < 600_000
    assert texts(parsed(svg([]))) == ["nothing to draw"]


def test_lines_are_told_apart_without_colour() -> None:
    """Each has dashes of its own, which its sample in the legend shows; no band hides another."""
    lines = [replace(series_of([0.0, 1.0], f"v{n}"), window=2) for n in range(6)]
    wide = [replace(each, points=(replace(each.points[0], high=2.0),)) for each in lines]

    drawn = svg([Chart("reward", "reward", "rollout", tuple(lines))])

    dashes = re.findall(r"mean[.]s(\d){stroke-dasharray:([\d ]+)}", drawn)
    assert [rank for rank, _ in dashes] == list("12345")
    assert len({dash for _, dash in dashes}) == 5
    assert len(re.findall(r'class="mean s\d" d="M84 ', drawn)) == 6
    assert "v3 · rollout 1 · 0 (1 value)" in drawn
    assert "band s" not in svg([Chart("reward", "reward", "rollout", tuple(wide))])


def test_the_viewer_has_the_same_dashes() -> None:
    """Its style sheet stands for the styles that its pictures come without."""
    of_viewer = (files("lightning_otel.serve.viewer") / "static" / "viewer.css").read_text()
    rule = r"svg[.]curve [.]mean[.](s\d) ?{ ?stroke-dasharray: ?([\d ]+);? ?}"

    assert re.findall(rule, of_viewer) == re.findall(rule, svg([]))


def test_both_schemes_are_styled() -> None:
    """Light is the default, dark where the reader's screen is; both have their own ground."""
    drawn = svg([chart_of([1.0, 2.0])])

    assert "prefers-color-scheme:dark" in drawn
    assert drawn.count("svg.curve .bg{fill:") == 2
    assert drawn.count("svg.curve .s0{stroke:") == 2


@pytest.mark.parametrize("attack", ATTACKS, ids=range(len(ATTACKS)))
def test_nothing_in_a_name_acts(attack: str, tmp_path: Path) -> None:
    """Runs, versions, metrics and notes are text, whatever they say; the file is the user's."""
    lines = (series_of([1.0, 2.0], attack, attack), series_of([2.0], attack, attack))
    path = tmp_path / "curves.svg"

    Curves([Chart(attack, attack, "version", lines, (attack,))]).save(path)

    picture = path.read_text()
    parsed(picture)
    assert not CONTROL.search(picture)
    assert path.stat().st_mode & 0o077 == 0


def test_a_notebook_shows_the_picture() -> None:
    """Curves are their SVG there, and text where they are printed."""
    found = Curves([chart_of([0.0, 1.0])])

    parsed(found._repr_html_())
    assert str(found).startswith("reward  2 values  0 -> 1\n")
