"""One trace: its tree, waterfall, chat, tools, tokens, rewards, attributes and raw spans.

Which of them, the selected span and what is folded stand in the address. Rows and bodies that are
far down are parts of their own, read when they are seen.
"""

import secrets
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lightning_otel.dataset import Store
from lightning_otel.serve.viewer import large, page
from lightning_otel.serve.viewer.links import MOST_CLOSED, Links
from lightning_otel.serve.viewer.made import TOOLS, adapted, credits, steps, tool_calls
from lightning_otel.serve.viewer.parts import Part, part_of
from lightning_otel.serve.viewer.span import detail, read_span
from lightning_otel.serve.viewer.spans import json_of, record_of
from lightning_otel.serve.viewer.talk import Talk, left_out, talks
from lightning_otel.serve.viewer.tree import Row, Shown, Trace, fold, held_trace, read_trace

TABS: Final = ("tree", "waterfall", "chat", "tools", "tokens", "rewards", "attributes", "raw")
CHUNK: Final = 250
"""Rows in one part of a page."""
MESSAGES: Final = 200
"""Messages, steps or rewards on a page."""
DEEPEST: Final = 24
"""Levels that are indented; what lies deeper says how deep."""
_WIDTH: Final = 1000
"""Of a waterfall, in its own units."""
_LEAST: Final = 4.0
"""Of a bar: a pixel where a waterfall is as narrow as on a telephone."""
_RAW: Final = 65_536


async def show(request: Request) -> Response:
    """A trace."""
    tab = page.choice(request, "tab", TABS)
    trace_id = request.path_params["trace_id"]
    span_id, first = page.text(request, "span"), page.integer(request, "first", 0, 0, 10**9)
    links = Links(request)

    def read(store: Store) -> Mapping[str, object]:
        trace = read_trace(store, trace_id)
        selected = trace.find(span_id) if span_id else None
        shown: dict[str, object] = {
            "title": f"Trace {trace_id[:12]}",
            "trace": trace,
            "tab": tab,
            "tabs": TABS,
            "links": links,
            "facts": _collect_facts(trace),
            "row": None if selected is None else trace.rows[selected],
            "missing": span_id if span_id and selected is None else "",
        }
        if selected is not None and tab in ("tree", "waterfall", "attributes", "raw"):
            shown.update(_read_selected(store, trace.rows[selected]))
        shown.update(_READ[tab](request, store, trace, first))
        return shown

    return await page.answer(request, "trace.html", read)


def _read_selected(store: Store, row: Row) -> Mapping[str, object]:
    found = detail(read_span(store, row.trace_id, row.span_id))
    return {"detail": found, "feedback_id": secrets.token_hex(8)}


def _collect_facts(trace: Trace) -> Mapping[str, Any]:
    """Collect the facts above a trace's tabs."""
    own = trace.own
    roots = [row for row in own if row.parent < 0]
    calls = [row for row in own if row.kind == "call"]
    status = "ended"
    if any(row.status == "ERROR" for row in roots):
        status = "failed"
    elif any(row.end_ns is None for row in roots):
        status = "open"
    return {
        "status": status,
        "agents": list(dict.fromkeys(row.agent for row in own if row.agent)),
        "models": list(dict.fromkeys(row.model for row in calls if row.model)),
        "calls": len(calls),
        "tools": sum(row.kind == "tool" for row in own),
        "errors": [row for row in own if row.status == "ERROR"],
        "open": [row for row in own if row.end_ns is None],
        "steps": sum(row.step is not None for row in own),
        "input_tokens": sum(row.step.input_tokens or 0 for row in own if row.step is not None),
        "output_tokens": sum(row.step.output_tokens or 0 for row in own if row.step is not None),
        "rewards": [row for row in trace.rows if row.kind == "reward" and row.reward is not None],
    }


def _read_rows(request: Request, store: Store, trace: Trace, first: int) -> Mapping[str, object]:
    """The parts of a tree or waterfall: those that are seen first, and the selected one."""
    links = Links(request)
    given = request.query_params
    closed = given.get("closed", "").split(",")[:MOST_CLOSED]
    found = fold(trace.rows, closed, others=bool(given.get("others")))
    near = {given.get("span"), given.get("near")}
    places = [at for at, each in enumerate(found.shown) if each.row.span_id in near]
    wanted = {at // CHUNK for at in (0, *(places or [min(first, len(found.shown) - 1)]))}
    chunks = [
        (at, found.shown[at : at + CHUNK] if at // CHUNK in wanted else [])
        for at in range(0, len(found.shown), CHUNK)
    ]
    return {
        "chunks": chunks,
        "size": CHUNK,
        "total": len(found.shown),
        "others": found.others,
        "shows_others": bool(given.get("others")),
        "links": links,
        "bar": partial(bar, trace.start_ns, trace.end_ns),
        "deepest": DEEPEST,
    }


def bar(since_ns: int, until_ns: int, row: Row) -> tuple[float, float]:
    """Return the position and length of a row's bar within ``_WIDTH``.

    Args:
        since_ns: When the trace begins.
        until_ns: When it ends.
        row: The row.
    """
    whole = max(1, until_ns - since_ns)
    begin = min(_WIDTH, max(0.0, (row.start_ns - since_ns) * _WIDTH / whole))
    end_ns = until_ns if row.end_ns is None else row.end_ns
    length = max(0, end_ns - row.start_ns)
    width = min(_WIDTH - begin, length * _WIDTH / whole)
    return round(min(begin, _WIDTH - _LEAST), 2), round(max(_LEAST, width), 2)


def _read_chat(request: Request, store: Store, trace: Trace, first: int) -> Mapping[str, object]:
    found, _ = adapted(store, trace.trace_id)
    if found is None:
        return _large_chat(request, store, trace, first)
    told = talks(found)
    part = part_of(sum(len(each.messages) for each in told), MESSAGES, first, "message")
    return {
        "part": part,
        "talks": list(_page_messages(told, part)),
        "left_out": left_out(found),
    }


def _large_chat(request: Request, store: Store, trace: Trace, first: int) -> Mapping[str, object]:
    """Some calls in their order; by default those around the selected span."""
    span_id = request.query_params.get("span")
    if span_id and "first" not in request.query_params:
        first = large.place_of(trace, span_id) // large.CALLS * large.CALLS
    every = large.steps(trace)
    part = part_of(len(every), large.CALLS, first, "step")
    return {
        "part": part,
        "talks": large.talks(store, every, part),
        "left_out": large.left_out(trace),
    }


def _page_messages(told: list[Talk], part: Part) -> Iterator[Talk]:
    """Some of the messages of several talks, counted through all of them."""
    first = part.first
    for each in told:
        kept = each.messages[max(0, first) : max(0, first + part.size)]
        if kept:
            yield each._replace(messages=kept)
        first -= len(each.messages)


def _read_tools(request: Request, store: Store, trace: Trace, first: int) -> Mapping[str, object]:
    found, size = adapted(store, trace.trace_id)
    return {
        "calls": tool_calls(store, trace, found, first),
        "with_spans": sum(row.kind == "tool" for row in trace.rows),
        "large": size if found is None else None,
        "first": first,
        "size": TOOLS,
    }


def _read_tokens(request: Request, store: Store, trace: Trace, first: int) -> Mapping[str, object]:
    found, _ = adapted(store, trace.trace_id)
    every = large.steps(trace) if found is None else steps(found)
    part = part_of(len(every), MESSAGES, first, "step")
    shown = every[part.places]
    return {
        "part": part,
        "steps": large.with_tokens(store, shown) if found is None else shown,
        "report": trace.report if found is None else found.report,
        "calls": [row for row in trace.rows if row.kind == "call"],
    }


def _read_rewards(request: Request, store: Store, trace: Trace, first: int) -> Mapping[str, object]:
    found, _ = adapted(store, trace.trace_id)
    every = large.steps(trace) if found is None else steps(found)
    report = trace.report if found is None else found.report
    given = large.credits(store, trace, every) if found is None else credits(found)
    part = part_of(max(len(given), len(every)), MESSAGES, first, "row")
    return {
        "part": part,
        "credits": given[part.first : part.first + part.size],
        "steps": every[part.first : part.first + part.size],
        "report": report,
        "lost": Counter(each.reason for each in report.dropped if each.noun == "reward"),
    }


def _read_attributes(
    request: Request, store: Store, trace: Trace, first: int
) -> Mapping[str, object]:
    if request.query_params.get("span") and trace.find(request.query_params["span"]) is not None:
        return {}
    row = trace.rows[0]
    return {"row": row, **_read_selected(store, row)}


def _read_raw(request: Request, store: Store, trace: Trace, first: int) -> Mapping[str, object]:
    span_id = request.query_params.get("span", "")
    position = trace.find(span_id) if span_id else 0
    row = trace.rows[position or 0]
    text = json_of(record_of(store, row.trace_id, row.span_id))
    return {"row": row, "text": text[:_RAW], "length": len(text)}


_READ: Final = {
    "tree": _read_rows,
    "waterfall": _read_rows,
    "chat": _read_chat,
    "tools": _read_tools,
    "tokens": _read_tokens,
    "rewards": _read_rewards,
    "attributes": _read_attributes,
    "raw": _read_raw,
}


async def rows(request: Request) -> Response:
    """A part of a tree or waterfall."""
    first = page.integer(request, "first", 0, 0, 10**9)
    tab = page.choice(request, "tab", TABS)

    def read(store: Store) -> Mapping[str, object]:
        trace = held_trace(store, request.path_params["trace_id"])
        found = dict(_read_rows(request, store, trace, first))
        given = request.query_params
        closed = given.get("closed", "").split(",")[:MOST_CLOSED]
        every: list[Shown] = fold(trace.rows, closed, others=bool(given.get("others"))).shown
        return {**found, "tab": tab, "trace": trace, "shown": every[first : first + CHUNK]}

    return await page.answer(request, "trace_rows.html", read, title="Spans")


ROUTES: Final[list[Route]] = [
    Route("/traces/{trace_id:str}", show, methods=["GET"]),
    Route("/traces/{trace_id:str}/rows", rows, methods=["GET"]),
]
