"""Calls over a websocket: each is one call, with its messages and its answer."""

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.adapter.forest import said
from websockets.sync.server import ServerConnection, serve

from lightning_otel import Store, auto_trace
from lightning_otel.types import conventions as c

pytestmark = pytest.mark.skipif(
    not hasattr(openai.OpenAI(api_key="k").beta, "responses"),
    reason="this openai has no connections by websocket",
)


def _answer(socket: ServerConnection) -> None:
    for number, sent in enumerate(socket, 1):
        text = f"answer to {json.loads(sent)['input']}"
        part = {"type": "output_text", "text": text, "annotations": []}
        item = {"type": "message", "id": "m", "role": "assistant", "status": "completed",
                "content": [part]}  # fmt: skip
        whole = {"id": f"r{number}", "object": "response", "created_at": 1, "model": "m",
                 "status": "completed", "output": [item], "tools": []}  # fmt: skip
        begun = {**whole, "status": "in_progress", "output": []}
        events = [
            {"type": "response.created", "response": begun},
            {"type": "response.output_text.delta", "output_index": 0, "content_index": 0,
             "item_id": "m", "delta": text[:6], "logprobs": []},
            {"type": "response.completed", "response": whole},
        ]  # fmt: skip
        if "fail" in text:
            events[1:] = [{"type": "error", "code": "server_error", "message": "broken"}]
        for place, event in enumerate(events):
            socket.send(json.dumps({**event, "sequence_number": place}))


@pytest.fixture
def urls() -> Iterator[dict[str, str]]:
    server = serve(_answer, "127.0.0.1", 0)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    place = f"127.0.0.1:{server.socket.getsockname()[1]}/v1"
    yield {"base_url": f"http://{place}", "websocket_base_url": f"ws://{place}", "api_key": "k"}
    server.shutdown()
    thread.join()


def read_answer(connection: Any) -> None:
    for event in connection:
        if event.type in ("response.completed", "error"):
            return


async def ask_async(urls: Any, texts: list[str]) -> None:
    async with openai.AsyncOpenAI(**urls) as client, client.responses.connect() as connection:
        for text in texts:
            await connection.response.create(model="m", input=text)
            async for event in connection:
                if event.type in ("response.completed", "error"):
                    break


def ask(urls: Any, texts: list[str], *, is_beta: bool = False) -> None:
    with openai.OpenAI(**urls) as client:
        responses: Any = client.beta.responses if is_beta else client.responses
        ask_within(responses.connect(), texts)


def ask_within(connecting: Any, texts: list[str]) -> None:
    with connecting as connection:
        for text in texts:
            connection.response.create(model="m", input=text)
            read_answer(connection)


@pytest.mark.parametrize("way", ["sync", "async", "beta"])
def test_each_request_of_a_connection_is_a_call(way: str, urls: Any, tmp_path: Path) -> None:
    """One that fails leaves the next as it is."""
    store, texts = Store(tmp_path / "s.duckdb"), ["one", "fail", "two"]
    with auto_trace(store=store):
        if way == "async":
            asyncio.run(ask_async(urls, texts))
        else:
            ask(urls, texts, is_beta=way == "beta")
    steps = list(store.transitions())
    assert [[*step.observation, *step.action] for step in steps] == [
        [said("user", text), {**said("assistant", f"answer to {text}"), "finish_reason": "stop"}]
        for text in ("one", "two")
    ]
    assert [step.finish_reason for step in steps] == ["stop", "stop"]
    assert list(store.report().reasons()) == ["failed: server_error"]
    port = int(urls["base_url"].rpartition(":")[2].partition("/")[0])
    calls = [span.attributes for span in store.spans() if span.name == "chat m"]
    assert {(call[c.SERVER_ADDRESS], call[c.SERVER_PORT]) for call in calls} == {
        ("127.0.0.1", port)
    }


def test_connection_left_early_abandons_its_call(urls: Any, tmp_path: Path) -> None:
    """With what came of the answer; outside a recording nothing is recorded."""
    store = Store(tmp_path / "s.duckdb")
    ask(urls, ["nobody listens"])
    with (
        auto_trace(store=store),
        openai.OpenAI(**urls) as client,
        client.responses.connect() as connection,
    ):
        connection.response.create(model="m", input="one")
        for event in connection:
            if event.type == "response.output_text.delta":
                break
    (span,) = [span for span in store.spans() if span.name == "chat m"]
    assert span.attributes["lightning.abandoned"] is True
    assert '"content":"answer"' in str(span.attributes["gen_ai.output.messages"])
