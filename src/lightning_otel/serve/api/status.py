"""The server by HTTP: how it stands, for people and Prometheus; its events; what it serves."""

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import version
from typing import Annotated, Any, Final, Literal

import orjson
from pydantic import Field
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from lightning_otel.dataset import Store
from lightning_otel.serve import otlp, responses
from lightning_otel.serve.api import operations
from lightning_otel.serve.api.events import EVENTS
from lightning_otel.serve.api.operation import RequestModel, ResponseModel, document, operation
from lightning_otel.store.removal import measure_disk
from lightning_otel.store.settle import list_sealed
from lightning_otel.store.source import read_overview
from lightning_otel.views.summary import Summary, read_summaries

_EXPOSITION: Final = "text/plain; version=0.0.4; charset=utf-8"
_STATUSES: Final = ("running", "succeeded", "failed", "incomplete")
_ESCAPES: Final = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
_TEXT: Final = {"type": "string"}
_OTLP: Final = {responses.PROTOBUF: _TEXT, responses.JSON: {"type": "object"}}


class PendingResponse(ResponseModel):
    """Feedback that waits for what it judges."""

    count: int
    oldest_s: float | None
    """For how long the oldest has waited; null if none does."""


class ServerResponse(ResponseModel):
    """The server, its store and its counters."""

    name: str
    version: str
    store: str
    stored: int
    """Spans kept since it began, those sent twice counted twice."""
    rejected: dict[str, int]
    """Spans that were not kept, by reason."""
    refused: dict[str, int]
    """Requests not served, by status."""
    pending_feedback: PendingResponse
    rollouts: dict[str, int]
    """Recorded rollouts by status."""
    queued: dict[str, int]
    """Rollouts in the queue by status."""
    training_requests: dict[str, int]
    size_bytes: int
    settle_lag_s: float


class HealthResponse(ResponseModel):
    """The server's health."""

    status: str


class EventsQuery(RequestModel):
    """From where on."""

    last_event_id: Annotated[str, Field(max_length=64)] = ""
    """The id of the last event that was seen; the header `Last-Event-ID`, which a browser sends by
    itself, is the same and counts more."""


@operation("GET", "/healthz", {200: "It serves."}, is_open=True)
async def health(request: Request) -> HealthResponse:
    """Tell that it serves."""
    return HealthResponse(status="ok")


@operation("GET", "/v1/status")
def status(request: Request) -> ServerResponse:
    """Tell what this server is, and what became of what it was sent."""
    values = _read_status(request)
    pending = PendingResponse(count=values.pop("pending"), oldest_s=values.pop("oldest_s"))
    return ServerResponse(
        **values,
        name="lightning-otel",
        version=version("lightning-otel"),
        store=request.app.state.store.name,
        pending_feedback=pending,
    )


class SummaryQuery(RequestModel):
    """The period."""

    period: Literal["1h", "24h", "7d", "30d"] = "24h"


class SummaryResponse(ResponseModel):
    """A period up to now, and the one before."""

    now: Summary
    before: Summary


@operation("GET", "/v1/summary")
def summary(request: Request, params: SummaryQuery) -> SummaryResponse:
    """Return rollouts, reward, errors, latency, tokens and cost of a period."""
    now, before = read_summaries(request.app.state.store, params.period)
    return SummaryResponse(now=now, before=before)


@operation("GET", "/metrics", content={"text/plain": _TEXT})
def metrics(request: Request) -> Response:
    """Tell numbers for Prometheus, in the text format 0.0.4."""
    return Response("".join(_write_metrics(_read_status(request))), media_type=_EXPOSITION)


@operation(
    "GET",
    "/v1/events",
    {200: "The events, until either side ends.", 503: "Too many listen."},
    content={EVENTS: _TEXT},
)
async def events(request: Request, params: EventsQuery) -> Response:
    """Send what happens as Server-Sent Events, resumed by `Last-Event-ID`.

    `trace`: spans of a trace ended. `rollout`: one ended. `reward`: one was given. `run`: a
    training run began, went on or ended. `ready` comes first; `reset` says that something was
    missed, so that what is shown is to be read anew.
    """
    last = request.headers.get("last-event-id", params.last_event_id)[:64]
    answer: Response = await request.app.state.events.answer(last)
    return answer


@operation(
    "POST",
    "/v1/traces",
    {200: "They are kept, but for those counted as rejected."},
    content=_OTLP,
    bodies=_OTLP,
    is_open=True,
)
async def traces(request: Request) -> Response:
    """Take spans by OTLP/HTTP; 200 says that they are kept."""
    return await otlp.traces(request)


@operation(
    "GET", "/openapi.json", {200: "OpenAPI 3.1."}, content={responses.JSON: {"type": "object"}}
)
async def openapi(request: Request) -> Response:
    """Return this document."""
    return Response(await run_in_threadpool(_write_document), media_type=responses.JSON)


@cache
def _write_document() -> bytes:
    return orjson.dumps(document(operations()), default=str)


def _read_status(request: Request) -> dict[str, Any]:
    state = request.app.state
    counts, repositories, store = state.ingester.counts, state.repositories, state.store
    feedback, layout = repositories.pending.waiting(), store.layout
    since_ns = feedback.oldest_ns
    values = {
        "stored": counts.stored,
        "rejected": dict(counts.rejected),
        "refused": {str(number): count for number, count in counts.refused.items()},
        "pending": feedback.count,
        "oldest_s": None if since_ns is None else max(0.0, (time.time_ns() - since_ns) / 1e9),
        "rollouts": state.by_status.of(store, _count_rollouts),
        "queued": {str(name): count for name, count in repositories.queue.counts().items()},
        "training_requests": {str(name): n for name, n in repositories.requests.counts().items()},
        "size_bytes": 0,
        "segments": 0,
        "settle_lag_s": 0.0,
    }
    if layout is not None:
        since_s = [path.stat().st_mtime for path in list_sealed(layout) if path.exists()]
        values["size_bytes"] = measure_disk(layout)
        values["segments"] = len(layout.list_unsettled(layout.read_manifest()))
        values["settle_lag_s"] = max([0.0, *(time.time() - begin_s for begin_s in since_s)])
    return values


def _count_rollouts(store: Store) -> dict[str, int]:
    query = "SELECT status, count(DISTINCT rollout_id) AS n FROM rollouts GROUP BY 1"
    counts = {row["status"]: int(row["n"]) for row in read_overview(store.source, query)}
    return {name: counts.get(name, 0) for name in _STATUSES}


def _write_metrics(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield the metrics in Prometheus's text format 0.0.4, see "Exposition formats"."""
    table: Sequence[tuple[str, str, str, Any]] = (
        ("spans_stored_total", "Spans kept, those sent twice counted twice.", "", facts["stored"]),
        ("spans_rejected_total", "Spans that were not kept, by reason.", "reason",
         facts["rejected"]),
        ("requests_refused_total", "Requests not served, by status of HTTP.", "status",
         facts["refused"]),
        ("feedback_pending", "Feedback that waits for what it judges.", "", facts["pending"]),
        ("feedback_pending_oldest_seconds", "For how long the oldest of it has waited.", "",
         facts["oldest_s"] or 0.0),
        ("rollouts", "Recorded rollouts, by status.", "status", facts["rollouts"]),
        ("queue_rollouts", "Rollouts in the queue, by status.", "status", facts["queued"]),
        ("training_requests", "Training that was asked for, by status.", "status",
         facts["training_requests"]),
        ("store_size_bytes", "Size of the store's files.", "", facts["size_bytes"]),
        ("store_unsettled_segments", "Segments that are not settled.", "", facts["segments"]),
        ("settle_lag_seconds", "How long the oldest closed segment waits to be settled.", "",
         facts["settle_lag_s"]),
    )  # fmt: skip
    for name, text, label, values in table:
        name = f"lightning_otel_{name}"
        kind = "counter" if name.endswith("_total") else "gauge"
        yield f"# HELP {name} {text}\n# TYPE {name} {kind}\n"
        for value, count in sorted(values.items()) if label else [("", values)]:
            labels = f'{{{label}="{value.translate(_ESCAPES)}"}}' if label else ""
            yield f"{name}{labels} {count}\n"
