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


values = values_with(st.integers())
# Where no tool speaks no number is expected, and one of more than 64 bits may lose digits.
of_64_bits = values_with(st.integers(-(1 << 63), (1 << 64) - 1))


def test_parts_have_the_conventions_shape() -> None:
    """Types and fields are those of the GenAI message schemas."""
    parts = [
        text_part("a"),
        reasoning_part("b"),
        tool_call_part("c", "f", {"x": 1}),
        tool_response_part("c", "d"),
    ]

    assert parts == [
        {"type": "text", "content": "a"},
        {"type": "reasoning", "content": "b"},
        {"type": "tool_call", "id": "c", "name": "f", "arguments": {"x": 1}},
        {"type": "tool_call_response", "id": "c", "response": "d"},
    ]


@given(values)
def test_tool_call_arguments_are_what_their_json_says(value: Any) -> None:
    """Argument text becomes the value it stands for."""
    part = tool_call_part("c", "f", json.dumps(value))

    assert part["arguments"] == value


@pytest.mark.parametrize(
    "text", ["", '{"a": 1', "not json", '{"a": NaN}', "Infinity", "[" * 100_000]
)
def test_tool_call_arguments_that_are_no_json_stay_text(text: str) -> None:
    """A cut, malformed or bottomless text is kept as the model wrote it."""
    assert tool_call_part("c", "f", text)["arguments"] == text


def test_message_leaves_out_what_is_none() -> None:
    """Further fields are there only with a value."""
    assert message("user", [], name=None, finish_reason="stop") == {
        "role": "user",
        "parts": [],
        "finish_reason": "stop",
    }


@given(st.lists(st.dictionaries(st.text(max_size=3), of_64_bits, max_size=3), max_size=3))
def test_parsed_messages_are_those_written(messages: list[dict[str, Any]]) -> None:
    """What was written as JSON comes back."""
    assert parse_messages(json.dumps(messages)) == tuple(messages)


@pytest.mark.parametrize(
    "text",
    [None, "", "[", '[{"role": "us', "7", '{"role": "user"}', "[1]", "[null]", "[" * 100_000],
)
def test_text_that_is_no_list_of_messages_is_none(text: str | None) -> None:
    """Absent, cut and foreign texts are told from an empty list."""
    assert parse_messages(text) is None


def test_plain_text_has_a_line_for_each_part() -> None:
    """Texts, calls, answers and media, in order."""
    messages = [
        message("user", [text_part("hi"), {"type": "uri", "uri": "https://a/b.png"}]),
        message("assistant", [reasoning_part("hm"), tool_call_part("c", "add", {"a": 1})]),
        message("tool", [tool_response_part("c", {"sum": 2}), tool_response_part("d", None)]),
    ]

    text = plain_text(messages)

    assert text == 'hi\nhttps://a/b.png\nhm\nadd({"a": 1})\n{"sum": 2}\nnull'


@pytest.mark.parametrize("parts", [None, 7, "text", {"a": 1}, []])
def test_plain_text_of_a_message_without_parts_is_empty(parts: object) -> None:
    """Messages of another shape say nothing, and raise nothing."""
    assert plain_text([{"role": "user", "parts": parts}, {}]) == ""


def test_plain_text_shows_bare_parts() -> None:
    """A part that is no object is shown as it is."""
    assert plain_text([{"parts": ["a", 1]}]) == "a\n1"


@pytest.mark.parametrize("number", [2**70, -(2**80), 2**64])
def test_parse_messages_keeps_every_digit_of_a_tools_number(number: int) -> None:
    """A whole number of more than 64 bits is what the model wrote, not near it."""
    call = {"type": "tool_call", "id": "c", "name": "look_up", "arguments": {"id": number}}
    answer = {"type": "tool_call_response", "id": "c", "response": number}

    found = parse_messages(json.dumps([{"role": "assistant", "parts": [call, answer]}]))

    assert found is not None
    assert found[0]["parts"] == [call, answer]


@pytest.mark.parametrize("text", ["\ud800", "half a pair \udc00 within"])
def test_parse_messages_reads_what_only_the_lenient_parser_reads(text: str) -> None:
    """Half of a surrogate pair, escaped in the JSON, costs no message."""
    messages = [{"role": "user", "parts": [{"type": "text", "content": text}]}]

    assert parse_messages(json.dumps(messages)) == tuple(messages)
