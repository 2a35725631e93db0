"""How values become text: safe for a terminal, valid as JSON, fit for a width."""

import json
import math
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from lightning_otel.cli.output import (
    age,
    count_noun,
    cut,
    json_text,
    plain,
    program,
    seconds,
    shown,
    size,
)

UNSAFE = {
    *map(chr, range(32)),
    *map(chr, range(127, 160)),
    *map(chr, range(0x2028, 0x202F)),
    *map(chr, range(0x2066, 0x206A)),
    *"\u061c\u200e\u200f",
}
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
PLAIN = st.none() | st.booleans() | st.integers() | TEXTS


@settings(deadline=None)
@given(st.text())
def test_shown_is_one_safe_line(text: str) -> None:
    """Whatever a text holds, no part of it steers the terminal, and its length stays."""
    found = shown(text)

    assert not UNSAFE & set(found)
    assert len(found) == len(text)
    assert found.encode() is not None


@settings(deadline=None)
@given(st.recursive(PLAIN, lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner)))
def test_json_text_is_safe_and_loses_nothing(value: object) -> None:
    """JSON holds the very value, in characters that cannot steer the terminal."""
    text = json_text(value)
    indented = json_text(value, indent=2)

    assert not UNSAFE & set(text)
    assert not UNSAFE & set(indented.replace("\n", ""))
    assert json.loads(text) == json.loads(indented) == value


@settings(deadline=None)
@given(st.text(), st.integers(2, 60))
def test_cut_fits_the_cells(text: str, width: int) -> None:
    """A text that is too wide ends in an ellipsis and fits, wide characters counted as two."""
    line = shown(text)

    found = cut(line, width)

    assert cell_len(found) <= width
    assert found == line or found.endswith("…")
    assert cut(line, None) == line


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (None, ""),
        (True, "True"),
        (1.5, "1.5"),
        ({"a": [1]}, '{"a": [1]}'),
        ([1, "ä"], '[1, "ä"]'),
        ("tab\tline\n", "tab line "),
        ("\ud800", "�"),
    ],
)
def test_shown_says_values_as_json_does(value: object, wanted: str) -> None:
    """Nothing is empty, objects and lists are JSON, white space is a space."""
    assert shown(value) == wanted


def test_plain_is_what_json_can_hold() -> None:
    """Bytes become base64, what is not finite becomes nothing, the rest its text."""
    found = plain({1: (b"ab", math.nan, -math.inf, 0.5), "x": 2j})

    assert found == {"1": ["YWI=", None, None, 0.5], "x": "2j"}


@pytest.mark.parametrize(
    ("duration_ns", "wanted"),
    [(0, "0 ms"), (8_400_000, "8 ms"), (1_240_000_000, "1.2 s"), (600_000_000_000, "10 min")],
)
def test_seconds_has_a_unit(duration_ns: int, wanted: str) -> None:
    """A duration is said in milliseconds, seconds or minutes."""
    assert seconds(duration_ns) == wanted


@pytest.mark.parametrize(
    ("ago_s", "wanted"),
    [(-5, "0 s"), (5, "5 s"), (600, "10 min"), (7200 * 5, "10 h"), (86_400 * 10, "10 d")],
)
def test_age_has_one_unit(ago_s: int, wanted: str) -> None:
    """An age is said in seconds, minutes, hours or days, and never less than nothing."""
    assert age(time.time_ns() - ago_s * 1_000_000_000) == wanted


def test_program_can_be_called_as_it_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On the PATH the program is its name; else where it lies, as short as that can be said."""
    beside = Path(sys.executable).with_name("lightning-otel")

    on_path = program()
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.chdir(beside.parent.parent)
    near = program()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "a folder" / "python"))
    nowhere = program()

    assert on_path == "lightning-otel"
    assert near == f"{beside.parent.name}/lightning-otel"
    assert nowhere == f"'{tmp_path}/a folder/python' -m lightning_otel"


@pytest.mark.parametrize(
    ("size_bytes", "wanted"), [(0, "0 kB"), (51_300, "51 kB"), (2_340_000, "2.3 MB")]
)
def test_size_has_a_unit(size_bytes: int, wanted: str) -> None:
    """A size is said in kilobytes or megabytes."""
    assert size(size_bytes) == wanted


def test_counted_takes_an_s() -> None:
    """One span, no spans, two spans."""
    assert [count_noun(number, "span") for number in (0, 1, 2)] == ["0 spans", "1 span", "2 spans"]
