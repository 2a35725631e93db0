"""The demo server, driven by the real openai client over loopback."""

from __future__ import annotations

import http.client
import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.facts import CALCULATOR

from lightning_otel.demo.policy import Tokenizer, ToyPolicy
from lightning_otel.demo.server import DemoServer

RESPONSES_CALCULATOR: Any = {"type": "function", **CALCULATOR["function"]}
QUESTION: list[Any] = [{"role": "user", "content": "What is 17*23?"}]
GREETING: list[Any] = [{"role": "user", "content": "hello  there\n"}]


@pytest.fixture
def server() -> Iterator[DemoServer]:
    """A running server with the toy policy."""
    with DemoServer(seed=1) as running:
        yield running


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
    stream = client.chat.completions.create(model="left", messages=GREETING, stream=True)

    next(stream)
    stream.close()

    (exchange,) = server.wait_for_log(1)
    assert exchange.client_gone
    assert exchange.response is None
    assert 1 <= len(exchange.chunks) <= 3


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
