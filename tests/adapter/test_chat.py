"""Messages: their text and their parts, and as the chat API writes them, and back."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_otel.messages import (
    flatten_tools,
    message,
    parse_messages,
    plain_text,
    read_message,
    reasoning_part,
    text_part,
    tool_call_part,
    tool_response_part,
)
from lightning_otel.messages.chat import messages_of, tools_of

texts = st.text(min_size=1, max_size=8)
ids = st.text("abcé19", min_size=1, max_size=6)
arguments = st.dictionaries(
    st.text(max_size=4), st.none() | st.booleans() | st.integers() | st.text(max_size=4), max_size=3
)
_media = st.one_of(
    texts.map(lambda text: {"type": "text", "content": text}),
    st.sampled_from(["image", "audio", "video", "document"]).map(
        lambda modality: {"type": "uri", "modality": modality, "uri": f"https://x/{modality}"}
    ),
    st.sampled_from([("image", "image/png"), ("audio", "audio/wav"), ("document", "a/pdf")]).map(
        lambda kind: {
            "type": "blob",
            "modality": kind[0],
            "mime_type": kind[1],
            "content": "AAEC",
        }
    ),
    st.sampled_from(["image", "document"]).map(
        lambda modality: {"type": "file", "modality": modality, "file_id": "file-1"}
    ),
    st.just({"type": "uri", "modality": "image", "uri": "https://x", "detail": "low"}),
    st.just({"type": "a server's own", "anything": [1, None]}),
)


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Whole conversations in the conventions' form, as a chat API could have been asked them."""
    found: list[dict[str, Any]] = []
    for turn in range(draw(st.integers(0, 5))):
        role = draw(st.sampled_from(["system", "developer", "user", "assistant"]))
        parts = draw(st.lists(_media, max_size=3))
        names = draw(st.lists(ids, max_size=2, unique=True)) if role == "assistant" else []
        call_ids = [f"{name} {turn}" for name in names]
        if role == "assistant":
            if draw(st.booleans()):
                parts.insert(0, {"type": "reasoning", "content": draw(texts)})
            if draw(st.booleans()):
                parts.append({"type": "refusal", "content": draw(texts)})
            parts += [
                {"type": "tool_call", "id": call_id, "name": name, "arguments": draw(arguments)}
                for call_id, name in zip(call_ids, names, strict=True)
            ]
        named = {"name": draw(ids)} if draw(st.booleans()) else {}
        found.append({"role": role, "parts": parts, **named})
        for call_id in call_ids:
            part = {"type": "tool_call_response", "id": call_id, "response": draw(st.text())}
            found.append({"role": "tool", "parts": [part]})
    return found


@given(conversations())
def test_messages_come_back_as_they_were(conversation: list[dict[str, Any]]) -> None:
    """Parts → chat → parts is the identity: text, media, reasoning, refusals, calls, results."""
    spoken = messages_of(conversation)

    assert [read_message(item) for item in spoken] == conversation
    assert messages_of(map(read_message, spoken)) == messages_of(spoken) == spoken
    assert json.loads(json.dumps(spoken, allow_nan=False)) == spoken


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (
            [
                {"type": "reasoning", "content": "it is a product"},
                {"type": "text", "content": "Let me see."},
                {"type": "tool_call", "id": "c1", "name": "calc", "arguments": {"a": "2*3 é"}},
                {"type": "tool_call", "id": "c2", "name": "calc", "arguments": '{"expr'},
            ],
            {
                "content": "Let me see.",
                "reasoning_content": "it is a product",
                "tool_calls": [
                    {"id": name, "type": "function", "function": {"name": "calc", "arguments": a}}
                    for name, a in (("c1", '{"a": "2*3 é"}'), ("c2", '{"expr'))
                ],
            },
        ),
        (
            [
                {"type": "text", "content": "What is this?"},
                {"type": "uri", "modality": "image", "uri": "https://x/y.png"},
                {"type": "blob", "modality": "image", "mime_type": "image/png", "content": "AAEC"},
            ],
            {
                "content": [
                    {"type": "text", "text": "What is this?"},
                    {"type": "image_url", "image_url": {"url": "https://x/y.png"}},
                    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAEC"}},
                ]
            },
        ),
    ],
    ids=["text beside calls", "images"],
)
def test_parts_of_a_message_stand_in_one(parts: list[Any], expected: dict[str, Any]) -> None:
    """Words, reasoning and calls with arguments as text; images as parts that a model reads."""
    item = {"role": "assistant", "parts": parts, "finish_reason": "stop"}

    assert messages_of([item]) == [{"role": "assistant", **expected}]


def test_tool_results_answer_their_calls_where_ids_are_lost() -> None:
    """Calls without ids get some, and results without ids answer the open calls in order."""
    call = {"type": "tool_call", "id": None, "name": "f", "arguments": None}
    result = {"type": "tool_call_response", "id": None, "response": {"found": [1]}}
    given_messages = [
        {"role": "assistant", "parts": [call, {**call, "id": "call_0"}, call]},
        {"role": "user", "parts": [result, result, {**result, "response": None}]},
        {"role": "tool", "parts": [{"type": "text", "content": "late"}]},
    ]

    called, *results = messages_of(given_messages)

    assert [call["id"] for call in called["tool_calls"]] == ["call_1", "call_0", "call_2"]
    assert {call["function"]["arguments"] for call in called["tool_calls"]} == {"{}"}
    assert [item["tool_call_id"] for item in results] == ["call_1", "call_0", "call_2", "call_3"]
    assert [item["content"] for item in results] == ['{"found": [1]}', '{"found": [1]}', "", "late"]


@pytest.mark.parametrize(
    ("item", "role"),
    [
        ({"parts": [{"type": "text", "content": "hi"}]}, "user"),
        ({"role": "", "parts": [{"type": "tool_call", "name": "f"}]}, "assistant"),
        ({"parts": [{"type": "tool_call_response", "response": "x"}]}, "tool"),
        ({"role": None, "content": "hi"}, "user"),
        ({"content": None, "function_call": {"name": "f", "arguments": "{}"}}, "assistant"),
        ({"role": "function", "name": "f", "content": "7"}, "tool"),
        ({}, "user"),
    ],
)
def test_missing_roles_are_what_they_can_only_be(item: dict[str, Any], role: str) -> None:
    """A message without a role is read by its parts, and never refused."""
    (found,) = messages_of([item])

    assert found["role"] == role


@pytest.mark.parametrize(
    "part",
    [
        7,
        None,
        {},
        {"type": ["list"]},
        {"type": "blob", "modality": "image"},
        {"type": "text", "content": None},
        {"type": "text", "content": {"a": float("nan")}},
        {"type": "tool_call", "name": None, "id": 3, "arguments": [float("inf"), 10**400]},
        {"type": "tool_call_response", "response": [{"type": "text", "text": "a"}, 3]},
        {"type": "tool_call_response", "response": {"deep": [[[[[]]]]]}},
        {"type": "image_url", "image_url": None},
        {"type": "file", "file": {}},
        {"type": "uri", "uri": 7},
    ],
)
def test_odd_parts_are_valid_json_and_lose_nothing(part: Any) -> None:
    """Whatever a tracer wrote comes out as JSON that every parser takes."""
    found = messages_of([{"role": "assistant", "parts": [part, {"type": "text", "content": "x"}]}])

    assert "x" in json.dumps(found, allow_nan=False)


def test_bottomless_arguments_are_said_to_be() -> None:
    """Nesting that no serializer follows is named, and costs no other message."""
    bottomless: list[Any] = []
    for _ in range(5000):
        bottomless = [bottomless]
    part = {"type": "tool_call", "id": "c", "name": "f", "arguments": bottomless}

    (found,) = messages_of([{"role": "assistant", "parts": [part]}])

    assert found["tool_calls"][0]["function"]["arguments"] == '"nested too deeply"'


def test_tools_go_both_ways() -> None:
    """Functions nest, a server's own tools stay, and the latest of one name counts."""
    flat: list[dict[str, Any]] = [
        {"type": "function", "name": "calc", "description": "old", "parameters": {}},
        {"type": "function", "name": "calc", "description": "new", "parameters": {"a": 1}},
        {"type": "web_search", "user_location": None},
    ]

    found = tools_of(flat)

    assert found == [
        {
            "type": "function",
            "function": {"name": "calc", "description": "new", "parameters": {"a": 1}},
        },
        {"type": "web_search", "user_location": None},
    ]
    assert tools_of(found) == found
    assert flatten_tools(found) == flat[1:]


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
