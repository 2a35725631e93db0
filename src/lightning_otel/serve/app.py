"""The web app: its routes, a plain list, behind the guard.

A route is a function of a request; what it needs of this server it finds in ``request.app.state``:
``store``, ``intake`` and ``bodies``.
"""

from importlib.metadata import version
from typing import Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from lightning_otel.serve import answers
from lightning_otel.serve.answers import RefusalError
from lightning_otel.serve.guard import Access, Bodies, Guard
from lightning_otel.serve.intake import Intake
from lightning_otel.store import Store

_COMPRESSED: Final = ("gzip", "deflate")


def make_app(store: Store, intake: Intake, access: Access) -> ASGIApp:
    """The app that serves a store."""
    app = Starlette(
        routes=[
            Route("/", about, methods=["GET"]),
            Route("/v1/traces", traces, methods=["POST"]),
            Route("/v1/{signal:str}", other_signal, methods=["POST"]),
        ],
        exception_handlers={RefusalError: refuse},
    )
    app.state.store = store
    app.state.intake = intake
    app.state.bodies = Bodies()
    app.state.has_token = bool(access.token)
    return Guard(app, access)


async def traces(request: Request) -> Response:
    """Take spans by OTLP/HTTP; 200 says that they are in a segment."""
    state, headers = request.app.state, request.headers
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "", *_COMPRESSED):
        raise RefusalError(415, "a body is sent as it is, or as gzip or deflate")
    content_type = answers.base_type(headers.get("content-type"))
    body = await state.bodies.read(request)
    peer = request.client.host if request.client else ""
    rejected = await state.intake.take(
        body,
        content_type,
        is_compressed=encoding in _COMPRESSED,
        came=f"{'otlp+token' if state.has_token else 'otlp'}:{peer}",
    )
    return answers.accepted(content_type, rejected)


async def other_signal(request: Request) -> Response:
    """Say that metrics and logs are not stored; a sender does not try again."""
    raise RefusalError(404, "only traces are taken here: POST /v1/traces")


async def about(request: Request) -> Response:
    """What this server is, and what became of what it was sent."""
    counts = request.app.state.intake.counts
    return JSONResponse(
        {
            "name": "lightning-otel",
            "version": version("lightning-otel"),
            "stored": counts.stored,
            "rejected": dict(counts.rejected),
            "refused": {str(status): count for status, count in counts.refused.items()},
        }
    )


async def refuse(request: Request, refusal: Exception) -> Response:
    """The answer to a request that a route does not serve."""
    assert isinstance(refusal, RefusalError)
    request.app.state.intake.counts.refused[refusal.status] += 1
    return answers.refused(answers.base_type(request.headers.get("content-type")), refusal)
