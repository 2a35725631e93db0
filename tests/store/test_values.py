"""Values of any kind become what JSON knows, and are never called into."""

import math
import uuid
from collections.abc import Iterator
from datetime import UTC, date, datetime, time
from decimal import Decimal
from enum import IntEnum, StrEnum
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_otel.store import values as values_module
from lightning_otel.store.values import (
    fragment_of,
    json_of,
    make_plain,
    plain,
    repaired,
    text_of,
    text_or_none,
    time_of,
)

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


class Level(IntEnum):
    """An integer with a name."""

    HIGH = 3


class Mode(StrEnum):
    """A text with a name."""

    CHAT = "chat"


class Spiteful:
    """Raises whatever it is asked."""

    def __str__(self) -> str:
        raise RuntimeError("asked for its text")

    __repr__ = __str__

    @property
    def __class__(self) -> Any:
        """Raises where ``isinstance`` looks."""
        raise RuntimeError("asked for its class")

    @__class__.setter
    def __class__(self, value: Any) -> None:
        raise RuntimeError("told its class")

    def __iter__(self) -> Iterator[object]:
        raise RuntimeError("iterated")

    def __hash__(self) -> int:
        return 1


@given(JSON)
def test_plain_gives_back_json_as_it_is(value: object) -> None:
    """What JSON knows is not changed."""
    assert plain(value) == value
    assert orjson.loads(json_of(plain(value))) == value


@pytest.mark.parametrize(
    ("value", "text_form"),
    [
        (math.nan, "NaN"),
        (math.inf, "Infinity"),
        (-math.inf, "-Infinity"),
        (b"\xff\x00", "/wA="),
        (bytearray(b"ab"), "YWI="),
        (memoryview(b"abcd")[::2], "YWM="),
        (1 << 80, str(1 << 80)),
        (-(1 << 63) - 1, str(-(1 << 63) - 1)),
        (10**5000, hex(10**5000)),
        (Decimal("1.10"), "1.10"),
        (datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), "2026-01-02T03:04:05+00:00"),
        (date(2026, 1, 2), "2026-01-02"),
        (time(3, 4, 5), "03:04:05"),
        (uuid.UUID(int=5), "00000000-0000-0000-0000-000000000005"),
        (Level.HIGH, 3),
        (Mode.CHAT, "chat"),
        (np.float32(0.5), 0.5),
        (np.float64("nan"), "NaN"),
        (np.int64(7), 7),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        ((1, (2.5, "x")), [1, [2.5, "x"]]),
        ({3}, [3]),
        ([1, 1 << 70], [1, str(1 << 70)]),
        ([0.5, math.inf], [0.5, "Infinity"]),
        ({1: "a", None: "b", (1, "x"): "c"}, {"1": "a", "null": "b", '[1,"x"]': "c"}),
        (object(), "<object>"),
        (Spiteful(), "<Spiteful>"),
        ([Spiteful()], ["<Spiteful>"]),
        (MagicMock(), "<MagicMock>"),
        (MagicMock(spec=str), "<MagicMock>"),
        (MagicMock(spec=dict), "<MagicMock>"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_plain_gives_other_values_a_text_form(value: object, text_form: object) -> None:
    """Each kind of value JSON does not know has one documented form."""
    assert plain(value) == text_form
    assert type(plain(value)) is type(text_form)


def test_plain_keeps_minus_zero() -> None:
    """The sign of a zero survives."""
    found = plain(-0.0)

    assert math.copysign(1, found) == -1


def test_plain_stops_at_a_value_inside_itself() -> None:
    """A list or dict that holds itself, once or many times, ends there."""
    single: list[Any] = [1]
    single.append(single)
    double: dict[str, Any] = {}
    double.update(a=double, b=[double])

    assert plain(single) == [1, "<list inside itself>"]
    assert plain(double) == {"a": "<dict inside itself>", "b": ["<dict inside itself>"]}


def test_plain_stops_at_great_depth() -> None:
    """Two thousand levels end after forty."""
    deep: Any = "bottom"
    for _ in range(2000):
        deep = [deep]

    found = plain(deep)

    for _ in range(40):
        (found,) = found
    assert found == "<list nested too deep>"


def test_plain_stops_at_many_items(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists that share their parts do not unfold to billions.

    The limit is lowered by a patch, because a million items take a second.
    """
    monkeypatch.setattr(values_module, "_MAX_ITEMS", 1_000)
    shared: list[Any] = [None, None]
    for _ in range(30):
        shared = [shared, shared]

    assert "<list of too many items>" in json_of(plain(shared))


def test_make_plain_replaces_only_what_json_does_not_know() -> None:
    """Attributes are made plain in place, and the length of their text is told."""
    attributes: dict[str, Any] = {
        "text": "four",
        "count": 2,
        "rate": math.nan,
        "raw": b"x",
        "no": None,
    }

    size = make_plain(attributes)

    assert attributes == {"text": "four", "count": 2, "rate": "NaN", "raw": "eA==", "no": None}
    assert size == len("four") + len("NaN") + len("eA==")


def test_repaired_makes_any_value_writable() -> None:
    """Lone surrogates, large integers and odd keys, however deep, do not stop the writing."""
    value = {"\ud800": ["a\udfff", {1: 1 << 90}], "b": "ok ✓"}

    found = repaired(value)

    assert found == {"?": ["a?", {"1": str(1 << 90)}], "b": "ok ✓"}
    assert orjson.loads(orjson.dumps(found)) == found


@pytest.mark.parametrize(
    ("value", "text"),
    [("name", "name"), (5, "5"), (b"n", "bg=="), (None, ""), (Mode.CHAT, "chat"), (["a"], '["a"]')],
)
def test_text_of_is_always_text(value: object, text: str) -> None:
    """A name that is no text gets one."""
    assert text_of(value) == text
    assert type(text_of(value)) is str


@pytest.mark.parametrize(
    ("value", "text"), [("a", "a"), (Mode.CHAT, "chat"), (None, None), (5, None), (["a"], None)]
)
def test_text_or_none_takes_only_text(value: object, text: str | None) -> None:
    """A hot column of text holds text or nothing."""
    assert text_or_none(value) == text
    assert type(text_or_none(value)) is type(text)


@pytest.mark.parametrize(
    ("value", "time_ns"),
    [(5, 5), (5.9, 5), (-1, 0), (1 << 62, 0), (math.nan, 0), ("5", 0), (None, 0), (True, 0)],
)
def test_time_of_fits_its_column(value: object, time_ns: int) -> None:
    """A time is nanoseconds that fit 64 bits, or 0."""
    assert time_of(value) == time_ns


def test_fragment_of_is_ready_json() -> None:
    """Attributes of any kind become JSON that other JSON can include."""
    fragment = fragment_of({"service.name": "a\ud800", "raw": b"x", "n": 1})

    assert orjson.loads(orjson.dumps(fragment)) == {"service.name": "a?", "raw": "eA==", "n": 1}
