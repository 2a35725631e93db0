"""Training by HTTP: ask for it, and look how it stands. A worker trains; nothing does in here."""

import json
from dataclasses import asdict
from typing import Annotated, Any, Final

from pydantic import Field, StringConstraints
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lightning_otel import algorithms
from lightning_otel.errors import ConfigError, NotFoundError
from lightning_otel.rewarding.learned import Earned, learned
from lightning_otel.rewarding.totals import Totals, standing
from lightning_otel.runs import TrainingRun
from lightning_otel.runs.requests import RequestStatus, TrainingRequest
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
from lightning_otel.serve.api.resources import VersionTold, version_told
from lightning_otel.serve.api.rooms import Rooms
from lightning_otel.serve.viewer.page import run
from lightning_otel.store import Store

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


class OptimizeBody(Asked):
    """What is asked for a kind of task."""

    category: Category = ""
    """The kind of task; empty is any."""
    name: Annotated[str, StringConstraints(min_length=1, max_length=255)] = "system_prompt"
    """The resource that is optimised."""
    model: Annotated[str, StringConstraints(max_length=255)] | None = None
    """Only what rollouts of this model earned counts; a name or glob."""
    min_rollouts: Annotated[int, Field(ge=1, le=1_000_000)] = 3
    """The fewest rewarded rollouts by which a version may be judged."""
    prompt: Annotated[str, Field(max_length=200_000)] | None = None
    """The task's text, which fills the placeholder of a template that has just one."""
    train: bool = False
    """Whether a run is asked for that looks for a better one."""
    algorithm: Word = "apo"
    idempotency_key: Key | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    """The algorithm's own, where `train` is true."""


class EarnedTold(Told):
    """What the rollouts of a version earned."""

    version: int
    rollouts: int
    mean: float
    error: float | None
    """The standard error of the mean."""


class OptimizeTold(Told):
    """The best version that is known, and the run that looks for a better one."""

    category: str
    resource: VersionTold | None
    """null where nothing is known; `reason` says so."""
    optimized_prompt: str | None
    """Its text, filled in where `prompt` was given."""
    earned: EarnedTold | None
    """null where too few rollouts were rewarded to judge by: it is the live version then."""
    versions: list[EarnedTold]
    """What each version earned, the best first."""
    is_general: bool
    """Whether nothing is known of the category, and it is what all are given."""
    reason: str
    request: RequestTold | None
    """The training that was asked for."""


class TotalsTold(Told):
    """What there is, and how much of it is rewarded."""

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
    """The mean of all rewards; null without one."""


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
    """How training stands."""

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
    """How much of it."""

    limit: Annotated[int, Field(ge=1, le=1_000)] = 20
    """Runs and requests, at most."""


async def trigger(request: Request) -> Response:
    """Ask for training: 202 with what was asked for, which a worker takes."""
    asked = await body_of(request, TriggerBody)
    named = ("max_iterations", "min_batch_size", "samples")
    given = {name: value for name in named if (value := getattr(asked, name)) is not None}
    settings = {**given, "options": asked.options} if asked.options else given
    key = _key(request, asked.idempotency_key)
    rooms: Rooms = request.app.state.rooms
    return await _asked_for(
        request, lambda: _put(rooms, asked.algorithm or "", asked.category, settings, key)
    )


async def _asked_for(request: Request, put: Any) -> Response:
    found: RequestTold = await run(request, lambda _: put())
    return told(found, 202 if found.is_new else 200)


async def requested(request: Request) -> Response:
    """One request for training as it stands."""
    rooms: Rooms = request.app.state.rooms
    name = request.path_params["request_id"]
    return told(await run(request, lambda _: _request(rooms.requests.get(name))))


async def status(request: Request) -> Response:
    """Totals, rewards by category, runs and what was asked for."""
    asked = query_of(request, StatusQuery)
    state = request.app.state

    def read(store: Store) -> TrainingTold:
        found = state.standing.of(store, standing)
        runs, rooms = state.rooms.runs.all(), state.rooms
        return TrainingTold(
            **_totals(found.total).model_dump(),
            categories={name: _totals(each) for name, each in found.categories.items()},
            pending_feedback=rooms.pending.waiting().count,
            runs=[_run(each) for each in runs[: asked.limit]],
            run_count=len(runs),
            requests=[_request(each) for each in rooms.requests.all(asked.limit)],
            request_counts={str(name): n for name, n in rooms.requests.counts().items()},
        )

    return told(await run(request, read))


async def optimize(request: Request) -> Response:
    """The best version known for a kind of task; with ``train``, ask for a search as well."""
    asked = await body_of(request, OptimizeBody)
    rooms: Rooms = request.app.state.rooms
    key = _key(request, asked.idempotency_key)

    def act(store: Store) -> OptimizeTold:
        found = _known(rooms, store, asked)
        if asked.train:
            settings = {"options": asked.options} if asked.options else {}
            found.request = _put(rooms, asked.algorithm, asked.category, settings, key)
        return found

    found = await run(request, act)
    is_new = found.request is not None and found.request.is_new
    return told(found, 202 if is_new else 200)


def _known(rooms: Rooms, store: Store, asked: OptimizeBody) -> OptimizeTold:
    found = OptimizeTold(
        category=asked.category, resource=None, optimized_prompt=None, earned=None, versions=[],
        is_general=False, reason="", request=None,
    )  # fmt: skip
    try:
        best = learned(
            asked.category,
            asked.name,
            model=asked.model,
            min_rollouts=asked.min_rollouts,
            resources=rooms.resources,
            store=store,
        )
    except NotFoundError as exc:
        found.reason = str(exc)
        return found
    found.resource = version_told(best.resource)
    found.earned = _earned(best.earned) if best.earned is not None else None
    found.versions = [_earned(each) for each in best.versions]
    found.is_general = best.is_general
    if best.earned is None:
        found.reason = (
            f"fewer than {asked.min_rollouts} rewarded rollouts of any version: the live one"
        )
    if best.resource.kind == "prompt":
        prompt = best.resource.prompt
        names = prompt.placeholders
        is_filled = asked.prompt is not None and len(names) == 1
        found.optimized_prompt = (
            prompt.format(**{names[0]: asked.prompt}) if is_filled else prompt.template
        )
    return found


def _put(
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
    return _request(made, is_new=is_new)


def _key(request: Request, given: str | None) -> str | None:
    """What makes asking twice asking once; in the header or the body."""
    header = request.headers.get(_HEADER)
    if header is None:
        return given
    header = header.strip()
    if not 0 < len(header) <= 200 or not header.isprintable() or not header.isascii():
        raise RefusalError(400, "Idempotency-Key is 1 to 200 printable characters")
    if given is not None and given != header:
        raise RefusalError(400, "Idempotency-Key and idempotency_key differ; send one")
    return header


def _request(found: TrainingRequest, *, is_new: bool = False) -> RequestTold:
    known = asdict(found)
    return RequestTold(
        **{name: known[name] for name in RequestTold.model_fields if name in known}, is_new=is_new
    )


def _run(found: TrainingRun) -> RunTold:
    return RunTold(**{name: getattr(found, name) for name in RunTold.model_fields})


def _totals(found: Totals) -> TotalsTold:
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


def _earned(found: Earned) -> EarnedTold:
    return EarnedTold(**found._asdict())


_CLASH: Final = Answer("The key asked for other training before.")
OPERATIONS: Final = (
    Operation(
        "POST", "/training/trigger", trigger,
        "Ask for training, which a worker does: `lightning-otel train --worker`.",
        {
            202: Answer("It was asked for.", {JSON: RequestTold}),
            200: Answer("It was asked for before, and stands so.", {JSON: RequestTold}),
            409: _CLASH,
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
    Operation(
        "POST", "/optimize", optimize,
        "The best version known for a kind of task; with `train`, ask for a search as well.",
        {
            200: Answer("The best version, or that none is known.", {JSON: OptimizeTold}),
            202: Answer("The same, and training was asked for.", {JSON: OptimizeTold}),
            409: _CLASH,
        },
        body=OptimizeBody,
    ),
)  # fmt: skip
ROUTES: Final[list[Route]] = routes(OPERATIONS)
