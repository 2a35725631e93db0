"""One request to a model: which requests are calls, whose they are, and what is read of them."""

import asyncio
import contextlib
import gc
import gzip
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from opentelemetry.trace import SpanKind
from tests.instrumentors.transport import answering

from lightning_otel import Store, auto_trace, call_slot, capture
from lightning_otel import conventions as c
from lightning_otel.demo.server import DemoServer
from lightning_otel.instrumentors.openai.request import ModelRequest

ASKED: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]


def test_request_of_an_azure_client_names_azure_and_its_deployment(
    store: Store, server: DemoServer, facts: Any
) -> None:
    """The Azure client's own paths are known, and its provider is Azure."""
    endpoint = server.base_url.removesuffix("/v1")
    azure = openai.AzureOpenAI(azure_endpoint=endpoint, api_version="1", api_key="k")

    with azure, auto_trace(store=store) as recording:
        azure.chat.completions.create(model="toy", messages=ASKED)
        azure.embeddings.create(model="toy", input="hello")

    chat, embedding = server.log
    assert chat.path == "/openai/deployments/toy/chat/completions?api-version=1"
    for span, exchange in zip(facts.calls(recording), (chat, embedding), strict=True):
        facts.agree(span, exchange, provider="azure.ai.openai")


def test_request_of_the_module_level_client_is_captured(
    store: Store, server: DemoServer, facts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``openai.chat.completions.create`` is a call like any other."""
    monkeypatch.setattr(openai, "base_url", f"{server.base_url}/")
    monkeypatch.setattr(openai, "api_key", "k")
    monkeypatch.setattr(openai, "api_type", "openai")
    monkeypatch.setattr(openai, "_client", None)

    with auto_trace(store=store) as recording:
        openai.chat.completions.create(model="toy", messages=ASKED)
    openai._load_client().close()

    (span,) = facts.calls(recording)
    facts.agree(span, server.log[0])


def test_request_of_clients_and_wrappers_made_before_instrumenting_is_captured(
    store: Store, server: DemoServer, client: openai.OpenAI, facts: Any
) -> None:
    """What a program made and kept before it was traced is traced from then on."""
    create = client.chat.completions.create
    raw = client.chat.completions.with_raw_response.create
    opened = client.responses.with_streaming_response.create

    with auto_trace(store=store) as recording:
        create(model="toy", messages=ASKED)
        raw(model="toy", messages=ASKED).parse()
        with opened(model="toy", input="hello") as response:
            response.parse()

    spans = facts.calls(recording)
    assert len(spans) == len(server.log) == 3
    for span, exchange in zip(spans, server.log, strict=True):
        facts.agree(span, exchange)


def test_request_that_is_no_model_call_makes_no_span(
    store: Store, client: openai.OpenAI, facts: Any
) -> None:
    """Lists, look-ups and other endpoints pass untouched."""
    with auto_trace(store=store) as recording:
        models = client.models.list()
        with pytest.raises(openai.NotFoundError):
            client.post("/chat/completions/chatcmpl-1", body={"model": "toy"}, cast_to=object)
        with pytest.raises(openai.NotFoundError):
            client.responses.cancel("resp_1")
        with pytest.raises(openai.NotFoundError):
            client.images.generate(model="toy", prompt="a cat")
        with pytest.raises(openai.NotFoundError):
            client.get("/chat/completions", cast_to=object)

    assert [model.id for model in models] == ["toy"]
    assert facts.calls(recording) == []


def test_request_retried_is_one_span(store: Store, server: DemoServer, facts: Any) -> None:
    """The span covers every attempt, and tells of the one that was answered."""
    patient = openai.OpenAI(base_url=server.base_url, api_key="k", max_retries=2)
    key = {"idempotency-key": "one"}

    with patient, auto_trace(store=store) as recording:
        patient.chat.completions.create(model="flaky-500", messages=ASKED, extra_headers=key)

    failed, answered = server.log
    assert (failed.status, answered.status) == (500, 200)
    (span,) = facts.calls(recording)
    facts.agree(span, answered)


def test_request_by_another_client_meanwhile_is_not_taken_for_this_one(
    store: Store, server: DemoServer, client: openai.OpenAI, facts: Any
) -> None:
    """A client that asks another one for its key gets its own answer on its span."""

    def key() -> str:
        return next(iter(client.models.list())).id

    keyed = openai.OpenAI(base_url=server.base_url, api_key=key, max_retries=0)

    with keyed, auto_trace(store=store) as recording:
        keyed.chat.completions.create(model="toy", messages=ASKED)

    (span,) = facts.calls(recording)
    (exchange,) = [held for held in server.log if held.path == "/v1/chat/completions"]
    assert exchange.headers["authorization"] == "Bearer toy"
    facts.agree(span, exchange)


def test_request_content_is_what_was_sent_even_if_the_program_changes_it_meanwhile(
    store: Store, server: DemoServer, facts: Any
) -> None:
    """Messages are read before sending; what a program appends while it waits is not in them."""
    messages: Any = [{"role": "user", "content": "slowly"}]

    async def ask() -> None:
        async with openai.AsyncOpenAI(base_url=server.base_url, api_key="k") as client:
            asking = asyncio.ensure_future(
                client.chat.completions.create(model="slow", messages=messages)
            )
            while not server.log:
                await asyncio.sleep(0.01)
                messages[:] = [{"role": "user", "content": "changed"}]
            await asking

    with auto_trace(store=store) as recording:
        asyncio.run(ask())

    (span,) = facts.calls(recording)
    facts.agree(span, server.log[0])


ERROR = b'{"error": {"type": "overloaded", "message": "come back later"}}'
BLANK = b'\n\n  \r\n{"id": "chatcmpl-1", "model": "toy", "choices": []}'
SURROGATE = b'{"id": "1", "choices": [{"message": {"role": "assistant", "content": "\\ud800"}}]}'
ANSWERS: dict[str, tuple[bytes, dict[str, Any]]] = {
    # The client gives the text of what is no JSON.
    "html": (b"<html>not an API</html>", {c.RESPONSE_ID: None, c.OUTPUT_MESSAGES: None}),
    # Gateways send status 200 and an error in the body, and blanks to keep a connection alive.
    "an error": (ERROR, {c.ERROR_TYPE: "overloaded"}),
    "blanks before it": (BLANK, {c.RESPONSE_ID: "chatcmpl-1"}),
    "half a character": (
        SURROGATE,
        {
            c.OUTPUT_MESSAGES: '[{"role": "assistant", "parts": '
            '[{"type": "text", "content": "\\ud800"}]}]'
        },
    ),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_request_answered_oddly_is_read_as_far_as_it_can_be(
    name: str, store: Store, facts: Any
) -> None:
    """The program gets what it gets without us."""
    body, expected = ANSWERS[name]
    gateway = answering(body, **({"content-type": "text/html"} if name == "html" else {}))
    create = gateway.chat.completions.create
    untraced: Any = create(model="toy", messages=ASKED)

    with auto_trace(store=store) as recording:
        assert create(model="toy", messages=ASKED) == untraced

    (span,) = facts.calls(recording)
    assert {key: span.attributes.get(key) for key in expected} == expected
    assert span.status == ("ERROR" if name == "an error" else "UNSET")
    assert c.INPUT_MESSAGES in span.attributes


def test_request_answered_with_a_compressed_stream_is_read(store: Store, facts: Any) -> None:
    """The span is made of the decoded body, as the program is."""
    chunk = {"id": "chatcmpl-1", "choices": [{"index": 0, "delta": {"content": "hi"}}]}
    body = gzip.compress(b"data: %s\n\ndata: [DONE]\n\n" % json.dumps(chunk).encode())
    gateway = answering(body, **{"content-type": "text/event-stream", "content-encoding": "gzip"})

    with auto_trace(store=store) as recording:
        stream = gateway.chat.completions.create(model="toy", messages=ASKED, stream=True)
        texts = [piece.choices[0].delta.content for piece in stream]

    assert texts == ["hi"]
    (span,) = facts.calls(recording)
    assert '"content":"hi"' in span.attributes[c.OUTPUT_MESSAGES]
    assert c.ABANDONED not in span.attributes


@pytest.fixture
def no_collection() -> Iterator[None]:
    """What is freed is freed without the garbage collector."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_request_that_is_over_is_freed_at_once(
    store: Store, client: openai.OpenAI, no_collection: None
) -> None:
    """Nothing of ours, nor the answer it was read from, waits for the garbage collector."""
    with auto_trace(store=store):
        client.chat.completions.create(model="toy", messages=ASKED)
        list(client.chat.completions.create(model="toy", messages=ASKED, stream=True))
        with contextlib.suppress(openai.BadRequestError):
            client.chat.completions.create(model="fail-400", messages=ASKED)

    assert not [held for held in gc.get_objects() if type(held) is ModelRequest]


def test_request_takes_over_the_call_a_framework_began(
    store: Store, server: DemoServer, client: openai.OpenAI, facts: Any
) -> None:
    """Structure from the framework, payload from the client, one span for one request."""
    with auto_trace(store=store) as recording:
        call = capture.Operation("their name", SpanKind.CLIENT, {c.AGENT_NAME: "planner"})
        with capture.attached(call_slot.offer_call(call)):
            for _ in range(2):
                client.chat.completions.create(
                    model="toy", messages=[{"role": "user", "content": "hello"}]
                )

    first, second = facts.calls(recording)
    assert first.attributes[c.AGENT_NAME] == "planner"
    assert [span.name for span in (first, second)] == ["chat toy", "chat toy"]
    assert first.parent_span_id == second.parent_span_id is not None
    facts.agree(second, server.log[1])
    assert first.attributes[c.RESPONSE_ID] == server.log[0].response_id
    assert first.attributes[c.OUTPUT_MESSAGES] == second.attributes[c.OUTPUT_MESSAGES]
