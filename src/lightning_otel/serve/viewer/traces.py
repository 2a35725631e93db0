"""The one list, by traces, rollouts or conversations: filtered, searched, chosen from, renewed."""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Final
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from lightning_otel.dataset import Store
from lightning_otel.errors import NotFoundError
from lightning_otel.serve.responses import RefusalError
from lightning_otel.serve.viewer import page
from lightning_otel.serve.viewer.urls import TraceLinks, page_path
from lightning_otel.store.sql import ROLLOUT
from lightning_otel.types.text import count_noun
from lightning_otel.views.nouns import CONVERSATIONS, FAILURES, ROLLOUTS
from lightning_otel.views.table import View
from lightning_otel.views.traces import CONVERSATION, TRACE_SEARCH

LISTS: Final[Mapping[str, View]] = {
    "traces": TRACE_SEARCH, "rollouts": ROLLOUTS, "conversations": CONVERSATIONS,
    "failures": FAILURES,
}  # fmt: skip
COLUMNS: Final = {
    "start_ns": "Started", "id": "ID", "title": "Input", "output": "Output", "status": "Status",
    "agents": "Agents", "models": "Models", "rollouts": "Rollouts", "attempts": "Attempts",
    "calls": "Calls", "tools": "Tools", "spans": "Spans", "tokens": "Tokens", "cost": "Cost",
    "duration": "Duration", "reward": "Reward",
}  # fmt: skip
_OF_ONE: Final = {"rollouts": "conversations", "attempts": "rollouts"}
"""Columns that one list alone has."""
_UNUSUAL: Final = frozenset({"id", "models", "tools", "spans"})
_ID: Final = re.compile(r"[0-9a-f]{6,32}|@last|[A-Za-z0-9_.:]+-[A-Za-z0-9_.:-]{4,}")
"""What may begin an id: of a trace or span, of a response, such as ``chatcmpl-…``, of a rollout."""
_MOST: Final = 1_000
_LONGEST: Final = 10_000
"""Characters of ids in an address, of which a server reads 16 KiB."""
_ROLLOUTS_OF: Final = f"""
SELECT DISTINCT {ROLLOUT} AS rollout_id FROM spans
WHERE {CONVERSATION} IN (SELECT unnest(?)) ORDER BY 1"""


@page.with_form_faults
async def show(request: Request) -> Response:
    """The list; or what an id that is searched for names."""
    of, text = request.url.path.strip("/"), page.text(request, "q")
    if _ID.fullmatch(text):
        place = await page.run(request, lambda store: _find_address(store, text))
        if place is not None:
            return page.see(place)
    columns = {name: label for name, label in COLUMNS.items() if _OF_ONE.get(name, of) == of}
    unusual = _UNUSUAL | (set() if of == "traces" else {"tokens"})
    chosen = request.query_params.getlist("show") or columns.keys() - unusual
    if unknown := sorted(set(chosen) - set(columns)):
        page.refuse_field(request, "show", f"no column {unknown[0]!r}; use {', '.join(columns)}")
    return await page.answer_list(
        request, "traces.html", LISTS[of], title=of.capitalize(), of=of, columns=columns,
        chosen=[name for name in columns if name in chosen], sorts=LISTS[of].sorts,
    )  # fmt: skip


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
    return TraceLinks.to(match["trace_id"])(span=span_id)


async def compare(request: Request) -> Response:
    """Lead to the comparison of the two rows that are chosen."""
    ids = list(dict.fromkeys(request.query_params.getlist("rollout")))
    if len(ids) != 2:
        raise RefusalError(400, f"{count_noun(len(ids), 'row')} chosen; choose two to compare")
    return page.see(f"{page_path('traces', ids[0], 'diff')}?{urlencode({'with': ids[1]})}")


def choose_rollouts(
    request: Request, others: Collection[str] = (), most: int | None = None
) -> Callable[[Store], tuple[list[str], bool]]:
    """Return what finds the rollouts that an address of a list chooses; True if more follow.

    They are those of the rows that are named (``rollout``), else those of a page of the list that
    match, or of all that match without ``most``.
    """
    number, of = page.page_number(request), page.choice(request, "of", tuple(LISTS))
    view = LISTS[of]
    values = page.read_filters(request, view.filters, ("of", "sort", "page", "rollout", *others))
    sort = page.sort_of(request, view)
    chosen = list(dict.fromkeys(request.query_params.getlist("rollout")))

    def find(store: Store) -> tuple[list[str], bool]:
        if chosen or page.faults_of(request):
            ids = chosen
            if of == "conversations":
                ids = [row["rollout_id"] for row in store.sql(_ROLLOUTS_OF, [chosen])]
            return ids[:most], len(ids) > (most or len(ids))
        # What a list shows of its rows is not read: they are named here.
        offset = (number - 1) * (most or 0)
        rows, total, _ = replace(view, add=None).read(
            store, values, limit=most, offset=offset, sort=sort
        )
        names = (name for row in rows for name in row.get("rollout_ids", (row["rollout_id"],)))
        return list(dict.fromkeys(names)), offset + len(rows) < total

    return find


async def export(request: Request) -> Response:
    """Lead to the export of the rows that are chosen, else of all that match the list's filters."""
    find = choose_rollouts(request, most=_MOST)
    of = page.choice(request, "of", tuple(LISTS))
    names = (*LISTS[of].filters, "rollout")
    options = {name: text for name in names if (text := page.text(request, name))}
    if not options.keys() <= {"since", "until"}:
        ids, is_more = await page.run(request, find)
        if not ids:
            raise RefusalError(400, f"no {of} match; change the filters")
        options = {"rollout_id": ",".join(ids)}
        if is_more or len(options["rollout_id"]) > _LONGEST:
            what = f"{len(ids):,} rollouts or more are too many for one address"
            raise RefusalError(400, f"{what}; choose some, or filter more")
    return page.see(f"/transitions/export?{urlencode(options)}")


async def redirect_conversation(request: Request) -> Response:
    """Redirect the address of a conversation to the traces that name it."""
    query = urlencode({"conversation": request.path_params["conversation_id"]})
    return RedirectResponse(f"/traces?{query}", 308)


ROUTES: Final[list[Route]] = [
    *(Route(f"/{noun}", show, methods=["GET"]) for noun in ("traces", "conversations")),
    Route("/compare", compare, methods=["GET"]),
    Route("/export", export, methods=["GET"]),
    Route("/conversations/{conversation_id:path}", redirect_conversation, methods=["GET"]),
]
