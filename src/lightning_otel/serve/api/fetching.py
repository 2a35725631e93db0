"""Selected spans as a Parquet file: what ``Store("http://…")`` reads on another machine."""

from typing import Annotated, Final

from pydantic import AfterValidator, Field
from starlette.requests import Request
from starlette.responses import Response

from lightning_otel.serve.api.operation import Answer, Asked, Operation, body_of
from lightning_otel.serve.streaming import PARQUET, parquet_parts
from lightning_otel.store.schema import COLUMNS
from lightning_otel.store.source import REWARD_ATTRIBUTES, Selection

_BODY_BYTES: Final = 20 << 20
_MAX_IDS: Final = 200_000


def _column(name: str) -> str:
    if name not in COLUMNS and name != REWARD_ATTRIBUTES:
        raise ValueError("no column of the view spans")
    return name


Id = Annotated[str, Field(max_length=1024)]
Ids = Annotated[tuple[Id, ...], Field(max_length=_MAX_IDS)]
SpanIds = Annotated[tuple[tuple[Id, Id], ...], Field(max_length=_MAX_IDS)]
Time = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
Columns = Annotated[tuple[Annotated[str, AfterValidator(_column)], ...], Field(min_length=1)]


class SelectionBody(Asked):
    """Which spans to fetch; an empty list or none selects all."""

    rollout_ids: Ids = ()
    trace_ids: Ids = ()
    since_ns: Time | None = None
    """Spans that start at this time or later, in Unix nanoseconds."""
    until_ns: Time | None = None
    """Spans that start at this time or earlier."""
    only: SpanIds = ()
    """Pairs of trace id and span id."""
    without: SpanIds = ()
    is_ordered: bool = False
    columns: Columns = tuple(COLUMNS)
    """Of the view `spans`."""


async def fetch(request: Request) -> Response:
    """Selected spans as a Parquet file."""
    body = await body_of(request, SelectionBody, most_bytes=_BODY_BYTES)
    selection, state = Selection(**body.model_dump()), request.app.state
    made = parquet_parts(lambda: state.store.source.fetch(selection))
    answer: Response = await state.streams.answer(made, PARQUET)
    return answer


OPERATIONS: Final = (
    Operation(
        "POST", "/v1/fetch", fetch,
        "Selected spans as Parquet, for `Store(\"http://…\")` elsewhere.",
        {200: Answer("One Parquet file.", {PARQUET: {"type": "string"}})},
        body=SelectionBody,
        needs_body=False,
    ),
)  # fmt: skip
