"""Spans out by OTLP from the program itself, through the SDK's own exporters."""

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.trace import SpanContext

from lightning_otel.exporters.otlp import otlp_exporter

SPAN = ReadableSpan(name="work", context=SpanContext(1, 2, is_remote=False))


class Refusing:
    """An endpoint that answers every request with 503, and counts them."""

    def __init__(self) -> None:
        self.requests = threading.Semaphore(0)
        self.count = 0
        refusing = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                refusing.count += 1
                self.send_response(503)
                self.send_header("Content-Length", "0")
                self.end_headers()
                refusing.requests.release()

            def log_message(self, format: str, *args: object) -> None:
                """Print nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Refusing]:
    """Such an endpoint, named by the environment."""
    made = Refusing()
    port = made.server.server_address[1]
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_otlp_exporter_tries_once_when_hurried(
    refusing: Refusing, caplog: pytest.LogCaptureFixture
) -> None:
    """A program that ends asks a refusing collector once, and one warning says what it answered."""
    exporter = otlp_exporter()
    exporter.hurry()

    results = [exporter.export([SPAN]) for _ in range(2)]
    exporter.shutdown()

    own = [record for record in caplog.records if record.name.startswith("lightning_otel")]
    assert results == [SpanExportResult.FAILURE] * 2
    assert refusing.count == 1
    assert exporter.complaint == "Service Unavailable"
    assert len(own) == 1
    assert "they are all kept here" in own[0].getMessage()


def test_otlp_exporter_is_woken_from_its_retries(refusing: Refusing) -> None:
    """One that waits to try again stops waiting when the program wants to end."""
    exporter = otlp_exporter(is_quiet=True)
    batch = [SPAN]
    thread = threading.Thread(target=exporter.export, args=(batch,))
    thread.start()
    refusing.requests.acquire()
    while not exporter.complaint:
        time.sleep(0.001)

    exporter.hurry()
    thread.join(30)
    exporter.shutdown()

    assert not thread.is_alive()
    assert refusing.count == 1


@pytest.mark.parametrize(
    ("protocol", "module"),
    [("", "http"), ("http/protobuf", "http"), ("grpc", "grpc"), ("http/json", "http")],
)
def test_otlp_exporter_heeds_the_protocol(
    monkeypatch: pytest.MonkeyPatch, protocol: str, module: str
) -> None:
    """The SDK's own exporter for the protocol the environment names; OTLP's default is HTTP."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")

    exporter = otlp_exporter()
    kind = type(exporter.inner)
    exporter.shutdown()

    assert f".proto.{module}." in kind.__module__
