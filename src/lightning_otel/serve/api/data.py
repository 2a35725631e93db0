"""Rollouts, transitions and spans by HTTP: a page at a time, or all at once.

A page of transitions holds whole rollouts, so that rewards and neighbours are never cut off.
"""

import base64
import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from datetime import UTC, date
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeVar, cast

import orjson
from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, create_model
from pydantic_core import PydanticCustomError
from starlette.requests import Request

from lightning_otel.dataset import Store
from lightning_otel.errors import ConfigError, NotFoundError
from lightning_otel.serve.api.operation import Parts, RequestModel, ResponseModel, operation
from lightning_otel.serve.responses import RefusalError
from lightning_otel.serve.streaming import PARQUET, join_lines, parquet_parts
from lightning_otel.serve.viewer.page import url
from lightning_otel.store.schema import COLUMNS
from lightning_otel.store.selection import REWARD_ATTRIBUTES, Selection
from lightning_otel.store.source import at_moment
from lightning_otel.store.sql import CALL_OPERATIONS, ROLLOUT, quote_text
from lightning_otel.types import conventions as c
from lightning_otel.types.instants import FORMS, instant_ns
from lightning_otel.types.values import parse_json
from lightning_otel.views.nouns import ATTEMPTS
from lightning_otel.views.options import TRANSITIONS
from lightning_otel.views.table import Filter

M = TypeVar("M", bound=RequestModel)

LINES: Final = "application/x-ndjson"
ARROW: Final = "application/vnd.apache.arrow.stream"
_LINES_TOO: Final = (
    LINES, "application/jsonl", "application/x-jsonlines", "application/json", "application/*",
    "*/*", "",
)  # fmt: skip
_KINDS: Final = {**dict.fromkeys(_LINES_TOO, LINES), ARROW: ARROW, PARQUET: PARQUET}
_BINARY: Final = {"type": "string"}
_ROW: Final = {"type": "object", "description": "A transition by column; docs/exports.md."}
_MOST_STEPS: Final = 100_000
_PART_STEPS: Final = 10_000
_MOST_ROLLOUTS: Final = 10_000
_MAX_IDS: Final = 200_000
# Whole rollouts until they hold so many steps, and whether there are more of them.
_PAGE: Final = f"""
WITH r AS (
  SELECT {ROLLOUT} AS rollout_id, min(start_ns) AS start_ns,
    count(*) FILTER (operation IN ({CALL_OPERATIONS})
      OR name = {quote_text(c.SPAN_ACTION)}) AS calls
  FROM spans WHERE {{wanted}} GROUP BY 1
), rest AS (
  SELECT rollout_id, start_ns, count(*) OVER () AS left_over,
    coalesce(sum(calls) OVER (ORDER BY start_ns, rollout_id
      ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0) AS before
  FROM r WHERE {{range}}
)
SELECT rollout_id, start_ns, left_over FROM rest WHERE before < ?
ORDER BY start_ns, rollout_id LIMIT {_MOST_ROLLOUTS}"""


class _Page(NamedTuple):
    """The rollouts of a page, and where the next one begins; empty for the last page."""

    rollout_ids: list[str]
    cursor: str


def _read_time(text: str) -> int:
    try:
        return instant_ns(text, zone=UTC)
    except ConfigError as exc:
        raise PydanticCustomError("time", f"this is no time; {FORMS}") from exc


def _read_cursor(text: str) -> Any:
    try:
        padded = text.encode("ascii") + b"=" * (-len(text) % 4)
        return orjson.loads(base64.b64decode(padded, altchars=b"-_", validate=True))
    except ValueError as exc:
        raise PydanticCustomError("cursor", "invalid cursor; omit it to start over") from exc


def _write_cursor(start_ns: int, *ids: str) -> str:
    return base64.urlsafe_b64encode(orjson.dumps([start_ns, *ids])).decode().rstrip("=")


def _check_column(name: str) -> str:
    if name not in COLUMNS and name != REWARD_ATTRIBUTES:
        raise ValueError("no column of the view spans")
    return name


Int64 = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
Time = Annotated[int, BeforeValidator(_read_time), WithJsonSchema({"type": "string"})]
_IS_CURSOR: Final = (
    BeforeValidator(_read_cursor), WithJsonSchema({"type": "string", "maxLength": 4096})
)  # fmt: skip
RolloutCursor = Annotated[tuple[Int64, str], *_IS_CURSOR]
AttemptCursor = Annotated[tuple[Int64, str, str], *_IS_CURSOR]
Id = Annotated[str, Field(max_length=1024)]
Ids = Annotated[tuple[Id, ...], Field(max_length=_MAX_IDS)]
SpanIds = Annotated[tuple[tuple[Id, Id], ...], Field(max_length=_MAX_IDS)]
Text = Annotated[str, Field(max_length=2000)]
Texts = Annotated[list[Text], Field(max_length=100)]
Columns = Annotated[tuple[Annotated[str, AfterValidator(_check_column)], ...], Field(min_length=1)]


def with_filters(filters: Mapping[str, Filter]) -> Callable[[type[M]], type[M]]:
    """Return what adds filters to the model of a query that does not declare them itself."""

    def add(model: type[M]) -> type[M]:
        fields: dict[str, Any] = {}
        for name, filter in filters.items():
            if name not in model.model_fields:
                text: Any = Literal[filter.choices] if filter.choices else Text
                kind = {date: Time, str: text, tuple: Texts}.get(filter.kind, filter.kind)
                default: Any = [] if filter.kind is tuple else None
                kind = kind | None if default is None else kind
                fields[name] = (kind, Field(default, description=filter.help))
        return create_model(model.__name__, __base__=model, __doc__=model.__doc__, **fields)

    return add


@with_filters(ATTEMPTS.filters)
class RolloutsQuery(RequestModel):
    """Filters of the list of rollouts."""

    limit: Annotated[int, Field(ge=1, le=1_000)] = 100
    cursor: AttemptCursor | None = None
    """What the page before said as `next_cursor`."""


class AttemptResponse(ResponseModel):
    """An attempt as it was recorded."""

    rollout_id: str
    attempt_id: str
    status: str
    start_ns: int
    end_ns: int
    spans: int
    traces: int
    calls: int
    rewards: int
    reward: float | None
    """What it earned; null if nothing."""
    input_tokens: int | None
    output_tokens: int | None
    cost: float | None
    """Of its calls with a price; null if none has one."""
    error_type: str | None
    error_message: str | None
    agents: str | None
    task: Annotated[Any, BeforeValidator(parse_json)]


class RolloutsResponse(ResponseModel):
    """A page of attempts, the newest first."""

    rollouts: list[AttemptResponse]
    total: int
    """How many there are on all pages."""
    next_cursor: str | None
    """Where the next page begins; null on the last one."""


class RolloutResponse(ResponseModel):
    """One rollout."""

    rollout_id: str
    attempts: list[AttemptResponse]
    """What was recorded of each; none if nothing is recorded yet."""
    queued: dict[str, Any] | None
    """Where it stands in the queue; null if it never was in it."""


@with_filters(TRANSITIONS)
class TransitionsQuery(RequestModel):
    """Filters of the list of transitions."""

    rollout_id: list[str] = Field(default_factory=list, max_length=1_000)
    """Only these rollouts, by their whole ids."""
    bodies: bool = True
    """Whether messages and tokens are among the columns."""
    limit: Annotated[int, Field(ge=1, le=_MOST_STEPS)] | None = None
    """A page holds whole rollouts until they have so many steps; without, all comes at once."""
    cursor: RolloutCursor | None = None
    """Where the page before ended: the header `Next-Cursor`."""
    report: Literal["0", "1"] = "0"
    """`1` adds a last line with the funnel of what was looked at, and why steps are left out."""


class SelectionBody(RequestModel):
    """Which spans to fetch; an empty list or none selects all."""

    rollout_ids: Ids = ()
    trace_ids: Ids = ()
    since_ns: Int64 | None = None
    """Spans that start at this time or later, in Unix nanoseconds."""
    until_ns: Int64 | None = None
    """Spans that start at this time or earlier."""
    only: SpanIds = ()
    """Pairs of trace id and span id."""
    without: SpanIds = ()
    is_ordered: bool = False
    columns: Columns = tuple(COLUMNS)
    """Of the view `spans`."""


@operation("GET", "/v1/rollouts")
def rollouts(request: Request, params: RolloutsQuery) -> RolloutsResponse:
    """List recorded rollouts, the newest first."""
    values = params.model_dump(include=set(ATTEMPTS.filters))
    store = request.app.state.store
    listing = ATTEMPTS.read(store, values, limit=params.limit, after=params.cursor)
    return RolloutsResponse(
        rollouts=[AttemptResponse(**row) for row in listing.rows],
        total=listing.total,
        next_cursor=_write_cursor(*listing.following) if listing.following else None,
    )


@operation("GET", "/v1/rollouts/{rollout_id:path}", {404: "There is none."})
def rollout(request: Request) -> RolloutResponse:
    """Read one rollout: each attempt, and where it stands in the queue."""
    name, state = request.path_params["rollout_id"], request.app.state
    query = "SELECT * FROM rollouts WHERE rollout_id = ? ORDER BY start_ns, attempt_id"
    attempts = [AttemptResponse(**row) for row in state.store.sql(query, [name])]
    matches = state.repositories.queue.rollouts(ids=[name])
    queued = asdict(matches[0]) if matches else None
    if not attempts and queued is None:
        raise NotFoundError(
            f"no rollout {name!r} is recorded or queued; GET /v1/rollouts lists those there are"
        )
    return RolloutResponse(rollout_id=name, attempts=attempts, queued=queued)


@operation("POST", "/v1/fetch", content={PARQUET: _BINARY}, most_bytes=20 << 20)
async def fetch(request: Request, params: SelectionBody) -> Parts:
    """Return selected spans as Parquet, for `Store("http://…")` elsewhere."""
    selection, source = Selection(**params.model_dump()), request.app.state.store.source
    return Parts(parquet_parts(lambda path: source.fetch(selection).to_parquet(path)), PARQUET)


@operation(
    "GET",
    "/v1/transitions",
    {
        200: "The rows; with `limit`, a page of whole rollouts.",
        406: "None of the forms it comes in is accepted.",
    },
    content={LINES: _ROW, ARROW: _BINARY, PARQUET: _BINARY},
    headers={
        "Next-Cursor": "Where the next page begins; absent on the last one.",
        "Link": 'The address of the next page, with `rel="next"`.',
    },
)
def transitions(request: Request, params: TransitionsQuery) -> Parts:
    """Return transitions, one row each; one that several branches share appears once."""
    state, kind = request.app.state, _choose_kind(request.headers.get("accept", ""))
    if params.report == "1" and kind != LINES:
        raise RefusalError(400, f"the report comes with {LINES}; ask for that")
    options = params.model_dump(exclude={"limit", "cursor", "report"})
    keywords = {name: value for name, value in options.items() if value not in (None, [])}
    state.repositories.deliver_feedback(state.ingester.keep)
    store: Store = at_moment(state.store)
    limit = _PART_STEPS if kind == PARQUET and params.limit is None else params.limit
    page, headers = None, {}
    if limit is not None or params.cursor is not None:
        page = _find_page(store, keywords, params.cursor, limit or _MOST_STEPS)
        link = f'<{url(request, cursor=page.cursor)}>; rel="next"'
        headers = {"Next-Cursor": page.cursor, "Link": link} if page.cursor else {}
    # Checked before anything is said; nothing is read yet.
    store.transitions(**_select_rollouts(keywords, _Page([], "")))
    page_keywords = _select_rollouts(keywords, page)
    if kind == ARROW:
        stream = _write_arrow(_read_tables(store, keywords, page))
    elif kind == PARQUET:
        stream = parquet_parts(lambda path: store.transitions(**page_keywords).to_parquet(path))
    else:
        cursor = page.cursor or None if page else None
        lines = _write_lines(store, page_keywords, cursor, is_reported=params.report == "1")
        stream = join_lines(lines)
    return Parts(stream, kind, headers)


def _choose_kind(accept: str) -> str:
    for choice in accept.split(","):
        kind = _KINDS.get(choice.partition(";")[0].strip().lower())
        if kind is not None:
            return kind
    raise RefusalError(406, f"transitions come as {LINES}, {ARROW} or {PARQUET}")


def _find_page(
    store: Store, keywords: Mapping[str, Any], place: tuple[int, str] | None, limit: int
) -> _Page:
    condition, values = "true", list[object]()
    if "rollout_id" in keywords:
        condition = f"{ROLLOUT} IN (SELECT unnest(?::VARCHAR[]))"
        values.append(keywords["rollout_id"])
    bounds = ["true"]
    if place is not None:
        bounds.append("(start_ns, rollout_id) > (?, ?)")
        values += place
    for sign, name in ((">=", "since"), ("<", "until")):
        if keywords.get(name) is not None:
            bounds.append(f"start_ns {sign} ?")
            values.append(keywords[name])
    query = _PAGE.format(wanted=condition, range=" AND ".join(bounds))
    rows = store.sql(query, [*values, limit]).rows()
    is_last = not rows or rows[-1]["left_over"] <= len(rows)
    cursor = "" if is_last else _write_cursor(rows[-1]["start_ns"], rows[-1]["rollout_id"])
    return _Page([row["rollout_id"] for row in rows], cursor)


def _select_rollouts(keywords: Mapping[str, Any], page: _Page | None) -> dict[str, Any]:
    """Return the keywords of a page: its rollouts stand for when they began."""
    ids = {"rollout_id": page.rollout_ids, "since": None, "until": None} if page else {}
    return {**keywords, **ids}


def _write_lines(
    store: Store, keywords: Mapping[str, Any], cursor: str | None, *, is_reported: bool
) -> Iterator[bytes]:
    table = store.transitions(**keywords)
    yield from table.lines()
    if is_reported:
        report = table.report()
        funnel = {name: value for name, value in asdict(report).items() if name != "dropped"}
        # Each reason is counted rather than each loss listed.
        funnel |= {"repairs": len(report.repairs), "left_out": report.reasons()}
        trailer = {"report": funnel, "cursor": cursor}
        yield orjson.dumps(trailer, option=orjson.OPT_APPEND_NEWLINE)


def _read_tables(store: Store, keywords: Mapping[str, Any], page: _Page | None) -> Iterator[Any]:
    """Yield the transitions as tables that memory holds; at least one, if an empty one."""
    if page is not None:
        yield store.transitions(**_select_rollouts(keywords, page))
        return
    place: tuple[int, str] | None = None
    while True:
        some = _find_page(store, keywords, place, _PART_STEPS)
        yield store.transitions(**_select_rollouts(keywords, some))
        if not some.cursor:
            return
        place = cast(tuple[int, str], tuple(_read_cursor(some.cursor)))


def _write_arrow(tables: Iterator[Any]) -> Iterator[bytes]:
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
