"""The chat completions format, read whole and put together from chunks."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_otel import conventions as c
from lightning_otel.adapter.tokens import decode_ids
from lightning_otel.demo import wire
from lightning_otel.demo.policy import Reply, Tokenizer, ToolCall
from lightning_otel.instrumentors.openai import chat
from lightning_otel.redact import scrub

words = st.text('ab é\n"\\', max_size=12)
calls = st.builds(
    ToolCall,
    id=st.uuids().map(str),
    name=st.sampled_from(["calculator", "search"]),
    arguments=st.dictionaries(words, words, max_size=2).map(json.dumps),
)


@st.composite
def replies(draw: st.DrawFn) -> Reply:
    """An answer of text, reasoning and tool calls, each of them or none."""
    reply = Reply(
        text=draw(words),
        reasoning=draw(words),
        tool_calls=tuple(draw(st.lists(calls, max_size=3))),
        finish_reason=draw(st.sampled_from(["stop", "length", "tool_calls"])),
    )
    count = len(reply.tokens)
    numbers = st.floats(max_value=0, allow_nan=False, allow_infinity=False)
    logprobs = draw(st.lists(numbers, min_size=count, max_size=count))
    return Reply(
        reply.text, reply.tool_calls, reply.reasoning, reply.finish_reason, tuple(logprobs)
    )


@given(st.lists(replies(), min_size=1, max_size=3), st.booleans())
def test_assembled_chunks_say_what_the_whole_answer_says(
    answers: list[Reply], has_numbers: bool
) -> None:
    """A streamed answer has the attributes and the content of the same answer sent whole."""
    body: Any = {"model": "toy", "messages": [], "stream_options": {"include_usage": True}}
    if has_numbers:
        body |= {"logprobs": True, "return_token_ids": True}
    answer = wire.chat(body, answers, Tokenizer())

    whole = chat.assemble(list(answer.chunks))

    assert chat.response_attributes(whole) == chat.response_attributes(answer.response)
    assert chat.response_content(whole) == chat.response_content(answer.response)
    assert chat.is_complete(list(answer.chunks))
    assert not chat.is_complete(list(answer.chunks[:1]))


@given(replies(), st.integers(0, 40))
def test_assembled_chunks_of_a_stream_left_early_are_a_beginning(reply: Reply, kept: int) -> None:
    """Any first part of a stream gives a beginning of the text, and never an error."""
    answer = wire.chat({"model": "toy"}, [reply], Tokenizer())

    whole = chat.assemble(list(answer.chunks[:kept]))

    said = "".join(choice.get("message", {}).get("content") or "" for choice in whole["choices"])
    assert reply.text.startswith(said)
    assert chat.response_content(whole)


def deltas(*calls: Any) -> list[Any]:
    """Chunks that each carry one piece of a tool call."""
    return [{"choices": [{"index": 0, "delta": {"tool_calls": [call]}}]} for call in calls]


@pytest.mark.parametrize("index", [0, None, "absent"])
def test_tool_call_pieces_find_their_call_without_an_index(index: object) -> None:
    """Servers that leave the index out or null it still give one call, whole."""
    place = {} if index == "absent" else {"index": index}
    chunks = deltas(
        {**place, "id": "call_1", "type": "function", "function": {"name": "f", "arguments": ""}},
        {**place, "function": {"arguments": '{"a"'}},
        {**place, "function": {"arguments": ": 1}"}},
    )

    whole = chat.assemble(chunks)

    (call,) = whole["choices"][0]["message"]["tool_calls"]
    assert (call["id"], call["type"]) == ("call_1", "function")
    assert call["function"] == {"name": "f", "arguments": '{"a": 1}'}


def test_tool_calls_in_turns_without_an_index_are_told_apart_by_id() -> None:
    """A new id opens a call; a known one goes on with its own."""
    chunks = deltas(
        {"index": None, "id": "a", "function": {"name": "f", "arguments": "1"}},
        {"index": None, "id": "b", "function": {"name": "g", "arguments": "2"}},
        {"index": None, "id": "a", "function": {"arguments": "3"}},
    )

    whole = chat.assemble(chunks)

    first, second = whole["choices"][0]["message"]["tool_calls"]
    assert first["function"] == {"name": "f", "arguments": "13"}
    assert second["function"] == {"name": "g", "arguments": "2"}


def said_in(content: dict[str, str], key: str = "gen_ai.input.messages") -> Any:
    """The messages of some content."""
    return json.loads(content[key])


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ("hi", [{"type": "text", "content": "hi"}]),
        ("", []),
        (None, []),
        ([{"type": "text", "text": "hi"}, "bare"], ["hi", "bare"]),
        (
            [{"type": "image_url", "image_url": {"url": "https://a/b.png", "detail": "low"}}],
            [{"type": "uri", "modality": "image", "uri": "https://a/b.png", "detail": "low"}],
        ),
        (
            [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}],
            [
                {
                    "type": "blob",
                    "modality": "image",
                    "mime_type": "image/png",
                    "content": "AAAA",
                }
            ],
        ),
        (
            [{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "mp3"}}],
            [
                {
                    "type": "blob",
                    "modality": "audio",
                    "mime_type": "audio/mp3",
                    "content": "AAAA",
                }
            ],
        ),
        (
            [{"type": "file", "file": {"file_id": "file-1"}}],
            [{"type": "file", "modality": "document", "file_id": "file-1"}],
        ),
        ([{"type": "refusal", "refusal": "no"}], [{"type": "refusal", "content": "no"}]),
        ([{"type": "new", "thing": 1}], [{"type": "new", "thing": 1}]),
    ],
)
def test_request_content_has_every_kind_of_part(given: object, parts: list[Any]) -> None:
    """Text, images, sounds and files become the conventions' parts; what is new stays as it is."""
    body = {"messages": [{"role": "user", "content": given, "name": "ann"}]}
    wanted = [
        {"type": "text", "content": part} if isinstance(part, str) else part for part in parts
    ]

    content = chat.request_content(body)

    assert said_in(content) == [{"role": "user", "parts": wanted, "name": "ann"}]


def test_request_content_has_custom_tools_and_calls() -> None:
    """Tools of another kind than functions are kept, and so are calls of them."""
    custom = {"type": "custom", "custom": {"name": "shell"}}
    call = {"id": "c", "type": "custom", "custom": {"name": "shell", "input": "ls"}}
    body = {"messages": [{"role": "assistant", "tool_calls": [call]}], "tools": [custom]}

    content = chat.request_content(body)

    part = {"type": "tool_call", "id": "c", "name": "shell", "arguments": "ls"}
    assert said_in(content) == [{"role": "assistant", "parts": [part]}]
    assert said_in(content, "gen_ai.tool.definitions") == [custom]


def test_response_content_keeps_a_refusal_and_its_logprobs() -> None:
    """A refusal is what the model said."""
    held = {"content": None, "refusal": [{"token": "no", "logprob": -0.5}]}
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": None, "refusal": "no"},
        "finish_reason": "stop",
        "logprobs": held,
    }

    content = chat.response_content({"choices": [choice]})

    (message,) = said_in(content, "gen_ai.output.messages")
    assert message["parts"] == [{"type": "refusal", "content": "no"}]
    assert content["lightning.response.logprobs"] == "AAAAAAAA4L8="


@pytest.mark.parametrize("nonsense", [None, 7, "text", {"a": 1}, [None, 7, "text"], [[]], [{}]])
@pytest.mark.parametrize("name", ["messages", "tools", "stop", "n", "response_format", "model"])
def test_request_of_nonsense_is_read_as_far_as_it_makes_sense(name: str, nonsense: object) -> None:
    """Whatever a program puts into a request, reading it raises nothing."""
    body = {"model": "toy", "temperature": 0.5, name: nonsense}

    attributes = chat.request_attributes(body)
    content = chat.request_content(body)

    assert attributes["gen_ai.request.temperature"] == 0.5
    assert isinstance(said_in(content), list)


@pytest.mark.parametrize("nonsense", [None, 7, "text", {"a": 1}, [None, 7, "text"], [[]], [{}]])
@pytest.mark.parametrize(
    "name",
    ["choices", "usage", "message", "tool_calls", "function", "logprobs", "content", "token_ids"],
)
def test_response_of_nonsense_is_read_as_far_as_it_makes_sense(name: str, nonsense: object) -> None:
    """Whatever a server answers, reading it raises nothing and keeps what is sound."""
    call: dict[str, Any] = {"id": "c", "function": {}}
    message: dict[str, Any] = {"role": "assistant", "content": "hi", "tool_calls": [call]}
    choice: dict[str, Any] = {"message": message, "logprobs": {"content": []}}
    body: dict[str, Any] = {"id": "chatcmpl-1", "choices": [choice]}
    for holder in (body, choice, message, call, choice["logprobs"]):
        if name in holder or (holder is body and name == "usage"):
            holder[name] = nonsense
            break
    else:
        choice[name] = nonsense

    attributes = chat.response_attributes(body)
    content = chat.response_content(body)

    assert attributes["gen_ai.response.id"] == "chatcmpl-1"
    assert isinstance(said_in(content, "gen_ai.output.messages"), list)


def test_unknown_fields_of_reasoning_are_read_by_both_names() -> None:
    """Engines spell the visible reasoning ``reasoning_content`` or ``reasoning``."""
    for name in ("reasoning_content", "reasoning"):
        message = {"role": "assistant", "content": "b", name: "a"}

        content = chat.response_content({"choices": [{"message": message}]})

        (found,) = said_in(content, "gen_ai.output.messages")
        assert found["parts"] == [
            {"type": "reasoning", "content": "a"},
            {"type": "text", "content": "b"},
        ]


@pytest.mark.parametrize("size", [0, 100_000])
def test_request_content_holds_no_secret_in_any_kind_of_message(size: int) -> None:
    """Written anew or remembered from the call before, plain or with parts, long or short."""
    secret = "sk-" + "a1B2" * 5
    said = f"{'x' * size} {secret}"
    called = {"name": "f", "arguments": json.dumps({"key": said})}
    messages = [
        {"role": "user", "content": said},
        {"role": "tool", "tool_call_id": "call_1", "content": said},
        {"role": "user", "content": [{"type": "text", "text": said}]},
        {"role": "assistant", "tool_calls": [{"id": "call_1", "function": called}]},
        {"role": "user", "content": said, "name": "someone"},
    ]

    once, again = (
        scrub(chat.request_content({"messages": messages})[c.INPUT_MESSAGES]) for _ in range(2)
    )

    assert once == again
    assert secret not in once
    assert once.count("[redacted:api_key]") == len(json.loads(once)) == len(messages)


def test_token_ids_may_stand_at_the_top() -> None:
    """As older vLLM and Agent Lightning's mock server send them, of each choice in order."""
    body = {"choices": [{}, {}], "prompt_token_ids": [1], "response_token_ids": [[2, 3], [4]]}

    content = chat.response_content(body)

    assert [list(ids) for ids in decode_ids(content[c.RESPONSE_TOKEN_IDS])] == [[2, 3], [4]]
