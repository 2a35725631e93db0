"""What every test has: a demo server, a store of its own, a clean environment, loopback only."""

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_otel import Store
from lightning_otel.demo.server import DemoServer
from lightning_otel.store.writer import writer_if_any

_connect = socket.socket.connect
_SELF_CLOSING = (
    ("openai._base_client", "AsyncHttpxClientWrapper"),
    ("langchain_openai.chat_models._client_utils", "_AsyncHttpxClientWrapper"),
)


def _connect_to_loopback(self: socket.socket, address: Any) -> Any:
    if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in (
        "127.0.0.1",
        "::1",
        "localhost",
    ):
        raise AssertionError(f"a test tried to leave this machine: {address}")
    return _connect(self, address)


@pytest.fixture(autouse=True)
def _loopback_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test leaves 127.0.0.1."""
    monkeypatch.setattr(socket.socket, "connect", _connect_to_loopback)


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No setting of the developer's shell, and no default store outside the test's folder."""
    for name in list(os.environ):
        if name.startswith(("OTEL_", "LIGHTNING_OTEL", "OPENAI_")) or name == "TRACEPARENT":
            monkeypatch.delenv(name)
    monkeypatch.setenv("LIGHTNING_OTEL_STORE", str(tmp_path / "default" / "traces.duckdb"))


@pytest.fixture(autouse=True)
def _no_client_closes_itself_in_another_test() -> None:
    """A forgotten async client stays one: collected, it would close itself in the loop that runs.

    That loop is a later test's, and the client's connections belong to a loop that is closed.
    """
    for module, name in _SELF_CLOSING:
        cls = getattr(sys.modules.get(module), name, None)
        if cls is not None and "__del__" in vars(cls):
            del cls.__del__


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A local store that does not exist yet; its segment is closed at the end of the test."""
    found = Store(tmp_path / "store" / "traces.duckdb")
    yield found
    assert found.layout is not None
    writer = writer_if_any(found.layout)
    if writer is not None:
        writer.seal()


@pytest.fixture
def server() -> Iterator[DemoServer]:
    """An OpenAI-compatible server on loopback, with a log of all it was asked and answered."""
    with DemoServer() as running:
        yield running
