"""The list of traces: filtered, searched, by pages, and renewed when something happens."""

import math
import re
from collections.abc import Mapping
from typing import Final
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lightning_otel.dataset import Store
from lightning_otel.errors import NotFoundError
from lightning_otel.serve.answers import RefusalError
from lightning_otel.serve.viewer import page
from lightning_otel.views.trace_filters import STATUSES, TraceFilter
from lightning_otel.views.traces import Cursor, find_traces

ROWS: Final = 50
"""Traces on a page."""
_YES_NO: Final = ("", "yes", "no")
_ORIGINS: Final = ("", "own", "received")
_NUMBER: Final = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d{1,3})?")
_CURSOR: Final = re.compile(r"(\d{1,19})-([^\0]{0,200})")
_ID: Final = re.compile(r"[0-9a-f]{6,32}|@last|[A-Za-z0-9_.:]+-[A-Za-z0-9_.:-]{4,}")
"""What may begin an id: of a trace or span, of a response, such as ``chatcmpl-…``, of a rollout."""
_FILTERS: Final = (
    "agent", "model", "status", "rewarded", "min_reward", "max_reward", "error", "since", "until",
    "version", "origin",
)  # fmt: skip


async def show(request: Request) -> Response:
    """The list; or what an id that is searched for names."""
    wanted, after = _parse_filter(request), _parse_cursor(request)
    if _ID.fullmatch(wanted.text):
        place = await page.run(request, lambda store: _find_address(store, wanted.text))
        if place is not None:
            return page.see(place)

    def read(store: Store) -> Mapping[str, object]:
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


def _parse_filter(request: Request) -> TraceFilter:
    """Parse the query into a filter.

    Raises:
        RefusalError: It cannot be understood.
    """
    given = request.query_params
    status = page.choice(request, "status", ("", *STATUSES))
    since, until = page.time(request, "since"), page.time(request, "until")
    origin = page.choice(request, "origin", _ORIGINS)
    return TraceFilter(
        agent=page.text(request, "agent") or None,
        model=page.text(request, "model") or None,
        status=next((each for each in STATUSES if each == status), None),
        rewarded=_parse_flag(request, "rewarded"),
        min_reward=_parse_number(given.get("min_reward", ""), "min_reward"),
        max_reward=_parse_number(given.get("max_reward", ""), "max_reward"),
        has_error=_parse_flag(request, "error"),
        since_ns=since,
        until_ns=until,
        resource_version=page.text(request, "version") or None,
        received=None if not origin else origin == "received",
        text=page.text(request, "q"),
    )


def _parse_flag(request: Request, name: str) -> bool | None:
    given = page.choice(request, name, _YES_NO)
    return None if not given else given == "yes"


def _parse_number(given: str, name: str) -> float | None:
    given = given.strip()
    if not given:
        return None
    if len(given) > 40 or _NUMBER.fullmatch(given) is None or not math.isfinite(float(given)):
        raise RefusalError(400, f"{name} is a number such as 0.5; change the address")
    return float(given)


def _parse_cursor(request: Request) -> Cursor | None:
    given = request.query_params.get("after", "")
    if not given:
        return None
    match = _CURSOR.fullmatch(given)
    if match is None or int(match[1]) >= 1 << 63:
        raise RefusalError(400, "after is what a page's link to the next one says; follow that")
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
        return f"/rollouts/{quote(whole, safe='')}"
    at = f"/traces/{quote(found['trace_id'], safe='')}"
    return at if column == "trace_id" else f"{at}?span={quote(found['span_id'], safe='')}"


ROUTES: Final[list[Route]] = [Route("/traces", show, methods=["GET"])]
