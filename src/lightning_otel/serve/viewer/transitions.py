"""The transitions: each with what it was worth and why, and every call that became none."""

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lightning_otel.adapter.selection import Selection, Wanted
from lightning_otel.dataset import Store
from lightning_otel.messages import plain_text
from lightning_otel.serve.viewer import page
from lightning_otel.serve.viewer.selecting import CHOICES, Chosen, chosen, registered
from lightning_otel.serve.viewer.weighing import HEAVY, light
from lightning_otel.store.sql import ROLLOUT
from lightning_otel.types import Credited, Dropped, Message, Report, Transition

ROWS: Final = 50
"""Transitions on a page."""
TEXT: Final = 240
"""Characters shown of what was seen or done; the trace has all of it."""
ROLLOUTS: Final = 1000
"""Rollouts that are read for a page; the next ones are a link away."""
_FEW: Final = 5
"""Calls shown of each reason, until one is asked for."""
MANY: Final = 200
"""Calls of the one that is asked for, a part at a time."""
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
SpanId = tuple[str, str]


class Reason(NamedTuple):
    """A reason for which calls, rewards or marks are in no transition.

    Attributes:
        entries: Some of them.
        total: How many there are.
    """

    noun: str
    reason: str
    entries: Sequence[Dropped]
    total: int


class Window(NamedTuple):
    """The rollouts that a page is of, where there are more than it reads.

    Attributes:
        since_ns: When the first of them began; None where all of them are read.
        rollouts: How many there are that were asked for.
        first: How many newer ones are left out.
    """

    since_ns: int | None
    until_ns: int | None
    rollouts: int
    first: int

    @property
    def is_part(self) -> bool:
        """True if other rollouts are left out."""
        return self.since_ns is not None or self.until_ns is not None


class Credit(NamedTuple):
    """A reward that reached a step, by what."""

    trace_id: str
    span_id: str
    by: str


def window(store: Store, asked: Chosen, first: int, *, is_all: bool = False) -> Window:
    """Select the newest rollouts of a selection, or those after so many newer ones.

    Args:
        store: Where they are.
        asked: Which are asked for; of it times count.
        first: How many newer ones are left out.
        is_all: Whether all are read, however many there are.
    """
    if is_all or asked.values["rollout"]:
        return Window(None, None, 0, 0)
    times: Wanted = {"since": asked.keywords.get("since"), "until": asked.keywords.get("until")}
    wanted = Selection.of(times)
    bounds = [wanted.since_ns, wanted.since_ns, wanted.until_ns, wanted.until_ns]
    (row,) = store.sql(_WINDOW, [*bounds, first, first + ROLLOUTS]).rows()
    rest = row["total"] > first + ROLLOUTS
    return Window(
        row["since_ns"] if rest else wanted.since_ns if first else None,
        row["until_ns"] if first else wanted.until_ns if rest else None,
        row["total"],
        first,
    )


def read(
    store: Store,
    asked: Chosen,
    number: int,
    reason: str = "",
    part: int = 1,
    within: Window | None = None,
) -> Mapping[str, object]:
    """Read the page.

    Args:
        store: Where the spans are.
        asked: Which transitions.
        number: Of the page, from 1.
        reason: The reason of which many calls are listed.
        part: Which many of them, from 1.
        within: Which rollouts; by default all.
    """
    within = within or Window(None, None, 0, 0)
    times = {"since": within.since_ns, "until": within.until_ns} if within.is_part else {}
    table = store.transitions(bodies=False, **{**asked.keywords, **times})
    rows, total = table.page(_NEWEST_FIRST, ROWS, (number - 1) * ROWS)
    report = table.report()
    return {
        "rows": _make_rows(store, asked, rows),
        "total": total,
        "size": ROWS,
        "number": number,
        "has_advantage": "advantage" in asked.keywords,
        "report": report,
        "lost": sum(each.noun == "call" for each in report.dropped),
        "reasons": reasons(report, reason, part),
        "reason": reason,
        "dropped_page": part,
        "many": MANY,
        "repairs": Counter(each.rule for each in report.repairs),
        "asked": asked.values,
        "query_of": asked.query,
        "choices": CHOICES,
        "formats": registered(),
        "command": asked.command(store),
        "within": within,
        "window_size": ROLLOUTS,
    }


def reasons(report: Report, whole: str = "", part: int = 1) -> list[Reason]:
    """Count what was left out by reason, the most frequent first.

    Args:
        report: The funnel.
        whole: The reason of which more is shown than a few.
        part: Which part of that, from 1.
    """
    found: dict[tuple[str, str], list[Dropped]] = {}
    for each in report.dropped:
        found.setdefault((each.noun, each.reason), []).append(each)
    ordered = sorted(found.items(), key=lambda item: -len(item[1]))
    many = slice((part - 1) * MANY, part * MANY)
    return [
        Reason(noun, why, entries[many if why == whole else slice(_FEW)], len(entries))
        for (noun, why), entries in ordered
    ]


_UNTOLD: Final[Mapping[str, object]] = {"observation": "", "action": "", "credits": ()}
HEAVY_TEXTS: Final[Mapping[str, object]] = {**_UNTOLD, "observation": HEAVY}


def _make_rows(
    store: Store, asked: Chosen, rows: Collection[Mapping[str, Any]]
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
    store: Store, asked: Chosen, rows: Collection[Mapping[str, Any]]
) -> dict[SpanId, Mapping[str, object]]:
    """Read the observation, action and rewards of a page's steps, shortened."""
    wanted = {(row["trace_id"], row["span_id"]) for row in rows}
    if not wanted:
        return {}
    every = list(dict.fromkeys(row["rollout_id"] for row in rows))
    ids = light(store, every)
    found: dict[SpanId, Mapping[str, object]] = {
        (row["trace_id"], row["span_id"]): HEAVY_TEXTS
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
                    found[key] = told(step, credits)
    return found


def told(step: Transition, credits: Mapping[str, Sequence[Credit]]) -> Mapping[str, object]:
    """Shorten the observation, action and rewards of a step."""
    return {
        "observation": shorten(step.observation[-1:]),
        "action": shorten(step.action[:1]),
        "credits": credits.get(step.span_id, ()),
    }


def credits_of(credited: Iterable[Credited]) -> dict[str, list[Credit]]:
    """The rewards that reached each call, by its span id."""
    found: dict[str, list[Credit]] = {}
    for each in credited:
        for call in each.calls:
            found.setdefault(call, []).append(Credit(each.trace_id, each.span_id, each.by))
    return found


def shorten(messages: Iterable[Message], most: int = TEXT) -> str:
    """Return the text of messages, cut."""
    text = plain_text(messages)
    return text if len(text) <= most else text[: most - 1] + "…"


async def transitions(request: Request) -> Response:
    """The page."""
    number = page.integer(request, "page", 1, 1, 10_000_000)
    reason = page.text(request, "reason")
    part = page.integer(request, "dropped", 1, 1, 1_000_000)

    after = page.integer(request, "after", 0, 0, 10**9)
    is_all = page.choice(request, "rollouts", ("newest", "all")) == "all"

    def shown(store: Store) -> Mapping[str, object]:
        asked = chosen(request.query_params, store)
        within = window(store, asked, after, is_all=is_all)
        return read(store, asked, number, reason, part, within)

    return await page.answer(request, "transitions.html", shown, title="Transitions")


ROUTES: Final[list[Route]] = [Route("/transitions", transitions, methods=["GET"])]
