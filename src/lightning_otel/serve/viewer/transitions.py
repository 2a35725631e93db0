"""The transitions: each with what it was worth and why, and every call that became none."""

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lightning_otel.dataset import Store
from lightning_otel.messages import plain_text
from lightning_otel.serve.viewer import page
from lightning_otel.serve.viewer.selection import SelectionForm, list_formats, read_selection
from lightning_otel.store.sql import ROLLOUT
from lightning_otel.types import Credited, Dropped, Report, Transition
from lightning_otel.types.transitions import distinct
from lightning_otel.views.options import TRANSITIONS

TEXT: Final = 240
"""Characters shown of what was seen or done; the trace has all of it."""
ROLLOUTS: Final = 1000
"""Rollouts that are read for a page; the next ones are a link away."""
_FEW: Final = 5
"""Calls shown of each reason, until one is asked for."""
MANY: Final = 200
"""Calls of the one that is asked for, a part at a time."""
PARAMETERS: Final = ("page", "reason", "dropped", "after", "rollouts")
_NEWEST_FIRST: Final = (
    "min(start_ns) OVER (PARTITION BY rollout_id) DESC, rollout_id, attempt_id, agent, branch, "
    "step, start_ns"
)

# From the newest on: where those that are left out end, and the last that is read.
_WINDOW: Final = f"""
WITH begun AS (SELECT {ROLLOUT} AS rollout_id, min(start_ns) AS start_ns FROM spans GROUP BY 1),
times AS (
  SELECT list_reverse_sort(list(start_ns)) AS starts, count(*) AS total FROM begun
  WHERE (?::BIGINT IS NULL OR start_ns >= ?) AND (?::BIGINT IS NULL OR start_ns < ?))
SELECT total, starts[?] AS until_ns, starts[?] AS since_ns FROM times
"""


@page.with_form_faults
async def transitions(request: Request) -> Response:
    """The page."""
    number = page.page_number(request)
    reason = page.text(request, "reason")
    part = page.integer(request, "dropped", 1, 1, 1_000_000)
    first = page.integer(request, "after", 0, 0, 10**9)
    is_all = page.choice(request, "rollouts", ("newest", "all")) == "all"

    def read(store: Store) -> Mapping[str, object]:
        selection = read_selection(request, store, PARAMETERS, TRANSITIONS)
        content = {"filters": TRANSITIONS, "query_of": selection.query}
        if page.faults_of(request):
            return content
        is_whole = is_all or not selection.query.keys().isdisjoint(("rollout_id", "selection"))
        within = None if is_whole else _find_window(store, selection, first)
        table = store.transitions(
            bodies=False, **{**selection.keywords, **(within or {}).get("times", {})}
        )
        rows, total = table.page(_NEWEST_FIRST, page.ROWS, (number - 1) * page.ROWS)
        report = table.report()
        return {
            **content,
            "rows": _make_rows(store, selection, rows),
            "total": total,
            "size": page.ROWS,
            "number": number,
            "has_advantage": "advantage" in selection.keywords,
            "report": report,
            "lost": sum(drop.noun == "call" for drop in report.dropped),
            "reasons": list(_count_reasons(report, reason, part)),
            "reason": reason,
            "dropped_page": part,
            "many": MANY,
            "repairs": Counter(repair.rule for repair in report.repairs),
            "formats": list_formats(),
            "command": selection.command(store),
            "within": within,
        }

    return await page.answer(request, "transitions.html", read, title="Transitions")


def _find_window(store: Store, selection: SelectionForm, first: int) -> dict[str, Any] | None:
    """Find the newest rollouts of a selection after so many newer ones; None if that is all."""
    since_ns, until_ns = selection.keywords.get("since"), selection.keywords.get("until")
    bounds = [since_ns, since_ns, until_ns, until_ns]
    (row,) = store.sql(_WINDOW, [*bounds, first, first + ROLLOUTS]).rows()
    is_more = row["total"] > first + ROLLOUTS
    if not is_more and not first:
        return None
    times = {
        "since": row["since_ns"] if is_more else since_ns,
        "until": row["until_ns"] if first else until_ns,
    }
    return {"times": times, "rollouts": row["total"], "first": first, "size": ROLLOUTS}


def _count_reasons(report: Report, whole: str, part: int) -> Iterator[dict[str, object]]:
    groups: dict[tuple[str, str], list[Dropped]] = {}
    for drop in report.dropped:
        groups.setdefault((drop.noun, drop.reason), []).append(drop)
    many = slice((part - 1) * MANY, part * MANY)
    for (noun, why), entries in sorted(groups.items(), key=lambda item: -len(item[1])):
        visible = entries[many if why == whole else slice(_FEW)]
        yield {"noun": noun, "reason": why, "entries": visible, "total": len(entries)}


_UNTOLD: Final[Mapping[str, object]] = {"observation": "", "action": "", "credits": ()}
TOO_LARGE_TEXTS: Final[Mapping[str, object]] = {**_UNTOLD, "observation": page.TOO_LARGE}


def _make_rows(
    store: Store, selection: SelectionForm, rows: Collection[Mapping[str, Any]]
) -> list[Mapping[str, object]]:
    contents = _read_contents(store, selection, rows)
    return [
        {
            **row,
            "resources": json.loads(row["resources"] or "{}"),
            **contents.get((row["trace_id"], row["span_id"]), _UNTOLD),
        }
        for row in rows
    ]


def _read_contents(
    store: Store, selection: SelectionForm, rows: Collection[Mapping[str, Any]]
) -> dict[tuple[str, str], Mapping[str, object]]:
    keys = {(row["trace_id"], row["span_id"]) for row in rows}
    if not keys:
        return {}
    rollout_ids = list(dict.fromkeys(row["rollout_id"] for row in rows))
    ids = page.select_small(store, rollout_ids)
    contents: dict[tuple[str, str], Mapping[str, object]] = {
        (row["trace_id"], row["span_id"]): TOO_LARGE_TEXTS
        for row in rows
        if row["rollout_id"] not in ids
    }
    if not ids:
        return contents
    for adaptation in store.adapt(**{**selection.adapting, "rollout_id": ids}):
        credits = credits_of(adaptation.credited)
        for step, _ in distinct(adaptation.trajectories):
            if (key := (step.trace_id, step.span_id)) in keys:
                contents[key] = shorten_step(step, credits)
    return contents


def shorten_step(
    step: Transition, credits: Mapping[str, Sequence[Credited]]
) -> Mapping[str, object]:
    """Shorten the observation, action and rewards of a step."""
    return {
        "observation": cut(plain_text(step.observation[-1:])),
        "action": cut(plain_text(step.action[:1])),
        "credits": credits.get(step.span_id, ()),
    }


def credits_of(credited: Iterable[Credited]) -> dict[str, list[Credited]]:
    """The rewards that reached each call, by its span id."""
    credits: dict[str, list[Credited]] = {}
    for credit in credited:
        for call in credit.calls:
            credits.setdefault(call, []).append(credit)
    return credits


def cut(text: str, most: int = TEXT) -> str:
    """Return a text of so many characters at most."""
    return text if len(text) <= most else text[: most - 1] + "…"


ROUTES: Final[list[Route]] = [Route("/transitions", transitions, methods=["GET"])]
