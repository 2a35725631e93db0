"""Rollouts: what was recorded and what is queued, with attempts, rewards, steps and reasons."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, Final, NamedTuple, cast, get_args

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from lightning_otel.adapter import Adaptation
from lightning_otel.dataset import Store
from lightning_otel.errors import ConfigError, NotFoundError
from lightning_otel.serve.bodies import form
from lightning_otel.serve.responses import RefusalError
from lightning_otel.serve.viewer import page, traces
from lightning_otel.serve.viewer.transitions import TOO_LARGE_TEXTS, credits_of, shorten_step
from lightning_otel.serve.viewer.urls import page_path
from lightning_otel.store.sql import ROLLOUT
from lightning_otel.types import Mode, Report, RolloutStatus, Trajectory, Transition
from lightning_otel.types.transitions import distinct
from lightning_otel.types.values import parse_json
from lightning_otel.views.messages import show_value
from lightning_otel.views.nouns import FAILURES, word_error
from lightning_otel.views.summary import group_failures
from lightning_otel.views.table import Filter

STEPS: Final = 100
"""Steps of one rollout on a page."""
_MANY: Final = 100
"""Traces, rewards and reasons of one rollout that are listed."""
_QUEUED: Final = {
    name: Filter("", "", choices=choices)
    for name, choices in (
        ("status", get_args(RolloutStatus)), ("mode", get_args(Mode)), ("agent", ()),
    )
}  # fmt: skip

_TRACES: Final = f"""
SELECT trace_id, count(*) AS spans, min(start_ns) AS start_ns,
  max(coalesce(end_ns, start_ns)) AS end_ns, count(*) OVER () AS total
FROM spans WHERE {ROLLOUT} = ? GROUP BY trace_id ORDER BY start_ns LIMIT {_MANY}
"""
_REWARDS: Final = f"""
SELECT *, count(*) OVER () AS total FROM rewards WHERE rollout_id = ?
ORDER BY start_ns LIMIT {_MANY}
"""


class StepRow(NamedTuple):
    """A step on the page of a rollout.

    Attributes:
        path: The trajectory that it is the first on.
        told: As :func:`transitions.shorten_step` gives it.
    """

    path: Trajectory
    step: Transition
    told: Mapping[str, object]


@page.with_form_faults
async def rollouts(request: Request) -> Response:
    """The list of what was recorded, of the queue, or of what failed, the newest first."""
    of = page.choice(request, "of", ("recorded", "queue", "failures"))
    if of == "failures":
        return await page.answer_list(
            request, "rollouts_failures.html", FAILURES, title="Failures", of=of,
            read_more=lambda store, values: {"groups": group_failures(store, values)},
        )  # fmt: skip
    if of == "recorded":
        return cast(Response, await traces.show(request))
    number = page.page_number(request)
    values = page.read_filters(request, _QUEUED)

    def read(_: Store) -> Mapping[str, object]:
        content = (
            {"queue": None} if page.faults_of(request) else _list_queue(request, number, **values)
        )
        return {"of": "queue", "filters": _QUEUED, "number": number, "size": page.ROWS, **content}

    return await page.answer(request, "rollouts_queue.html", read, title="Rollouts")


def _list_queue(request: Request, number: int, **values: Any) -> Mapping[str, object]:
    repositories = request.app.state.repositories
    if not repositories.is_made:
        return {"rows": [], "total": 0, "queue": None}
    from lightning_otel.state.rollouts import paused_since_ns, read_page

    content = {
        "counts": repositories.queue.counts(),  # which ends what runs longer than it may
        "reasons": repositories.queue.reasons().most_common(_MANY),
        "paused_ns": paused_since_ns(repositories.state),
    }
    rows, total = read_page(repositories.state, page.ROWS, (number - 1) * page.ROWS, **values)
    return {"rows": rows, "total": total, "queue": content}


async def rollout(request: Request) -> Response:
    """One of them; the beginning of an id leads to it."""
    prefix = request.path_params["rollout_id"]
    number = page.page_number(request)

    def read(store: Store) -> Mapping[str, object]:
        return _read_rollout(store, prefix, _read_queued(request, prefix), number)

    try:
        return await page.answer(request, "rollout.html", read)
    except NotFoundError:
        rollout_id = await page.run(request, lambda store: store.rollout_of(*store.find(prefix)))
        if rollout_id == prefix:
            raise
        return RedirectResponse(page_path("rollouts", rollout_id))


def _read_queued(request: Request, rollout_id: str) -> dict[str, Any] | None:
    repositories = request.app.state.repositories
    try:
        if not repositories.is_made:
            return None
        queue = repositories.queue
        queued_rollout = queue.get(rollout_id)
    except (ConfigError, NotFoundError):  # without SQLAlchemy there is no queue
        return None
    from lightning_otel.state.queue import FINAL

    attempts, is_over = queue.attempts(rollout_id), queued_rollout.status in FINAL
    return {"rollout": queued_rollout, "attempts": attempts, "is_over": is_over}


def _read_rollout(
    store: Store, rollout_id: str, queued: dict[str, Any] | None, number: int
) -> Mapping[str, object]:
    attempts = store.sql(
        "SELECT * FROM rollouts WHERE rollout_id = ? ORDER BY start_ns", [rollout_id]
    ).rows()
    if not attempts and queued is None:
        raise NotFoundError(f"there is no rollout {rollout_id!r}; look for it among all of them")
    is_small = bool(page.select_small(store, [rollout_id]))
    adaptations = list(store.adapt(rollout_id=rollout_id, include_incomplete=True, bodies=is_small))
    report = Report.total(adaptation.report for adaptation in adaptations)
    steps = _list_steps(adaptations, is_small=is_small)
    page_steps = steps[(number - 1) * STEPS : number * STEPS]
    task = next((row["task"] for row in attempts if row["task"] is not None), None)
    return {
        "title": f"Rollout {rollout_id}",
        "rollout_id": rollout_id,
        "queued": queued,
        "attempts": attempts,
        "tries": _merge_attempts(attempts, queued["attempts"] if queued else ()),
        "task": show_value(queued["rollout"].task if queued else parse_json(task)),
        "traces": store.sql(_TRACES, [rollout_id]).rows(),
        "rewards": store.sql(_REWARDS, [rollout_id]).rows(),
        "by": {reward.span_id: reward for made_one in adaptations for reward in made_one.credited},
        "dropped": report.dropped[:_MANY],
        "dropped_total": len(report.dropped),
        "report": report,
        "steps": page_steps,
        "grouped": [
            (members[0].path, members)
            for _, group in groupby(page_steps, key=lambda entry: id(entry.path))
            if (members := list(group))
        ],
        "total": len(steps),
        "number": number,
        "size": STEPS,
        **_collect_used([entry.step for entry in steps]),
    }


def _merge_attempts(
    recorded: Sequence[Mapping[str, Any]], queued: Sequence[Any]
) -> list[dict[str, Any]]:
    """Merge the attempts in order; where one stands the queue knows best."""
    spans = {row["attempt_id"]: row for row in recorded}
    known_attempts = {attempt.attempt_id: attempt for attempt in queued}
    attempts = []
    for attempt_id in dict.fromkeys([*known_attempts, *spans]):
        row = dict.fromkeys(("calls", "spans", "cost", "reward"), None) | {"worker_id": ""}
        row |= spans.get(attempt_id, {})
        row["reason"] = word_error(row)
        if attempt := known_attempts.get(attempt_id):
            row |= {"status": attempt.status, "worker_id": attempt.worker_id}
            row |= {"reason": attempt.reason or row["reason"]}
            row |= {"start_ns": attempt.started_ns, "end_ns": attempt.ended_ns}
        attempts.append({**row, "attempt_id": attempt_id})
    return attempts


def _list_steps(adaptations: Iterable[Adaptation], *, is_small: bool) -> list[StepRow]:
    steps = []
    for adaptation in adaptations:
        credits = credits_of(adaptation.credited)
        for step, path in distinct(adaptation.trajectories):
            texts = shorten_step(step, credits) if is_small else TOO_LARGE_TEXTS
            steps.append(StepRow(path, step, texts))
    return steps


def _collect_used(steps: Sequence[Transition]) -> dict[str, object]:
    stamps = (step.resource_version for step in steps if not step.resources)
    return {
        "agents": list(dict.fromkeys(step.agent for step in steps if step.agent)),
        "models": list(dict.fromkeys(step.model for step in steps if step.model)),
        "versions": sorted({item for step in steps for item in step.resources.items()}),
        "stamps": list(dict.fromkeys(filter(None, stamps))),
        "modes": list(dict.fromkeys(step.mode for step in steps if step.mode)),
    }


async def cancel(request: Request) -> Response:
    """End a rollout that waits or runs."""
    rollout_id = request.path_params["rollout_id"]
    fields = await form(request)

    def work(_: Store) -> object:
        queue = page.require_state(request, f"rollout {rollout_id!r}").queue
        return queue.cancel(rollout_id, fields.get("reason", "").strip())

    if not await page.run(request, work):
        raise RefusalError(409, "the rollout was over already; nothing was changed")
    return page.see(page_path("rollouts", rollout_id))


async def pause(request: Request) -> Response:
    """Let nobody take anything out of the queue, or let them again."""
    act = (await form(request)).get("act", "")
    if act not in ("pause", "resume"):
        raise RefusalError(400, "act is pause or resume")

    def work(_: Store) -> object:
        queue = page.require_state(request, "queue").queue
        return queue.pause() if act == "pause" else queue.resume()

    await page.run(request, work)
    return page.see("/rollouts?of=queue")


ROUTES: Final[list[Route]] = [
    Route("/rollouts", rollouts, methods=["GET"]),
    Route("/rollouts", pause, methods=["POST"]),
    Route("/rollouts/{rollout_id:path}/cancel", cancel, methods=["POST"]),
    Route("/rollouts/{rollout_id:path}", rollout, methods=["GET"]),
]
