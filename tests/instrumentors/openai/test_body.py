"""Streams: ended once, whichever way the program leaves them, and kept as far as they came."""

import asyncio
import contextlib
import gc
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from threading import Thread
from typing import Any

import openai
import pytest
from tests.instrumentors.transport import http

from lightning_otel import Store, auto_trace
from lightning_otel.demo.server import DemoServer
from lightning_otel.types import Span

ASKED: Any = [{"role": "user", "content": "one two three four five six seven eight nine"}]


def opened(client: openai.OpenAI, model: str = "toy", **options: Any) -> Any:
    """A stream of nine words and more."""
    return client.chat.completions.create(model=model, messages=ASKED, stream=True, **options)


@contextlib.asynccontextmanager
async def async_client(server: DemoServer) -> AsyncIterator[openai.AsyncOpenAI]:
    """An asynchronous client that does not retry."""
    async with openai.AsyncOpenAI(base_url=server.base_url, api_key="k", max_retries=0) as client:
        yield client


def said(span: Span) -> str:
    """The text of a span's answer."""
    (message,) = json.loads(span.attributes["gen_ai.output.messages"])
    return "".join(part["content"] for part in message["parts"])


def stop_in_loop(stream: Any) -> None:
    """Leave the loop, then the stream."""
    for _ in stream:
        break
    stream.close()


def close_unread(stream: Any) -> None:
    """Never read it."""
    stream.close()


def leave_block(stream: Any) -> None:
    """Leave a ``with`` block early."""
    with stream:
        next(iter(stream))


def never_read(stream: Any) -> None:
    """Forget a stream that was never read."""


LEAVING = [stop_in_loop, close_unread, leave_block, never_read]


@pytest.mark.parametrize("leave", LEAVING)
def test_stream_left_early_is_one_abandoned_span(
    leave: Callable[[Any], None],
    store: Store,
    server: DemoServer,
    client: openai.OpenAI,
    facts: Any,
) -> None:
    """However the program leaves, one span ends, abandoned, with what had come until then."""
    server.chunk_delay_s = 0.2

    with auto_trace(store=store) as recording:
        leave(opened(client))
        gc.collect()

    (span,) = facts.calls(recording)
    assert not span.is_incomplete
    assert span.status == "UNSET"
    assert span.attributes["lightning.abandoned"] is True
    assert span.attributes["gen_ai.request.stream"] is True
    if leave not in (close_unread, never_read):
        assert span.attributes["gen_ai.response.id"]
        assert "You said: one".startswith(said(span))


def test_stream_paused_by_a_break_goes_on(
    store: Store, server: DemoServer, client: openai.OpenAI, facts: Any
) -> None:
    """A second loop over the same stream reads on, and the span is whole."""
    with auto_trace(store=store) as recording:
        stream = opened(client)
        for _ in stream:
            break
        assert facts.calls(recording)[0].is_incomplete
        rest = list(stream)

    assert rest
    (span,) = facts.calls(recording)
    facts.agree(span, server.log[0])


def test_stream_left_after_its_last_word_is_whole(
    store: Store, server: DemoServer, client: openai.OpenAI, facts: Any
) -> None:
    """A program that stops at the finish reason, before the closing mark, abandons nothing."""
    with auto_trace(store=store) as recording:
        stream = opened(client)
        for chunk in stream:
            if chunk.choices and chunk.choices[0].finish_reason:
                break
        stream.close()

    (span,) = facts.calls(recording)
    facts.agree(span, server.log[0])


def test_stream_that_tells_an_error_fails_with_it(
    store: Store, server: DemoServer, client: openai.OpenAI, facts: Any
) -> None:
    """An error event ends the span with its type and message; the words before it are kept."""
    untraced = failing(lambda: list(opened(client, "sse-error")))

    with auto_trace(store=store) as recording:
        traced = failing(lambda: list(opened(client, "sse-error")))

    assert traced == untraced
    (span,) = facts.calls(recording)
    assert (span.status, span.status_message) == ("ERROR", "the demo server broke off")
    assert span.attributes["error.type"] == "server_error"
    assert span.attributes["gen_ai.response.id"] == server.log[1].response_id


def test_responses_stream_left_early_keeps_what_came(
    store: Store, server: DemoServer, client: openai.OpenAI, facts: Any
) -> None:
    """The pieces of an abandoned response are put together."""
    server.chunk_delay_s = 0.02
    words = "one two three" + " four" * 50

    with auto_trace(store=store) as recording:
        text = ""
        with client.responses.create(model="toy", input=words, stream=True) as stream:
            for event in stream:
                if event.type == "response.output_text.delta":
                    text += event.delta
                    if "three" in text:
                        break

    (span,) = facts.calls(recording)
    assert span.attributes["lightning.abandoned"] is True
    assert span.attributes["gen_ai.response.id"].startswith("resp_")
    assert said(span).startswith(text)


def failing(read: Callable[[], object]) -> list[object]:
    """The exception that reading ends in, and its cause."""
    # openai 2 lets a stream's transport error through as it is.
    with pytest.raises((openai.APIError, http.TransportError)) as caught:
        read()
    exc = caught.value
    said = getattr(exc, "body", None)
    return [type(exc), str(exc), said, type(exc.__cause__), str(exc.__cause__)]


def test_stream_helper_left_early_is_abandoned(
    store: Store, server: DemoServer, client: openai.OpenAI, facts: Any
) -> None:
    """The helper closes the response, not the stream: the span ends all the same."""
    server.chunk_delay_s = 0.2

    with auto_trace(store=store) as recording:
        with client.chat.completions.stream(model="toy", messages=ASKED) as stream:
            next(iter(stream))
        (span,) = facts.calls(recording)

    assert not span.is_incomplete
    assert span.attributes["lightning.abandoned"] is True


def test_streaming_response_never_read_is_abandoned(
    store: Store, client: openai.OpenAI, facts: Any
) -> None:
    """A response opened and left unread ends its span when it is closed."""
    with auto_trace(store=store) as recording:
        with client.chat.completions.with_streaming_response.create(
            model="toy", messages=ASKED
        ) as response:
            assert response.status_code == 200
        (span,) = facts.calls(recording)

    assert span.attributes["lightning.abandoned"] is True


def test_stream_is_the_clients_own_object_and_its_response_is_given_back(
    store: Store, client: openai.OpenAI
) -> None:
    """The stream has the client's own type, and nothing of ours stays on the response."""
    with auto_trace(store=store):
        stream = opened(client)
        list(stream)

    assert type(stream) is openai.Stream
    assert not {"iter_bytes", "aiter_bytes", "close", "aclose"} & stream.response.__dict__.keys()


def test_stream_delays_no_chunk(store: Store, server: DemoServer, client: openai.OpenAI) -> None:
    """The first chunk is the program's before the server has sent the last."""
    server.chunk_delay_s = 1

    with auto_trace(store=store):
        stream = opened(client)
        first = next(iter(stream))
        unfinished = server.log
        server.chunk_delay_s = 0
        rest = list(stream)

    assert first.choices
    assert unfinished == []
    assert len(rest) > 3


def test_async_stream_cancelled_fails_and_keeps_what_came(
    store: Store, server: DemoServer, facts: Any
) -> None:
    """A task cancelled in mid-stream is cancelled, and its span has failed with half an answer."""
    server.chunk_delay_s = 0.1
    texts: list[str] = []

    async def ask() -> None:
        async with async_client(server) as client:

            async def read() -> None:
                stream = await client.chat.completions.create(
                    model="toy", messages=ASKED, stream=True
                )
                async for chunk in stream:
                    texts.append(chunk.choices[0].delta.content or "")

            reading = asyncio.ensure_future(read())
            while len(texts) < 3:
                await asyncio.sleep(0.01)
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading

    with auto_trace(store=store) as recording:
        asyncio.run(ask())

    (span,) = facts.calls(recording)
    assert span.status == "ERROR"
    assert span.attributes["error.type"].endswith("CancelledError")
    assert said(span) == "".join(texts) != ""


def test_stream_read_by_another_thread_belongs_to_the_rollout_that_asked(
    store: Store, server: DemoServer, client: openai.OpenAI, facts: Any
) -> None:
    """The span is that of the request, whoever reads the answer."""
    with auto_trace(store=store) as recording:
        stream = opened(client)
    reader = Thread(target=lambda: list(stream))
    reader.start()
    reader.join()

    (span,) = facts.calls(recording)
    facts.agree(span, server.log[0])


def test_time_to_first_chunk_is_the_time_the_program_waited(
    store: Store, server: DemoServer, client: openai.OpenAI, facts: Any
) -> None:
    """A slow server's first chunk is as late on the span as it was to the program."""
    with auto_trace(store=store) as recording:
        began = time.perf_counter()
        stream = opened(client, "slow")
        next(iter(stream))
        waited_s = time.perf_counter() - began
        list(stream)

    (span,) = facts.calls(recording)
    assert 0.5 <= span.attributes["gen_ai.response.time_to_first_chunk"] <= waited_s


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
