"""Any value as bounded JSON text, and no code of the value's own runs for it."""

import dataclasses
import enum
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from lightning_otel.messages import values
from lightning_otel.messages.values import text_of

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("ab"), inner, max_size=4),
    max_leaves=20,
)


@given(plain.filter(lambda value: not isinstance(value, str)))
def test_plain_values_are_written_as_they_are(value: Any) -> None:
    """What JSON can say is said whole."""
    assert json.loads(text_of(value)) == value


@given(st.text())
def test_text_is_itself_and_always_valid(text: str) -> None:
    """A string is not quoted; half a surrogate pair becomes a question mark."""
    text_of(text).encode()
    assert len(text_of(text)) == len(text)


class Hostile:
    """Raises, whatever is asked of it."""

    def __str__(self) -> str:
        raise AssertionError("str was called")

    def __repr__(self) -> str:
        raise AssertionError("repr was called")

    def __iter__(self) -> Iterator[object]:
        raise AssertionError("it was iterated")

    def __getattribute__(self, name: str) -> object:
        raise AssertionError(f"{name} was read")


class Loud(dict[Any, Any]):
    """A dict whose own ways of being read fail."""

    def items(self) -> Any:
        """Fail."""
        raise AssertionError("items was called")

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("it was iterated")


class Shouting(str):
    """A text that fails to be one."""

    def __str__(self) -> str:
        raise AssertionError("str was called")

    def __getitem__(self, item: Any) -> str:
        raise AssertionError("it was cut")


class Colour(enum.Enum):
    """An enumeration."""

    RED = "red"


@dataclasses.dataclass
class Point:
    """A dataclass that holds something else."""

    x: int
    held: object


class Model(BaseModel):
    """A pydantic model with a field that fails when dumped."""

    x: int
    held: Any


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (Hostile(), "<Hostile>"),
        ({"a": Hostile(), Hostile(): 1}, {"a": "<Hostile>", "<Hostile>": 1}),
        (Loud(a=[Loud(b=1)]), {"a": [{"b": 1}]}),
        ([Shouting("a")], ["a"]),
        (Point(1, Hostile()), {"x": 1, "held": "<Hostile>"}),
        (Model(x=1, held=Hostile()), {"x": 1, "held": "<Hostile>"}),
        ((Colour.RED, b"bytes", object), ["red", "<bytes>", "<type>"]),
        ({1: 2, None: 3, 1.5: 4, (1,): 5}, {"1": 2, "null": 3, "1.5": 4, "<tuple>": 5}),
        ([float("nan"), float("inf")], [None, None]),
        (2**70, 2**70),
        ("\ud800", None),
    ],
    ids=map(str, range(11)),
)
def test_values_are_read_without_running_their_code(value: Any, said: Any) -> None:
    """Anything but plain data is named by its type."""
    text = text_of(value)

    assert (text == "?") if said is None else (text == said or json.loads(text) == said)


def test_generators_are_not_drained() -> None:
    """They are the program's to read."""
    numbers = (number for number in range(3))

    assert text_of({"numbers": numbers}) == '{"numbers":"<generator>"}'
    assert list(numbers) == [0, 1, 2]


def test_value_that_holds_itself_ends() -> None:
    """The inner ones are named by type where the depth ends."""
    value: dict[str, Any] = {}
    value["self"] = value

    assert text_of(value).count("self") == values.DEPTH_LIMIT
    assert "<dict>" in text_of(value)


def test_values_of_any_size_are_bounded() -> None:
    """In characters and in items, and quickly."""
    huge = "x" * 100_000_000
    started_s = time.monotonic()

    texts = [text_of(huge), text_of([huge, huge]), text_of([{"a": [0]}] * 10_000_000)]

    assert max(map(len, texts)) <= values.TEXT_LIMIT + 16 * values.ITEM_LIMIT
    assert time.monotonic() - started_s < 5
