"""Message JSON: parts, and text back out of it."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_otel.messages import (
    message,
    parse_messages,
    plain_text,
    reasoning_part,
    text_part,
    tool_call_part,
    tool_response_part,
)


def values_with(integers: st.SearchStrategy[int]) -> st.SearchStrategy[Any]:
    """Values of any shape that JSON knows."""
    return st.recursive(
        st.none() | st.booleans() | integers | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
        max_leaves=5,
    )


@given(values_with(st.integers()))
def test_tool_calls_come_back_with_every_digit(value: Any) -> None:
    """Argument text is the value it stands for; a tool's whole numbers have any size."""
    call = tool_call_part("c", "f", json.dumps(value))

    found = parse_messages(json.dumps([message("assistant", [call], name=None)]))

    expected = {"type": "tool_call", "id": "c", "name": "f", "arguments": value}
    assert found == ({"role": "assistant", "parts": [expected]},)


@pytest.mark.parametrize(
    "text", ["", '{"a": 1', "not json", '{"a": NaN}', "Infinity", "[" * 100_000]
)
def test_tool_call_arguments_that_are_no_json_stay_text(text: str) -> None:
    """A cut, malformed or bottomless text is kept as the model wrote it."""
    assert tool_call_part("c", "f", text)["arguments"] == text


# Where no tool speaks no number is expected, and one of more than 64 bits may lose digits.
of_64_bits = values_with(st.integers(-(1 << 63), (1 << 64) - 1))


@given(st.lists(st.dictionaries(st.text(max_size=3), of_64_bits, max_size=3), max_size=3))
def test_parsed_messages_are_those_written(messages: list[dict[str, Any]]) -> None:
    """What was written as JSON comes back."""
    assert parse_messages(json.dumps(messages)) == tuple(messages)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        *[
            (text, None)
            for text in (None, "", "[", '[{"role": "us', "7", '{"role": "user"}', "[1]", "[null]")
        ],
        ("[" * 100_000, None),
        # Half of a surrogate pair, which only a lenient parser reads.
        ('[{"text": "\\ud800 b"}]', ({"text": "\ud800 b"},)),
        ('[{"n": 1, "deep": 18446744073709551616}]', ({"n": 1, "deep": 2**64},)),
    ],
)
def test_text_that_is_no_list_of_messages_is_none(text: str | None, found: Any) -> None:
    """Absent, cut and foreign texts are told from an empty list."""
    assert parse_messages(text) == found


def test_plain_text_has_a_line_for_each_part() -> None:
    """Texts, calls, answers and media, in order; messages of another shape say nothing."""
    messages: list[Any] = [
        message("user", [text_part("hi"), {"type": "uri", "uri": "https://a/b.png"}]),
        message("assistant", [reasoning_part("hm"), tool_call_part("c", "add", {"a": 1})]),
        message("tool", [tool_response_part("c", {"sum": 2}), tool_response_part("d", None)]),
        {"parts": ["bare", 1]},
        {},
        *[{"role": "user", "parts": parts} for parts in (None, 7, "text", {"a": 1}, [])],
    ]

    text = plain_text(messages)

    assert text == 'hi\nhttps://a/b.png\nhm\nadd({"a": 1})\n{"sum": 2}\nnull\nbare\n1'
