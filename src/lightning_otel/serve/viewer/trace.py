"""One trace: its tree, waterfall, chat, tools, tokens, rewards, attributes and raw spans.

Rows and bodies that are far down are parts of their own, read when they are seen.
"""

import secrets
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lightning_otel.dataset import Store
from lightning_otel.errors import NotFoundError
from lightning_otel.serve.api.cache import Mark, read_fingerprint
from lightning_otel.serve.viewer import page
from lightning_otel.serve.viewer.span_detail import detail, json_of, read_span, record_of
from lightning_otel.serve.viewer.steps import (
    CALLS,
    Range,
    add_tokens,
    list_steps,
    read_ends,
    read_threads,
    read_tool_calls,
)
from lightning_otel.serve.viewer.text_diff import compare_lines, fold_lines
from lightning_otel.serve.viewer.urls import MOST_CLOSED, TraceLinks
from lightning_otel.store.prices import COSTS, SUM_COSTS
from lightning_otel.store.source import read_overview
from lightning_otel.types import conventions as c
from lightning_otel.types.text import one_line
from lightning_otel.views.differences import compare_ids
from lightning_otel.views.folding import Folded, fold
from lightning_otel.views.previews import LIGHT, find_text, read_previews
from lightning_otel.views.stored_trace import read_trace
from lightning_otel.views.trace import Row, Trace

TABS: Final = ("tree", "waterfall", "chat", "tools", "tokens", "rewards", "attributes", "raw")
_WITHOUT_IDS: Final = tuple(tab for tab in TABS if tab != "tokens")
CHUNK: Final = 250
"""Rows in one part of a page."""
STEPS: Final = 200
"""Steps or rewards on a page."""
PREVIEW: Final = 30
"""Cells of what was asked, and of what was answered, in a row."""
_SHORT: Final = 200
"""Characters of a name or message in a row."""
DEEPEST: Final = 24
"""Levels that are indented; what lies deeper says how deep."""
_WIDTH: Final = 1000
"""Of a waterfall, in its own units."""
_LEAST: Final = 4.0
"""Of a bar: a pixel where a waterfall is as narrow as on a telephone."""
_RAW: Final = 65_536
_COST: Final = f"""
SELECT {SUM_COSTS} AS cost, count(*) FILTER (cost IS NULL) AS unpriced
FROM ({COSTS}) WHERE trace_id = ?"""
KEPT_S: Final = 60.0
"""For a page's parts; and a process that dies ends its attempts, and writes nothing."""


class _Kept(NamedTuple):
    """The trace that was read last, what the store was like before that, and when."""

    trace: Trace
    mark: Mark | None
    since_s: float


_LAST: dict[str, _Kept] = {}
"""By the name of its store."""


def read_cached_trace(store: Store, trace_id: str, *, is_part: bool = False) -> Trace:
    """Return a trace; the one read last, where nothing was written since.

    For a part of a page (``is_part``) it is the trace as the page had it.

    Raises:
        NotFoundError: There is none.
    """
    # Taken before it is read: what comes meanwhile makes it old.
    mark = None if store.layout is None else read_fingerprint(store.layout)
    drop_traces(KEPT_S)
    entry = _LAST.get(store.name)
    if (
        entry is not None
        and entry.trace.trace_id == trace_id
        and (is_part or (mark is not None and entry.mark == mark))
    ):
        return entry.trace
    del entry
    _LAST.pop(store.name, None)  # before another one takes as much again
    trace = read_trace(store, "trace", trace_id, _SHORT)
    _LAST[store.name] = _Kept(trace, mark, time.monotonic())
    return trace


def drop_traces(kept_s: float = 0.0) -> None:
    """Evict expired cached traces: one of 30,000 spans takes 20 MB."""
    now_s = time.monotonic()
    for name, entry in list(_LAST.items()):
        if now_s - entry.since_s >= kept_s:
            _LAST.pop(name, None)


async def show(request: Request) -> Response:
    """A trace."""
    tab = page.choice(request, "tab", TABS)
    trace_id = request.path_params["trace_id"]
    span_id, first = page.text(request, "span"), page.integer(request, "first", 0, 0, 10**9)

    def read(store: Store) -> Mapping[str, object]:
        trace = read_cached_trace(store, trace_id)
        matches = _find_matches(request, store, trace)
        ids = (row.span.span_id for row in trace.rows)
        at = trace.find(span_id or next((span_id for span_id in ids if span_id in matches), ""))
        row = trace.rows[at or 0]
        has_ids = any(row.step.capture == "exact" for row in trace.rows if row.step)
        content: dict[str, object] = {
            "title": one_line(trace.words, 60) or f"Trace {trace_id[:12]}",
            "trace": trace,
            "tab": tab,
            "tabs": [name for name in TABS if has_ids or name in (tab, *_WITHOUT_IDS)],
            "links": TraceLinks.of(request),
            "facts": _collect_facts(store, trace),
            "row": row,
            "missing": span_id if at is None else "",
        }
        if tab in ("tree", "waterfall", "attributes", "raw"):
            content.update(read_panel(store, trace, at or 0))
        if tab in _READ:
            content.update(_READ[tab](request, store, trace, first))
        return content

    return await page.answer(request, "trace.html", read)


def read_panel(store: Store, trace: Trace, position: int) -> Mapping[str, object]:
    """Read what stands beside the rows: a span, what it was given and returned, and its rewards."""
    row = trace.rows[position]
    content: dict[str, Any] = dict(detail(read_span(store, *row.key)))
    # A rollout, an agent or a chain says by its first and last step what it holds no words of.
    prompt, answered = read_ends(store, trace, trace.rows[position + 1 : position + 1 + row.size])
    if not (content["given"] or content["input"]):
        content["given"] = prompt
    if not (content["answered"] or content["output"]):
        content["answered"] = answered
    return {
        "row": row,
        "detail": content,
        "credits": [
            reward
            for reward in _list_rewards(trace)
            if reward is row or position in reward.credited
        ],
        "feedback_id": secrets.token_hex(8),
    }


def _list_rewards(trace: Trace) -> list[Row]:
    return [row for row in trace.rows if row.kind == "reward"]


def _collect_facts(store: Store, trace: Trace) -> Mapping[str, Any]:
    rows = trace.own
    roots = [row for row in rows if row.parent < 0]
    calls = [row for row in rows if row.is_call]
    models = (row.span.attributes.get(c.RESPONSE_MODEL) for row in calls)
    steps = [row.step for row in rows if row.step is not None]
    status = "ended"
    if any(row.span.status == "ERROR" for row in roots):
        status = "failed"
    elif any(row.span.is_incomplete for row in roots):
        status = "open"
    return {
        "status": status,
        "agents": list(dict.fromkeys(row.agent for row in rows if row.agent)),
        "models": list(dict.fromkeys(model for model in models if model)),
        "calls": len(calls),
        "tools": sum(row.kind == "tool" for row in rows),
        "errors": [row for row in rows if row.is_fault],
        "open": [row for row in rows if row.span.is_incomplete],
        "steps": len(steps),
        "input_tokens": sum(step.input_tokens or 0 for step in steps),
        "output_tokens": sum(step.output_tokens or 0 for step in steps),
        **read_overview(store.source, _COST, [trace.trace_id])[0],
        "rewards": [row for row in trace.rows if row.counts_as_reward],
    }


def _find_matches(request: Request, store: Store, trace: Trace) -> Mapping[str, Sequence[str]]:
    text = page.text(request, "q")
    return find_text(store, trace.own, text) if text else {}


def _fold_rows(request: Request, trace: Trace, matches: Mapping[str, Sequence[str]]) -> Folded:
    query = request.query_params
    closed = query.get("closed", "").split(",")[:MOST_CLOSED]
    only = matches if page.text(request, "q") else None
    return fold(trace.rows, closed, others=bool(query.get("others")), only=only)


def _read_rows(request: Request, store: Store, trace: Trace, first: int) -> Mapping[str, object]:
    query, matches = request.query_params, _find_matches(request, store, trace)
    visible, others = _fold_rows(request, trace, matches)
    targets = {query.get("span"), query.get("near")}
    places = [at for at, item in enumerate(visible) if item.row.span.span_id in targets]
    numbers = {at // CHUNK for at in (0, *(places or [min(first, len(visible) - 1)]))}
    chunks = [
        (at, visible[at : at + CHUNK] if at // CHUNK in numbers else [])
        for at in range(0, len(visible), CHUNK)
    ]
    visible_rows = [item.row for _, some in chunks for item in some]
    return {
        "chunks": chunks,
        "row_links": TraceLinks.of(request).here,
        "matches": matches,
        **_read_lines(store, trace, visible_rows),
        "size": CHUNK,
        "total": len(visible),
        "others": others,
        "shows_others": bool(query.get("others")),
    }


def _read_lines(store: Store, trace: Trace, rows: Sequence[Row]) -> Mapping[str, object]:
    """Read what a row says beyond its own columns: step, words, and the way of rewards."""
    rewards = reversed(_list_rewards(trace))
    return {
        "previews": read_previews(store, rows, PREVIEW, LIGHT),
        "earned": {trace.rows[target].key: row for row in rewards for target in row.credited},
        "bar": partial(bar, trace.start_ns, trace.end_ns),
        "deepest": DEEPEST,
    }


def bar(since_ns: int, until_ns: int, row: Row) -> tuple[float, float]:
    """Return the position and length of a row's bar in a trace from one time to another."""
    whole = max(1, until_ns - since_ns)
    span = row.span
    begin = min(_WIDTH, max(0.0, (span.start_ns - since_ns) * _WIDTH / whole))
    end_ns = until_ns if span.end_ns is None else span.end_ns
    length = max(0, end_ns - span.start_ns)
    width = min(_WIDTH - begin, length * _WIDTH / whole)
    return round(min(begin, _WIDTH - _LEAST), 2), round(max(_LEAST, width), 2)


def _read_chat(request: Request, store: Store, trace: Trace, first: int) -> Mapping[str, object]:
    query, size = request.query_params, CALLS
    until = page.integer(request, "until", 0, 0, 10**9) or None
    position = trace.find(query.get("span", ""))
    if position is not None and "first" not in query:
        before = sum(row.step is not None for row in trace.rows[: position + 1])
        size = CALLS if until is None else 1
        first = max(0, before - 1) // size * size
    part = Range.of(sum(row.step is not None for row in trace.rows), size, first, "step")
    return {
        "part": part,
        "talks": read_threads(store, trace, part, until),
        "left_out": [row for row in trace.rows if row.is_call and row.step is None],
    }


def _read_tools(request: Request, store: Store, trace: Trace, first: int) -> Mapping[str, object]:
    part, calls = read_tool_calls(store, trace, first)
    return {
        "part": part,
        "calls": calls,
        "with_spans": sum(row.kind == "tool" for row in trace.rows),
    }


def _read_tokens(request: Request, store: Store, trace: Trace, first: int) -> Mapping[str, object]:
    steps = list_steps(trace)
    part = Range.of(len(steps), STEPS, first, "step")
    return {
        "part": part,
        "steps": add_tokens(store, steps[part.places]),
        "report": trace.report,
        "calls": [row for row in trace.rows if row.is_call],
    }


def _read_rewards(request: Request, store: Store, trace: Trace, first: int) -> Mapping[str, object]:
    steps = list_steps(trace)
    rewards = _list_rewards(trace)
    part = Range.of(max(len(rewards), len(steps)), STEPS, first, "row")
    return {
        "part": part,
        "credits": rewards[part.places],
        "steps": steps[part.places],
        "report": trace.report,
        "lost": Counter(drop.reason for drop in trace.report.dropped if drop.noun == "reward"),
    }


def _read_raw(request: Request, store: Store, trace: Trace, first: int) -> Mapping[str, object]:
    row = trace.rows[trace.find(request.query_params.get("span", "")) or 0]
    text = json_of(record_of(store, *row.key))
    return {"row": row, "text": text[:_RAW], "length": len(text)}


_READ: Final = {
    "tree": _read_rows,
    "waterfall": _read_rows,
    "chat": _read_chat,
    "tools": _read_tools,
    "tokens": _read_tokens,
    "rewards": _read_rewards,
    "raw": _read_raw,
}


async def rows(request: Request) -> Response:
    """A part of a tree or waterfall."""
    first = page.integer(request, "first", 0, 0, 10**9)
    tab = page.choice(request, "tab", TABS)

    def read(store: Store) -> Mapping[str, object]:
        trace = read_cached_trace(store, request.path_params["trace_id"], is_part=True)
        matches = _find_matches(request, store, trace)
        visible = _fold_rows(request, trace, matches).shown[first : first + CHUNK]
        return {
            **_read_lines(store, trace, [item.row for item in visible]),
            "tab": tab,
            "trace": trace,
            "row_links": TraceLinks.of(request),
            "matches": matches,
            "shown": visible,
        }

    return await page.answer(request, "trace_rows.html", read, title="Spans")


async def diff(request: Request) -> Response:
    """A trace beside another, compared as the command line does it."""
    trace_id, other = request.path_params["trace_id"], page.text(request, "with")
    is_whole = page.choice(request, "lines", ("changed", "all")) == "all"

    def read(store: Store) -> Mapping[str, object]:
        content = {"title": "Compare", "error": "", "is_whole": is_whole, "sides": ()}
        try:
            ids = {store.rollout_of(*store.find(prefix)) for prefix in (trace_id, other) if other}
            if not other or len(page.select_small(store, list(ids))) < len(ids):
                return {**content, "error": page.TOO_LARGE if other else ""}
            a, b, differences = compare_ids(store, trace_id, other)
        except NotFoundError as exc:
            return {**content, "error": str(exc)}
        pairs = differences.said
        texts = ([line.text for line in pairs if line.sign in " " + sign] for sign in "-+")
        lines = compare_lines(*texts)
        lines = lines if is_whole else fold_lines(lines)
        return {**content, "sides": (a, b), "found": differences, "lines": lines, "most": STEPS}

    return await page.answer(request, "trace_diff.html", read, is_long=True)


ROUTES: Final[list[Route]] = [
    Route("/traces/{trace_id:path}/diff", diff, methods=["GET"]),
    Route("/traces/{trace_id:str}", show, methods=["GET"]),
    Route("/traces/{trace_id:str}/rows", rows, methods=["GET"]),
]
