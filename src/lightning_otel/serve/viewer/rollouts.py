"""Rollouts: what was recorded and what is queued, with attempts, rewards, steps and reasons."""

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, Final, NamedTuple, get_args

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from lightning_otel import conventions as c
from lightning_otel.adapter import Adaptation
from lightning_otel.dataset import Store
from lightning_otel.errors import ConfigError, NotFoundError
from lightning_otel.formats.transition_rows import transition
from lightning_otel.serve.answers import RefusalError
from lightning_otel.serve.bodies import form
from lightning_otel.serve.viewer import page
from lightning_otel.serve.viewer.addresses import path_of
from lightning_otel.serve.viewer.beside import required, state_of
from lightning_otel.serve.viewer.chat import show_value
from lightning_otel.serve.viewer.transitions import HEAVY_TEXTS, credits_of, told
from lightning_otel.serve.viewer.weighing import light
from lightning_otel.store.earnings import LAST_REWARD
from lightning_otel.store.sql import ROLLOUT, attribute
from lightning_otel.types import Mode, Report, RolloutStatus, Trajectory, Transition

ROWS: Final = 50
"""Rollouts on a page."""
STEPS: Final = 100
"""Steps of one rollout on a page."""
_MANY: Final = 100
"""Traces, rewards and reasons of one rollout that are listed."""
RECORDED: Final = ("", "running", "succeeded", "failed", "incomplete")
QUEUED: Final = ("", *get_args(RolloutStatus))
MODES: Final = ("", *get_args(Mode))

_RECORDED: Final = f"""
SELECT *, count(*) OVER () AS total FROM (
  SELECT rollout_id, count(*) AS attempts, arg_max(status, start_ns) AS status,
    min(start_ns) AS start_ns, max(end_ns) AS end_ns,
    arg_max(agents, start_ns) AS agents, sum(spans)::BIGINT AS spans, sum(calls)::BIGINT AS calls,
    sum(rewards)::BIGINT AS rewards, {LAST_REWARD} AS reward,
    left(arg_max(task, start_ns), 300) AS task
  FROM rollouts GROUP BY rollout_id
)
WHERE (? = '' OR status = ?) AND (? = '' OR contains(coalesce(agents, ''), ?))
  AND (? = '' OR starts_with(rollout_id, ?)) AND (? IS NULL OR start_ns >= ?)
ORDER BY start_ns DESC, rollout_id LIMIT {ROWS} OFFSET ?
"""
_MODES: Final = f"""
SELECT {ROLLOUT} AS rollout_id, any_value({attribute(c.MODE)}) AS mode FROM spans
WHERE {ROLLOUT} IN (SELECT unnest(?)) AND start_ns BETWEEN ? AND ? GROUP BY 1
"""
_TRACES: Final = f"""
SELECT trace_id, count(*) AS spans, min(start_ns) AS start_ns,
  max(coalesce(end_ns, start_ns)) AS end_ns, count(*) OVER () AS total
FROM spans WHERE {ROLLOUT} = ? GROUP BY trace_id ORDER BY start_ns LIMIT {_MANY}
"""
_REWARDS: Final = f"""
SELECT *, count(*) OVER () AS total FROM rewards WHERE rollout_id = ?
ORDER BY start_ns LIMIT {_MANY}
"""


class Wanted(NamedTuple):
    """Filters of the list of rollouts; an empty text is any."""

    status: str = ""
    agent: str = ""
    prefix: str = ""
    mode: str = ""
    since_ns: int | None = None


class Shown(NamedTuple):
    """A step on the page of a rollout.

    Attributes:
        path: The trajectory that it is the first on.
        told: As :func:`transitions.told` gives it.
    """

    path: Trajectory
    step: Transition
    told: Mapping[str, object]


def recorded(store: Store, wanted: Wanted, number: int) -> Mapping[str, object]:
    """A page of the rollouts that spans tell of, the newest first."""
    given: list[object] = [each for text in wanted[:3] for each in (text, text)]
    rows = store.sql(
        _RECORDED, [*given, wanted.since_ns, wanted.since_ns, (number - 1) * ROWS]
    ).rows()
    if rows:
        ids = [row["rollout_id"] for row in rows]
        bounds = min(row["start_ns"] for row in rows), max(row["end_ns"] for row in rows)
        modes = {row["rollout_id"]: row["mode"] for row in store.sql(_MODES, [ids, *bounds])}
        rows = [{**row, "mode": modes.get(row["rollout_id"])} for row in rows]
    return {"rows": rows, "total": rows[0]["total"] if rows else 0, "size": ROWS}


def queued(store: Store, wanted: Wanted, number: int) -> Mapping[str, object]:
    """A page of the queue, the newest first, with what stands where and why attempts failed."""
    state = state_of(store)
    if state is None:
        return {"rows": [], "total": 0, "size": ROWS, "queue": None}
    from lightning_otel.state.queue import Queue
    from lightning_otel.state.rollouts import paused_since_ns, read_page

    queue = Queue(state)
    told = {
        "counts": queue.counts(),  # which ends what runs longer than it may
        "reasons": queue.reasons().most_common(_MANY),
        "paused_ns": paused_since_ns(state),
    }
    status: Any = wanted.status or None
    mode: Any = wanted.mode or None
    agent = wanted.agent or None
    found = read_page(state, ROWS, (number - 1) * ROWS, status=status, mode=mode, agent=agent)
    return {"rows": found.rollouts, "total": found.total, "size": ROWS, "queue": told}


def read(store: Store, rollout_id: str, number: int = 1) -> Mapping[str, object]:
    """Everything that is known of one rollout.

    Args:
        store: Where it is.
        rollout_id: Its whole id.
        number: Which page of its steps, from 1.

    Raises:
        NotFoundError: Neither spans nor the queue tell of it.
    """
    attempts = store.sql(
        "SELECT * FROM rollouts WHERE rollout_id = ? ORDER BY start_ns", [rollout_id]
    ).rows()
    queued_as = _queued_as(store, rollout_id)
    if not attempts and queued_as is None:
        raise NotFoundError(f"there is no rollout {rollout_id!r}; look for it among all of them")
    traces = store.sql(_TRACES, [rollout_id]).rows()
    rewards = store.sql(_REWARDS, [rollout_id]).rows()
    made: list[Adaptation] = []
    if light(store, [rollout_id]):
        made = list(store.adapt(rollout_id=rollout_id, include_incomplete=True))
        steps, report = _list_steps(made), Report.total(each.report for each in made)
    else:
        steps, report = _without_bodies(store, rollout_id)
    first = (number - 1) * STEPS
    return {
        "title": f"Rollout {rollout_id}",
        "rollout_id": rollout_id,
        "queued": queued_as,
        "attempts": attempts,
        "tries": _merge_attempts(attempts, queued_as),
        "task": show_value(queued_as["rollout"].task if queued_as else _read_task(attempts)),
        "traces": traces,
        "rewards": rewards,
        "by": {each.span_id: each for made_one in made for each in made_one.credited},
        "dropped": report.dropped[:_MANY],
        "dropped_total": len(report.dropped),
        "report": report,
        "steps": steps[first : first + STEPS],
        "grouped": _group_steps(steps[first : first + STEPS]),
        "total": len(steps),
        "number": number,
        "size": STEPS,
        **_collect_used(step.step for step in steps),
    }


def _queued_as(store: Store, rollout_id: str) -> dict[str, Any] | None:
    """The rollout as the queue has it, with its attempts; None if it has not."""
    try:
        state = state_of(store)
    except ConfigError:  # without SQLAlchemy there is no queue
        return None
    if state is None:
        return None
    from lightning_otel.state.queue import FINAL, Queue

    queue = Queue(state)
    try:
        found = queue.get(rollout_id)
    except NotFoundError:
        return None
    return {
        "rollout": found,
        "attempts": queue.attempts(rollout_id),
        "is_over": found.status in FINAL,
    }


class Try(NamedTuple):
    """An attempt, as the queue and the spans tell of it; None where one of them does not."""

    attempt_id: str
    status: str
    reason: str
    worker_id: str
    start_ns: int
    end_ns: int | None
    calls: int | None
    spans: int | None
    reward: float | None


def _merge_attempts(
    recorded_ones: Sequence[Mapping[str, Any]], queued_as: Mapping[str, Any] | None
) -> list[Try]:
    """The attempts in order; how one stands the queue knows best."""
    spans = {row["attempt_id"]: row for row in recorded_ones}
    queued_ones = {each.attempt_id: each for each in queued_as["attempts"]} if queued_as else {}
    found = []
    for attempt_id in dict.fromkeys([*queued_ones, *spans]):
        own, row = queued_ones.get(attempt_id), spans.get(attempt_id, {})
        found.append(
            Try(
                attempt_id,
                own.status if own else row["status"],
                own.reason if own else "",
                own.worker_id if own else "",
                own.started_ns if own else row["start_ns"],
                own.ended_ns if own else row["end_ns"],
                row.get("calls"),
                row.get("spans"),
                row.get("reward"),
            )
        )
    return found


def _group_steps(steps: Iterable[Shown]) -> list[tuple[Trajectory, list[Shown]]]:
    """Steps in a row of the same trajectory together."""
    return [(list_of[0].path, list_of) for _, own in groupby(steps, key=lambda each: id(each.path))
            if (list_of := list(own))]  # fmt: skip


def _list_steps(made: Iterable[Adaptation]) -> list[Shown]:
    """Each step once, with the first trajectory it lies on."""
    found: list[Shown] = []
    seen: set[tuple[str, str]] = set()
    for each in made:
        credits = credits_of(each.credited)
        for path in each.trajectories:
            for step in path.transitions:
                key = (step.trace_id, step.span_id)
                if key not in seen:
                    seen.add(key)
                    found.append(Shown(path, step, told(step, credits)))
    return found


_UNREAD: Final[Mapping[str, Any]] = {"observation": (), "action": (), "next_observation": None}


def _without_bodies(store: Store, rollout_id: str) -> tuple[list[Shown], Report]:
    """The steps of a rollout whose messages are too much for a page."""
    table = store.transitions(bodies=False, rollout_id=rollout_id, include_incomplete=True)
    paths: dict[tuple[str, str, int], list[Transition]] = {}
    for row in table.dicts():
        step = transition({**_UNREAD, **row})
        paths.setdefault((step.attempt_id, step.agent, row["branch"]), []).append(step)
    found = []
    for (attempt_id, agent, branch), own in paths.items():
        path = Trajectory(rollout_id, attempt_id, agent, branch, tuple(own))
        found += [Shown(path, step, HEAVY_TEXTS) for step in own]
    return found, table.report()


def _collect_used(steps: Iterable[Transition]) -> dict[str, object]:
    """Collect agents, models, versions and modes of a rollout's steps."""
    agents: dict[str, None] = {}
    models: dict[str, None] = {}
    versions: dict[tuple[str, str], None] = {}
    stamps: dict[str, None] = {}
    modes: dict[str, None] = {}
    for step in steps:
        agents[step.agent] = None
        versions |= dict.fromkeys(step.resources.items())
        if step.model:
            models[step.model] = None
        if step.resource_version and not step.resources:
            stamps[step.resource_version] = None
        if step.mode:
            modes[step.mode] = None
    return {
        "agents": [each for each in agents if each],
        "models": list(models),
        "versions": sorted(versions),
        "stamps": list(stamps),
        "modes": list(modes),
    }


def _read_task(attempts: Sequence[Mapping[str, Any]]) -> object:
    """The task that was recorded, which is JSON where it was written as such."""
    text = next((row["task"] for row in attempts if row["task"] is not None), None)
    try:
        return json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        return text


async def rollouts(request: Request) -> Response:
    """The list of what was recorded, or of the queue."""
    shown = page.choice(request, "of", ("recorded", "queue"))
    number = page.integer(request, "page", 1, 1, 10_000_000)
    statuses = RECORDED if shown == "recorded" else QUEUED
    wanted = Wanted(
        page.choice(request, "status", statuses),
        page.text(request, "agent"),
        page.text(request, "id"),
        page.choice(request, "mode", MODES),
        page.time(request, "since"),
    )
    list_them = recorded if shown == "recorded" else queued

    def work(store: Store) -> Mapping[str, object]:
        return {
            "of": shown,
            "wanted": wanted,
            "statuses": statuses,
            "modes": MODES,
            "number": number,
            **list_them(store, wanted, number),
        }

    return await page.answer(request, f"rollouts_{shown}.html", work, title="Rollouts")


async def rollout(request: Request) -> Response:
    """One of them; the beginning of an id leads to it."""
    given = request.path_params["rollout_id"]
    number = page.integer(request, "page", 1, 1, 10_000_000)
    try:
        return await page.answer(request, "rollout.html", lambda store: read(store, given, number))
    except RefusalError as refusal:
        if refusal.status != 404:
            raise
        noun, whole = await page.run(request, lambda store: store.find(given))
        found = whole
        if noun != "rollout":
            found = await page.run(request, lambda store: store.rollout_of(noun, whole))
        if found == given:
            raise
        return RedirectResponse(path_of("rollouts", found))


async def cancel(request: Request) -> Response:
    """End a rollout that waits or runs."""
    rollout_id = request.path_params["rollout_id"]
    given = await form(request)

    def work(store: Store) -> bool:
        from lightning_otel.state.queue import Queue

        queue = Queue(required(store, f"rollout {rollout_id!r}"))
        return queue.cancel(rollout_id, given.get("reason", "").strip())

    if not await page.run(request, work):
        raise RefusalError(409, "the rollout was over already; nothing was changed")
    return page.see(path_of("rollouts", rollout_id))


async def pause(request: Request) -> Response:
    """Let nobody take anything out of the queue, or let them again."""
    act = (await form(request)).get("act", "")
    if act not in ("pause", "resume"):
        raise RefusalError(400, "act is pause or resume")

    def work(store: Store) -> None:
        from lightning_otel.state.queue import Queue

        queue = Queue(required(store, "queue"))
        queue.pause() if act == "pause" else queue.resume()

    await page.run(request, work)
    return page.see("/rollouts?of=queue")


ROUTES: Final[list[Route]] = [
    Route("/rollouts", rollouts, methods=["GET"]),
    Route("/rollouts", pause, methods=["POST"]),
    Route("/rollouts/{rollout_id:path}/cancel", cancel, methods=["POST"]),
    Route("/rollouts/{rollout_id:path}", rollout, methods=["GET"]),
]
