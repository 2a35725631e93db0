"""The ways in: each a command line under which a program that knows nothing of us is recorded."""

import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span

WITHIN_AUTO_TRACE = """\
import runpy, sys, lightning_otel
sys.argv = sys.argv[1:]
with lightning_otel.auto_trace():
    runpy.run_path(sys.argv[0], run_name="__main__")
"""
WAYS: Mapping[str, tuple[str, ...]] = {
    "auto_trace": (sys.executable, "-c", WITHIN_AUTO_TRACE),
    "run": (sys.executable, "-m", "lightning_otel", "run", "--", "python"),
    "opentelemetry-instrument": (
        str(Path(sys.executable).with_name("opentelemetry-instrument")),
        "--traces_exporter",
        "duckdb",
        sys.executable,
    ),
}


class Start:
    """Starts a program in one of the ways, with a store of its own."""

    def __init__(self, way: str, store: Path) -> None:
        self.command = WAYS[way]
        self.store = store
        self.environment = {**os.environ, "LIGHTNING_OTEL_STORE": str(store)}

    def export_to(self, endpoint: str) -> None:
        """Let spans go out by OTLP too."""
        self.command = tuple("duckdb,otlp" if word == "duckdb" else word for word in self.command)
        self.environment["OTEL_EXPORTER_OTLP_ENDPOINT"] = endpoint
        self.environment["OTEL_EXPORTER_OTLP_PROTOCOL"] = "http/protobuf"

    def __call__(self, program: Path, *args: object, **options: Any) -> "subprocess.Popen[str]":
        """The started process; its streams are pipes unless told otherwise."""
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        return subprocess.Popen(
            [str(word) for word in (*self.command, program, *args)],
            env=self.environment,
            encoding="utf-8",
            **{**streams, **options},
        )

    def put_under_run(self) -> None:
        """Start what is started under ``lightning-otel run``."""
        self.command = (*WAYS["run"][:-1], *self.command)

    def configure_sdk(self, folder: Path) -> None:
        """Register the SDK's own configurator, as opentelemetry-distro does."""
        info = folder / "a_distro-1.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: a-distro\nVersion: 1\n")
        (info / "entry_points.txt").write_text(
            "[opentelemetry_configurator]\n"
            "configurator = opentelemetry.sdk._configuration:_OTelSDKConfigurator\n"
        )
        path = self.environment.get("PYTHONPATH")
        self.environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), path]))


@pytest.fixture
def starter(tmp_path: Path) -> Callable[[str], Start]:
    """Gives what starts programs in a way."""
    return lambda way: Start(way, tmp_path / "ways" / "traces.duckdb")


class Collector:
    """Speaks the Collector's side of OTLP/HTTP and keeps every span it accepted."""

    def __init__(self) -> None:
        self.is_refusing = False
        self.refused = threading.Event()
        self.spans: list[Span] = []
        self._server: ThreadingHTTPServer | None = None

    def __enter__(self) -> "Collector":
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                status = collector.take(body) if self.path == "/v1/traces" else 404
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(status)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: object) -> None:
                """Print nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._server is not None
        self._server.shutdown()
        self._server.server_close()

    @property
    def endpoint(self) -> str:
        """What to put into ``OTEL_EXPORTER_OTLP_ENDPOINT``."""
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def take(self, body: bytes) -> int:
        """The status for a request, whose spans are kept unless it is refused."""
        if self.is_refusing:
            self.refused.set()
            return 503
        request = ExportTraceServiceRequest.FromString(body)
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.spans += scope.spans
        return 200

    def counts(self) -> Counter[tuple[str, str]]:
        """How often each span came."""
        return Counter((span.trace_id.hex(), span.span_id.hex()) for span in self.spans)

    def keys(self) -> set[str]:
        """Every attribute key that came."""
        return {attribute.key for span in self.spans for attribute in span.attributes}


@pytest.fixture
def collector() -> Iterator[Collector]:
    """A running collector."""
    with Collector() as running:
        yield running
