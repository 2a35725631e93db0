"""A real ``lightning-otel serve`` in a process of its own, and bodies to send to it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from tests.viewer.client import Answer, send

PROTOBUF, JSON = "application/x-protobuf", "application/json"
START_NS = 1_760_000_000_000_000_000


class Serving:
    """The server; ``url`` is where it listens."""

    def __init__(
        self,
        store: Path,
        *options: str,
        umask: int = -1,
        preexec_fn: Callable[[], object] | None = None,
    ) -> None:
        self.store = store
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lightning_otel", "serve", "--store", str(store), *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            umask=umask,
            preexec_fn=preexec_fn,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        self.port = int(self.url.rpartition(":")[2] or 0)
        key_file = store.with_name(store.name + ".d") / "viewer.key"
        self.key = key_file.read_text().strip() if key_file.exists() else ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, _: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate(timeout=20)

    def ask(self, method: str, path: str, body: bytes = b"", **headers: str) -> Answer:
        """The answer to a request, as ``send`` takes it."""
        return send(f"127.0.0.1:{self.port}", method, path, body or None, **headers)

    def post(self, body: bytes, content_type: str = PROTOBUF, **headers: str) -> Answer:
        return self.ask("POST", "/v1/traces", body, content_type=content_type, **headers)

    def memory_mb(self) -> float:
        """The most memory it had since it began."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(text.partition("VmHWM:")[2].split()[0]) / 1024

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Tell it to end; gives its exit code and what it said on stderr."""
        self.process.send_signal(number)
        _, said = self.process.communicate(timeout=20)
        return self.process.returncode, said


def request_of(count: int, name: str = "work", **attributes: str) -> ExportTraceServiceRequest:
    """A trace request of so many spans with fresh ids."""
    request = ExportTraceServiceRequest()
    scope = request.resource_spans.add().scope_spans.add()
    scope.scope.name = "some.library"
    now = time.time_ns()
    for index in range(count):
        span = scope.spans.add(
            trace_id=os.urandom(16),
            span_id=os.urandom(8),
            name=name,
            start_time_unix_nano=now + index,
            end_time_unix_nano=now + index + 5,
        )
        for key, value in attributes.items():
            span.attributes.add(key=key).value.string_value = value
    return request


def body_of(count: int, name: str = "work", **attributes: str) -> bytes:
    body: bytes = request_of(count, name, **attributes).SerializeToString()
    return body


def varint(number: int) -> bytes:
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes([*found, number])


def field(number: int, content: bytes) -> bytes:
    """A message as a field of another."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def deep_value(levels: int) -> bytes:
    """A value of so many lists within each other."""
    value = b""
    for _ in range(levels):
        value = field(5, field(1, value))
    return value
