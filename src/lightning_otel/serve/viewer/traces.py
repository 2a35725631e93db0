"""The list of traces: filtered, searched, by pages, and renewed when something happens."""

import re
from typing import Final
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from lightning_otel.dataset import Store
from lightning_otel.errors import NotFoundError
from lightning_otel.serve.viewer import page
from lightning_otel.serve.viewer.urls import Links, page_path
from lightning_otel.views.traces import TRACE_SEARCH

_ID: Final = re.compile(r"[0-9a-f]{6,32}|@last|[A-Za-z0-9_.:]+-[A-Za-z0-9_.:-]{4,}")
"""What may begin an id: of a trace or span, of a response, such as ``chatcmpl-…``, of a rollout."""


@page.with_form_faults
async def show(request: Request) -> Response:
    """The list; or what an id that is searched for names."""
    text = page.text(request, "q")
    if _ID.fullmatch(text):
        place = await page.run(request, lambda store: _find_address(store, text))
        if place is not None:
            return page.see(place)
    return await page.answer_list(request, "traces.html", TRACE_SEARCH, title="Traces")


def _find_address(store: Store, prefix: str) -> str | None:
    try:
        noun, whole = store.find(prefix)
    except NotFoundError:
        return None
    column = {"rollout": "trace_id", "trace": "trace_id"}.get(noun, f"{noun}_id")
    query = f"SELECT trace_id, span_id FROM spans WHERE {column} = ? ORDER BY start_ns LIMIT 1"
    match = next(iter(store.sql(query, [whole])), None)
    if match is None:
        return page_path("rollouts", whole)
    span_id = None if column == "trace_id" else match["span_id"]
    return Links.to(match["trace_id"])(span=span_id)


async def redirect_conversation(request: Request) -> Response:
    """Redirect an address of the former list of conversations to the search for the id."""
    conversation_id = request.path_params.get("conversation_id", "")
    query = f"?{urlencode({'q': conversation_id})}" if conversation_id else ""
    return RedirectResponse(f"/traces{query}", 308)


ROUTES: Final[list[Route]] = [
    Route("/traces", show, methods=["GET"]),
    Route("/conversations", redirect_conversation, methods=["GET"]),
    Route("/conversations/{conversation_id:path}", redirect_conversation, methods=["GET"]),
]
