"""Rollouts by HTTP: what is recorded of them, and where they stand in the queue."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any, Final, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lightning_otel.dataset import Store
from lightning_otel.errors import NotFoundError
from lightning_otel.serve.answers import JSON
from lightning_otel.serve.api.cursors import cursor_of, instant_of, place_of
from lightning_otel.serve.api.operation import (
    Answer,
    Asked,
    Operation,
    Told,
    query_of,
    routes,
    told,
)
from lightning_otel.serve.viewer.page import run
from lightning_otel.values import parse_json

RecordedStatus = Literal["running", "succeeded", "failed", "incomplete"]


class RolloutsQuery(Asked):
    """Filters of the list of rollouts."""

    status: RecordedStatus | None = None
    agent: Annotated[str, Field(max_length=1_000)] | None = None
    """One that took part, by its whole name."""
    rewarded: bool | None = None
    since: str | None = None
    """Began then or later: `10m`, ISO 8601 (UTC if it names no zone), or Unix nanoseconds."""
    until: str | None = None
    limit: Annotated[int, Field(ge=1, le=1_000)] = 100
    cursor: Annotated[str, Field(max_length=4_096)] | None = None
    """What the page before said as `next_cursor`."""


class AttemptTold(Told):
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
    agents: str | None
    task: Any


class RolloutsTold(Told):
    """A page of attempts, the newest first."""

    rollouts: list[AttemptTold]
    total: int
    """How many there are on all pages."""
    next_cursor: str | None
    """Where the next page begins; null on the last one."""


class RolloutTold(Told):
    """One rollout."""

    rollout_id: str
    attempts: list[AttemptTold]
    """What was recorded of each; none if nothing is recorded yet."""
    queued: dict[str, Any] | None
    """Where it stands in the queue; null if it never was in it."""


async def rollouts(request: Request) -> Response:
    """A page of recorded rollouts, the newest first."""
    asked = query_of(request, RolloutsQuery)
    where, values = _make_conditions(asked)
    place = place_of(asked.cursor, 2)
    return told(
        await run(request, lambda store: _read_page(store, where, values, place, asked.limit))
    )


async def rollout(request: Request) -> Response:
    """One rollout: each attempt, and where it stands in the queue."""
    name = request.path_params["rollout_id"]
    rooms = request.app.state.rooms

    def read(store: Store) -> RolloutTold:
        query = "SELECT * FROM rollouts WHERE rollout_id = ? ORDER BY start_ns, attempt_id"
        attempts = [_make_attempt(row) for row in store.sql(query, [name])]
        queued = rooms.queue.rollouts(ids=[name])
        if not attempts and not queued:
            raise NotFoundError(
                f"no rollout {name!r} is recorded or queued; GET /v1/rollouts lists those there are"
            )
        found = asdict(queued[0]) if queued else None
        return RolloutTold(rollout_id=name, attempts=attempts, queued=found)

    return told(await run(request, read))


def _make_conditions(asked: RolloutsQuery) -> tuple[str, list[object]]:
    conditions, values = ["true"], list[object]()
    if asked.status is not None:
        conditions.append("status = ?")
        values.append(asked.status)
    if asked.agent is not None:
        conditions.append("list_contains(string_split(agents, ', '), ?)")
        values.append(asked.agent)
    if asked.rewarded is not None:
        conditions.append("reward IS NOT NULL" if asked.rewarded else "reward IS NULL")
    for sign, name in ((">=", "since"), ("<", "until")):
        time_ns = instant_of(getattr(asked, name), name)
        if time_ns is not None:
            conditions.append(f"start_ns {sign} ?")
            values.append(time_ns)
    return " AND ".join(conditions), values


def _read_page(
    store: Store,
    where: str,
    values: list[object],
    place: tuple[int, tuple[str, ...]] | None,
    limit: int,
) -> RolloutsTold:
    after, behind = "true", list[object]()
    if place is not None:
        start_ns, (rollout_id, attempt_id) = place
        after = "(start_ns, rollout_id, attempt_id) < (?, ?, ?)"
        behind = [start_ns, rollout_id, attempt_id]
    # One look at the spans for both: the view costs as much as it reads.
    query = f"""
WITH r AS MATERIALIZED (SELECT * FROM rollouts WHERE {where})
SELECT total, page.* FROM (SELECT count(*) AS total FROM r) LEFT JOIN (
  SELECT * FROM r WHERE {after}
  ORDER BY start_ns DESC, rollout_id DESC, attempt_id DESC LIMIT {limit + 1}
) AS page ON true ORDER BY start_ns DESC, rollout_id DESC, attempt_id DESC"""
    rows = store.sql(query, [*values, *behind]).rows()
    total = int(rows[0].pop("total"))
    found = [_make_attempt(row) for row in rows if row["rollout_id"] is not None]
    shown, cursor = found[:limit], None
    if len(found) > limit:
        last = shown[-1]
        cursor = cursor_of(last.start_ns, last.rollout_id, last.attempt_id)
    return RolloutsTold(rollouts=shown, total=total, next_cursor=cursor)


def _make_attempt(row: Mapping[str, Any]) -> AttemptTold:
    return AttemptTold(**{**row, "task": parse_json(row["task"])})


OPERATIONS: Final = (
    Operation(
        "GET", "/v1/rollouts", rollouts, "A page of recorded rollouts, the newest first.",
        {200: Answer("The page.", {JSON: RolloutsTold})}, query=RolloutsQuery,
    ),
    Operation(
        "GET", "/v1/rollouts/{rollout_id:path}", rollout,
        "One rollout: each attempt, and where it stands in the queue.",
        {200: Answer("The rollout.", {JSON: RolloutTold}), 404: Answer("There is none.")},
    ),
)  # fmt: skip
ROUTES: Final[list[Route]] = routes(OPERATIONS)
