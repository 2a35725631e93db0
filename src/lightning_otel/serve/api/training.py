"""Training by HTTP: ask for it, and look how it stands. A worker trains; nothing does in here."""

import json
from dataclasses import asdict
from typing import Annotated, Any, Final

from pydantic import Field, StringConstraints
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lightning_otel import algorithms, config
from lightning_otel.dataset import Store
from lightning_otel.errors import ConfigError
from lightning_otel.rewarding.totals import Totals, standing
from lightning_otel.serve.answers import JSON, RefusalError
from lightning_otel.serve.api.feedback import Key
from lightning_otel.serve.api.operation import (
    Answer,
    Asked,
    Operation,
    Told,
    body_of,
    query_of,
    routes,
    told,
)
from lightning_otel.serve.api.rooms import Rooms
from lightning_otel.serve.viewer.page import run
from lightning_otel.state.requests import RequestStatus, TrainingRequest
from lightning_otel.state.runs import TrainingRun

_HEADER: Final = "idempotency-key"
_MOST_SETTINGS: Final = 16_384
Category = Annotated[str, StringConstraints(max_length=200, pattern=r"^[^\x00-\x1f/@,\[\]]*$")]
Word = Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9._-]+$")]


class TriggerBody(Asked):
    """Training to be asked for; all of it may be left to the worker."""

    algorithm: Word | None = None
    """What is to learn; by default what the worker is set up for."""
    category: Category = ""
    """The kind of task it is for."""
    idempotency_key: Key | None = None
    """With one, training is asked for once, however often this is sent; the header
    `Idempotency-Key` is the same."""
    max_iterations: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """How many steps the run has."""
    min_batch_size: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    samples: Annotated[int, Field(ge=1, le=10_000)] | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    """The algorithm's own."""


class RequestTold(Told):
    """Training that was asked for."""

    request_id: str
    status: RequestStatus
    algorithm: str
    category: str
    settings: dict[str, Any]
    run_id: str
    """The run that was begun for it; empty before."""
    reason: str
    """Why it failed."""
    tries: int
    created_ns: int
    ended_ns: int | None
    is_new: bool = False
    """Whether it was asked for just now."""


class TotalsTold(Told):
    """Counts of a store, and the share that has rewards."""

    total_spans: int
    rollouts: int
    rewarded_rollouts: int
    rewarded_rollouts_share: float | None
    """null without a rollout."""
    steps: int
    """Transitions: spans that are steps of an agent."""
    rewarded_steps: int
    rewarded_share: float | None
    """The share of steps that have a reward; null without a step."""
    rewards: int
    average_reward: float | None
    """The mean over rollouts that have a reward; null without one, or where none has a step."""


class RunTold(Told):
    """A training run."""

    run_id: str
    algorithm: str
    status: str
    step: int
    reason: str
    created_ns: int
    seen_ns: int
    ended_ns: int | None


class TrainingTold(TotalsTold):
    """The state of training."""

    agent_lightning_available: bool
    """Always: this server does what Agent Lightning is asked for."""
    store_available: bool
    """Whether anything was recorded."""
    trainer_available: bool
    """Whether training is not switched off here."""
    average_reward: float
    """As for a category; 0 where nothing is rewarded."""

    categories: dict[str, TotalsTold]
    """The same of each kind of task; what has none counts above alone."""
    pending_feedback: int
    runs: list[RunTold]
    """The newest ones; `run_count` is how many there are."""
    run_count: int
    requests: list[RequestTold]
    """The newest ones; `request_counts` says how many stand where."""
    request_counts: dict[str, int]


class StatusQuery(Asked):
    """The parts of the state to return."""

    limit: Annotated[int, Field(ge=1, le=1_000)] = 20
    """Runs and requests, at most."""


async def trigger(request: Request) -> Response:
    """Ask for training: 202 with what was asked for, which a worker takes."""
    asked = await body_of(request, TriggerBody)
    named = ("max_iterations", "min_batch_size", "samples")
    given = {name: value for name in named if (value := getattr(asked, name)) is not None}
    settings = {**given, "options": asked.options} if asked.options else given
    key = key_of(request, asked.idempotency_key)
    rooms: Rooms = request.app.state.rooms
    return await _asked_for(
        request, lambda: put(rooms, asked.algorithm or "", asked.category, settings, key)
    )


async def _asked_for(request: Request, put: Any) -> Response:
    found: RequestTold = await run(request, lambda _: put())
    return told(found, 202 if found.is_new else 200)


async def requested(request: Request) -> Response:
    """One request for training as it stands."""
    rooms: Rooms = request.app.state.rooms
    name = request.path_params["request_id"]
    return told(await run(request, lambda _: _describe_request(rooms.requests.get(name))))


async def status(request: Request) -> Response:
    """Totals, rewards by category, runs and what was asked for."""
    asked = query_of(request, StatusQuery)
    state = request.app.state

    def read(store: Store) -> TrainingTold:
        found = state.standing.of(store, standing)
        runs, rooms = state.rooms.runs.all(), state.rooms
        total = _describe_totals(found.total)
        return TrainingTold(
            **{**total.model_dump(), "average_reward": total.average_reward or 0.0},
            agent_lightning_available=True,
            store_available=store.layout is None or store.layout.exists(),
            trainer_available=config.TRAIN.read(),
            categories={name: _describe_totals(each) for name, each in found.categories.items()},
            pending_feedback=rooms.pending.waiting().count,
            runs=[_describe_run(each) for each in runs[: asked.limit]],
            run_count=len(runs),
            requests=[_describe_request(each) for each in rooms.requests.all(asked.limit)],
            request_counts={str(name): n for name, n in rooms.requests.counts().items()},
        )

    return told(await run(request, read))


def put(
    rooms: Rooms, algorithm: str, category: str, settings: dict[str, Any], key: str | None
) -> RequestTold:
    """Ask for training.

    Raises:
        RefusalError: It cannot be what it says, or the key asked for something else.
    """
    if algorithm and algorithm not in algorithms.names():
        known = ", ".join(algorithms.names())
        raise RefusalError(400, f"there is no algorithm {algorithm!r}; there are {known}")
    try:
        text = json.dumps(settings, allow_nan=False)
    except ValueError as exc:
        raise RefusalError(400, "options hold a number that is none") from exc
    if len(text) > _MOST_SETTINGS:
        raise RefusalError(413, f"options may have {_MOST_SETTINGS} characters")
    if not all(name.isidentifier() for name in settings.get("options", {})):
        raise RefusalError(400, "an option's name is a word, such as learning_rate")
    try:
        made, is_new = rooms.requests.put(
            algorithm, category=category, settings=settings, idempotency_key=key
        )
    except ConfigError as exc:
        raise RefusalError(409, str(exc)) from exc
    return _describe_request(made, is_new=is_new)


def key_of(request: Request, given: str | None) -> str | None:
    """Return the idempotency key of a request, from its header or body."""
    header = request.headers.get(_HEADER)
    if header is None:
        return given
    header = header.strip()
    if not 0 < len(header) <= 200 or not header.isprintable() or not header.isascii():
        raise RefusalError(400, "Idempotency-Key is 1 to 200 printable characters")
    if given is not None and given != header:
        raise RefusalError(400, "Idempotency-Key and idempotency_key differ; send one")
    return header


def _describe_request(found: TrainingRequest, *, is_new: bool = False) -> RequestTold:
    known = asdict(found)
    return RequestTold(
        **{name: known[name] for name in RequestTold.model_fields if name in known}, is_new=is_new
    )


def _describe_run(found: TrainingRun) -> RunTold:
    return RunTold(**{name: getattr(found, name) for name in RunTold.model_fields})


def _describe_totals(found: Totals) -> TotalsTold:
    return TotalsTold(
        total_spans=found.spans,
        rollouts=found.rollouts,
        rewarded_rollouts=found.rewarded_rollouts,
        rewarded_rollouts_share=found.rewarded_rollouts_share,
        steps=found.steps,
        rewarded_steps=found.rewarded_steps,
        rewarded_share=found.rewarded_share,
        rewards=found.rewards,
        average_reward=found.average_reward,
    )


CLASH: Final = Answer("The key asked for other training before.")
OPERATIONS: Final = (
    Operation(
        "POST", "/training/trigger", trigger,
        "Ask for training, which a worker does: `lightning-otel train --worker`.",
        {
            202: Answer("It was asked for.", {JSON: RequestTold}),
            200: Answer("It was asked for before, and stands so.", {JSON: RequestTold}),
            409: CLASH,
        },
        body=TriggerBody, needs_body=False,
    ),
    Operation(
        "GET", "/training/requests/{request_id}", requested,
        "One request for training as it stands.",
        {200: Answer("The request.", {JSON: RequestTold}), 404: Answer("There is none.")},
    ),
    Operation(
        "GET", "/training/status", status,
        "Totals, average reward and the share of what is rewarded, by category; runs and requests.",
        {200: Answer("How it stands.", {JSON: TrainingTold})}, query=StatusQuery,
    ),
)  # fmt: skip
ROUTES: Final[list[Route]] = routes(OPERATIONS)
