"""An OTLP endpoint on loopback that decodes what it is sent and answers as it is told."""

import gzip
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from http.server import ThreadingHTTPServer
from typing import NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from tests.listening import Handler


class Reply(NamedTuple):
    """What an endpoint answers; with a status below 300 the spans are taken."""

    status: int = 200
    body: bytes = b""
    kind: str = "application/x-protobuf"
    headers: tuple[tuple[str, str], ...] = ()
    hang: threading.Event | None = None


def partial(rejected: int, message: str) -> bytes:
    answer = ExportTraceServiceResponse()
    answer.partial_success.rejected_spans = rejected
    answer.partial_success.error_message = message
    return bytes(answer.SerializeToString())


class Endpoint:
    """Keeps every span it took, and the headers and sizes of all requests."""

    def __init__(self, port: int = 0) -> None:
        self.reply: Callable[[Sequence[Span], int], Reply] = lambda spans, size: Reply()
        self.spans: list[Span] = []
        self.resources: list[object] = []
        self.sizes: list[int] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.asked = threading.Semaphore(0)
        self._lock = threading.Lock()  # guards what threads of several requests note
        endpoint = self

        class Decoder(Handler):
            def do_POST(self) -> None:
                endpoint.answer(self)

        self.server = ThreadingHTTPServer(("127.0.0.1", port), Decoder)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def answer(self, handler: Handler) -> None:
        body = handler.read_body()
        if handler.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        request = ExportTraceServiceRequest.FromString(body)
        spans = [
            span
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        reply = self.reply(spans, len(body))
        with self._lock:
            self.paths.append(handler.path)
            self.headers.append({key.lower(): value for key, value in handler.headers.items()})
            if spans:
                self.sizes.append(len(spans))
            if reply.status < 300:
                self.spans += spans
                self.resources += [each.resource for each in request.resource_spans]
        self.asked.release()
        if reply.hang is not None:
            reply.hang.wait(30)
        try:
            handler.send(reply.body, reply.kind, reply.status, reply.headers)
        except OSError:
            return  # whoever asked has gone

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def counts(self) -> Counter[str]:
        return Counter(span.span_id.hex() for span in self.spans)

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
