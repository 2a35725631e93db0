"""How values become text: safe for a terminal, valid as JSON, fit for a width."""

import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from lightning_otel.cli.output import (
    format_age_since,
    format_ns,
    format_size,
    json_text,
    printable,
    program_command,
    to_json_value,
)
from lightning_otel.types.text import one_line

UNSAFE = {
    *map(chr, range(32)), *map(chr, range(127, 160)), *map(chr, range(0x2028, 0x202F)),
    *map(chr, range(0x2066, 0x206A)), *"\u061c\u200e\u200f",
}  # fmt: skip
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
PLAIN = st.none() | st.booleans() | st.integers() | TEXTS


@settings(deadline=None)
@given(st.text(), st.integers(2, 60))
def test_shown_is_one_safe_line_that_can_be_cut(text: str, width: int) -> None:
    """No part of it steers the terminal; too wide, it ends in an ellipsis, wide signs as two."""
    line = printable(text)
    found = one_line(text, width)

    assert not UNSAFE & set(line)
    assert len(line) == len(text)
    assert line.encode() is not None
    assert cell_len(found) <= width
    assert found == line or found.endswith("…")


@settings(deadline=None)
@given(st.recursive(PLAIN, lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner)))
def test_json_text_is_safe_and_loses_nothing(value: object) -> None:
    """JSON holds the very value, in characters that cannot steer the terminal."""
    text, indented = json_text(value), json_text(value, indent=2)

    assert not UNSAFE & set(text + indented.replace("\n", ""))
    assert json.loads(text) == json.loads(indented) == value


def _age_of(ago_s: int) -> str:
    return format_age_since(time.time_ns() - ago_s * 1_000_000_000)


@pytest.mark.parametrize(
    ("words", "value", "wanted"),
    [
        (printable, None, ""),
        (printable, 1.5, "1.5"),
        (printable, {"a": [1]}, '{"a": [1]}'),
        (printable, [1, "ä"], '[1, "ä"]'),
        (printable, "tab\tline\n", "tab line "),
        (printable, "\ud800", "�"),
        (to_json_value, {1: (b"ab", math.nan), "x": 2j}, {"1": ["YWI=", None], "x": "2j"}),
        *((format_ns, ns, text) for ns, text in (
            (0, "0 ms"), (8_400_000, "8 ms"), (1_240_000_000, "1.2 s"), (600 * 10**9, "10 min"))),
        *((format_size, size_bytes, text) for size_bytes, text in (
            (0, "0 kB"), (51_300, "51 kB"), (2_340_000, "2.3 MB"))),
        *((_age_of, ago, text) for ago, text in (
            (-5, "0 s"), (5, "5 s"), (600, "10 min"), (36_000, "10 h"), (864_000, "10 d"))),
    ],
)  # fmt: skip
def test_values_are_worded(words: Callable[..., object], value: object, wanted: object) -> None:
    """In one unit, as people would say it; nothing is empty, objects and lists are JSON."""
    assert words(value) == wanted


def test_program_can_be_called_as_it_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On the PATH the program is its name; else where it lies, as short as that can be said."""
    beside = Path(sys.executable).with_name("lightning-otel")

    assert program_command() == "lightning-otel"
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.chdir(beside.parent.parent)
    assert program_command() == f"{beside.parent.name}/lightning-otel"
    monkeypatch.setattr(sys, "executable", str(tmp_path / "a folder" / "python"))
    assert program_command() == f"'{tmp_path}/a folder/python' -m lightning_otel"
