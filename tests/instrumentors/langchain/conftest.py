"""LangChain's models over the demo server, and trees of spans to hold against what was run."""

import asyncio
import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("langchain")
pytest.importorskip("langchain_openai")

from langchain_openai import ChatOpenAI
from langchain_openai.chat_models import _client_utils

from lightning_otel.demo.server import DemoServer
from lightning_otel.instrumentors.langchain import runs
from lightning_otel.tracing import Recording
from lightning_otel.types import Span

Chat = Callable[..., ChatOpenAI]


@pytest.fixture
def chat(server: DemoServer) -> Chat:
    """Makes models that ask the demo server and do not retry."""

    def make(**options: Any) -> ChatOpenAI:
        given = {"model": "toy", "base_url": server.base_url, "api_key": "k", "max_retries": 0}
        return ChatOpenAI(**(given | options))

    return make


def _collect() -> None:
    """Free what nobody holds; LangChain never closes its clients, which Python says aloud."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()


@pytest.fixture(autouse=True, scope="module")
def _cached_clients() -> Iterator[None]:
    """langchain-openai keeps a client for each address: they go here, and in no other test."""
    yield
    _client_utils._cached_sync_httpx_client.cache_clear()
    _client_utils._cached_async_httpx_client.cache_clear()
    _collect()


@pytest.fixture
def own_client() -> Iterator[None]:
    """Asked for by tests whose models make a client that is not kept."""
    yield
    _collect()


@pytest.fixture(autouse=True)
def _nothing_open() -> Iterator[None]:
    """Each test ends with no run open."""
    before = runs.open_count()
    yield
    assert runs.open_count() == before


@pytest.fixture(autouse=True)
def _quiet_loop() -> Iterator[None]:
    """No test leaves an event loop set."""
    yield
    asyncio.set_event_loop(None)


class Tree:
    """The spans of a recording by what stands in what."""

    def __init__(self, recording: Recording) -> None:
        self.spans = sorted(recording.spans(), key=lambda span: span.start_ns)
        self._by_id = {span.span_id: span for span in self.spans}

    def lines(self) -> list[str]:
        """Each span's name, indented by its depth below the rollout's."""
        return ["  " * (self.depth(span) - 1) + span.name for span in self.walk() if self.up(span)]

    def walk(self) -> list[Span]:
        """All spans, each after its parent and with all that stands in it."""
        found: list[Span] = []
        waiting = [span for span in reversed(self.spans) if self.up(span) is None]
        while waiting:
            span = waiting.pop()
            found.append(span)
            waiting += [inner for inner in reversed(self.spans) if self.up(inner) is span]
        return found

    def up(self, span: Span) -> Span | None:
        """The span it stands in."""
        return self._by_id.get(span.parent_span_id or "")

    def path(self, span: Span) -> list[str]:
        """Names from below the rollout down to the span."""
        above = self.up(span)
        return [] if above is None else [*self.path(above), span.name]

    def depth(self, span: Span) -> int:
        """How many spans it stands in."""
        return len(self.path(span))

    def named(self, name: str) -> list[Span]:
        """The spans of a name."""
        return [span for span in self.spans if span.name == name]

    def check(self) -> "Tree":
        """Assert that it is one trace of ended spans without orphans."""
        assert len({span.trace_id for span in self.spans}) == 1
        assert all(span.end_ns is not None for span in self.spans)
        assert [span.name for span in self.spans if self.up(span) is None] == [
            "agentlightning.rollout"
        ]
        return self
