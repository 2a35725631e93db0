"""Status of the server, for people, health checks and Prometheus."""

import time
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import version
from typing import Any, Final, NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lightning_otel.dataset import Store
from lightning_otel.serve.answers import JSON
from lightning_otel.serve.api.operation import Answer, Operation, Told, routes, told
from lightning_otel.serve.api.rooms import Rooms
from lightning_otel.serve.viewer.page import run
from lightning_otel.store.layout import total_bytes
from lightning_otel.store.settle import sealed
from lightning_otel.store.source import overview

EXPOSITION: Final = "text/plain; version=0.0.4; charset=utf-8"
_PREFIX: Final = "lightning_otel"
_STATUSES: Final = ("running", "succeeded", "failed", "incomplete")
_ESCAPES: Final = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


class Sizes(NamedTuple):
    """The size of a store and the backlog of its settling.

    Attributes:
        size_bytes: Of its files and segments.
        segments: Those that are not settled.
        lag_s: How long the oldest closed segment has waited; 0 if none waits.
    """

    size_bytes: int
    segments: int
    lag_s: float


class PendingTold(Told):
    """Feedback that waits for what it judges."""

    count: int
    oldest_s: float | None
    """For how long the oldest has waited; null if none does."""


class ServerTold(Told):
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
    pending_feedback: PendingTold
    rollouts: dict[str, int]
    """Recorded rollouts by status."""
    queued: dict[str, int]
    """Rollouts in the queue by status."""
    training_requests: dict[str, int]
    size_bytes: int
    settle_lag_s: float


class HealthTold(Told):
    """The server's health."""

    status: str


async def health(request: Request) -> Response:
    """200: it serves."""
    return told(HealthTold(status="ok"))


async def status(request: Request) -> Response:
    """Answer with the server, its store and its counters."""
    counts = request.app.state.intake.counts

    def read(store: Store) -> ServerTold:
        found = _read_status(request, store)
        sizes, waiting = found["sizes"], found["waiting"]
        return ServerTold(
            name="lightning-otel",
            version=version("lightning-otel"),
            store=store.name,
            stored=counts.stored,
            rejected=dict(counts.rejected),
            refused={str(number): count for number, count in counts.refused.items()},
            pending_feedback=PendingTold(count=waiting.count, oldest_s=_age_s(waiting.oldest_ns)),
            rollouts=found["rollouts"],
            queued=found["queued"],
            training_requests=found["requests"],
            size_bytes=sizes.size_bytes,
            settle_lag_s=sizes.lag_s,
        )

    return told(await run(request, read))


async def metrics(request: Request) -> Response:
    """The same as numbers for Prometheus."""
    counts = request.app.state.intake.counts

    def read(store: Store) -> bytes:
        found = _read_status(request, store)
        return "".join(_write_metrics(counts, found)).encode()

    return Response(await run(request, read), media_type=EXPOSITION)


def _read_status(request: Request, store: Store) -> dict[str, Any]:
    state = request.app.state
    rooms: Rooms = state.rooms
    return {
        "sizes": _measure_store(store),
        "waiting": rooms.pending.waiting(),
        "rollouts": state.by_status.of(store, _by_status),
        "queued": {str(name): count for name, count in rooms.queue.counts().items()},
        "requests": {str(name): count for name, count in rooms.requests.counts().items()},
    }


def _by_status(store: Store) -> dict[str, int]:
    query = "SELECT status, count(DISTINCT rollout_id) AS n FROM rollouts GROUP BY 1"
    found = {row["status"]: int(row["n"]) for row in overview(store.source, query)}
    return {name: found.get(name, 0) for name in _STATUSES}


def _measure_store(store: Store) -> Sizes:
    layout = store.layout
    if layout is None:
        return Sizes(0, 0, 0.0)
    manifest = layout.read_manifest()
    segments = layout.unsettled(manifest)
    files = [layout.data / file.name for file in manifest.live_files]
    oldest_s = min((path.stat().st_mtime for path in sealed(layout) if path.exists()), default=None)
    lag_s = 0.0 if oldest_s is None else max(0.0, time.time() - oldest_s)
    return Sizes(total_bytes([*files, *segments]), len(segments), lag_s)


def _age_s(since_ns: int | None) -> float | None:
    return None if since_ns is None else max(0.0, (time.time_ns() - since_ns) / 1e9)


def _write_metrics(counts: Any, found: Mapping[str, Any]) -> Iterator[str]:
    """The metrics in the text format.

    Source: Prometheus, "Exposition formats", text format 0.0.4.
    """
    sizes, waiting = found["sizes"], found["waiting"]
    refused = {str(number): count for number, count in counts.refused.items()}
    yield _write_metric(
        "spans_stored_total", "counter", "Spans kept, those sent twice counted twice.",
        [({}, counts.stored)],
    )  # fmt: skip
    yield _write_metric(
        "spans_rejected_total", "counter", "Spans that were not kept, by reason.",
        _label_counts("reason", dict(counts.rejected)),
    )  # fmt: skip
    yield _write_metric(
        "requests_refused_total", "counter", "Requests not served, by status of HTTP.",
        _label_counts("status", refused),
    )  # fmt: skip
    yield _write_metric(
        "feedback_pending", "gauge", "Feedback that waits for what it judges.",
        [({}, waiting.count)],
    )  # fmt: skip
    yield _write_metric(
        "feedback_pending_oldest_seconds", "gauge", "For how long the oldest of it has waited.",
        [({}, _age_s(waiting.oldest_ns) or 0.0)],
    )  # fmt: skip
    yield _write_metric(
        "rollouts",
        "gauge",
        "Recorded rollouts, by status.",
        _label_counts("status", found["rollouts"]),
    )
    yield _write_metric(
        "queue_rollouts", "gauge", "Rollouts in the queue, by status.",
        _label_counts("status", found["queued"]),
    )  # fmt: skip
    yield _write_metric(
        "training_requests", "gauge", "Training that was asked for, by status.",
        _label_counts("status", found["requests"]),
    )  # fmt: skip
    yield _write_metric(
        "store_size_bytes", "gauge", "Size of the store's files.", [({}, sizes.size_bytes)]
    )
    yield _write_metric(
        "store_unsettled_segments", "gauge", "Segments that are not settled.",
        [({}, sizes.segments)],
    )  # fmt: skip
    yield _write_metric(
        "settle_lag_seconds", "gauge", "How long the oldest closed segment waits to be settled.",
        [({}, sizes.lag_s)],
    )  # fmt: skip


def _label_counts(label: str, counts: Mapping[str, int]) -> list[tuple[dict[str, str], float]]:
    return [({label: value}, count) for value, count in sorted(counts.items())]


def _write_metric(
    name: str, kind: str, text: str, samples: Iterable[tuple[Mapping[str, str], float]]
) -> str:
    full = f"{_PREFIX}_{name}"
    lines = [f"# HELP {full} {text}", f"# TYPE {full} {kind}"]
    for labels, value in samples:
        named = ",".join(f'{key}="{text.translate(_ESCAPES)}"' for key, text in labels.items())
        lines.append(f"{full}{{{named}}} {value}" if named else f"{full} {value}")
    return "\n".join(lines) + "\n"


OPERATIONS: Final = (
    Operation(
        "GET", "/healthz", health, "Whether it serves.",
        {200: Answer("It does.", {JSON: HealthTold})}, is_open=True,
    ),
    Operation(
        "GET", "/v1/status", status, "What this server is, and what became of what it was sent.",
        {200: Answer("Counts since it began, and how the store stands.", {JSON: ServerTold})},
    ),
    Operation(
        "GET", "/metrics", metrics, "Numbers for Prometheus.",
        {200: Answer("The text format 0.0.4.", {"text/plain": {"type": "string"}})},
    ),
)  # fmt: skip
ROUTES: Final[list[Route]] = routes(OPERATIONS)
