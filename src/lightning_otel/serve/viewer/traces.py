"""The list of traces: filtered, searched, by pages, and renewed when something happens."""

import re
from collections.abc import Mapping
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lightning_otel.dataset import Store
from lightning_otel.errors import NotFoundError
from lightning_otel.serve.responses import RefusalError
from lightning_otel.serve.viewer import page
from lightning_otel.serve.viewer.urls import Links, page_path
from lightning_otel.views.traces import STATUSES, Cursor, TraceFilter, find_traces

ROWS: Final = 50
"""Traces on a page."""
_CURSOR: Final = re.compile(r"(\d{1,19})-([^\0]{0,200})")
_ID: Final = re.compile(r"[0-9a-f]{6,32}|@last|[A-Za-z0-9_.:]+-[A-Za-z0-9_.:-]{4,}")
"""What may begin an id: of a trace or span, of a response, such as ``chatcmpl-…``, of a rollout."""
_FILTERS: Final = (
    "agent", "model", "status", "rewarded", "min_reward", "max_reward", "error", "since", "until",
    "version", "origin",
)  # fmt: skip


@page.with_form_faults
async def show(request: Request) -> Response:
    """The list; or what an id that is searched for names."""
    text, after = page.text(request, "q"), _parse_cursor(request)
    flags = {"yes": True, "no": False, "own": False, "received": True}
    wanted = TraceFilter(
        agent=page.text(request, "agent") or None,
        model=page.text(request, "model") or None,
        status=page.choice(request, "status", ("", *STATUSES)) or None,
        rewarded=flags.get(page.choice(request, "rewarded", ("", "yes", "no"))),
        has_error=flags.get(page.choice(request, "error", ("", "yes", "no"))),
        since_ns=page.time(request, "since"),
        until_ns=page.time(request, "until"),
        resource_version=page.text(request, "version") or None,
        received=flags.get(page.choice(request, "origin", ("", "own", "received"))),
        min_reward=page.decimal(request, "min_reward"),
        max_reward=page.decimal(request, "max_reward"),
        text=text,
    )
    if _ID.fullmatch(text):
        place = await page.run(request, lambda store: _find_address(store, text))
        if place is not None:
            return page.see(place)

    def read(store: Store) -> Mapping[str, object]:
        if page.faults_of(request):
            return {"statuses": STATUSES, "has_filter": True}
        found = find_traces(store.source, wanted, after=after, limit=ROWS)
        following = found.following
        return {
            "found": found,
            "is_first": after is None,
            "next": None if following is None else f"{following.start_ns}-{following.trace_id}",
            "has_filter": any(request.query_params.get(name) for name in _FILTERS),
            "statuses": STATUSES,
        }

    return await page.answer(request, "traces.html", read, title="Traces")


def _parse_cursor(request: Request) -> Cursor | None:
    given = request.query_params.get("after", "")
    if not given:
        return None
    match = _CURSOR.fullmatch(given)
    if match is None or int(match[1]) >= 1 << 63:
        raise RefusalError(400, "after is not a place in the list; follow a link to older traces")
    return Cursor(int(match[1]), match[2])


def _find_address(store: Store, prefix: str) -> str | None:
    """The address of what an id or its beginning names; None where several things are, or none."""
    try:
        noun, whole = store.find(prefix)
    except NotFoundError:
        return None
    column = {"rollout": "trace_id", "trace": "trace_id"}.get(noun, f"{noun}_id")
    query = f"SELECT trace_id, span_id FROM spans WHERE {column} = ? ORDER BY start_ns LIMIT 1"
    found = next(iter(store.sql(query, [whole])), None)
    if found is None:
        return page_path("rollouts", whole)
    span_id = None if column == "trace_id" else found["span_id"]
    return Links.to(found["trace_id"])(span=span_id)


ROUTES: Final[list[Route]] = [Route("/traces", show, methods=["GET"])]
