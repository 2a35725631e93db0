"""Transitions by HTTP: JSON Lines, Arrow or Parquet, all at once or a page at a time.

A page holds whole rollouts, in order of when they began: what is adapted together is read together,
and a rollout's rewards and neighbours are never cut off.
"""

import io
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Annotated, Any, Final, Literal, NamedTuple

import orjson
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lightning_otel import conventions as c
from lightning_otel.dataset import Store
from lightning_otel.serve.answers import RefusalError
from lightning_otel.serve.api.cursors import cursor_of, instant_of, place_of
from lightning_otel.serve.api.operation import LINES, Answer, Asked, Operation, query_of, routes
from lightning_otel.serve.streaming import PARQUET, PART_BYTES, parquet_parts
from lightning_otel.serve.viewer.page import run, url
from lightning_otel.store.sql import ROLLOUT, quoted
from lightning_otel.types import CaptureLevel, Credit, Report

ARROW: Final = "application/vnd.apache.arrow.stream"
_KINDS: Final = {
    LINES: LINES,
    "application/jsonl": LINES,
    "application/x-jsonlines": LINES,
    "application/json": LINES,
    "application/*": LINES,
    "*/*": LINES,
    "": LINES,
    ARROW: ARROW,
    PARQUET: PARQUET,
}
_MOST_STEPS: Final = 100_000
_PART_STEPS: Final = 10_000
_MOST_ROLLOUTS: Final = 10_000
_CALLS: Final = ", ".join(quoted(name) for name in sorted(c.CALL_OPERATIONS))
# Whole rollouts until they hold so many steps, and whether there are more of them.
_PAGE: Final = f"""
WITH r AS (
  SELECT {ROLLOUT} AS rollout_id, min(start_ns) AS start_ns,
    count(*) FILTER (operation IN ({_CALLS}) OR name = {quoted(c.SPAN_ACTION)}) AS calls
  FROM spans WHERE {{wanted}} GROUP BY 1
), rest AS (
  SELECT rollout_id, start_ns, count(*) OVER () AS left_over,
    coalesce(sum(calls) OVER (ORDER BY start_ns, rollout_id
      ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0) AS before
  FROM r WHERE {{range}}
)
SELECT rollout_id, start_ns, left_over FROM rest WHERE before < ?
ORDER BY start_ns, rollout_id LIMIT {_MOST_ROLLOUTS}"""


class TransitionsQuery(Asked):
    """Filters of the list of transitions."""

    agents: list[str] = Field(default_factory=list, max_length=100)
    """Names, globs or `re:…`, the first that matches decides; `!` before one leaves out."""
    rollout_id: list[str] = Field(default_factory=list, max_length=1_000)
    """Only these rollouts, by their whole ids."""
    since: str | None = None
    """Rollouts that began then or later: `10m`, ISO 8601 (UTC if it names no zone), or Unix ns."""
    until: str | None = None
    """Rollouts that began before then."""
    mode: str | None = None
    resource_version: str | None = None
    """The version stamped on a step, or `name@version`; globs too."""
    rewarded: bool | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    capture: CaptureLevel | None = None
    received: bool = True
    """Whether spans that came over the network count, rewards among them."""
    include_incomplete: bool = False
    """Also what rollouts did that broke off."""
    credit: Credit = "previous"
    """How a reward without a link reaches a step."""
    bodies: bool = True
    """Whether messages and tokens are among the columns."""
    limit: Annotated[int, Field(ge=1, le=_MOST_STEPS)] | None = None
    """A page holds whole rollouts until they have so many steps; without, all comes at once."""
    cursor: Annotated[str, Field(max_length=4_096)] | None = None
    """Where the page before ended: the header `Next-Cursor`."""
    report: Literal["0", "1"] = "0"
    """`1` adds a last line with the funnel of what was looked at, and why steps are left out."""


class _Page(NamedTuple):
    """The rollouts of a page, and the next page's cursor; empty for the last page."""

    rollout_ids: list[str]
    cursor: str


async def transitions(request: Request) -> Response:
    """The transitions asked for."""
    asked = query_of(request, TransitionsQuery)
    kind = _kind_of(request.headers.get("accept", ""))
    if asked.report == "1" and kind != LINES:
        raise RefusalError(400, f"the report comes with {LINES}; ask for that")
    keywords = _make_keywords(asked)
    if kind == PARQUET and asked.limit is None:
        asked = asked.model_copy(update={"limit": _PART_STEPS})
    state = request.app.state
    await run(request, lambda store: state.rooms.give_waiting(state.intake.keep))
    page: _Page | None = None
    if asked.limit is not None or asked.cursor is not None:
        place = place_of(asked.cursor, 1)
        limit = asked.limit or _MOST_STEPS
        page = await run(request, lambda store: _find_page(store, keywords, place, limit))
    headers = _make_headers(request, page)
    store: Store = state.store
    # Checked before anything is said; nothing is read yet.
    await run(request, lambda store: store.transitions(**_select_rollouts(keywords, [])))
    if kind == ARROW:
        made = _arrow(_read_tables(store, keywords, page))
    elif kind == PARQUET:
        rollout_ids = None if page is None else page.rollout_ids
        made = parquet_parts(lambda: store.transitions(**_select_rollouts(keywords, rollout_ids)))
    else:
        made = _write_lines(store, keywords, page, is_reported=asked.report == "1")
    answer: Response = await state.streams.answer(made, kind, headers)
    return answer


def _make_keywords(asked: TransitionsQuery) -> dict[str, Any]:
    found: dict[str, Any] = {
        "agents": asked.agents or None,
        "rollout_id": asked.rollout_id or None,
        "since": instant_of(asked.since, "since"),
        "until": instant_of(asked.until, "until"),
        "received": asked.received,
    }
    named = (
        "mode", "resource_version", "rewarded", "min_reward", "max_reward", "capture",
        "include_incomplete", "credit", "bodies",
    )  # fmt: skip
    return {**found, **{name: getattr(asked, name) for name in named}}


def _find_page(
    store: Store, keywords: Mapping[str, Any], place: tuple[int, tuple[str, ...]] | None, limit: int
) -> _Page:
    wanted, values = "true", list[object]()
    if keywords["rollout_id"] is not None:
        wanted = f"{ROLLOUT} IN (SELECT unnest(?::VARCHAR[]))"
        values.append(keywords["rollout_id"])
    bounds = ["true"]
    if place is not None:
        start_ns, (rollout_id,) = place
        bounds.append("(start_ns > ? OR (start_ns = ? AND rollout_id > ?))")
        values += [start_ns, start_ns, rollout_id]
    for sign, name in ((">=", "since"), ("<", "until")):
        if keywords[name] is not None:
            bounds.append(f"start_ns {sign} ?")
            values.append(keywords[name])
    query = _PAGE.format(wanted=wanted, range=" AND ".join(bounds))
    rows = store.sql(query, [*values, limit]).rows()
    if not rows:
        return _Page([], "")
    last = rows[-1]
    cursor = cursor_of(last["start_ns"], last["rollout_id"])
    return _Page([row["rollout_id"] for row in rows], cursor * (last["left_over"] > len(rows)))


def _select_rollouts(keywords: Mapping[str, Any], rollout_ids: list[str] | None) -> dict[str, Any]:
    """The keywords of a page: its rollouts stand for when they began."""
    if rollout_ids is None:
        return dict(keywords)
    return {**keywords, "rollout_id": rollout_ids, "since": None, "until": None}


def _write_lines(
    store: Store, keywords: Mapping[str, Any], page: _Page | None, *, is_reported: bool
) -> Iterator[bytes]:
    """JSON Lines in parts of some size, and the report."""
    table = store.transitions(
        **_select_rollouts(keywords, None if page is None else page.rollout_ids)
    )
    held: list[bytes] = []
    size = 0
    for line in table.lines():
        held.append(line)
        size += len(line)
        if size >= PART_BYTES:
            yield b"".join(held)
            held, size = [], 0
    if is_reported:
        told = {
            "report": _describe_report(table.report()),
            "cursor": page.cursor or None if page else None,
        }
        held.append(orjson.dumps(told, option=orjson.OPT_APPEND_NEWLINE))
    if held:
        yield b"".join(held)


def _describe_report(report: Report) -> dict[str, Any]:
    """The funnel, with each reason counted rather than each loss listed."""
    found = asdict(report)
    repairs = found.pop("repairs")
    found.pop("dropped")
    return {**found, "repairs": len(repairs), "left_out": report.reasons()}


def _read_tables(store: Store, keywords: Mapping[str, Any], page: _Page | None) -> Iterator[Any]:
    """The transitions as tables that memory holds; at least one, if an empty one."""
    if page is not None:
        yield store.transitions(**_select_rollouts(keywords, page.rollout_ids))
        return
    place: tuple[int, tuple[str, ...]] | None = None
    while True:
        some = _find_page(store, keywords, place, _PART_STEPS)
        yield store.transitions(**_select_rollouts(keywords, some.rollout_ids))
        if not some.cursor:
            return
        place = place_of(some.cursor, 1)


def _arrow(tables: Iterable[Any]) -> Iterator[bytes]:
    """Yield one Arrow IPC stream of the tables' rows; memory holds one of them at a time."""
    from nanoarrow.ipc import StreamWriter  # type: ignore[import-untyped]  # no stubs

    sink = io.BytesIO()
    writer = StreamWriter.from_writable(sink)
    try:
        for table in tables:
            writer.write_stream(table)
            yield sink.getvalue()
            sink.seek(0)
            sink.truncate()
        writer.close()
        yield sink.getvalue()
    finally:
        # Not closed if something failed: that would write the mark of a whole stream.
        writer.release()


def _make_headers(request: Request, page: _Page | None) -> dict[str, str]:
    if page is None or not page.cursor:
        return {}
    return {
        "Next-Cursor": page.cursor,
        "Link": f'<{url(request, cursor=page.cursor)}>; rel="next"',
    }


def _kind_of(accept: str) -> str:
    """Return the first media type of the Accept header that we have."""
    for each in accept.split(","):
        kind = _KINDS.get(each.partition(";")[0].strip().lower())
        if kind is not None:
            return kind
    raise RefusalError(406, f"transitions come as {LINES}, {ARROW} or {PARQUET}")


_ROW: Final = {"type": "object", "description": "A transition by column; docs/exports.md."}
OPERATIONS: Final = (
    Operation(
        "GET", "/v1/transitions", transitions,
        "Transitions, one row each; one that several branches share appears once.",
        {
            200: Answer(
                "The rows; with `limit`, a page of whole rollouts.",
                {LINES: _ROW, ARROW: {"type": "string"}, PARQUET: {"type": "string"}},
                {
                    "Next-Cursor": "Where the next page begins; absent on the last one.",
                    "Link": "The address of the next page, with `rel=\"next\"`.",
                },
            ),
            406: Answer("None of the forms it comes in is accepted."),
        },
        query=TransitionsQuery,
    ),
)  # fmt: skip
ROUTES: Final[list[Route]] = routes(OPERATIONS)
