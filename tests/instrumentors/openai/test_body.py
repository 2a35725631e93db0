"""Streams: ended once, whichever way the program leaves them, and kept as far as they came."""

import asyncio
import gc
import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from threading import Thread
from typing import Any

import openai
import pytest
from tests.instrumentors.loopback import serving

from lightning_otel import Store, auto_trace
from lightning_otel.demo.server import DemoServer
from lightning_otel.types import Span

ASKED: Any = [{"role": "user", "content": "one two three four five six seven eight nine"}]


def opened(client: openai.OpenAI, model: str = "toy", **options: Any) -> Any:
    return client.chat.completions.create(model=model, messages=ASKED, stream=True, **options)


def said(span: Span) -> str:
    (message,) = json.loads(span.attributes["gen_ai.output.messages"])
    return "".join(part["content"] for part in message["parts"])


def _leave_helper(client: openai.OpenAI) -> str:
    # It closes the response, not the stream.
    with client.chat.completions.stream(model="toy", messages=ASKED) as stream:
        next(iter(stream))
    return ""


def _leave_response(client: openai.OpenAI) -> str:
    read = ""
    with client.responses.create(model="toy", input=ASKED, stream=True) as stream:
        for event in stream:
            if event.type == "response.output_text.delta":
                read += event.delta
                if "three" in read:
                    break
    return read


def _never_read(client: openai.OpenAI) -> None:
    create = client.chat.completions.with_streaming_response.create
    with create(model="toy", messages=ASKED) as response:
        assert response.status_code == 200


def _leave_raw(client: openai.OpenAI) -> str:
    create = client.chat.completions.with_streaming_response.create
    with create(model="toy", messages=ASKED, stream=True) as response:
        next(response.http_response.iter_raw())
    return ""


LEAVING: dict[str, Callable[[openai.OpenAI], str | None]] = {
    "helper": _leave_helper,
    "response": _leave_response,
    "raw bytes": _leave_raw,
    "streaming response": _never_read,
    "closed unread": lambda client: opened(client).close(),
    "forgotten": lambda client: opened(client) and None,
}
"""By name: reads a little and leaves; returns what it read, None if it read nothing."""


@pytest.mark.parametrize("how", LEAVING)
def test_stream_left_early_is_one_abandoned_span(
    how: str, store: Store, server: DemoServer, client: openai.OpenAI, facts: Any
) -> None:
    """However the program leaves, one span ends, abandoned, with what had come until then."""
    server.chunk_delay_s = 0.1

    with auto_trace(store=store) as recording:
        read = LEAVING[how](client)
        gc.collect()
        (span,) = facts.calls(recording)

    assert (span.is_incomplete, span.status) == (False, "UNSET")
    assert span.attributes["lightning.abandoned"] is True
    if read is not None:
        assert span.attributes["gen_ai.response.id"]
        assert said(span).startswith(read)


def _pause(stream: Any) -> None:
    for _ in stream:
        break
    assert list(stream)


def _stop_at_finish(stream: Any) -> None:
    for chunk in stream:
        if chunk.choices and chunk.choices[0].finish_reason:
            break
    stream.close()


def _read_in_thread(stream: Any) -> None:
    reader = Thread(target=lambda: list(stream))
    reader.start()
    reader.join()


@pytest.mark.parametrize("read", [_pause, _stop_at_finish, _read_in_thread])
def test_stream_read_to_its_end_is_whole(
    read: Callable[[Any], None],
    store: Store,
    server: DemoServer,
    client: openai.OpenAI,
    facts: Any,
) -> None:
    """In two loops, without the closing mark, or by another thread once the recording is over."""
    with auto_trace(store=store) as recording:
        stream = opened(client)
    read(stream)

    (span,) = facts.calls(recording)
    facts.agree(span, server.log[0])
    assert type(stream) is openai.Stream
    assert not {"iter_bytes", "aiter_bytes", "close", "aclose"} & stream.response.__dict__.keys()


def test_stream_delays_no_chunk(
    store: Store, server: DemoServer, client: openai.OpenAI, facts: Any
) -> None:
    """The first chunk is the program's before the server has sent the last."""
    server.chunk_delay_s = 1

    with auto_trace(store=store) as recording:
        stream = opened(client)
        next(iter(stream))
        unfinished = server.log
        server.chunk_delay_s = 0
        assert len(list(stream)) > 3

    assert unfinished == []
    (span,) = facts.calls(recording)
    facts.agree(span, server.log[0])


def test_async_stream_cancelled_fails_and_keeps_what_came(
    store: Store, server: DemoServer, facts: Any
) -> None:
    """A task cancelled in mid-stream is cancelled, and its span has failed with half an answer."""
    server.chunk_delay_s = 0.1
    texts: list[str] = []

    async def ask() -> None:
        async with openai.AsyncOpenAI(base_url=server.base_url, api_key="k") as client:
            has_begun = asyncio.Event()

            async def read() -> None:
                create = client.chat.completions.create
                async for chunk in await create(model="toy", messages=ASKED, stream=True):
                    texts.append(chunk.choices[0].delta.content or "")
                    if len(texts) == 3:
                        has_begun.set()

            reading = asyncio.ensure_future(read())
            await has_begun.wait()
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading

    with auto_trace(store=store) as recording:
        asyncio.run(ask())

    (span,) = facts.calls(recording)
    assert span.status == "ERROR"
    assert span.attributes["error.type"].endswith("CancelledError")
    assert said(span) == "".join(texts) != ""


SCRIPT = """
import contextlib, openai, sys
from lightning_otel import Store, auto_trace
from lightning_otel.demo.server import DemoServer

server = DemoServer(chunk_delay_s=0.5)
server.start()
client = openai.OpenAI(base_url=server.base_url, api_key="k")
with auto_trace(store=sys.argv[1]) if sys.argv[1] else contextlib.nullcontext():
    stream = client.chat.completions.create(
        model="toy", messages=[{"role": "user", "content": "a b c d e f"}], stream=True
    )
    if sys.argv[2] == "read":
        next(iter(stream))
print(type(stream).__name__)
"""


@pytest.mark.parametrize("how", ["read", "unread"])
def test_stream_still_open_at_exit_is_silent(how: str, store: Store) -> None:
    """A process that ends with an open stream ends as it would have, with nothing on stderr."""

    def ended(kept_in: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-c", SCRIPT, kept_in, how]
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)

    bare, traced = ended(""), ended(store.name)

    # Not 0 on Python 3.13.0, where httpx2 crashes at exit on a stream that was read in part.
    assert traced.returncode == bare.returncode
    assert (traced.stdout, traced.stderr) == ("Stream\n", "")
    (call,) = [span for span in store.spans().rows() if span.name == "chat toy"]
    assert call.is_incomplete or call.attributes["lightning.abandoned"] is True


def _read_raw(response: Any) -> bytes:
    return b"".join(response.http_response.iter_raw())


def _read_raw_by_lines(response: Any) -> bytes:
    """As a proxy does that looks at each line, and leaves once it saw the last."""
    read = b""
    for chunk in response.http_response.iter_raw(64):
        read += chunk
        if b"[DONE]" in read:
            break
    return read


def _read_bytes(response: Any) -> bytes:
    return b"".join(response.iter_bytes())


def _read_text(response: Any) -> bytes:
    return "".join(response.iter_text()).encode()


def _read_lines(response: Any) -> bytes:
    return "\n".join(response.iter_lines()).encode()


async def _read_raw_async(client: openai.AsyncOpenAI, **request: Any) -> bytes:
    create = client.chat.completions.with_streaming_response.create
    async with client, create(**request) as response:
        return b"".join([chunk async for chunk in response.http_response.aiter_raw()])


READING = [_read_raw, _read_raw_by_lines, _read_bytes, _read_text, _read_lines]


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("read", READING)
def test_bytes_that_a_proxy_hands_on_are_kept(
    read: Any, is_stream: bool, store: Store, server: DemoServer, client: openai.OpenAI, facts: Any
) -> None:
    """Whichever way it reads them."""
    create = client.chat.completions.with_streaming_response.create
    with auto_trace(store=store) as recording:
        with create(model="toy", messages=ASKED, stream=is_stream) as response:
            assert b"choices" in read(response)
        (span,) = facts.calls(recording)
    facts.agree(span, server.log[0])


def test_raw_bytes_are_kept_asynchronously(store: Store, server: DemoServer, facts: Any) -> None:
    """As the synchronous ones."""
    client = openai.AsyncOpenAI(base_url=server.base_url, api_key="k")
    with auto_trace(store=store) as recording:
        asyncio.run(_read_raw_async(client, model="toy", messages=ASKED, stream=True))
        (span,) = facts.calls(recording)
    facts.agree(span, server.log[0])


def test_compressed_raw_bytes_are_read() -> None:
    """The program gets them as they came."""
    whole = {"id": "r", "model": "m", "choices": [{"message": {"content": "hi"}}]}
    sent = gzip.compress(json.dumps(whole).encode())
    with (
        serving(lambda *_: sent) as base_url,
        openai.OpenAI(base_url=base_url, api_key="k") as client,
        auto_trace(store=Store(":memory:")) as recording,
    ):
        create = client.chat.completions.with_streaming_response.create
        with create(model="m", messages=ASKED) as response:
            assert _read_raw(response) == sent
        _, span = recording.spans()
    assert said(span) == "hi"
