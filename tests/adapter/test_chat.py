"""Messages of the conventions as the chat API writes them, and back."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_otel.messages import flatten_tools, read_message
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


def test_text_beside_tool_calls_stays() -> None:
    """An assistant's words, reasoning and calls stand in one message; arguments are JSON text."""
    parts = [
        {"type": "reasoning", "content": "it is a product"},
        {"type": "text", "content": "Let me see."},
        {"type": "tool_call", "id": "c1", "name": "calc", "arguments": {"expression": "2*3 é"}},
        {"type": "tool_call", "id": "c2", "name": "calc", "arguments": '{"expr'},
    ]

    (found,) = messages_of([{"role": "assistant", "parts": parts, "finish_reason": "tool_calls"}])

    assert found == {
        "role": "assistant",
        "content": "Let me see.",
        "reasoning_content": "it is a product",
        "tool_calls": [
            {
                "id": "c1",
                "type": "function",
                "function": {"name": "calc", "arguments": '{"expression": "2*3 é"}'},
            },
            {"id": "c2", "type": "function", "function": {"name": "calc", "arguments": '{"expr'}},
        ],
    }


def test_images_are_parts_and_not_text() -> None:
    """An image by URL or by its bytes becomes a part that a vision model reads."""
    parts = [
        {"type": "text", "content": "What is this?"},
        {"type": "uri", "modality": "image", "uri": "https://x/y.png"},
        {"type": "blob", "modality": "image", "mime_type": "image/png", "content": "AAEC"},
    ]

    (found,) = messages_of([{"role": "user", "parts": parts}])

    assert found["content"] == [
        {"type": "text", "text": "What is this?"},
        {"type": "image_url", "image_url": {"url": "https://x/y.png"}},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAEC"}},
    ]


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
