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
from lightning_otel.serve.viewer.size_limit import TOO_LARGE, select_small
from lightning_otel.store.sql import ROLLOUT
from lightning_otel.types import Credited, Dropped, Report, Transition
from lightning_otel.views.options import TRANSITIONS

TEXT: Final = 240
"""Characters shown of what was seen or done; the trace has all of it."""
ROLLOUTS: Final = 1000
"""Rollouts that are read for a page; the next ones are a link away."""
_FEW: Final = 5
"""Calls shown of each reason, until one is asked for."""
MANY: Final = 200
"""Calls of the one that is asked for, a part at a time."""
_PARAMETERS: Final = ("page", "reason", "dropped", "after", "rollouts")
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
    number = page.integer(request, "page", 1, 1, 10_000_000)
    reason = page.text(request, "reason")
    part = page.integer(request, "dropped", 1, 1, 1_000_000)
    first = page.integer(request, "after", 0, 0, 10**9)
    is_all = page.choice(request, "rollouts", ("newest", "all")) == "all"

    def read(store: Store) -> Mapping[str, object]:
        asked = read_selection(request, store, _PARAMETERS, TRANSITIONS)
        shown = {"filters": TRANSITIONS, "query_of": asked.query}
        if page.faults_of(request):
            return shown
        is_whole = is_all or "rollout_id" in asked.query
        within = None if is_whole else _find_window(store, asked, first)
        table = store.transitions(
            bodies=False, **{**asked.keywords, **(within or {}).get("times", {})}
        )
        rows, total = table.page(_NEWEST_FIRST, page.ROWS, (number - 1) * page.ROWS)
        report = table.report()
        return {
            **shown,
            "rows": _make_rows(store, asked, rows),
            "total": total,
            "size": page.ROWS,
            "number": number,
            "has_advantage": "advantage" in asked.keywords,
            "report": report,
            "lost": sum(each.noun == "call" for each in report.dropped),
            "reasons": list(_count_reasons(report, reason, part)),
            "reason": reason,
            "dropped_page": part,
            "many": MANY,
            "repairs": Counter(each.rule for each in report.repairs),
            "formats": list_formats(),
            "command": asked.command(store),
            "within": within,
        }

    return await page.answer(request, "transitions.html", read, title="Transitions")


def _find_window(store: Store, asked: SelectionForm, first: int) -> dict[str, Any] | None:
    """Find the newest rollouts of a selection after so many newer ones; None if that is all."""
    since_ns, until_ns = asked.keywords.get("since"), asked.keywords.get("until")
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
    found: dict[tuple[str, str], list[Dropped]] = {}
    for each in report.dropped:
        found.setdefault((each.noun, each.reason), []).append(each)
    many = slice((part - 1) * MANY, part * MANY)
    for (noun, why), entries in sorted(found.items(), key=lambda item: -len(item[1])):
        shown = entries[many if why == whole else slice(_FEW)]
        yield {"noun": noun, "reason": why, "entries": shown, "total": len(entries)}


_UNTOLD: Final[Mapping[str, object]] = {"observation": "", "action": "", "credits": ()}
TOO_LARGE_TEXTS: Final[Mapping[str, object]] = {**_UNTOLD, "observation": TOO_LARGE}


def _make_rows(
    store: Store, asked: SelectionForm, rows: Collection[Mapping[str, Any]]
) -> list[Mapping[str, object]]:
    told = _read_contents(store, asked, rows)
    return [
        {
            **row,
            "resources": json.loads(row["resources"] or "{}"),
            **told.get((row["trace_id"], row["span_id"]), _UNTOLD),
        }
        for row in rows
    ]


def _read_contents(
    store: Store, asked: SelectionForm, rows: Collection[Mapping[str, Any]]
) -> dict[tuple[str, str], Mapping[str, object]]:
    wanted = {(row["trace_id"], row["span_id"]) for row in rows}
    if not wanted:
        return {}
    every = list(dict.fromkeys(row["rollout_id"] for row in rows))
    ids = select_small(store, every)
    found: dict[tuple[str, str], Mapping[str, object]] = {
        (row["trace_id"], row["span_id"]): TOO_LARGE_TEXTS
        for row in rows
        if row["rollout_id"] not in ids
    }
    if not ids:
        return found
    for each in store.adapt(**{**asked.adapting, "rollout_id": ids}):
        credits = credits_of(each.credited)
        for path in each.trajectories:
            for step in path.transitions:
                key = (step.trace_id, step.span_id)
                if key in wanted:
                    found[key] = shorten_step(step, credits)
    return found


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
    found: dict[str, list[Credited]] = {}
    for each in credited:
        for call in each.calls:
            found.setdefault(call, []).append(each)
    return found


def cut(text: str, most: int = TEXT) -> str:
    """Return a text of so many characters at most."""
    return text if len(text) <= most else text[: most - 1] + "…"


ROUTES: Final[list[Route]] = [Route("/transitions", transitions, methods=["GET"])]
