"""LangChain's models over the demo server."""

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

Chat = Callable[..., ChatOpenAI]


@pytest.fixture
def chat(server: DemoServer) -> Chat:
    """Makes models that ask the demo server and do not retry."""

    def make(**options: Any) -> ChatOpenAI:
        given = {"model": "toy", "base_url": server.base_url, "api_key": "k", "max_retries": 0}
        return ChatOpenAI(**(given | options))

    return make


async def all_of(stream: Any) -> list[Any]:
    """Everything an async stream gives."""
    return [item async for item in stream]


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
    """Asked for by tests whose models make a client that is not kept, or that collect garbage.

    What an earlier test left unclosed would be told of the test in which it is freed.
    """
    _collect()
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
