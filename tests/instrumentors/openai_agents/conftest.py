"""The real SDK over the demo server, its tracing listened to and never sent anywhere."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from lightning_otel import conventions as c
from lightning_otel.demo.server import DemoServer
from lightning_otel.tracing import Recording
from lightning_otel.types import Span

agents = pytest.importorskip("agents", reason="openai-agents is not installed")

Tree = tuple[str, tuple[Any, ...]]


class Listener(agents.TracingProcessor):  # type: ignore[misc]  # of a module imported if it is there
    """The program's own trace processor."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def on_trace_start(self, trace: Any) -> None:
        """A trace began."""
        self.heard.append(f"+trace {trace.name}")

    def on_trace_end(self, trace: Any) -> None:
        """A trace ended."""
        self.heard.append(f"-trace {trace.name}")

    def on_span_start(self, span: Any) -> None:
        """A span began."""
        self.heard.append(f"+{span.span_data.type}")

    def on_span_end(self, span: Any) -> None:
        """A span ended."""
        self.heard.append(f"-{span.span_data.type}")

    def shutdown(self) -> None:
        """Nothing is held."""

    def force_flush(self) -> None:
        """Nothing is pending."""


@pytest.fixture
def listener() -> Listener:
    """The only trace processor of the test."""
    return Listener()


@pytest.fixture(autouse=True)
def _tracing(listener: Listener) -> Iterator[None]:
    """The SDK's tracing is on, and nothing but the listener hears it."""
    agents.set_trace_processors([listener])
    agents.set_tracing_disabled(False)
    yield
    agents.set_trace_processors([])
    agents.set_tracing_disabled(False)


@pytest.fixture(params=["chat", "responses"])
def api(request: pytest.FixtureRequest) -> str:
    """Which of the two APIs a model speaks."""
    return str(request.param)


@pytest.fixture
def model(server: DemoServer, api: str) -> Any:
    """A model of the demo server, over either API."""
    kinds = {
        "chat": agents.OpenAIChatCompletionsModel,
        "responses": agents.OpenAIResponsesModel,
    }
    return kinds[api](model="toy", openai_client=client_of(server.base_url))


def client_of(base_url: str) -> openai.AsyncOpenAI:
    """A client that is used in one event loop after the other, and so keeps no connection."""
    return openai.AsyncOpenAI(
        base_url=base_url, api_key="k", max_retries=0, default_headers={"Connection": "close"}
    )


def said_last(server: DemoServer) -> str:
    """The text of the last answer."""
    answer = server.log[-1].response or {}
    if "choices" in answer:
        return str(answer["choices"][0]["message"]["content"])
    return str(answer["output"][-1]["content"][0]["text"])


async def _run(agent: Any, asked: Any, **options: Any) -> Any:
    return (await agents.Runner.run(agent, asked, **options)).final_output


async def _run_streamed(agent: Any, asked: Any, **options: Any) -> Any:
    result = agents.Runner.run_streamed(agent, asked, **options)
    async for _ in result.stream_events():
        pass
    return result.final_output


def _run_sync(agent: Any, asked: Any, **options: Any) -> Any:
    with asyncio.Runner() as runner:
        asyncio.set_event_loop(runner.get_loop())
        try:
            return agents.Runner.run_sync(agent, asked, **options).final_output
        finally:
            asyncio.set_event_loop(None)


@pytest.fixture(params=["run", "run_streamed", "run_sync"])
def run(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Runs an agent in each way there is, and gives what it said."""
    if request.param == "run_sync":
        return _run_sync
    way = {"run": _run, "run_streamed": _run_streamed}[request.param]

    def in_a_loop(agent: Any, asked: Any, **options: Any) -> Any:
        return asyncio.run(way(agent, asked, **options))

    return in_a_loop


def tree(recording: Recording) -> Tree:
    """The names of the recording's spans, nested; every span has its parent among them."""
    spans = recording.spans()
    below: dict[str | None, list[Span]] = {}
    for span in spans:
        below.setdefault(span.parent_span_id, []).append(span)

    def nested(span: Span) -> Tree:
        return span.name, tuple(nested(child) for child in below.get(span.span_id, ()))

    (root,) = below[None]
    assert len({span.trace_id for span in spans}) == 1
    assert all(span.end_ns is not None for span in spans)
    found = nested(root)
    assert _size(found) == len(spans)
    return found


def _size(node: Tree) -> int:
    return 1 + sum(map(_size, node[1]))


def named(recording: Recording, prefix: str) -> list[Span]:
    """The recording's spans whose name begins like this."""
    return [span for span in recording.spans() if span.name.startswith(prefix)]


def model_calls(recording: Recording) -> list[Span]:
    """The recording's calls of a model."""
    return [span for span in recording.spans() if span.attributes.get(c.OPERATION) == c.CHAT]
