"""The web app: its routes, a plain list, behind the guard.

A route finds what it needs of this server in ``request.app.state``, and refuses by raising a
``RefusalError`` or an error of ours: a page for people, OTLP's own form for programs.
"""

from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from typing import Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp

from lightning_otel.dataset import Store
from lightning_otel.errors import LightningOtelError
from lightning_otel.rewards.totals import StoreTotals
from lightning_otel.serve import otlp, responses
from lightning_otel.serve.api import ROUTES as API
from lightning_otel.serve.api.cache import CachedRead
from lightning_otel.serve.api.events import EventBroker
from lightning_otel.serve.api.repositories import Repositories
from lightning_otel.serve.bodies import Bodies
from lightning_otel.serve.guard import Access, Guard
from lightning_otel.serve.ingest import Ingester
from lightning_otel.serve.responses import RefusalError
from lightning_otel.serve.streaming import Streams
from lightning_otel.serve.viewer import ROUTES as PAGES
from lightning_otel.serve.viewer import page
from lightning_otel.serve.viewer.trace import drop_traces

_REASONS: Final = {
    404: "there is nothing at this address; see the pages above, or GET /openapi.json",
    405: "this address is asked in another way; see GET /openapi.json",
}
_SUMMARY_S: Final = 60.0
"""Seconds for which a period counts as ending now."""
_MOST_STREAMS: Final = 8
"""Long answers of the API under way: each has a DuckDB."""


def make_app(
    store: Store,
    ingester: Ingester,
    access: Access,
    repositories: Repositories,
    broker: EventBroker,
) -> ASGIApp:
    """Make the app that serves a store, behind the guard."""
    app = Starlette(
        routes=[*PAGES, *otlp.ROUTES, *API],
        exception_handlers={
            **dict.fromkeys((RefusalError, LightningOtelError, HTTPException), refuse),
            ClientDisconnect: leave,
            500: fail,
        },
    )
    state = app.state
    state.store, state.ingester, state.access = store, ingester, access
    state.bodies = Bodies()
    state.readers = page.Readers()
    state.long_readers = page.Readers(page.LONG_AT_ONCE, drop_traces)
    state.funnel = CachedRead[Mapping[str, object]]()
    state.summaries = defaultdict[object, CachedRead[Mapping[str, object]]](
        partial(CachedRead, most_s=_SUMMARY_S)
    )
    state.curves = defaultdict[tuple[str, ...], CachedRead[Mapping[str, object]]](CachedRead)
    # Anybody here may give feedback: however much that is, who has the key is not kept waiting.
    state.feedback_readers = page.Readers()
    state.repositories, state.events = repositories, broker
    state.streams = Streams(_MOST_STREAMS)
    state.learned_reads, state.rollout_by_span, state.export_counts = {}, {}, {}
    state.totals, state.by_status = CachedRead[StoreTotals](), CachedRead[dict[str, int]]()
    return Guard(app, access, refused)


async def refuse(request: Request, error: Exception) -> Response:
    """Answer a request that a route does not serve, or for which there is none."""
    if isinstance(error, HTTPException):
        reason = _REASONS.get(error.status_code, error.detail)
        error = RefusalError(error.status_code, reason, error.headers)
    elif isinstance(error, LightningOtelError):
        error = responses.refusal_of(error)
    assert isinstance(error, RefusalError)
    request.app.state.ingester.counts.refused[error.status] += 1
    return refused(request, error)


async def leave(request: Request, error: Exception) -> Response:
    """Answer nobody: who asked has gone, and was not refused."""
    return Response()


async def fail(request: Request, error: Exception) -> Response:
    """Answer after a fault of ours, which the log tells of; the request learns nothing."""
    return refused(request, RefusalError(500, "this failed; the server's log says why"))


def refused(request: Request, refusal: RefusalError) -> Response:
    """Return a refusal as its reader expects it."""
    if otlp.is_call(request):
        return otlp.refuse_call(refusal)
    if page.is_for_people(request):
        return page.refused(request, refusal)
    return responses.refused(responses.base_type(request.headers.get("content-type")), refusal)
