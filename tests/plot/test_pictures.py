"""Charts as characters and as SVG, and progress: what they show, and that nothing in them acts."""

import io
import math
import re
from collections.abc import Callable
from dataclasses import replace
from importlib.resources import files
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.plot.made import START_NS, chart_of, series_of
from tests.test_picture import ATTACKS, parsed, texts

from lightning_otel import Progress
from lightning_otel.types.text import width_of
from lightning_otel.views.plot import Chart, Curves, bar, chart_lines, svg
from lightning_otel.views.plot.characters import sparkline
from lightning_otel.views.plot.curves import Point, Series, labels, moment, share, ticks, widened

FINITE = st.floats(allow_nan=False, allow_infinity=False)
CONTROL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\u2066\u061c\u200f\u2028]")


@given(FINITE, FINITE, FINITE, st.integers(2, 9))
def test_scales_hold_any_numbers(one: float, other: float, value: float, most: int) -> None:
    """Bounds are apart, nothing overflows between them, and ticks are few and finite."""
    low, high = widened(min(one, other), max(one, other))

    found = ticks(low, high, most)

    assert low < high
    assert 0 <= share(value, low, high) <= 1
    assert len(found) <= max(2, most)
    assert all(math.isfinite(each) and 0 <= share(each, low, high) <= 1 for each in found)


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        (ticks(0.0, 1.0, 4), [0.0, 0.5, 1.0]),
        (ticks(-0.3, 0.3, 4), [-0.2, 0.0, 0.2]),
        (ticks(3.0, 97.0, 4), [20.0, 40.0, 60.0, 80.0]),
        (ticks(-1e308, 1e308, 4), [-1e308, 0.0, 1e308]),
        (chart_of([]).bounds(), (0.0, 1.0)),
        (chart_of([3.0]).bounds(), (2.7, 3.3)),
        (chart_of([1e-4] * 9).bounds(), (0.9e-4, 1.1e-4)),
        (chart_of([0.0]).bounds(), (-0.5, 0.5)),
        (chart_of([3.0]).reach(), (0, 2)),
    ],
)
def test_scales_are_round_and_apart(found: object, wanted: object) -> None:
    """One, two or five of a power of ten, as many as fit; a scale never has the length nought."""
    assert found == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        (labels([0.0, 0.5, 1.0]), ["0", "0.5", "1"]),
        (labels([100000.0, 100001.0]), ["100000", "100001"]),
        (labels([1e20, 2e20]), ["1e+20", "2e+20"]),
        (labels([0.1 + 0.2, 0.3]), ["0.30000000000000004", "0.3"]),
        ([moment(START_NS, days * 86_400) for days in (1 / 1440, 1 / 24, 3, 90)],
         ["22:13:20", "22:13", "11-14 22:13", "2023-11-14"]),
        ([sparkline(each) for each in ([], [0.0, 0.5, 1.0], [-7.0, 8.0])], ["", "▁▅█", "▁█"]),
        (sparkline(n / 7 for n in range(8)), "▁▂▃▄▅▆▇█"),
        ([bar(part, 4) for part in (0.0, 1.0, 0.5, 0.28125, -1.0, 2.0)],
         ["", "████", "██", "█▏", "", "████"]),
        (bar(0.5, 1), "▌"),
    ],
)  # fmt: skip
def test_numbers_become_text(found: object, wanted: object) -> None:
    """As short as can be and still apart; a share to an eighth of a character, and clipped."""
    assert found == wanted
    assert moment(-5, 60)
    assert moment(1e30, 60)


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
        ([float(n) for n in range(5000)], "reward  5,000 values  0 -> 4999"),
    ],
)
def test_any_values_are_drawn(values: list[float], words: str) -> None:
    """None, one, equal, negative, huge, tiny, near and many values all have a whole picture."""
    found, picture = drawn(chart_of(values), 60), svg([chart_of(values)])

    assert found[0] == words
    assert any(re.search("[▁-█]", line) for line in found[1:9]) == bool(values)
    parsed(picture)
    assert "nan" not in picture.lower().replace("dominant", "")
    assert "inf" not in picture
    assert len(picture) < 600_000


@given(st.lists(FINITE, max_size=30), st.integers(1, 120), st.booleans())
def test_no_line_is_longer_than_the_terminal_is_wide(
    values: list[float], width: int, is_ascii: bool
) -> None:
    """Whatever is drawn, it fits; a terminal narrower than 24 cells is taken for one of 24."""
    for lines in ([values], [values, values[::-1]]):
        found = drawn(chart_of(*lines), width, is_ascii=is_ascii)

        assert max(map(width_of, found)) <= max(24, width)


def test_a_picture_has_scales_titles_and_numbers() -> None:
    """Both axes are labelled, the line is drawn, and each point is told where the pointer rests."""
    root = parsed(svg([chart_of([0.0, 0.5, 1.0])]))

    said = texts(root)
    assert {"reward", "3 values", "0", "0.2", "1", "2", "3"} <= set(said)
    assert "rollout, in the order they began" in said
    told = [element.text for element in root.iter("{http://www.w3.org/2000/svg}title")]
    assert "rollout 2 · 0.5 (1 value)" in told
    lines = [e.get("d") for e in root.iter("{http://www.w3.org/2000/svg}path")]
    assert "M84.0 278.0L392.0 168.0L700.0 58.0" in lines
    assert texts(parsed(svg([]))) == ["nothing to draw"]


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
    assert ['class="mean' in picture for picture in pictures] == [True, False]
    assert "mean of the last 8" in pictures[0]
    assert "version a@1 · 0.5 ± 0.25 (mean of 4)" in pictures[1]


def test_scales_cover_what_is_drawn() -> None:
    """A maximum that no dot, band or interval shows stretches none; a constant is where it is."""
    one = Point(1, 0.5, 0.0, 7.0, 4, 0.5, 4, error=0.25, label="a@1")
    two = Point(2, 0.7, 0.5, 0.9, 4, 0.6, 8, error=0.1, label="a@2")
    line = Series("", (one, two))
    versions = Chart("reward", "reward", "version", (line,))
    several = Chart("reward", "reward", "step", (line, replace(line, name="b")))
    flat = drawn(chart_of([1e-4] * 20), 40)

    assert versions.bounds() == pytest.approx((0.25, 0.8))
    assert (several.bounds(), several.bounds(has_dots=False)) == ((0.5, 0.7), (0.5, 0.6))
    assert drawn(versions, 24)[1:9] == [
        "    ││                 │",
        "    ││                 *",
        "0.6 ┤│                 │",
        "    ││",
        "    │*",
        "0.4 ┤│",
        "    ││",
        "    ││",
    ]
    assert [line[:9] for line in flat if "┤" in line] == ["0.00011 ┤", " 0.0001 ┤", "  9e-05 ┤"]
    assert ["█" in line or "▁" in line for line in flat[3:6]] == [False, True, True]


def test_lines_are_told_apart_without_colour() -> None:
    """Each has dashes of its own, also in the viewer; no band hides another; dark has its style."""
    lines = [replace(series_of([0.0, 1.0], f"v{n}"), window=2) for n in range(6)]
    wide = [replace(each, points=(replace(each.points[0], high=2.0),)) for each in lines]
    of_viewer = (files("lightning_otel.serve.viewer") / "static" / "viewer.css").read_text()
    rule = r"svg[.]curve [.]mean[.]s(\d) ?{ ?stroke-dasharray: ?([\d ]+);? ?}"

    picture = svg([Chart("reward", "reward", "rollout", tuple(lines))])

    dashes = re.findall(rule, picture)
    assert [rank for rank, _ in dashes] == list("12345")
    assert len({dash for _, dash in dashes}) == 5
    assert re.findall(rule, of_viewer) == dashes
    assert len(re.findall(r'class="mean s\d" d="M84 ', picture)) == 6
    assert "v3 · rollout 1 · 0 (1 value)" in picture
    assert "band s" not in svg([Chart("reward", "reward", "rollout", tuple(wide))])
    assert "prefers-color-scheme:dark" in picture
    assert [picture.count(f"svg.curve .{each}") for each in ("bg{fill:", "s0{stroke:")] == [2, 2]


class _Terminal(io.StringIO):
    """A stream that says it is a terminal; a real one is not needed to see what is written."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def clock(step_s: float) -> Callable[[], float]:
    """Return a clock that goes on by so much each time it is read."""
    times = count(step_s, step_s)
    return lambda: next(times)


@pytest.mark.parametrize("attack", ATTACKS, ids=range(len(ATTACKS)))
def test_nothing_in_a_name_acts(attack: str, tmp_path: Path) -> None:
    """Titles, runs, versions, metrics and notes are text everywhere; the file is the user's."""
    lines = (series_of([1.0, 2.0], attack, attack), series_of([2.0], attack, attack))
    chart = Chart(attack, attack, "version", lines, (attack,))
    path, stream = tmp_path / "c.svg", _Terminal()

    text = "\n".join(drawn(chart, 100))
    Curves([chart]).save(path)
    with Progress(stream=stream) as progress:
        progress(1, 2, {attack: 1.0})

    line = stream.getvalue().removeprefix("\r").removesuffix("\x1b[K\n")
    parsed(path.read_text())
    assert not CONTROL.search(text + path.read_text() + line)
    assert text.count("\n") == 14
    assert path.stat().st_mode & 0o077 == 0
    text.encode("utf-8")


def test_a_notebook_shows_the_picture() -> None:
    """Curves are their SVG there, and text where they are printed."""
    found = Curves([chart_of([0.0, 1.0])])

    parsed(found._repr_html_())
    assert str(found).startswith("reward  2 values  0 -> 1\n")


def test_a_terminal_keeps_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn anew after each step, ended once."""
    monkeypatch.setenv("COLUMNS", "100")
    stream = _Terminal()

    with Progress(stream=stream, now_s=clock(2.0)) as progress:
        for step, reward in enumerate((0.0, 0.5, 1.0), 1):
            progress(step, 4, {"kept": 3.0, "loss": 0.25, "reward": reward, "left_out/x": 1.0})

    lines = stream.getvalue().split("\r")
    assert lines[1].startswith("step 1/4  █████                25%  reward 0  loss 0.25  kept 3")
    assert lines[3].endswith("reward 1  loss 0.25  kept 3  ▁▅█  2 s a step  2 s left\x1b[K\n")
    assert len(lines) == 4


def test_a_file_gets_a_line_now_and_then() -> None:
    """The first, the last, and one every ten seconds; strange numbers are told as they are."""
    stream, strange = io.StringIO(), io.StringIO()

    with Progress(stream=stream, now_s=clock(1.0)) as progress:
        for step in range(1, 26):
            progress(step, None, {"reward": 1.0})
    with Progress(stream=strange) as progress:
        progress(1, 1, {"reward": 1.7e308, "loss": float("nan")})
        progress(2, 1, {"reward": -1.7e308, "loss": float("inf")})
        progress.close()

    steps = [line.split("  ")[0] for line in stream.getvalue().splitlines()]
    assert steps == ["step 1", "step 11", "step 21", "step 25"]
    assert "\x1b" not in stream.getvalue()
    assert "loss nan" in strange.getvalue()
    assert "100%  reward -1.7e+308  loss inf  █▁" in strange.getvalue()


def test_labels_of_versions_keep_their_ends() -> None:
    """Of two long names the versions differ, and neither is cut where it does."""
    points = tuple(
        Point(x, 0.5, 0.5, 0.5, 1, 0.5, 1, label=f"a_long_name_of_a_system_prompt@{x}")
        for x in (1, 2)
    )
    drawn = svg([Chart("reward", "reward", "version", (Series("", points),))])

    assert drawn.count(">a_long_name_of_a_system_prompt@1<") == 1
    assert drawn.count(">a_long_name_of_a_system_prompt@2<") == 1
