"""The real SDK over the demo server, its tracing listened to and never sent anywhere."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from lightning_otel import Recording
from lightning_otel.demo.server import DemoServer
from lightning_otel.types import Span

agents = pytest.importorskip("agents", reason="openai-agents is not installed")


class Listener(agents.TracingProcessor):  # type: ignore[misc]  # of a module imported if it is there
    """The program's own trace processor."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        for name in ("trace_start", "trace_end", "span_start", "span_end"):
            setattr(self, f"on_{name}", lambda each, name=name: self._hear(name, each))

    def _hear(self, name: str, each: Any) -> None:
        data = getattr(each, "span_data", None)
        self.heard.append(f"{name} {data.type if data is not None else each.name}")

    def shutdown(self) -> None:
        """Nothing is held."""

    on_trace_start = on_trace_end = on_span_start = on_span_end = force_flush = shutdown  # type: ignore[assignment]  # abstract there


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


@pytest.fixture(params=["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
def model(server: DemoServer, request: pytest.FixtureRequest) -> Any:
    """A model of the demo server, over either API."""
    kind = getattr(agents, request.param)
    return kind(model="toy", openai_client=client_of(server.base_url))


def client_of(base_url: str) -> openai.AsyncOpenAI:
    """A client that is used in one event loop after the other, and so keeps no connection."""
    return openai.AsyncOpenAI(
        base_url=base_url, api_key="k", max_retries=0, default_headers={"Connection": "close"}
    )


async def run_streamed(agent: Any, asked: Any, **options: Any) -> Any:
    result = agents.Runner.run_streamed(agent, asked, **options)
    async for _ in result.stream_events():
        pass
    return result


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
    way = {"run": agents.Runner.run, "run_streamed": run_streamed}[request.param]
    return lambda *args, **options: asyncio.run(way(*args, **options)).final_output


def spans_of(recording: Recording, prefix: str) -> list[Span]:
    return [span for span in recording.spans() if span.name.startswith(prefix)]
