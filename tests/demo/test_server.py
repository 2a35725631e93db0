"""The demo server, driven by the real openai client over loopback."""

from __future__ import annotations

import http.client
import json
import math
import random
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_otel.demo.policy import Reply, Tokenizer, ToyPolicy, pieces
from lightning_otel.demo.server import DemoServer

CALCULATOR: Any = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Works out an expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
RESPONSES_CALCULATOR: Any = {"type": "function", **CALCULATOR["function"]}
QUESTION: list[Any] = [{"role": "user", "content": "What is 17*23?"}]
GREETING: list[Any] = [{"role": "user", "content": "hello  there\n"}]


class Thinker:
    """A policy that thinks before it speaks."""

    def reply(self, body: Mapping[str, Any], rng: random.Random) -> Reply:
        """Two tokens of thought, three of text."""
        return Reply(text="so it is", reasoning="let me", logprobs=(-0.5, 0.0, -0.25, 0.0, -1.0))


@pytest.fixture
def server() -> Iterator[DemoServer]:
    """A running server with the toy policy."""
    with DemoServer(seed=1) as running:
        yield running


@pytest.fixture
def client(server: DemoServer) -> Iterator[openai.OpenAI]:
    """A client of that server that does not retry."""
    with openai.OpenAI(base_url=server.base_url, api_key="k", max_retries=0) as opened:
        yield opened


def test_chat_is_logged_as_the_client_saw_it(server: DemoServer, client: openai.OpenAI) -> None:
    """The log holds the request's body, headers and the very answer."""
    seen = client.chat.completions.create(model="toy", messages=GREETING)

    (exchange,) = server.log
    assert seen.choices[0].message.content == "You said: hello  there\n"
    assert exchange.response == json.loads(seen.model_dump_json(exclude_unset=True))
    assert exchange.response_id == seen.id
    assert exchange.request == {"model": "toy", "messages": GREETING}
    assert (exchange.path, exchange.status) == ("/v1/chat/completions", 200)
    assert exchange.headers["authorization"] == "Bearer k"
    assert not exchange.is_stream
    assert not exchange.client_gone
    assert seen.usage is not None
    assert seen.usage.total_tokens == seen.usage.prompt_tokens + seen.usage.completion_tokens


def test_tools_loop_ends_with_the_right_answer(server: DemoServer, client: openai.OpenAI) -> None:
    """A policy that copies calls the calculator, then tells what it said."""
    policy = ToyPolicy({"copy": 100.0})
    server.policy = policy
    messages = list(QUESTION)
    ids = {"return_token_ids": True}

    first = client.chat.completions.create(
        model="toy", messages=messages, tools=[CALCULATOR], extra_body=ids
    )
    (call,) = first.choices[0].message.tool_calls or []
    assert call.type == "function"
    messages.append(first.choices[0].message.to_dict())
    messages.append({"role": "tool", "tool_call_id": call.id, "content": "391"})
    second = client.chat.completions.create(
        model="toy", messages=messages, tools=[CALCULATOR], extra_body=ids
    )

    assert first.choices[0].finish_reason == "tool_calls"
    assert json.loads(call.function.arguments) == {"expression": "17*23"}
    assert second.choices[0].message.content == "The answer is 391"
    before, after = (exchange.response or {} for exchange in server.log)
    history = before["prompt_token_ids"] + before["choices"][0]["token_ids"]
    assert after["prompt_token_ids"][: len(history)] == history


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("messages", [QUESTION, GREETING])
def test_stream_adds_up_to_the_logged_response(
    server: DemoServer, client: openai.OpenAI, messages: list[Any], count: int
) -> None:
    """Text, arguments, logprobs and token ids of the chunks add up to the whole answer."""
    stream = client.chat.completions.create(
        model="toy",
        messages=messages,
        tools=[CALCULATOR],
        n=count,
        logprobs=True,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"return_token_ids": True},
    )

    chunks = [chunk.to_dict() for chunk in stream]

    (exchange,) = server.log
    whole: Any = exchange.response
    assert list(exchange.chunks) == chunks
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert (chunks[-1]["choices"], chunks[-1]["usage"]) == ([], whole["usage"])
    for choice in whole["choices"]:
        parts: Any = [
            part
            for chunk in chunks
            for part in chunk["choices"]  # type: ignore[attr-defined]  # to_dict() says object
            if part["index"] == choice["index"]
        ]
        text = "".join(part["delta"].get("content") or "" for part in parts)
        calls = [call for part in parts for call in part["delta"].get("tool_calls", ())]
        arguments = "".join(call["function"]["arguments"] for call in calls)
        wanted = choice["message"].get("tool_calls", [])
        assert text == (choice["message"]["content"] or "")
        assert arguments == "".join(call["function"]["arguments"] for call in wanted)
        assert [call["id"] for call in calls if "id" in call] == [call["id"] for call in wanted]
        assert [i for part in parts for i in part.get("token_ids", ())] == choice["token_ids"]
        said = [
            entry for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]
        ]
        assert said == choice["logprobs"]["content"]
        assert len(said) == len(choice["token_ids"])
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        assert server.tokenizer.decode(choice["token_ids"]).endswith(text)


def test_logprobs_are_those_of_the_style(server: DemoServer, client: openai.OpenAI) -> None:
    """The first token of a report carries the style's log-probability."""
    messages: list[Any] = [*QUESTION, {"role": "tool", "tool_call_id": "c", "content": "391"}]

    seen = client.chat.completions.create(model="toy", messages=messages, n=8, logprobs=True)

    texts = {choice.message.content for choice in seen.choices}
    assert texts == {f"The answer is {number}" for number in (391, 390, 393)}
    for choice in seen.choices:
        assert choice.logprobs is not None
        entries = choice.logprobs.content or []
        assert [entry.logprob for entry in entries] == [round(math.log(1 / 3), 6), 0, 0, 0]
        assert "".join(entry.token for entry in entries) == choice.message.content


def test_same_seed_gives_the_same_words() -> None:
    """Two servers with one seed answer concurrent requests alike, and ids stay unique."""
    bodies: list[list[Any]] = [[{"role": "tool", "content": str(i)}] for i in range(20)]

    def words() -> tuple[list[str | None], set[str]]:
        with (
            DemoServer(seed=7) as server,
            ThreadPoolExecutor(8) as pool,
            openai.OpenAI(base_url=server.base_url, api_key="k") as client,
        ):
            create = client.chat.completions.create
            seen = list(pool.map(lambda m: create(model="toy", messages=m), bodies))
        return [answer.choices[0].message.content for answer in seen], {one.id for one in seen}

    first, first_ids = words()
    second, second_ids = words()

    assert first == second
    assert len(first_ids | second_ids) == 40


def test_max_tokens_cuts_the_text(client: openai.OpenAI) -> None:
    """A token limit ends the text early with the finish reason `length`."""
    seen = client.chat.completions.create(model="toy", messages=GREETING, max_tokens=2)

    assert seen.choices[0].message.content == "You said:"
    assert seen.choices[0].finish_reason == "length"


def test_reasoning_comes_apart_from_the_text() -> None:
    """A thinking policy's thoughts are in their own field, their own count and their own item."""
    with (
        DemoServer(Thinker()) as server,
        openai.OpenAI(base_url=server.base_url, api_key="k") as client,
    ):
        chat = client.chat.completions.create(model="toy", messages=GREETING, logprobs=True)
        streamed = list(client.chat.completions.create(model="toy", messages=GREETING, stream=True))
        with client.responses.stream(model="toy", input="hi") as stream:
            final = stream.get_final_response()

    message = chat.choices[0].message.to_dict()
    deltas = [chunk.choices[0].delta.to_dict() for chunk in streamed]
    assert (message["reasoning_content"], message["content"]) == ("let me", "so it is")
    assert chat.usage is not None
    assert chat.usage.completion_tokens_details is not None
    assert chat.usage.completion_tokens_details.reasoning_tokens == 2
    assert "".join(str(delta.get("reasoning_content", "")) for delta in deltas) == "let me"
    assert [item.type for item in final.output] == ["reasoning", "message"]
    assert final.output_text == "so it is"


def test_responses_create_is_logged_as_seen(server: DemoServer, client: openai.OpenAI) -> None:
    """A Responses API answer is complete and equal to the log's."""
    seen = client.responses.create(
        model="toy",
        input="hi there",
        instructions="Be kind.",
        temperature=0.5,
        include=["message.output_text.logprobs"],
    )

    (exchange,) = server.log
    assert seen.output_text == "You said: hi there"
    assert exchange.response == json.loads(seen.model_dump_json(exclude_unset=True))
    assert exchange.response_id == seen.id
    assert (seen.instructions, seen.temperature) == ("Be kind.", 0.5)
    assert seen.usage is not None
    assert seen.usage.output_tokens == 4


def test_responses_tools_loop(server: DemoServer, client: openai.OpenAI) -> None:
    """A function call item and its output lead to the answer."""
    server.policy = ToyPolicy({"copy": 100.0})
    items: list[Any] = [{"role": "user", "content": "17*23"}]

    first = client.responses.create(model="toy", input=items, tools=[RESPONSES_CALCULATOR])
    (call,) = first.output
    assert call.type == "function_call"
    items += [call.to_dict()]
    items += [{"type": "function_call_output", "call_id": call.call_id, "output": "391"}]
    second = client.responses.create(model="toy", input=items, tools=[RESPONSES_CALCULATOR])

    assert json.loads(call.arguments) == {"expression": "17*23"}
    assert second.output_text == "The answer is 391"


@pytest.mark.parametrize("asked", ["17*23", "hello"])
def test_responses_stream_adds_up(server: DemoServer, client: openai.OpenAI, asked: str) -> None:
    """The typed events, numbered from 0, lead the helper to the logged response."""
    raw = client.responses.create(
        model="toy", input=asked, tools=[RESPONSES_CALCULATOR], stream=True
    )
    events = [event.to_dict() for event in raw]
    with client.responses.stream(model="toy", input=asked, tools=[RESPONSES_CALCULATOR]) as stream:
        final = stream.get_final_response()

    first, second = server.log
    assert list(first.chunks) == events
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["response"] == first.response
    assert final.id == second.response_id
    whole: Any = second.response
    assert [item.to_dict()["id"] for item in final.output] == [
        item["id"] for item in whole["output"]
    ]
    deltas = "".join(str(event.get("delta", "")) for event in events)
    item: Any = whole["output"][0]
    assert deltas == (item["arguments"] if asked == "17*23" else item["content"][0]["text"])


def test_responses_cut_short_is_incomplete(client: openai.OpenAI) -> None:
    """A token limit leaves the response incomplete and says why."""
    seen = client.responses.create(model="toy", input="a b c", max_output_tokens=2)

    assert seen.status == "incomplete"
    assert seen.incomplete_details is not None
    assert seen.incomplete_details.reason == "max_output_tokens"


def test_completions_stream_and_whole_agree(server: DemoServer, client: openai.OpenAI) -> None:
    """Legacy choices, one per prompt and sample, come the same whole and in chunks."""
    asked: Any = {"model": "toy", "prompt": ["one", "two x"], "n": 2, "logprobs": 0}
    asked["extra_body"] = {"return_token_ids": True}

    whole = client.completions.create(**asked)
    chunks = list(client.completions.create(**asked, stream=True))

    logged: Any = server.log[0].response
    texts = ["You said: one"] * 2 + ["You said: two x"] * 2
    assert [choice.text for choice in whole.choices] == texts
    for choice in logged["choices"]:
        parts: Any = [
            c.choices[0].to_dict() for c in chunks if c.choices[0].index == choice["index"]
        ]
        offsets = [at for p in parts for at in (p["logprobs"] or {}).get("text_offset", ())]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert offsets == choice["logprobs"]["text_offset"]
        assert [i for part in parts for i in part.get("token_ids", ())] == choice["token_ids"]
        assert parts[0]["prompt_token_ids"] == choice["prompt_token_ids"]
        prompt = server.tokenizer.decode(choice["prompt_token_ids"])
        assert choice["text"] == f"You said: {prompt}"


def test_token_ids_are_taken_for_a_prompt(server: DemoServer, client: openai.OpenAI) -> None:
    """Prompts and inputs given as token ids mean the text they decode to."""
    token_ids = server.tokenizer.encode("one two")

    flat = client.completions.create(model="toy", prompt=token_ids)
    nested = client.embeddings.create(model="toy", input=[token_ids])
    text = client.embeddings.create(model="toy", input="one two")

    assert flat.choices[0].text == "You said: one two"
    assert nested.data == text.data


def test_embeddings_are_the_same_in_both_encodings(client: openai.OpenAI) -> None:
    """base64, the client's own choice, and plain floats give one vector per text."""
    packed = client.embeddings.create(model="toy", input=["a", "b"], dimensions=5)
    plain = client.embeddings.create(
        model="toy", input=["a", "b"], dimensions=5, encoding_format="float"
    )

    vectors = [item.embedding for item in packed.data]
    assert vectors == [item.embedding for item in plain.data]
    assert [len(vector) for vector in vectors] == [5, 5]
    assert vectors[0] != vectors[1]


def test_models_are_listed(client: openai.OpenAI) -> None:
    """The list of models names the toy."""
    assert [model.id for model in client.models.list()] == ["toy"]


def test_azure_path_names_the_model(server: DemoServer) -> None:
    """The Azure client's deployment path is served, its deployment being the model."""
    endpoint = server.base_url.removesuffix("/v1")

    with openai.AzureOpenAI(azure_endpoint=endpoint, api_key="k", api_version="v") as client:
        seen = client.chat.completions.create(model="mine", messages=GREETING)

    assert seen.model == "mine"
    path = "/openai/deployments/mine/chat/completions?api-version=v"
    assert server.log[0].path == path


@pytest.mark.parametrize(
    ("model", "error"),
    [
        ("fail-400", openai.BadRequestError),
        ("fail-401", openai.AuthenticationError),
        ("fail-429", openai.RateLimitError),
        ("fail-500", openai.InternalServerError),
    ],
)
def test_failing_models_raise(
    server: DemoServer, client: openai.OpenAI, model: str, error: type[openai.APIStatusError]
) -> None:
    """A `fail-` model answers with its status and an OpenAI error."""
    with pytest.raises(error) as caught:
        client.chat.completions.create(model=model, messages=GREETING)

    (exchange,) = server.log
    assert exchange.status == caught.value.status_code == int(model[-3:])
    assert exchange.response == {"error": caught.value.body}
    has_hint = "retry-after-ms" in caught.value.response.headers
    assert has_hint == (model in ("fail-429", "fail-500"))


def test_flaky_model_answers_the_retry(server: DemoServer, client: openai.OpenAI) -> None:
    """The first request fails, the client's own retry succeeds."""
    retrying = client.with_options(max_retries=1)

    retrying.chat.completions.create(model="flaky-500", messages=GREETING)

    assert [exchange.status for exchange in server.log] == [500, 200]


def test_slow_model_outlasts_a_short_timeout(server: DemoServer, client: openai.OpenAI) -> None:
    """A client that gives up waiting is logged as gone."""
    with pytest.raises(openai.APITimeoutError):
        client.chat.completions.create(model="slow", messages=GREETING, timeout=0.1)

    (exchange,) = server.wait_for_log(1)
    assert exchange.client_gone


def test_cut_stream_ends_in_the_middle(server: DemoServer, client: openai.OpenAI) -> None:
    """The socket closes after three chunks, which the log keeps."""
    stream = client.chat.completions.create(model="cut", messages=GREETING, stream=True)
    chunks: list[object] = []

    with pytest.raises(openai.APIConnectionError):
        chunks.extend(chunk.to_dict() for chunk in stream)

    (exchange,) = server.log
    assert len(exchange.chunks) == 3
    assert exchange.response is None
    assert exchange.response_id is not None


def test_cut_answer_ends_in_the_middle(client: openai.OpenAI) -> None:
    """Without a stream half of the body comes."""
    with pytest.raises(openai.APIConnectionError):
        client.chat.completions.create(model="cut", messages=GREETING)


def test_sse_error_raises_from_the_stream(server: DemoServer, client: openai.OpenAI) -> None:
    """An error among the chunks reaches the reader of the stream."""
    stream = client.chat.completions.create(model="sse-error", messages=GREETING, stream=True)

    with pytest.raises(openai.APIError, match="broke off"):
        list(stream)

    assert "error" in server.log[0].chunks[3]


def test_odd_chunks_reach_the_client(server: DemoServer, client: openai.OpenAI) -> None:
    """Null choices, null indexes and empty choices arrive as they are."""
    create = client.chat.completions.create

    odd = list(create(model="null-choices", messages=GREETING, stream=True))
    calls = list(create(model="null-index", messages=QUESTION, tools=[CALCULATOR], stream=True))
    empty = list(create(model="empty", messages=GREETING, stream=True))
    whole = create(model="empty", messages=GREETING)

    assert any(chunk.to_dict()["choices"] is None for chunk in odd)
    found = [call for chunk in calls for call in chunk.choices[0].delta.tool_calls or ()]
    assert found
    assert all(call.to_dict()["index"] is None for call in found)
    assert [chunk.choices for chunk in empty] == [[]]
    assert whole.choices == []
    assert len(server.log) == 4


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("model", ["surrogate", "big", "legion"])
def test_fixed_texts_arrive_whole(client: openai.OpenAI, model: str, stream: bool) -> None:
    """Lone surrogates, 200 tokens and 20 KB come through whole and streamed."""
    asked: Any = {"model": model, "messages": GREETING, "logprobs": True}

    if stream:
        chunks = list(client.chat.completions.create(**asked, stream=True))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    else:
        text = client.chat.completions.create(**asked).choices[0].message.content or ""

    assert ("\ud800" in text) == (model == "surrogate")
    assert model != "big" or len(pieces(text)) == 200
    assert model != "legion" or len(text) > 20_000


def test_forced_fault_beats_the_model(server: DemoServer, client: openai.OpenAI) -> None:
    """`fault` applies to every model, until it is taken back."""
    server.fault = "html"
    page = client.chat.completions.with_raw_response.create(model="toy", messages=GREETING)
    server.fault = None

    assert page.headers["content-type"] == "text/html"
    assert client.chat.completions.create(model="toy", messages=GREETING).choices


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/v1/nothing", b"{}", 404),
        ("GET", "/v1/chat/completions", None, 404),
        ("POST", "/v1/chat/completions", b"{broken", 400),
        ("POST", "/v1/chat/completions", b'{"model": "toy"}', 400),
        ("POST", "/chat/completions", b'{"messages": []}', 200),
    ],
)
def test_raw_requests_get_json(
    server: DemoServer, method: str, path: str, body: bytes | None, status: int
) -> None:
    """Wrong paths and bodies get a JSON error, and the connection stays usable."""
    connection = http.client.HTTPConnection(urlsplit(server.base_url).netloc, timeout=5)

    answers = []
    for _ in range(2):
        connection.request(method, path, body)
        response = connection.getresponse()
        answers.append((response.status, json.loads(response.read())))
    connection.close()

    assert [answer[0] for answer in answers] == [status, status]
    assert ("error" in answers[0][1]) == (status != 200)
    assert [exchange.response for exchange in server.log] == [answer[1] for answer in answers]


def test_client_that_leaves_a_stream_is_logged(server: DemoServer, client: openai.OpenAI) -> None:
    """A stream closed early is logged with the chunks sent and no whole response."""
    server.chunk_delay_s = 0.01
    stream = client.chat.completions.create(model="big", messages=GREETING, stream=True)

    next(stream)
    stream.close()

    (exchange,) = server.wait_for_log(1)
    assert exchange.client_gone
    assert exchange.response is None
    assert 1 <= len(exchange.chunks) < 202


def test_server_can_be_stopped_and_needs_a_start() -> None:
    """There is no address outside the running time, and stopping twice is harmless."""
    server = DemoServer()

    with server:
        assert server.base_url.startswith("http://127.0.0.1:")
    server.stop()

    with pytest.raises(RuntimeError, match="start"):
        _ = server.base_url


@given(st.lists(st.text()))
def test_tokenizer_gives_every_text_back(texts: list[str]) -> None:
    """Decoding undoes encoding, whatever was seen before."""
    tokenizer = Tokenizer()

    encoded = [tokenizer.encode(text) for text in texts]

    assert [tokenizer.decode(token_ids) for token_ids in encoded] == texts


@given(st.integers(-10_000, 10_000), st.integers())
def test_policy_is_wrong_in_every_other_style(value: int, seed: int) -> None:
    """Only copying gives the tool's number, and no two styles give the same one."""
    body = {"messages": [{"role": "tool", "content": f"= {value}"}]}
    texts = []

    for style in ("copy", "guess", "round"):
        policy = ToyPolicy({style: 200.0})
        texts.append(policy.reply(body, random.Random(seed)).text)

    assert texts[0] == f"The answer is {value}"
    assert len(set(texts)) == 3
