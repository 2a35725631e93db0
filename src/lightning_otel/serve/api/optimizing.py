"""The best prompt known for a kind of task, by HTTP; each answer is recorded as a rollout."""

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Final

from pydantic import Field, StringConstraints
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lightning_otel import conventions as c
from lightning_otel.adapter.tracking import resources_text
from lightning_otel.dataset import Store
from lightning_otel.errors import NotFoundError
from lightning_otel.rewarding.learned import Earned, learned, rewards_by_version
from lightning_otel.serve.answers import JSON
from lightning_otel.serve.api.feedback import Key
from lightning_otel.serve.api.fresh import Fresh, mark_of_store
from lightning_otel.serve.api.operation import Answer, Asked, Operation, Told, body_of, routes, told
from lightning_otel.serve.api.resources import VersionTold, version_told
from lightning_otel.serve.api.rooms import Rooms
from lightning_otel.serve.api.training import (
    CLASH,
    Category,
    RequestTold,
    Word,
    key_of,
    put,
)
from lightning_otel.serve.viewer.page import run
from lightning_otel.types import Span

_AGENT: Final = "optimize"
_MOST_ANSWERS: Final = 1_000
"""Of which the server knows by heart to what rollout feedback goes; of others it looks them up."""
_MOST_HELD: Final = 64
_PATIENCE: Final = 9.0
"""Rewards that come all the time are read a tenth of it."""
_UNKNOWN: Final = 50.0
Rewards = Mapping[int, Sequence[float]]


class OptimizeBody(Asked):
    """A request for the best version of a category's resource."""

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
    """The rewards of a version's rollouts."""

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
    """Its text, filled in where `prompt` was given; `prompt` itself where nothing is known."""
    quality_score: float = _UNKNOWN
    """What that version earned on average, -1 to 1 brought to 0 to 100; 50 where that is not
    known."""
    task_id: str | None = None
    """The rollout that a `prompt` and its answer were recorded as."""
    span_id: str | None = None
    """Its step, which `/feedback` judges."""
    earned: EarnedTold | None
    """null where too few rollouts were rewarded to judge by: it is the live version then."""
    versions: list[EarnedTold]
    """What each version earned, the best first."""
    is_general: bool
    """Whether nothing is known of the category, and it is what all are given."""
    reason: str
    request: RequestTold | None
    """The training that was asked for."""


async def optimize(request: Request) -> Response:
    """The best version known for a kind of task, recorded where it answers a prompt."""
    asked = await body_of(request, OptimizeBody)
    rooms: Rooms = request.app.state.rooms
    key = key_of(request, asked.idempotency_key)

    def act(store: Store) -> OptimizeTold:
        found = _find_best(request, store, asked)
        if asked.prompt is not None and found.optimized_prompt is not None:
            _record_prompt(request, store, asked, found)
        if asked.train:
            settings = {"options": asked.options} if asked.options else {}
            found.request = put(rooms, asked.algorithm, asked.category, settings, key)
        return found

    found = await run(request, act)
    is_new = found.request is not None and found.request.is_new
    return told(found, 202 if is_new else 200)


def _record_prompt(
    request: Request, store: Store, asked: OptimizeBody, found: OptimizeTold
) -> None:
    """Keep a prompt and what it became as a rollout of one step, which feedback may judge."""
    state = request.app.state
    found.task_id = f"rollout-{secrets.token_hex(8)}"
    task = {"prompt": asked.prompt, "category": asked.category, "model": asked.model}
    stamps: dict[str, Any] = {
        c.ROLLOUT_ID: found.task_id,
        c.ATTEMPT_ID: "1",
        c.AGENT_NAME: _AGENT,
        c.RECEIVED: f"http:{request.client.host if request.client else ''}",
    }
    if asked.model:
        stamps[c.REQUEST_MODEL] = asked.model
    if found.resource is not None:
        used = {found.resource.name: str(found.resource.version)}
        stamps[c.RESOURCES] = resources_text({"*": used})
    now_ns, trace_id, root_id = time.time_ns(), secrets.token_hex(16), secrets.token_hex(8)
    found.span_id = secrets.token_hex(8)

    def span(span_id: str, name: str, attributes: dict[str, Any], at_ns: int) -> Span:
        parent = None if span_id == root_id else root_id
        return Span(
            trace_id, span_id, parent, name, at_ns, at_ns, attributes={**stamps, **attributes}
        )

    def text(value: str) -> dict[str, str]:
        return {c.OBJECT_TYPE: "str", c.OBJECT_LITERAL: value}

    root = {c.OPERATION_NAME: _AGENT, c.TASK: json.dumps(task, ensure_ascii=False)}
    given, made = str(asked.prompt), str(found.optimized_prompt)
    spans = [
        span(secrets.token_hex(8), c.SPAN_OBSERVATION, text(given), now_ns + 1),
        span(found.span_id, c.SPAN_ACTION, text(made), now_ns + 2),
        replace(span(root_id, c.SPAN_ROLLOUT, root, now_ns), end_ns=now_ns + 3),
    ]
    before = mark_of_store(store)
    state.intake.keep(spans)
    after = mark_of_store(store)
    if len(state.answers) >= _MOST_ANSWERS:
        state.answers.clear()
    state.answers[found.span_id] = found.task_id
    for fresh in list(state.earnings.values()):
        fresh.stay(before, after)  # a rollout without a reward says nothing of any version


def _read_rewards(request: Request, store: Store, name: str, model: str | None) -> Rewards:
    """Return rewards by version, cached for a moment."""
    held: dict[tuple[str, str | None], Fresh[Rewards]] = request.app.state.earnings
    if len(held) > _MOST_HELD:
        held.clear()
    fresh = held.setdefault((name, model), Fresh(_PATIENCE))
    return fresh.of(store, lambda each: rewards_by_version(each, name, model))


def _find_best(request: Request, store: Store, asked: OptimizeBody) -> OptimizeTold:
    found = OptimizeTold(
        category=asked.category, resource=None, optimized_prompt=asked.prompt, earned=None,
        versions=[], is_general=False, reason="", request=None,
    )  # fmt: skip
    try:
        best = learned(
            asked.category,
            asked.name,
            model=asked.model,
            min_rollouts=asked.min_rollouts,
            resources=request.app.state.rooms.resources,
            store=store,
            rewards_of=partial(_read_rewards, request),
        )
    except NotFoundError as exc:
        found.reason = str(exc)
        return found
    found.resource = version_told(best.resource)
    found.earned = _describe_rewards(best.earned) if best.earned is not None else None
    if best.earned is not None:
        found.quality_score = 50 * (1 + max(-1.0, min(1.0, best.earned.mean)))
    found.versions = [_describe_rewards(each) for each in best.versions]
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


def _describe_rewards(found: Earned) -> EarnedTold:
    return EarnedTold(**found._asdict())


OPERATIONS: Final = (
    Operation(
        "POST", "/optimize", optimize,
        "The best version known for a kind of task; with `train`, ask for a search as well.",
        {
            200: Answer("The best version, or that none is known.", {JSON: OptimizeTold}),
            202: Answer("The same, and training was asked for.", {JSON: OptimizeTold}),
            409: CLASH,
        },
        body=OptimizeBody,
    ),
)  # fmt: skip
ROUTES: Final[list[Route]] = routes(OPERATIONS)
