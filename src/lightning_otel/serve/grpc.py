"""OTLP/gRPC on the same port: one unary call, whose frames HTTP/2 carries as they are.

A gRPC library would bring 19 MB and a server of its own beside the guard; of what it does this
needs five bytes before a message and a status in the trailers.
Source: "gRPC over HTTP2" of grpc.io; ``trace_service.proto`` of OTLP 1.x.
"""

from collections.abc import Mapping
from typing import Final
from urllib.parse import quote

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lightning_otel.serve.answers import CODES, INVALID_ARGUMENT, RefusalError, base_type, said

_SERVICES: Final = "/opentelemetry.proto.collector."
EXPORT: Final = f"{_SERVICES}trace.v1.TraceService/Export"
MEDIA_TYPES: Final = ("application/grpc", "application/grpc+proto")
"""What a call's content is. No web page can send it without being asked about."""
_UNIMPLEMENTED: Final = 12
_HEAD_BYTES: Final = 5
_COMPRESSED: Final = ("gzip", "deflate")


def is_call(request: Request) -> bool:
    """Return whether a request is an OTLP gRPC call."""
    if request.scope["http_version"] != "2" or not request.url.path.startswith(_SERVICES):
        return False
    return base_type(request.headers.get("content-type")) in MEDIA_TYPES


def message_of(request: Request, body: bytes) -> tuple[bytes, bool]:
    """The one message of a call, and whether it is compressed.

    Raises:
        RefusalError: It is none, or compressed in another way.
    """
    if len(body) < _HEAD_BYTES or int.from_bytes(body[1:_HEAD_BYTES]) != len(body) - _HEAD_BYTES:
        raise RefusalError(400, "the call holds no message, or more than one")
    is_compressed = body[0] == 1
    if is_compressed and request.headers.get("grpc-encoding") not in _COMPRESSED:
        raise RefusalError(415, "a message is sent as it is, or as gzip or deflate")
    return body[_HEAD_BYTES:], is_compressed


def accepted(rejected: Mapping[str, int]) -> Response:
    """The answer that the spans are kept, but for those rejected with a reason each."""
    answer = ExportTraceServiceResponse()
    if rejected:
        answer.partial_success.rejected_spans = sum(rejected.values())
        answer.partial_success.error_message = said(rejected)
    message = answer.SerializeToString()
    return _Answer(b"\0" + len(message).to_bytes(_HEAD_BYTES - 1) + message, 0, "")


def refused(refusal: RefusalError) -> Response:
    """The answer that a call is not served."""
    if refusal.status == 404:
        return _Answer(b"", _UNIMPLEMENTED, "this server takes traces; send nothing else")
    return _Answer(b"", CODES.get(refusal.status, INVALID_ARGUMENT), str(refusal))


class _Answer(Response):
    """An answer that ends with a gRPC status."""

    def __init__(self, body: bytes, code: int, message: str) -> None:
        super().__init__(body, media_type=MEDIA_TYPES[0])
        del self.headers["content-length"]
        self._trailers = [(b"grpc-status", str(code).encode())]
        if message:
            self._trailers.append((b"grpc-message", quote(message, safe=" ;:,.()'/").encode()))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send({**start, "trailers": True})
        await send({"type": "http.response.body", "body": self.body})
        await send({"type": "http.response.trailers", "headers": self._trailers})
