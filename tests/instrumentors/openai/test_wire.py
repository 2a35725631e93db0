"""The four wire formats as any server may send them: what the span of a call says of each."""

import base64
import json
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.instrumentors.transport import read

from lightning_otel.adapter.tokens import decode_ids, decode_logprobs
from lightning_otel.demo import wire
from lightning_otel.demo.policy import PieceTokenizer, Reply, ToolCall, pieces
from lightning_otel.types import conventions as c

CHAT, COMPLETIONS, RESPONSES, EMBEDDINGS = (
    "/chat/completions", "/completions", "/responses", "/embeddings",
)  # fmt: skip
STREAMED = (c.REQUEST_STREAM, c.TIME_TO_FIRST_CHUNK, c.ABANDONED)

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
    numbers = st.floats(max_value=0, allow_nan=False, allow_infinity=False)
    count = len(reply.tokens)
    logprobs = tuple(draw(st.lists(numbers, min_size=count, max_size=count)))
    return Reply(reply.text, reply.tool_calls, reply.reasoning, reply.finish_reason, logprobs)


def made(path: str, found: list[Reply], body: dict[str, Any]) -> Any:
    """The answer as it is sent in this format, whole and in pieces."""
    if path == CHAT:
        return wire.chat(body, found, PieceTokenizer())
    if path == RESPONSES:
        return wire.response(body, found[0])
    texts = [Reply(r.text or "x", logprobs=(-0.5,) * len(pieces(r.text or "x"))) for r in found]
    return wire.completion(body, [["hi"]], texts, PieceTokenizer())


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
@given(found=st.lists(replies(), min_size=1, max_size=3), has_numbers=st.booleans())
def test_streamed_answer_says_what_the_whole_one_says(
    path: str, found: list[Reply], has_numbers: bool
) -> None:
    """Attributes, messages, token ids and logprobs."""
    body: Any = {"model": "toy", "stream_options": {"include_usage": True}}
    if has_numbers:
        body |= {"logprobs": 0 if path == COMPLETIONS else True, "return_token_ids": True}
    answer = made(path, found, body)

    whole = read(path, body, answer.response)
    streamed = read(path, body, [*answer.chunks, {"done": True}])

    assert c.ABANDONED not in streamed
    assert {key: held for key, held in streamed.items() if key not in STREAMED} == whole


junk = st.recursive(
    st.sampled_from([None, 7, "text", True, 2.5, {}, [], {"a": 1}, [None, 7, "text"]]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(words, inner, max_size=2),
    max_leaves=4,
)
REQUEST = (
    "messages", "tools", "stop", "n", "response_format", "input", "instructions", "reasoning",
    "text", "conversation", "prompt", "seed", "service_tier", "encoding_format",
)  # fmt: skip
ANSWER = (
    "choices", "usage", "output", "data", "incomplete_details", "status", "prompt_token_ids",
    "token_ids", "system_fingerprint",
)  # fmt: skip
CHOICE = ("message", "logprobs", "token_ids", "finish_reason", "text", "index")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, EMBEDDINGS])
@given(data=st.data())
def test_nonsense_is_read_as_far_as_it_makes_sense(path: str, data: st.DataObject) -> None:
    """Whatever stands in a request or an answer, reading it raises nothing and keeps the rest."""

    def some(names: tuple[str, ...]) -> dict[str, Any]:
        return data.draw(st.dictionaries(st.sampled_from(names), junk, max_size=3))

    request = {"temperature": 0.5, **some(REQUEST)}
    answer = {"id": "a1", "choices": [{"message": some(("content", "tool_calls")), **some(CHOICE)}]}
    answer |= {"output": [{"type": "message", **some(("content", "type"))}], **some(ANSWER)}

    found = read(path, request, answer)
    read(path, request, [answer, {"type": "response.created", **some(("response", "item"))}])

    assert (found["gen_ai.request.temperature"], found[c.RESPONSE_ID]) == (0.5, "a1")
    for key in (c.INPUT_MESSAGES, c.OUTPUT_MESSAGES):
        assert isinstance(found.get(key, []), list)


def usage(*names: str) -> Any:
    given, made, given_details, made_details = names
    return {"usage": {
        given: 1, made: 2, given_details: {"cached_tokens": 3},
        made_details: {"reasoning_tokens": 4},
    }}  # fmt: skip


COUNTS = {
    c.INPUT_TOKENS: 1, c.OUTPUT_TOKENS: 2, c.CACHED_TOKENS: 3, c.REASONING_TOKENS: 4,
}  # fmt: skip
FINISHED: list[tuple[Any, Any]] = [
    ({"status": "completed", "output": []}, ["stop"]),
    ({"status": "completed", "output": [{"type": "function_call"}]}, ["tool_calls"]),
    ({"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}, ["length"]),
    ({"status": "incomplete", "incomplete_details": {"reason": "filter"}}, ["filter"]),
    ({"status": "incomplete"}, ["length"]),
    ({"status": "failed"}, ["error"]),
    ({"status": "in_progress"}, None),
]
ATTRIBUTES: list[tuple[str, Any, Any, dict[str, Any]]] = [
    (CHAT, {"temperature": 1}, {}, {c.REQUEST_TEMPERATURE: 1.0}),
    (CHAT, {"temperature": True}, {}, {c.REQUEST_TEMPERATURE: None}),
    (CHAT, {"temperature": "hot"}, {}, {c.REQUEST_TEMPERATURE: None}),
    (CHAT, {"max_tokens": 5}, {}, {c.REQUEST_MAX_TOKENS: 5}),
    (CHAT, {"max_tokens": 5.5}, {}, {c.REQUEST_MAX_TOKENS: None}),
    (CHAT, {"top_k": 3, "top_p": 0.5}, {}, {c.REQUEST_TOP_K: 3, c.REQUEST_TOP_P: 0.5}),
    (CHAT, {"stop": "a"}, {}, {c.REQUEST_STOP: ["a"]}),
    (CHAT, {"stop": ["a", 1]}, {}, {c.REQUEST_STOP: None}),
    (CHAT, {"n": 1}, {}, {c.REQUEST_CHOICES: None}),
    (CHAT, {"n": 3}, {}, {c.REQUEST_CHOICES: 3}),
    (CHAT, {"service_tier": "auto"}, {}, {c.OPENAI_REQUEST_TIER: None}),
    (CHAT, {"service_tier": "flex"}, {}, {c.OPENAI_REQUEST_TIER: "flex"}),
    (CHAT, {"response_format": {"type": "text"}}, {}, {c.OUTPUT_TYPE: "text"}),
    (RESPONSES, {"text": {"format": {"type": "json_schema"}}}, {}, {c.OUTPUT_TYPE: "json"}),
    (RESPONSES, {"reasoning": {"effort": "high"}}, {}, {c.REQUEST_REASONING_LEVEL: "high"}),
    (RESPONSES, {"conversation": {"id": "c1"}}, {}, {c.CONVERSATION_ID: "c1"}),
    (CHAT, {}, usage("prompt_tokens", "completion_tokens", "prompt_tokens_details",
                     "completion_tokens_details"), COUNTS),
    (RESPONSES, {}, usage("input_tokens", "output_tokens", "input_tokens_details",
                          "output_tokens_details"), COUNTS),
    (CHAT, {}, {"usage": {"prompt_tokens": "1"}}, {c.INPUT_TOKENS: None}),
    *((RESPONSES, {}, answer, {c.FINISH_REASONS: reasons}) for answer, reasons in FINISHED),
    *(
        (EMBEDDINGS, {}, {"data": [{"embedding": held}]}, {c.EMBEDDING_DIMENSIONS: size})
        for size in (1, 2, 3, 1536)
        for held in (
            [0.5] * size,
            base64.b64encode(struct.pack(f"<{size}f", *[0.5] * size)).decode(),
        )
    ),
    *((EMBEDDINGS, {}, {"data": data}, {c.EMBEDDING_DIMENSIONS: None}) for data in (7, [{}])),
]  # fmt: skip


@pytest.mark.parametrize(("path", "request_body", "answer", "expected"), ATTRIBUTES)
def test_attributes_have_the_names_and_types_of_the_conventions(
    path: str, request_body: Any, answer: Any, expected: dict[str, Any]
) -> None:
    """A value of another type is left out; what is missing is missing, never 0."""
    found = read(path, request_body, answer)

    assert {key: found.get(key) for key in expected} == expected
    assert [type(found.get(key)) for key in expected] == [type(held) for held in expected.values()]


def text(content: str) -> dict[str, str]:
    return {"type": "text", "content": content}


def blob(modality: str, mime_type: str) -> dict[str, str]:
    return {"type": "blob", "modality": modality, "mime_type": mime_type, "content": "AAAA"}


PARTS: list[tuple[Any, Any]] = [
    ("hi", [text("hi")]),
    ("", []),
    (None, []),
    ([{"type": "text", "text": "hi"}, "bare"], [text("hi"), text("bare")]),
    ([{"type": "image_url", "image_url": {"url": "https://a/b.png", "detail": "low"}}],
     [{"type": "uri", "modality": "image", "uri": "https://a/b.png", "detail": "low"}]),
    ([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}],
     [blob("image", "image/png")]),
    ([{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "mp3"}}],
     [blob("audio", "audio/mp3")]),
    ([{"type": "file", "file": {"file_id": "file-1"}}],
     [{"type": "file", "modality": "document", "file_id": "file-1"}]),
    ([{"type": "refusal", "refusal": "no"}], [{"type": "refusal", "content": "no"}]),
    ([{"type": "new", "thing": 1}], [{"type": "new", "thing": 1}]),
]  # fmt: skip
ITEMS: list[Any] = [
    {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
    {"type": "custom_tool_call", "call_id": "c", "name": "sh", "input": "ls"},
    {"type": "custom_tool_call_output", "call_id": "c", "output": "x"},
    {"type": "web_search_call", "id": "ws_1"},
    {"type": "item_reference", "id": "msg_1"},
]
SHELL = {"id": "c", "type": "custom", "custom": {"name": "shell", "input": "ls"}}
SHELL_PART = {"type": "tool_call", "id": "c", "name": "shell", "arguments": "ls"}
ADD = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
ADD_PART = {"type": "tool_call", "id": "c", "name": "add", "arguments": {"a": 1}}
ASKED: list[tuple[str, Any, list[tuple[str, list[Any]]]]] = [
    *((CHAT, {"messages": [{"role": "user", "content": given}]}, [("user", parts)])
      for given, parts in PARTS),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [SHELL]}]},
     [("assistant", [SHELL_PART])]),
    (CHAT, {"messages": [
        {"role": "assistant", "content": "a", "reasoning_content": "hm", "tool_calls": [ADD]},
        {"role": "tool", "tool_call_id": "c", "content": "3"},
    ]}, [
        ("assistant", [{"type": "reasoning", "content": "hm"}, text("a"), ADD_PART]),
        ("tool", [{"type": "tool_call_response", "id": "c", "response": "3"}]),
    ]),
    (RESPONSES, {"input": ITEMS}, [
        ("user", [text("hi")]),
        ("assistant", [{"type": "reasoning", "content": "hm"}, text("a"),
                       {**SHELL_PART, "name": "sh"}]),
        ("tool", [{"type": "tool_call_response", "id": "c", "response": "x"}]),
        ("assistant", [{"type": "openai.web_search_call", "id": "ws_1"},
                       {"type": "openai.item_reference", "id": "msg_1"}]),
    ]),
    (COMPLETIONS, {"prompt": ["a", "b"]}, [("user", [text("a")]), ("user", [text("b")])]),
    (EMBEDDINGS, {"input": "a"}, [("user", [text("a")])]),
    (EMBEDDINGS, {"input": ["a", "b"]}, [("user", [text("a")]), ("user", [text("b")])]),
    *((EMBEDDINGS, {"input": held}, []) for held in ([1, 2], ["a", 1])),
    *((COMPLETIONS, {"prompt": held}, []) for held in (7, [[1, 2], [3]], [True, 2.5])),
]  # fmt: skip


@pytest.mark.parametrize(("path", "request_body", "expected"), ASKED)
def test_requests_become_messages(path: str, request_body: Any, expected: Any) -> None:
    """What has no word in the conventions is handed on as it is."""
    found = read(path, request_body).get(c.INPUT_MESSAGES, [])

    assert [(message["role"], message["parts"]) for message in found] == expected


def named(name: str) -> dict[str, Any]:
    return {"message": {"role": "assistant", "content": "b", name: "a"}}


SAID: list[tuple[Any, list[Any]]] = [
    (named("reasoning_content"), [{"type": "reasoning", "content": "a"}, text("b")]),
    (named("reasoning"), [{"type": "reasoning", "content": "a"}, text("b")]),
    ({"message": {"content": None, "refusal": "no"}}, [{"type": "refusal", "content": "no"}]),
]


@pytest.mark.parametrize(("choice", "parts"), SAID)
def test_answers_become_messages(choice: Any, parts: list[Any]) -> None:
    """Visible reasoning under either name, and a refusal, are what the model said."""
    (found,) = read(CHAT, {}, {"choices": [choice]})[c.OUTPUT_MESSAGES]

    assert found["parts"] == parts


def piece(place: Any, **call: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"tool_calls": [{**place, **call}]}}]}


@pytest.mark.parametrize("place", [{"index": 0}, {"index": None}, {}])
def test_pieces_of_a_tool_call_find_it_without_an_index(place: Any) -> None:
    """Where a server leaves it out an id tells calls apart, else the last one counts."""
    chunks = [
        piece(place, id="a", function={"name": "f", "arguments": ""}),
        piece(place, function={"arguments": '{"a"'}),
        piece(place, function={"arguments": ": 1}"}),
    ]
    in_turns = [
        piece({"index": None}, id=call_id, function={"name": call_id, "arguments": text})
        for call_id, text in (("a", "1"), ("b", "2"), ("a", "3"))
    ]

    (said,) = read(CHAT, {}, chunks)[c.OUTPUT_MESSAGES]
    (both,) = read(CHAT, {}, in_turns)[c.OUTPUT_MESSAGES]

    assert [(p["id"], p["name"], p["arguments"]) for p in said["parts"]] == [("a", "f", {"a": 1})]
    assert [(p["id"], p["arguments"]) for p in both["parts"]] == [("a", 13), ("b", 2)]


def test_arguments_under_way_and_errors_are_kept_beside_what_came() -> None:
    """Of a Responses stream that was left, and of one that broke."""
    call = ToolCall("call_1", "calculator", '{"expression": "1 + 1"}')
    events = [
        event
        for event in wire.response({"model": "toy"}, Reply("", (call,))).chunks
        if event["type"].endswith(("created", "item.added", "arguments.delta"))
    ]
    broken = {"type": "error", "code": "server_error", "message": "broken"}

    (said,) = read(RESPONSES, {}, events)[c.OUTPUT_MESSAGES]
    failed = read(RESPONSES, {}, [events[0], broken])
    chat = read(CHAT, {}, [{"id": "resp_1"}, {"error": broken | {"type": "server_error"}}])

    assert said["parts"][0]["arguments"] == {"expression": "1 + 1"}
    for each in (failed, chat):
        assert each[c.ERROR_TYPE] == "server_error"
        assert each[c.RESPONSE_ID].startswith("resp_")


@pytest.mark.parametrize("odd", [{"name": "bob"}, {"content": "half \ud800"}])
def test_items_of_one_turn_are_one_message(odd: Any) -> None:
    """Also where one of them has a name, or half a character."""
    spoken = {"type": "message", "role": "assistant", "content": "Let me see."}
    call = {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"}
    items = [{"role": "user", "content": "Look!"}, {**spoken, **odd}, call, spoken]
    asked, turn, *more = read(RESPONSES, {"input": items}, {})[c.INPUT_MESSAGES]
    assert (asked["role"], turn["role"], more) == ("user", "assistant", [])
    assert [part["type"] for part in turn["parts"]] == ["text", "tool_call", "text"]
    assert turn.get("name") == odd.get("name")


def test_what_only_the_server_reads_is_kept() -> None:
    """Reasoning that is encrypted, and the namespace of a call."""
    items = [
        {"type": "reasoning", "id": "rs", "summary": [], "encrypted_content": "gAAA"},
        {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}",
         "namespace": "eyes"},
    ]  # fmt: skip
    whole = {"id": "r", "status": "completed", "output": items}
    found = read(RESPONSES, {"input": items}, whole)
    for key in (c.INPUT_MESSAGES, c.OUTPUT_MESSAGES):
        (said,) = found[key]
        assert said["parts"] == [
            {"type": "reasoning", "content": "", "encrypted_content": "gAAA"},
            {"type": "tool_call", "id": "1", "name": "look", "arguments": {}, "namespace": "eyes"},
        ]


def test_model_of_azures_path_counts_where_the_body_names_none() -> None:
    """A gateway's request of its own."""
    path = "/openai/deployments/my%20gpt/chat/completions?api-version=1"
    assert read(path, {"messages": []}, {})[c.REQUEST_MODEL] == "my gpt"
    assert read(path, {"messages": [], "model": "m"}, {})[c.REQUEST_MODEL] == "m"


def test_pieces_of_an_answer_that_failed_are_kept_under_their_kinds() -> None:
    """Its last event holds nothing of them; one of a kind that nobody knows has its name."""
    deltas = [("refusal", "I can"), ("refusal", "not"), ("custom_tool_call_input", "ls -"),
              ("mime", "what"), ("reasoning_text", "hm")]  # fmt: skip
    places = {name: place for place, name in enumerate(dict(deltas))}
    events = [
        {"type": f"response.{name}.delta", "output_index": places[name], "delta": text}
        for name, text in deltas
    ]
    error = {"code": "server_error", "message": "broken"}
    failed = {"id": "r", "status": "failed", "output": [], "error": error}
    found = read(RESPONSES, {}, [*events, {"type": "response.failed", "response": failed}])
    (said,) = found[c.OUTPUT_MESSAGES]
    assert said["parts"] == [
        {"type": "refusal", "content": "I cannot"},
        {"type": "tool_call", "id": None, "name": None, "arguments": "ls -"},
        {"type": "openai.mime", "mime": "what"},
        {"type": "reasoning", "content": "hm"},
    ]
    assert (said["finish_reason"], found[c.ERROR_TYPE]) == ("error", "server_error")


def logprobs(*tokens: Any) -> dict[str, Any]:
    return {"logprobs": {"content": [{"token": token, "logprob": -0.5} for token in tokens]}}


NUMBERS: list[tuple[str, Any, Any, dict[str, Any]]] = [
    # At the top as vLLM has the prompt's, on each choice as SGLang and legacy answers do.
    (CHAT, {}, {"prompt_token_ids": [1], "choices": [{"prompt_token_ids": [2]}]},
     {c.PROMPT_TOKEN_IDS: [[1]]}),
    (CHAT, {}, {"choices": [{}, {"prompt_token_ids": [2]}]}, {c.PROMPT_TOKEN_IDS: [[2]]}),
    # As older vLLM and Agent Lightning's mock server send them, of each choice in order.
    (CHAT, {}, {"choices": [{}, {}], "response_token_ids": [[2, 3], [4]]},
     {c.RESPONSE_TOKEN_IDS: [[2, 3], [4]]}),
    (COMPLETIONS, {"prompt": [5, 6]}, {}, {c.PROMPT_TOKEN_IDS: [[5, 6]]}),
    (COMPLETIONS, {}, {"choices": [{"token_ids": [1], "logprobs": None}, {"text": "b"}]},
     {c.RESPONSE_TOKEN_IDS: [[1], []], c.RESPONSE_LOGPROBS: []}),
    # An echoed prompt's first token has none: such a list is not the answer's.
    (COMPLETIONS, {}, {"choices": [{"logprobs": {"token_logprobs": [None, -0.5]}}]},
     {c.RESPONSE_LOGPROBS: []}),
    (CHAT, {}, {"choices": [{"logprobs": {"refusal": [{"token": "no", "logprob": -0.5}]}}]},
     {c.RESPONSE_LOGPROBS: [[-0.5]]}),
    # A list of words, or with a gap, names no ids, and is never taken for some.
    *((CHAT, {}, {"choices": [logprobs(*tokens)]}, {c.LOGPROB_TOKEN_IDS: ids}) for tokens, ids in (
        (["token_id:3", "token_id:40"], [[3, 40]]), (["token_id:3", " word"], []),
        (["token_id:3", None], []), (["token_id:x"], []), (["token_id:"], []), ([" word"], []),
    )),
    # One value that is no token id leaves no list to trust; the others stay.
    *((CHAT, {}, {"prompt_token_ids": [1, bad], "choices": [{"token_ids": [1, 2]}]},
       {c.PROMPT_TOKEN_IDS: [], c.RESPONSE_TOKEN_IDS: [[1, 2]]})
      for bad in ("x", None, 2**40, 1.5, [1])),
]  # fmt: skip


@pytest.mark.parametrize(("path", "request_body", "answer", "expected"), NUMBERS)
def test_token_ids_and_logprobs_are_all_or_none(
    path: str, request_body: Any, answer: Any, expected: dict[str, list[Any]]
) -> None:
    """Wherever an engine puts them, each choice has its own."""
    found = read(path, request_body, answer)

    for key, values in expected.items():
        decode: Any = decode_logprobs if key == c.RESPONSE_LOGPROBS else decode_ids
        assert ([list(held) for held in decode(found[key])] if key in found else []) == values


@pytest.mark.parametrize("size", [0, 100_000])
def test_no_secret_is_kept_in_any_kind_of_message(size: int) -> None:
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

    once, again = (read(CHAT, {"messages": messages})[c.INPUT_MESSAGES] for _ in range(2))

    assert once == again
    assert secret not in str(once)
    assert str(once).count("[redacted:api_key]") == len(once) == len(messages)
