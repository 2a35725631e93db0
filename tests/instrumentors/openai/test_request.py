"""One request to a model: which requests are calls, whose they are, and what is read of them."""

import asyncio
import contextlib
import gc
import gzip
import json
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from tests.instrumentors.transport import answering

from lightning_otel import Store, auto_trace
from lightning_otel.demo.server import DemoServer
from lightning_otel.types import conventions as c

ASKED: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]


def of_azure(base_url: str) -> openai.OpenAI:
    endpoint = base_url.removesuffix("/v1")
    return openai.AzureOpenAI(azure_endpoint=endpoint, api_version="1", api_key="k")


def keyed(base_url: str) -> openai.OpenAI:
    """A client that asks another one for its key meanwhile."""

    def ask_for_key() -> str:
        with openai.OpenAI(base_url=base_url, api_key="k", max_retries=0) as other:
            return next(iter(other.models.list())).id

    return openai.OpenAI(base_url=base_url, api_key=ask_for_key)


PATIENT: Any = {"model": "flaky-500", "extra_headers": {"idempotency-key": "one"}}
CLIENTS: dict[str, tuple[Callable[[str], Any], dict[str, Any], str, list[tuple[str, int]]]] = {
    "Azure's": (
        of_azure, {}, "azure.ai.openai",
        [("/openai/deployments/toy/chat/completions?api-version=1", 200)],
    ),
    "with a key of another's": (
        keyed, {}, "openai", [("/v1/models", 200), ("/v1/chat/completions", 200)]
    ),
    # The span covers every attempt, and tells of the one that was answered.
    "with retries": (
        lambda base_url: openai.OpenAI(base_url=base_url, api_key="k"), PATIENT, "openai",
        [("/v1/chat/completions", 500), ("/v1/chat/completions", 200)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CLIENTS)
def test_request_of_any_client_is_one_span(
    name: str, store: Store, server: DemoServer, facts: Any
) -> None:
    """It has the answer that the client got, and nobody else's."""
    make, more, whose, expected = CLIENTS[name]

    with auto_trace(store=store) as recording, make(server.base_url) as client:
        client.chat.completions.create(**{"model": "toy", "messages": ASKED, **more})

    assert [(exchange.path, exchange.status) for exchange in server.log] == expected
    (span,) = facts.calls(recording)
    facts.agree(span, server.log[-1], provider=whose)


def test_request_of_clients_and_wrappers_made_before_instrumenting_is_captured(
    store: Store,
    server: DemoServer,
    client: openai.OpenAI,
    facts: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a program made and kept before it was traced is traced from then on, as its module."""
    named = {"base_url": f"{server.base_url}/", "api_key": "k", "api_type": "openai"}
    for name, value in {**named, "_client": None}.items():
        monkeypatch.setattr(openai, name, value)
    create = client.chat.completions.create
    raw = client.chat.completions.with_raw_response.create
    opened = client.responses.with_streaming_response.create

    with auto_trace(store=store) as recording:
        create(model="toy", messages=ASKED)
        raw(model="toy", messages=ASKED).parse()
        with opened(model="toy", input="hello") as response:
            response.parse()
        openai.chat.completions.create(model="toy", messages=ASKED)
    openai._load_client().close()

    spans = facts.calls(recording)
    assert len(spans) == len(server.log) == 4
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
    "html": (
        b"<html>not an API</html>",
        {
            c.RESPONSE_ID: None,
            c.OUTPUT_MESSAGES: None,
            "lightning.response.unread": "<html>not an API</html>",
        },
    ),
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
    if name == "html":
        (reason,) = store.report().reasons()
        assert reason.startswith("unreadable: the server's answer")
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


def ours_alive() -> Counter[str]:
    kinds = map(type, gc.get_objects())
    return Counter(
        kind.__qualname__
        for kind in kinds
        if str(kind.__module__).startswith("lightning_otel.instrumentors.")
    )


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
    gc.collect()
    before = ours_alive()
    with auto_trace(store=store):
        client.chat.completions.create(model="toy", messages=ASKED)
        stream = client.chat.completions.create(model="toy", messages=ASKED, stream=True)
        assert ours_alive() > before
        list(stream)
        list(client.chat.completions.create(model="toy", messages=ASKED, stream=True))
        with contextlib.suppress(openai.BadRequestError):
            client.chat.completions.create(model="fail-400", messages=ASKED)

    del stream
    assert ours_alive() <= before
