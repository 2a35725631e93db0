"""Requests about one span of a trace: its record, text, tokens and a reward."""

import secrets
from collections.abc import Iterator, Mapping
from typing import Final
from urllib.parse import quote, urlencode

import orjson
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from lightning_otel import config, rewards
from lightning_otel.dataset import Store
from lightning_otel.errors import NotFoundError
from lightning_otel.rewards.feedback import Conflict, give, make_feedback
from lightning_otel.serve.bodies import form
from lightning_otel.serve.responses import RefusalError
from lightning_otel.serve.streaming import join_lines
from lightning_otel.serve.viewer import page
from lightning_otel.serve.viewer.span_detail import (
    TOKENS,
    decode_row,
    detail,
    read_span,
    show_tokens,
    text_of,
)
from lightning_otel.serve.viewer.trace import read_cached_trace, read_panel
from lightning_otel.serve.viewer.urls import TraceLinks, page_path
from lightning_otel.store.selection import Selection

_LONGEST: Final = 20_000


async def span(request: Request) -> Response:
    """One span."""
    trace_id, span_id = request.path_params["trace_id"], request.path_params["span_id"]

    def read(store: Store) -> Mapping[str, object]:
        trace = read_cached_trace(store, trace_id, is_part=True)
        position = trace.find(span_id)
        if position is None:  # it may have begun since
            trace = read_cached_trace(store, trace_id)
            position = trace.find(span_id)
        if position is None:
            raise NotFoundError(
                f"there is no span {span_id!r} in trace {trace_id!r}; see the trace"
            )
        return {
            "title": f"Span {span_id}",
            "trace": trace,
            **read_panel(store, trace, position),
            "links": TraceLinks.of(request),
            "tab": "tree",
        }

    return await page.answer(request, "span.html", read)


async def text(request: Request) -> Response:
    """The whole of a text that was cut, as plain text; or an image."""
    trace_id, span_id = request.path_params["trace_id"], request.path_params["span_id"]
    query = dict(request.query_params)
    content = await page.run(
        request, lambda store: text_of(read_span(store, trace_id, span_id), query)
    )
    if isinstance(content, tuple):
        return Response(content[1], media_type=content[0])
    return PlainTextResponse(content.encode("utf-8", "replace"))


async def tokens(request: Request) -> Response:
    """The tokens of a call."""
    trace_id, span_id = request.path_params["trace_id"], request.path_params["span_id"]

    def read(store: Store) -> Mapping[str, object]:
        tokens = detail(read_span(store, trace_id, span_id))["tokens"]
        return {
            "tokens": tokens,
            "prompt": [] if tokens is None else show_tokens(tokens.prompt_ids),
            "response": [] if tokens is None else show_tokens(tokens.response_ids, tokens.logprobs),
            "most": TOKENS,
            "links": TraceLinks.of(request),
            "span_id": span_id,
        }

    return await page.answer(request, "trace_tokens.html", read, title=f"Tokens of {span_id}")


async def raw(request: Request) -> Response:
    """The trace's spans, or one of them, as JSON lines, each as it is stored."""
    trace_id, span_id = request.path_params["trace_id"], page.text(request, "span")
    only = ((trace_id, span_id),) if span_id else ()
    selection = Selection(trace_ids=(trace_id,), only=only)
    name = quote(f"trace-{span_id or trace_id}.jsonl")
    answer: Response = await request.app.state.streams.answer(
        join_lines(_write_lines(request.app.state.store, selection)),
        "application/x-ndjson",
        {"Content-Disposition": f'attachment; filename="{name}"'},
    )
    return answer


def _write_lines(store: Store, selection: Selection) -> Iterator[bytes]:
    for row in store.source.fetch(selection).dicts():
        yield orjson.dumps(decode_row(row), option=orjson.OPT_APPEND_NEWLINE)


async def reward(request: Request) -> Response:
    """Give a reward to a span, and show it."""
    trace_id, span_id = request.path_params["trace_id"], request.path_params["span_id"]
    fields = await form(request)
    value, reward_id = await _keep_feedback(request, span_id, fields)
    back = {"span": span_id, "given": f"{value:g}", "reward": reward_id}
    tab = fields.get("tab", "")
    if tab in ("waterfall", "attributes"):
        back["tab"] = tab
    return page.see(f"{page_path('traces', trace_id)}?{urlencode(back)}")


async def retract_reward(request: Request) -> Response:
    """Retract a reward that a trace lists, and show what was shown."""
    trace_id, span_id = request.path_params["trace_id"], request.path_params["span_id"]
    fields, keep = await form(request), request.app.state.ingester.keep
    await page.run(request, lambda store: rewards.retract(store, span_id, keep))
    back = urlencode({name: fields[name] for name in ("span", "tab") if name in fields})
    return page.see(f"{page_path('traces', trace_id)}?{back}")


async def _keep_feedback(
    request: Request, span_id: str, fields: Mapping[str, str]
) -> tuple[float, str]:
    """Keep what a form says of a span once, however often it is sent; return reward and span id."""
    if not config.is_enabled():
        raise RefusalError(400, "recording is switched off; nothing was kept")
    key = fields.get("reward", "")
    if key not in ("1", "-1"):
        raise RefusalError(400, "reward is 1 or -1; POST /v1/feedback takes ratings")
    feedback = make_feedback(
        "span",
        span_id,
        # Of the page, and of what was pressed on it: to press twice gives once.
        feedback_id=f"{fields.get('feedback_id', '')[:200] or secrets.token_hex(8)}{key}",
        text=fields.get("text", "").strip()[:_LONGEST] or None,
        reward=float(key),
    )
    keep = request.app.state.ingester.keep
    (reward,) = await page.run(request, lambda store: give(store, [feedback], keep))
    if reward is None:
        raise RefusalError(404, f"there is no span {span_id!r} in the store; see the list")
    if isinstance(reward, Conflict):
        raise RefusalError(409, f"{reward.reason}; go back and reload the page")
    return feedback.value, reward.span_id


_AT: Final = "/traces/{trace_id:str}"
_SPAN: Final = f"{_AT}/spans/{{span_id:str}}"
ROUTES: Final[list[Route]] = [
    Route(f"{_AT}/raw", raw, methods=["GET"]),
    Route(_SPAN, span, methods=["GET"]),
    Route(f"{_SPAN}/text", text, methods=["GET"]),
    Route(f"{_SPAN}/tokens", tokens, methods=["GET"]),
    Route(f"{_SPAN}/reward", reward, methods=["POST"]),
    Route(f"{_SPAN}/retract", retract_reward, methods=["POST"]),
]
