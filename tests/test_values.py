"""Arguments and results of any type as bounded JSON text, and no code of the value's own runs.

The forms of plain values are in ``tests/store/test_line.py``.
"""

import dataclasses
import enum
import inspect
import json
import math
import time
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from lightning_otel.messages import content_parts, text_part
from lightning_otel.messages.media import to_json
from lightning_otel.types.values import ITEM_LIMIT, TEXT_LIMIT, text_of

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("ab"), inner, max_size=4),
    max_leaves=20,
)


@given(PLAIN)
def test_plain_values_are_written_as_they_are(value: Any) -> None:
    """What JSON can say is said whole; a string is not quoted, and always valid."""
    text = text_of(value)

    text.encode()
    assert len(text) == len(value) if isinstance(value, str) else json.loads(text) == value


class Hostile:
    """Raises, whatever is asked of it."""

    def __getattribute__(self, name: str) -> object:
        raise AssertionError(f"{name} was read")

    def __iter__(self) -> Iterator[object]:
        raise AssertionError("it was iterated")

    __str__ = __repr__ = __iter__  # type: ignore[assignment]  # on purpose


class Loud(dict[Any, Any]):
    """A dict whose own ways of being read fail."""

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("it was iterated")

    items = keys = __iter__  # type: ignore[assignment]  # on purpose


class Shouting(str):
    """A text that fails to be one."""

    def __str__(self) -> str:
        raise AssertionError("str was called")

    __getitem__ = __str__  # type: ignore[assignment]  # on purpose


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


NUMBERS = (number for number in range(3))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"a": Hostile(), Hostile(): 1}, {"a": "<Hostile>", "<Hostile>": 1}),
        (Loud(a=[Loud(b=1)]), {"a": [{"b": 1}]}),
        ([Shouting("a")], ["a"]),
        (Point(1, Hostile()), {"x": 1, "held": "<Hostile>"}),
        (Model(x=1, held=Hostile()), {"x": 1, "held": "<Hostile>"}),
        ((Colour.RED, b"bytes", object), ["red", "<bytes>", "<type>"]),
        ([NUMBERS], ["<generator>"]),
    ],
    ids=map(str, range(7)),
)
def test_values_are_read_without_running_their_code(value: Any, said: Any) -> None:
    """Anything but plain data is named by its type, and a generator is not drained."""
    assert json.loads(text_of(value)) == said
    assert inspect.getgeneratorstate(NUMBERS) == inspect.GEN_CREATED


def test_values_of_any_size_are_bounded() -> None:
    """In characters and in items, and quickly; what is left out is counted."""
    huge = "x" * 100_000_000
    started_s = time.monotonic()

    texts = [text_of(huge), text_of([huge, huge]), text_of([{"a": [0]}] * 10_000_000)]

    assert max(map(len, texts)) <= TEXT_LIMIT + 16 * ITEM_LIMIT
    assert texts[2].endswith('"<9,990,000 more items>"]')
    assert time.monotonic() - started_s < 5


def test_parts_of_messages_are_read_without_running_their_code() -> None:
    """What stands among a message's parts and is none is named by its type."""
    hostile = Hostile.__new__(Hostile)
    first, second, third = content_parts([hostile, {"type": [hostile]}, Point(1, hostile)])

    assert first == text_part('"<Hostile>"')
    assert second == {"type": '["<Hostile>"]'}
    assert third == text_part('{"x": 1, "held": "<Hostile>"}')


def test_mappings_of_any_type_are_objects_in_json() -> None:
    """Not named by their type, as what JSON has no word for is."""
    view = MappingProxyType({"a": math.nan})

    assert [to_json(view), to_json({"b": [view]})] == ['{"a": null}', '{"b": [{"a": null}]}']
