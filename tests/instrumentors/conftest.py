"""Real clients of the demo server, and every fact of a span held against the server's own log."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tests import facts as facts_of_log

from lightning_otel import capture, provider, uninstrument


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


def instrumentor(name: str) -> Any:
    """An instrumentor of ours, as OpenTelemetry's own command finds it."""
    (point,) = entry_points(group="opentelemetry_instrumentor", name=f"lightning-{name}")
    return point.load()()


@pytest.fixture
def facts() -> ModuleType:
    """What spans must say."""
    return facts_of_log


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
    uninstrument()
    before = capture.process.faults
    yield
    uninstrument()
    if "faults_allowed" not in request.fixturenames:
        assert capture.process.faults == before
