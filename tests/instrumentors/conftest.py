"""Real clients of the demo server, and every fact of a span held against the server's own log."""

import asyncio
import base64
import contextlib
import json
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from lightning_otel import capture, provider
from lightning_otel import conventions as c
from lightning_otel.demo.server import DemoServer, Exchange
from lightning_otel.messages import read_items, read_message, text_part
from lightning_otel.tracing import Recording
from lightning_otel.types import Span

OPERATIONS = {
    "chat/completions": "chat",
    "responses": "chat",
    "completions": "text_completion",
    "embeddings": "embeddings",
}
REQUEST_KEYS = {
    "model": "gen_ai.request.model",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "max_tokens": "gen_ai.request.max_tokens",
    "max_completion_tokens": "gen_ai.request.max_tokens",
    "max_output_tokens": "gen_ai.request.max_tokens",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "seed": "gen_ai.request.seed",
    "reasoning_effort": "gen_ai.request.reasoning.level",
    "previous_response_id": "gen_ai.request.previous_response.id",
    "dimensions": "gen_ai.embeddings.dimension.count",
    "service_tier": "openai.request.service_tier",
}
RESPONSE_KEYS = {
    "id": "gen_ai.response.id",
    "model": "gen_ai.response.model",
    "system_fingerprint": "openai.response.system_fingerprint",
    "service_tier": "openai.response.service_tier",
}
USAGE_KEYS = {
    "gen_ai.usage.input_tokens": ("prompt_tokens", "input_tokens"),
    "gen_ai.usage.output_tokens": ("completion_tokens", "output_tokens"),
}


class Facts:
    """What spans must say, worked out from the server's log alone."""

    def __init__(self, server: DemoServer) -> None:
        self.server = server

    def calls(self, recording: Recording) -> list[Span]:
        """The recording's call spans."""
        return [span for span in recording.spans() if c.OPERATION in span.attributes]

    def agree(self, span: Span, exchange: Exchange, **more: Any) -> None:
        """Assert that every attribute of the span is what the log says, and none is missing.

        Args:
            span: A call's span.
            exchange: The request and its answer.
            **more: ``provider``, ``agent``, ``conversation``, ``output_type`` where there is one.
        """
        found = dict(span.attributes)
        for stamp in (c.ROLLOUT_ID, c.ATTEMPT_ID, c.SEQUENCE_ID):
            found.pop(stamp, None)
        first_chunk_s = found.pop(c.TIME_TO_FIRST_CHUNK, None)
        content = {key: found.pop(key) for key in c.CONTENT_KEYS if key in found}

        assert found == self.attributes(exchange, **more)
        assert read(content) == read(self.content(exchange))
        assert (first_chunk_s is not None) == exchange.is_stream
        assert span.name == f"{found[c.OPERATION]} {found[c.REQUEST_MODEL]}"
        assert (span.kind, span.status, span.scope) == ("CLIENT", "UNSET", c.SCOPE)
        assert span.end_ns is not None
        assert 0 <= (first_chunk_s or 0) * 1e9 <= span.end_ns - span.start_ns

    def attributes(self, exchange: Exchange, **more: Any) -> dict[str, Any]:
        """The attributes a finished call has, without content."""
        request, response = exchange.request or {}, exchange.response or {}
        endpoint = self.endpoint(exchange)
        address = urlsplit(self.server.base_url)
        found = {
            "gen_ai.operation.name": OPERATIONS[endpoint],
            "gen_ai.provider.name": more.get("provider", "openai"),
            "server.address": address.hostname,
            "server.port": address.port,
        }
        found |= {key: request[name] for name, key in REQUEST_KEYS.items() if name in request}
        found |= {key: response[name] for name, key in RESPONSE_KEYS.items() if name in response}
        if endpoint in ("chat/completions", "responses"):
            found["openai.api.type"] = endpoint.replace("/", "_")
        if request.get("stream"):
            found["gen_ai.request.stream"] = True
        if "stop" in request:
            stop = request["stop"]
            found["gen_ai.request.stop_sequences"] = [stop] if isinstance(stop, str) else stop
        if request.get("n", 1) != 1:
            found["gen_ai.request.choice.count"] = request["n"]
        if endpoint == "embeddings":
            found["gen_ai.embeddings.dimension.count"] = request.get("dimensions", 8)
            found["gen_ai.request.encoding_formats"] = [request["encoding_format"]]
        if "agent" in more:
            found[c.AGENT_NAME] = more["agent"]
        if "conversation" in more:
            found[c.CONVERSATION_ID] = more["conversation"]
        if "output_type" in more:
            found["gen_ai.output.type"] = more["output_type"]
        return found | self.finish(exchange) | self.usage(exchange)

    def endpoint(self, exchange: Exchange) -> str:
        """The endpoint's name, such as ``chat/completions``."""
        path = urlsplit(exchange.path).path
        return next(name for name in OPERATIONS if path.endswith(f"/{name}"))

    def finish(self, exchange: Exchange) -> dict[str, Any]:
        """Why each choice ended."""
        response = exchange.response or {}
        reasons = [choice["finish_reason"] for choice in response.get("choices", ())]
        if "output" in response:
            called = any(item["type"] == "function_call" for item in response["output"])
            reasons = ["tool_calls" if called else "stop"]
            if response["status"] == "incomplete":
                reasons = ["length"]
        return {"gen_ai.response.finish_reasons": reasons} if reasons else {}

    def usage(self, exchange: Exchange) -> dict[str, int]:
        """The token counts, where the server sent them."""
        usage = (exchange.response or {}).get("usage") or {}
        is_chat_stream = exchange.is_stream and "choices" in (exchange.response or {})
        if is_chat_stream and not any(chunk.get("usage") for chunk in exchange.chunks):
            return {}
        found = {
            key: usage[name] for key, names in USAGE_KEYS.items() for name in names if name in usage
        }
        for given in ("prompt_tokens_details", "input_tokens_details"):
            if given in usage:
                found["gen_ai.usage.cache_read.input_tokens"] = usage[given]["cached_tokens"]
        for made in ("completion_tokens_details", "output_tokens_details"):
            if made in usage:
                found["gen_ai.usage.reasoning.output_tokens"] = usage[made]["reasoning_tokens"]
        return found

    def content(self, exchange: Exchange) -> dict[str, str]:
        """Messages, tools, token ids and logprobs, as texts."""
        request, response = exchange.request or {}, exchange.response or {}
        given = request.get("messages", request.get("prompt", request.get("input")))
        found: dict[str, Any] = {
            c.INPUT_MESSAGES: read_items([given] if type(given) is str else given)
        }
        if "messages" in request:
            found[c.INPUT_MESSAGES] = [read_message(message) for message in given]
        choices = response.get("choices", ())
        if "output" in response:
            (turn,) = read_items(response["output"], "assistant")
            (reason,) = self.finish(exchange).values()
            found[c.OUTPUT_MESSAGES] = [{**turn, "finish_reason": reason[0]}]
        elif choices:
            found[c.OUTPUT_MESSAGES] = [
                read_message(
                    choice.get("message") or {"content": choice["text"]},
                    "assistant",
                    finish_reason=choice["finish_reason"],
                )
                for choice in choices
            ]
        if request.get("instructions"):
            found[c.SYSTEM_INSTRUCTIONS] = [text_part(request["instructions"])]
        if request.get("tools"):
            found[c.TOOL_DEFINITIONS] = [
                {"type": "function", **tool.get("function", tool)} for tool in request["tools"]
            ]
        return {key: json.dumps(value) for key, value in found.items()} | self.tokens(response)

    def tokens(self, response: dict[str, Any]) -> dict[str, str]:
        """Token ids and logprobs, packed."""
        choices = response.get("choices", ())
        found = {}
        holders = [response, *choices]
        prompts = [held["prompt_token_ids"] for held in holders if held.get("prompt_token_ids")]
        if prompts:
            found[c.PROMPT_TOKEN_IDS] = pack("i", prompts[0])
        if any(choice.get("token_ids") for choice in choices):
            packed = [pack("i", choice["token_ids"]) for choice in choices]
            found[c.RESPONSE_TOKEN_IDS] = ",".join(packed)
        logprobs = [logprobs_of(choice) for choice in choices]
        if not choices:
            parts = [
                part for item in response.get("output", ()) for part in item.get("content", ())
            ]
            logprobs = [[entry["logprob"] for part in parts for entry in part["logprobs"]]]
        if any(logprobs):
            found[c.RESPONSE_LOGPROBS] = ",".join(pack("d", held) for held in logprobs)
        return found


def read(content: dict[str, str]) -> dict[str, Any]:
    """Content with its JSON parsed: a tool call's arguments keep the spaces the model wrote."""
    return {
        key: json.loads(text) if text.startswith("[") else text for key, text in content.items()
    }


def pack(code: str, values: list[Any]) -> str:
    """Base64 of little-endian numbers."""
    return base64.b64encode(struct.pack(f"<{len(values)}{code}", *values)).decode()


def logprobs_of(choice: dict[str, Any]) -> list[float]:
    """The logprobs of a choice of either completions endpoint."""
    held = choice.get("logprobs") or {}
    return held.get("token_logprobs") or [entry["logprob"] for entry in held.get("content", ())]


class SilentServer:
    """Takes requests and never answers."""

    def __init__(self) -> None:
        self._asked = threading.Semaphore(0)
        self._held: list[socket.socket] = []
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.base_url = f"http://127.0.0.1:{self._listening.getsockname()[1]}/v1"
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listening.accept()
                self._held.append(connection)
                connection.recv(1)
                self._asked.release()

    async def asked(self, count: int) -> None:
        """Wait until that many requests are on their way."""
        for _ in range(count):
            await asyncio.to_thread(self._asked.acquire)

    def stop(self) -> None:
        """Hang up."""
        for held in (self._listening, *self._held):
            with contextlib.suppress(OSError):
                held.shutdown(socket.SHUT_RDWR)
            held.close()


@pytest.fixture
def silent() -> Iterator[SilentServer]:
    """A server to wait for in vain."""
    server = SilentServer()
    yield server
    server.stop()


@pytest.fixture(autouse=True)
def _no_certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading them, which no test needs, costs a client more than all of its calls."""
    monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path))


@pytest.fixture
def facts(server: DemoServer) -> Facts:
    """What spans must say."""
    return Facts(server)


@pytest.fixture
def client(server: DemoServer) -> Iterator[openai.OpenAI]:
    """A client of the server that does not retry."""
    with openai.OpenAI(base_url=server.base_url, api_key="k", max_retries=0) as opened:
        yield opened


@pytest.fixture
def exported() -> Iterator[InMemorySpanExporter]:
    """Another exporter, of all spans of the process, on the provider that we use or set."""
    provider.ensure_provider()
    exporter = InMemorySpanExporter()
    found: Any = trace.get_tracer_provider()
    found.add_span_processor(SimpleSpanProcessor(exporter))
    yield exporter
    exporter.shutdown()


@pytest.fixture
def faults_allowed() -> None:
    """Asked for by tests that make our own code fail."""


@pytest.fixture(autouse=True)
def _clean(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test begins and ends without instrumentation, and none of our code may fail in it."""
    provider.uninstrument()
    before = capture.process.faults
    yield
    provider.uninstrument()
    if "faults_allowed" not in request.fixturenames:
        assert capture.process.faults == before
