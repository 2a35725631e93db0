"""Spans in by OTLP/HTTP and OTLP/gRPC."""

from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lightning_otel.serve import answers, grpc
from lightning_otel.serve.answers import RefusalError

_COMPRESSED: Final = ("gzip", "deflate")


async def traces(request: Request) -> Response:
    """Take spans by OTLP/HTTP; 200 says that they are in a segment."""
    state, headers = request.app.state, request.headers
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "", *_COMPRESSED):
        raise RefusalError(415, "a body is sent as it is, or as gzip or deflate")
    content_type = answers.base_type(headers.get("content-type"))
    body = await state.bodies.read(request)
    rejected = await state.intake.take(
        body,
        content_type,
        is_compressed=encoding in _COMPRESSED,
        came=_sender_of(request),
    )
    return answers.accepted(content_type, rejected)


async def export(request: Request) -> Response:
    """Take spans by OTLP/gRPC, likewise."""
    state = request.app.state
    message, is_compressed = grpc.message_of(request, await state.bodies.read(request))
    came = _sender_of(request)
    return grpc.accepted(
        await state.intake.take(message, answers.PROTOBUF, is_compressed=is_compressed, came=came)
    )


def _sender_of(request: Request) -> str:
    peer = request.client.host if request.client else ""
    return f"{'otlp+token' if request.app.state.has_token else 'otlp'}:{peer}"


ROUTES: Final[list[Route]] = [
    Route("/v1/traces", traces, methods=["POST"]),
    Route(grpc.EXPORT, export, methods=["POST"]),
]
