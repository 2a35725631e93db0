"""Spans in by OTLP/HTTP and OTLP/gRPC, logs by HTTP, each answered in the sender's own format.

gRPC comes on the same port: five bytes before a message and a status in the trailers, instead of a
library of 19 MB.
Source: OTLP 1.x, "OTLP/HTTP Response"; "gRPC over HTTP2" of grpc.io.
"""

from typing import Final
from urllib.parse import quote

import orjson
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from lightning_otel.serve.responses import (
    CODES,
    INVALID_ARGUMENT,
    JSON,
    PROTOBUF,
    RefusalError,
    base_type,
    said,
)

_SERVICES: Final = "/opentelemetry.proto.collector."
EXPORT: Final = f"{_SERVICES}trace.v1.TraceService/Export"
GRPC_TYPES: Final = ("application/grpc", "application/grpc+proto")
"""Content types of a call. No web page can send one without being asked about."""
_UNIMPLEMENTED: Final = 12
_HEAD_BYTES: Final = 5
_COMPRESSED: Final = ("gzip", "deflate")
LOGS: Final = "/v1/logs"


async def traces(request: Request) -> Response:
    """Take spans, or logs of GenAI events, by OTLP/HTTP; 200 says that they are in a segment."""
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "", *_COMPRESSED):
        raise RefusalError(415, "a body is sent as it is, or as gzip or deflate")
    kind = base_type(request.headers.get("content-type"))
    body = await request.app.state.bodies.read(request)
    count, message, answer = await _take_spans(
        request, body, kind, is_compressed=encoding in _COMPRESSED
    )
    if kind != JSON:
        return Response(answer, media_type=PROTOBUF)
    name = "rejectedLogRecords" if request.url.path == LOGS else "rejectedSpans"
    partial = {"partialSuccess": {name: str(count), "errorMessage": message}}
    return Response(orjson.dumps(partial if count else {}), media_type=JSON)


async def export(request: Request) -> Response:
    """Take spans by OTLP/gRPC, likewise."""
    body = await request.app.state.bodies.read(request)
    if len(body) < _HEAD_BYTES or int.from_bytes(body[1:_HEAD_BYTES]) != len(body) - _HEAD_BYTES:
        raise RefusalError(400, "the call holds no message, or more than one")
    is_compressed = body[0] == 1
    if is_compressed and request.headers.get("grpc-encoding") not in _COMPRESSED:
        raise RefusalError(415, "a message is sent as it is, or as gzip or deflate")
    _, _, answer = await _take_spans(
        request, body[_HEAD_BYTES:], PROTOBUF, is_compressed=is_compressed
    )
    return _CallAnswer(b"\0" + len(answer).to_bytes(_HEAD_BYTES - 1) + answer, 0, "")


async def _take_spans(
    request: Request, body: bytes, kind: str, *, is_compressed: bool
) -> tuple[int, str, bytes]:
    """Return how many spans were rejected, why, and OTLP's answer that says so."""
    state, peer = request.app.state, request.client.host if request.client else ""
    came = f"{'otlp+token' if state.access.token else 'otlp'}:{peer}"
    is_logs = request.url.path == LOGS
    rejected = await state.ingester.take(
        body, kind, is_compressed=is_compressed, is_logs=is_logs, came=came
    )
    answer = ExportLogsServiceResponse() if is_logs else ExportTraceServiceResponse()
    count, message = sum(rejected.values()), said(rejected)
    if count:
        name = "rejected_log_records" if is_logs else "rejected_spans"
        setattr(answer.partial_success, name, count)
        answer.partial_success.error_message = message
    return count, message, answer.SerializeToString()


def is_call(request: Request) -> bool:
    """Return whether a request is an OTLP gRPC call."""
    if request.scope["http_version"] != "2" or not request.url.path.startswith(_SERVICES):
        return False
    return base_type(request.headers.get("content-type")) in GRPC_TYPES


def refuse_call(refusal: RefusalError) -> Response:
    """Return the answer that a call is not served."""
    if refusal.status == 404:
        return _CallAnswer(b"", _UNIMPLEMENTED, "this server takes traces; send nothing else")
    return _CallAnswer(b"", CODES.get(refusal.status, INVALID_ARGUMENT), str(refusal))


class _CallAnswer(Response):
    def __init__(self, body: bytes, code: int, message: str) -> None:
        super().__init__(body, media_type=GRPC_TYPES[0])
        del self.headers["content-length"]
        self._trailers = [(b"grpc-status", str(code).encode())]
        if message:
            self._trailers.append((b"grpc-message", quote(message, safe=" ;:,.()'/").encode()))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send({**start, "trailers": True})
        await send({"type": "http.response.body", "body": self.body})
        await send({"type": "http.response.trailers", "headers": self._trailers})


ROUTES: Final[list[Route]] = [
    Route("/v1/traces", traces, methods=["POST"]),
    Route(LOGS, traces, methods=["POST"]),
    Route(EXPORT, export, methods=["POST"]),
]
