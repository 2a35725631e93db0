"""Training by HTTP: ask for it, look how it stands, and get the best prompt known so far.

A worker trains; nothing does in here. Each answer with a prompt is recorded as a rollout.
"""

import json
import secrets
import time
from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import Field, StringConstraints
from starlette.requests import Request

from lightning_otel import algorithms
from lightning_otel.adapter.agent_patterns import resources_text
from lightning_otel.dataset import Store
from lightning_otel.errors import ConfigError, NotFoundError
from lightning_otel.rewards.best_version import learned, rewards_by_version
from lightning_otel.rewards.keywords import learned_optimizations, missing_words
from lightning_otel.rewards.totals import count_totals
from lightning_otel.serve.api.cache import CachedRead, read_store_fingerprint
from lightning_otel.serve.api.feedback import Key
from lightning_otel.serve.api.operation import RequestModel, ResponseModel, operation, write_json
from lightning_otel.serve.api.resources import Name, VersionResponse
from lightning_otel.serve.responses import RefusalError
from lightning_otel.state.requests import RequestStatus
from lightning_otel.types import Span
from lightning_otel.types import conventions as c

_HEADER: Final = "idempotency-key"
_MOST_SETTINGS: Final = 16_384
_SETTINGS: Final = {"max_iterations", "min_batch_size", "samples", "options"}
_AGENT: Final = "optimize"
_MOST_ANSWERS: Final = 1_000
"""Of which the server knows by heart to what rollout feedback goes; of others it looks them up."""
_MOST_HELD: Final = 64
_PATIENCE: Final = 9.0
"""Rewards that come all the time are read a tenth of it."""
_UNKNOWN: Final = 50.0
_CLASH: Final[Mapping[int, str]] = {409: "The key asked for other training before."}

Category = Annotated[str, StringConstraints(max_length=200, pattern=r"^[^\x00-\x1f/@,\[\]]*$")]
Word = Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9._-]+$")]


class TriggerBody(RequestModel):
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


class RequestResponse(ResponseModel):
    """Training that was asked for."""

    request_id: str
    status: RequestStatus
    algorithm: str
    category: str
    settings: dict[str, Any]
    run_id: str
    """The run that was begun for it; empty before."""
    reason: str
    """Why it failed, or why it waits in vain: no worker takes it."""
    tries: int
    created_ns: int
    ended_ns: int | None
    is_new: bool = False
    """Whether it was asked for just now."""


class TotalsResponse(ResponseModel):
    """Counts of a store, and the share that has rewards."""

    total_spans: Annotated[int, Field(validation_alias="spans")]
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


class RunResponse(ResponseModel):
    """A training run."""

    run_id: str
    algorithm: str
    status: str
    step: int
    reason: str
    created_ns: int
    seen_ns: int
    ended_ns: int | None


class TrainingResponse(TotalsResponse):
    """The state of training."""

    agent_lightning_available: bool
    """Always: this server does what Agent Lightning is asked for."""
    store_available: bool
    """Whether anything was recorded."""
    trainer_available: bool
    """Whether a worker is there to train."""
    average_reward: float
    """As for a category; 0 where nothing is rewarded."""
    categories: dict[str, TotalsResponse]
    """The same of each kind of task; what has none counts above alone."""
    pending_feedback: int
    runs: list[RunResponse]
    """The newest ones; `run_count` is how many there are."""
    run_count: int
    requests: list[RequestResponse]
    """The newest ones; `request_counts` says how many stand where."""
    request_counts: dict[str, int]


class StatusQuery(RequestModel):
    """The parts of the state to return."""

    limit: Annotated[int, Field(ge=1, le=1_000)] = 20
    """Runs and requests, at most."""


class OptimizeBody(RequestModel):
    """A request for the best version of a category's resource."""

    category: Category = ""
    """The kind of task; empty is any."""
    name: Name = "system_prompt"
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


class EarnedResponse(ResponseModel):
    """The rewards of a version's rollouts."""

    version: int
    rollouts: int
    mean: float
    error: float | None
    """The standard error of the mean."""


class OptimizeResponse(ResponseModel):
    """The best version that is known, and the run that looks for a better one."""

    category: str
    resource: VersionResponse | None
    """null where nothing is known; `reason` says so."""
    optimized_prompt: str | None
    """Its text, filled in where `prompt` was given, or followed by it with the words that better
    answers of the category share; `prompt` with those words where no version is known."""
    quality_score: float = _UNKNOWN
    """What that version earned on average, -1 to 1 brought to 0 to 100; 50 where that is not
    known."""
    task_id: str | None = None
    """The rollout that a `prompt` and its answer were recorded as."""
    span_id: str | None = None
    """Its step, which `/feedback` judges."""
    earned: EarnedResponse | None
    """null where too few rollouts were rewarded to judge by: it is the live version then."""
    versions: list[EarnedResponse]
    """What each version earned, the best first; none that was withdrawn or rolled back."""
    is_general: bool
    """Whether nothing is known of the category, and it is what all are given."""
    reason: str
    request: RequestResponse | None
    """The training that was asked for."""


@operation(
    "POST",
    "/training/trigger",
    {202: "It was asked for.", 200: "It was asked for before, and stands so.", **_CLASH},
)
def trigger(request: Request, params: TriggerBody) -> tuple[RequestResponse, int]:
    """Ask for training, which a worker does: `lightning-otel train --worker`."""
    job = _put_request(request, params, _read_key(request, params.idempotency_key))
    return job, 202 if job.is_new else 200


@operation("GET", "/training/requests/{request_id}", {404: "There is none."})
def requested(request: Request) -> RequestResponse:
    """Read one request for training as it stands."""
    job = request.app.state.repositories.requests.get(request.path_params["request_id"])
    return RequestResponse.of(job)


@operation("GET", "/training/status")
def status(request: Request, params: StatusQuery) -> TrainingResponse:
    """Tell totals, average reward and the rewarded share, by category; runs and requests."""
    state, repositories = request.app.state, request.app.state.repositories
    store: Store = state.store
    totals = state.totals.of(store, count_totals)
    runs = repositories.runs.all()
    total = TotalsResponse.of(totals.total).model_dump()
    return TrainingResponse(
        **{**total, "average_reward": totals.total.average_reward or 0.0},
        agent_lightning_available=True,
        store_available=store.layout is None or store.layout.exists(),
        trainer_available=repositories.requests.has_worker(),
        categories={name: TotalsResponse.of(entry) for name, entry in totals.categories.items()},
        pending_feedback=repositories.pending.waiting().count,
        runs=[RunResponse.of(run) for run in runs[: params.limit]],
        run_count=len(runs),
        requests=[RequestResponse.of(job) for job in repositories.requests.all(params.limit)],
        request_counts={str(name): n for name, n in repositories.requests.counts().items()},
    )


@operation(
    "POST",
    "/optimize",
    {
        200: "The best version, or that none is known.",
        202: "The same, and training was asked for.",
        **_CLASH,
    },
)
def optimize(request: Request, params: OptimizeBody) -> tuple[OptimizeResponse, int]:
    """Find the best version known for a kind of task; with `train`, ask for a search as well."""
    key = _read_key(request, params.idempotency_key)
    answer = _find_best(request, params)
    if params.prompt is not None and answer.optimized_prompt is not None:
        _record_prompt(request, params, answer)
    if params.train:
        answer.request = _put_request(request, params, key)
    return answer, 202 if answer.request is not None and answer.request.is_new else 200


def _put_request(
    request: Request, params: TriggerBody | OptimizeBody, key: str | None
) -> RequestResponse:
    algorithm = params.algorithm or ""
    if algorithm and algorithm not in algorithms.names():
        names = ", ".join(algorithms.names())
        raise RefusalError(400, f"there is no algorithm {algorithm!r}; there are {names}")
    options = params.model_dump(include=_SETTINGS, exclude_none=True)
    settings = {name: value for name, value in options.items() if value != {}}
    write_json(settings, "options", _MOST_SETTINGS)
    if not all(map(str.isidentifier, params.options)):
        raise RefusalError(400, "an option's name is a word, such as learning_rate")
    try:
        job, is_new = request.app.state.repositories.requests.put(
            algorithm, category=params.category, settings=settings, idempotency_key=key
        )
    except ConfigError as exc:
        raise RefusalError(409, str(exc)) from exc
    return RequestResponse.of(job).model_copy(update={"is_new": is_new})


def _read_key(request: Request, key: str | None) -> str | None:
    header = request.headers.get(_HEADER)
    if header is None:
        return key
    header = header.strip()
    if not 0 < len(header) <= 200 or not header.isprintable() or not header.isascii():
        raise RefusalError(400, "Idempotency-Key is 1 to 200 printable characters")
    if key is not None and key != header:
        raise RefusalError(400, "Idempotency-Key and idempotency_key differ; send one")
    return header


def _record_prompt(request: Request, params: OptimizeBody, answer: OptimizeResponse) -> None:
    state = request.app.state
    answer.task_id = f"rollout-{secrets.token_hex(8)}"
    task = {"prompt": params.prompt, "category": params.category, "model": params.model}
    stamps: dict[str, Any] = {
        c.ROLLOUT_ID: answer.task_id,
        c.ATTEMPT_ID: "1",
        c.AGENT_NAME: _AGENT,
        c.RECEIVED: f"http:{request.client.host if request.client else ''}",
    }
    if params.model:
        stamps[c.REQUEST_MODEL] = params.model
    if answer.resource is not None:
        versions = {answer.resource.name: str(answer.resource.version)}
        stamps[c.RESOURCES] = resources_text({"*": versions})
    now_ns, trace_id, root_id = time.time_ns(), secrets.token_hex(16), secrets.token_hex(8)
    seen_id, answer.span_id = secrets.token_hex(8), secrets.token_hex(8)
    prompt, output = (
        {c.OBJECT_TYPE: "str", c.OBJECT_LITERAL: str(text)}
        for text in (params.prompt, answer.optimized_prompt)
    )
    root = {c.OPERATION_NAME: _AGENT, c.TASK: json.dumps(task, ensure_ascii=False)}
    spans = [
        Span(trace_id, span_id, parent, name, start_ns, end_ns, attributes={**stamps, **more})
        for span_id, parent, name, start_ns, end_ns, more in (
            (seen_id, root_id, c.SPAN_OBSERVATION, now_ns + 1, now_ns + 1, prompt),
            (answer.span_id, root_id, c.SPAN_ACTION, now_ns + 2, now_ns + 2, output),
            (root_id, None, c.SPAN_ROLLOUT, now_ns, now_ns + 3, root),
        )
    ]
    before = read_store_fingerprint(state.store)
    state.ingester.keep(spans)
    after = read_store_fingerprint(state.store)
    if len(state.rollout_by_span) >= _MOST_ANSWERS:
        state.rollout_by_span.clear()
    state.rollout_by_span[answer.span_id] = answer.task_id
    for fresh in list(state.learned_reads.values()):
        fresh.keep_valid(before, after)  # of a rollout without a reward nothing is learnt


def _cache_of(request: Request, *key: str | None) -> CachedRead[Any]:
    reads: dict[tuple[str | None, ...], CachedRead[Any]] = request.app.state.learned_reads
    if len(reads) > _MOST_HELD:
        reads.clear()
    return reads.setdefault(key, CachedRead(_PATIENCE))


def _find_best(request: Request, params: OptimizeBody) -> OptimizeResponse:
    answer = OptimizeResponse(
        category=params.category, resource=None, optimized_prompt=params.prompt, earned=None,
        versions=[], is_general=False, reason="", request=None,
    )  # fmt: skip
    try:
        best = learned(
            params.category,
            params.name,
            model=params.model,
            min_rollouts=params.min_rollouts,
            resources=request.app.state.repositories.resources,
            store=request.app.state.store,
            rewards_of=lambda store, name, model: _cache_of(request, "rewards", name, model).of(
                store, lambda opened: rewards_by_version(opened, name, model)
            ),
        )
    except NotFoundError as exc:
        answer.reason = str(exc)
        _add_words(request, params, answer)
        return answer
    answer.resource = VersionResponse.of(best.resource)
    answer.earned = best.earned and EarnedResponse.of(best.earned)
    if best.earned is not None:
        answer.quality_score = 50 * (1 + max(-1.0, min(1.0, best.earned.mean)))
    answer.versions = [EarnedResponse.of(version) for version in best.versions]
    answer.is_general = best.is_general
    if best.earned is None:
        answer.reason = (
            f"fewer than {params.min_rollouts} rewarded rollouts of any version that was not "
            "withdrawn: the live one"
        )
    if best.resource.kind == "prompt":
        prompt = best.resource.prompt
        names = prompt.placeholders
        if params.prompt is None:
            answer.optimized_prompt = prompt.template
        elif len(names) == 1:
            answer.optimized_prompt = prompt.format(**{names[0]: params.prompt})
        else:  # instructions: they come before the prompt, and not instead of it
            _add_words(request, params, answer)
            answer.optimized_prompt = f"{prompt.template}\n\n{answer.optimized_prompt}"
    return answer


def _add_words(request: Request, params: OptimizeBody, answer: OptimizeResponse) -> None:
    if params.prompt is None:
        return
    category, model = params.category, params.model
    learnt: dict[str, Any] = _cache_of(request, "words", category, model).of(
        request.app.state.store, lambda store: learned_optimizations(category, model, store=store)
    )
    words = missing_words(params.prompt, learnt)
    if words:
        answer.optimized_prompt = ", ".join([params.prompt, *words])
        reason = f"better answers share the words {', '.join(words)}"
        answer.reason = "; ".join(filter(None, [answer.reason, reason]))
