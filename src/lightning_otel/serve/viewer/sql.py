"""Read-only SQL over the views, in the sandbox: a table on the page, all of it as a file.

The statement stands in the address, so that an answer can be linked to; it can change nothing.
"""

import csv
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, Final

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lightning_otel.dataset import Store
from lightning_otel.errors import LightningOtelError, QueryError, StoreError
from lightning_otel.serve.responses import RefusalError
from lightning_otel.serve.streaming import join_lines
from lightning_otel.serve.viewer import page
from lightning_otel.types.text import csv_cell
from lightning_otel.types.values import make_plain, repair_text
from lightning_otel.views.sandbox import Limits, Result, run_statement

LIMITS: Final = Limits(wall_s=30.0, memory_bytes=1 << 30, rows=200, size_bytes=8 << 20)
"""Of a page."""
FILE_LIMITS: Final = Limits(
    wall_s=120.0, memory_bytes=1 << 30, rows=1_000_000, size_bytes=256 << 20
)
"""Of a file."""
_LONGEST: Final = 20_000
_CELL: Final = 200
EXAMPLES: Final = {
    "Columns of spans": "DESCRIBE spans",
    "Reward by agent": """SELECT agents, count(*) AS rollouts, round(avg(reward), 3) AS mean_reward
FROM rollouts GROUP BY agents ORDER BY rollouts DESC""",
    "Slowest calls": """SELECT model, agent, round(duration_ms) AS ms, output_tokens, trace_id
FROM calls ORDER BY duration_ms DESC LIMIT 20""",
    "Tokens by model": """SELECT model, count(*) AS calls, sum(input_tokens) AS tokens_in, \
sum(output_tokens) AS tokens_out
FROM calls GROUP BY model ORDER BY calls DESC""",
    "Errors": """SELECT error_type, model, count(*) AS calls FROM calls
WHERE status = 'ERROR' GROUP BY ALL ORDER BY calls DESC""",
    "Worst rollouts": """SELECT rollout_id, reward, calls, task FROM rollouts
WHERE reward IS NOT NULL ORDER BY reward, start_ns DESC LIMIT 20""",
}
"""Statements worth beginning with, by title."""


async def show(request: Request) -> Response:
    """The page, with the answer to the statement in its address if there is one."""
    text, is_left = _read_statement(request), threading.Event()
    try:
        content = await page.run(
            request, lambda store: _show_answer(store, text, lambda: not is_left.is_set())
        )
    finally:
        is_left.set()
    status = 400 if content.get("error") else 200
    return await page.answer(request, "sql.html", lambda _: content, title="SQL", status=status)


async def columns(request: Request) -> Response:
    """The views and their columns."""
    return await page.answer(request, "sql_columns.html", _read_columns, title="Views and columns")


async def download(request: Request) -> Response:
    """The whole answer as CSV or JSON lines."""
    text, kind = _read_statement(request), request.path_params["kind"]
    if kind not in _WRITERS:
        raise RefusalError(404, "an answer comes as answer.csv or answer.jsonl")
    if not text:
        raise RefusalError(400, "there is no statement; pass one in ?q=")
    store = request.app.state.store
    name = f'attachment; filename="answer.{kind}"'
    answer: Response = await request.app.state.streams.answer(
        _write_parts(store, text, _WRITERS[kind]), _TYPES[kind], {"Content-Disposition": name}
    )
    return answer


def _read_statement(request: Request) -> str:
    statement = request.query_params.get("q", "").strip()
    if len(statement) > _LONGEST:
        raise RefusalError(400, f"a statement here has at most {_LONGEST:,} characters; shorten it")
    return statement


def _run_statement(
    store: Store, text: str, limits: Limits, is_wanted: Callable[[], bool] = lambda: True
) -> Result:
    if store.layout is None:
        raise StoreError("the page queries local stores only; use: lightning-otel sql")
    return run_statement(store.layout, text, limits, is_wanted)


def _show_answer(store: Store, text: str, is_wanted: Callable[[], bool]) -> Mapping[str, object]:
    content = {"text": text, "examples": EXAMPLES, "limits": LIMITS, "file_limits": FILE_LIMITS}
    if not text:
        return content
    start_s = time.perf_counter()
    try:
        with _run_statement(store, text, LIMITS, is_wanted) as answer:
            rows = [[_make_cell(value) for value in row] for row in answer]
    except LightningOtelError as exc:
        return {**content, "error": exc.what, "remedy": exc.remedy}
    return {
        **content,
        "columns": answer.columns,
        "rows": rows,
        "cut": answer.cut,
        "took_ns": int((time.perf_counter() - start_s) * 1e9),
    }


_VIEWS: Final = "FROM (SHOW ALL TABLES) WHERE schema = 'main'"


def _read_columns(store: Store) -> Mapping[str, object]:
    with _run_statement(store, _VIEWS, LIMITS) as answer:
        rows = [dict(zip(answer.columns, row, strict=True)) for row in answer]
    views = [
        {
            "name": row["name"],
            "columns": list(zip(row["column_names"], row["column_types"], strict=True)),
        }
        for row in rows
    ]
    return {"views": views}


def _make_cell(value: Any) -> dict[str, Any]:
    text = _cell_text(value)
    whole = len(text) if len(text) > _CELL else 0
    return {"text": text[:_CELL], "whole": whole, "is_null": value is None}


def _cell_text(value: Any) -> str:
    if isinstance(value, (Mapping, list, tuple)):
        return orjson.dumps(_json_value(value)).decode()
    return "" if value is None else str(value)


def _json_value(value: Any) -> Any:
    return str(value) if isinstance(value, timedelta) else repair_text(make_plain(value))


def _write_csv(answer: Result) -> Iterator[bytes]:
    echo: Any = SimpleNamespace(write=str)  # a row is written as the return value
    write: Callable[[list[object]], str] = csv.writer(echo).writerow
    yield write([csv_cell(name, name) for name in answer.columns]).encode("utf-8", "replace")
    for row in answer:
        text = write([csv_cell(value, _cell_text(value)) for value in row])
        yield text.encode("utf-8", "replace")
    _check_whole(answer)


def _write_jsonl(answer: Result) -> Iterator[bytes]:
    for row in answer:
        record = dict(zip(answer.columns, map(_json_value, row), strict=True))
        yield orjson.dumps(repair_text(record), option=orjson.OPT_APPEND_NEWLINE)
    _check_whole(answer)


def _check_whole(answer: Result) -> None:
    if answer.cut:
        raise QueryError(f"the answer has more {answer.cut} than a file may have; add a LIMIT")


def _write_parts(
    store: Store, text: str, write: Callable[[Result], Iterator[bytes]]
) -> Iterator[bytes]:
    """Yield the lines of a file in parts; a fault after the first rows breaks it off."""
    with _run_statement(store, text, FILE_LIMITS) as answer:
        yield from join_lines(write(answer))


_WRITERS: Final = {"csv": _write_csv, "jsonl": _write_jsonl}
_TYPES: Final = {"csv": "text/csv; charset=utf-8", "jsonl": "application/x-ndjson"}

ROUTES: Final[list[Route]] = [
    Route("/sql", show, methods=["GET"]),
    Route("/sql/columns", columns, methods=["GET"]),
    Route("/sql/answer.{kind:str}", download, methods=["GET"]),
]
