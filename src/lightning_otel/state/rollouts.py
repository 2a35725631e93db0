"""Rollouts of the queue: attempts and leases as data, rows, outcomes of attempts."""

import json
import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, get_args

import sqlalchemy as sa

from lightning_otel.capture import operations
from lightning_otel.errors import ConfigError, NotFoundError
from lightning_otel.state.leases import id_batches
from lightning_otel.state.tables import ATTEMPTS, PAUSES, ROLLOUTS
from lightning_otel.types import Mode, Rollout, RolloutStatus
from lightning_otel.types.rollouts import FINAL
from lightning_otel.types.values import TEXT_LIMIT, check_finite, check_seconds, check_whole

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection

    from lightning_otel.state import State

_LONGEST_REASON: Final = 2000
_MOST_SAMPLES: Final = 10_000
_JSON: Final = ("task", "resources")
"""Columns of a rollout that are kept as JSON."""

AttemptStatus: TypeAlias = Literal[
    "running", "succeeded", "failed", "timeout", "unresponsive", "cancelled"
]
"""Status of an attempt. *Unresponsive*: no heartbeat in time, or the worker is known to be dead.

Source: Agent Lightning 0.3, ``AttemptStatus``.
"""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try at a rollout."""

    rollout_id: str
    attempt_id: str  # a number from 1; its spans carry it
    worker_id: str
    status: AttemptStatus
    reason: str  # of a failure; empty if it succeeded, or runs
    started_ns: int
    ended_ns: int | None


@dataclass(frozen=True, slots=True)
class Lease:
    """A rollout that one worker holds for a while, to make one attempt at it."""

    rollout: Rollout
    attempt_id: str
    worker_id: str
    until_ns: int  # its end unless a heartbeat prolongs it
    lease_s: float  # by which a heartbeat prolongs it
    deadline_ns: int | None = None  # when it is timed out, whatever heartbeats say


def clean_reason(text: str) -> str:
    """Return a reason without secrets, of bounded length, and text in any database."""
    reason = operations.scrub_message(operations.clean_text(text)).replace("\0", "�").strip()
    return reason if len(reason) <= _LONGEST_REASON else reason[: _LONGEST_REASON - 1] + "…"


def describe_timeout(timeout_s: float | None) -> str:
    """Return the reason of an attempt that took longer than it may."""
    return f"timed out: the attempt took longer than {timeout_s or 0:g} s"


def make_rollouts(
    tasks: Iterable[Any], samples: int = 1, group_ids: Sequence[str] | None = None, **shared: Any
) -> list[Rollout]:
    """Make rollouts of tasks, those of one task beside each other, or raise ConfigError."""
    if isinstance(tasks, (str, bytes, Mapping)):
        raise ConfigError(f"tasks is one {type(tasks).__name__}; put a list of tasks")
    common = Rollout(rollout_id="", task=None, **shared)
    if common.mode not in get_args(Mode):
        modes = ", ".join(get_args(Mode))
        raise ConfigError(f"mode is {common.mode!r}; it must be one of {modes}")
    samples = check_whole("samples", samples, 1, _MOST_SAMPLES)
    row_of(common)  # before a task is read
    texts = [encode_task(task) for task in tasks]
    if group_ids is not None and len(group_ids) != len(texts):
        raise ConfigError(
            f"there are {len(group_ids)} group_ids for {len(texts)} tasks; give one each"
        )
    groups = group_ids or [make_id("group") if samples > 1 else "" for _ in texts]
    return [
        replace(common, rollout_id=make_id("rollout"), task=json.loads(text), group_id=group_id)
        for text, group_id in zip(texts, groups, strict=True)
        for _ in range(samples)
    ]


def encode_task(task: object) -> str:
    """Return a task as JSON, or raise ConfigError."""
    try:
        text = json.dumps(task, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as exc:
        raise ConfigError(
            f"the task {str(task)[:80]!r} cannot be written as JSON ({exc}); "
            "give text, numbers, lists and dicts"
        ) from exc
    if len(text) > TEXT_LIMIT:
        raise ConfigError(
            f"a task has {len(text):,} characters as JSON, and may have {TEXT_LIMIT:,}; put what "
            "is large into a file, and its path into the task"
        )
    return text


def make_id(noun: str) -> str:
    """Return an id that nothing else has."""
    return f"{noun}-{secrets.token_hex(8)}"


def rollout_of(row: "sa.Row[Any]") -> Rollout:
    """Return the rollout in a row."""
    mapping = row._mapping
    values = {field.name: mapping[field.name] for field in fields(Rollout)}
    return Rollout(**values | {name: json.loads(values[name]) for name in _JSON})


def row_of(rollout: Rollout) -> dict[str, Any]:
    """Return the row of a rollout, or raise ConfigError for a number that makes no sense."""
    check_whole("priority", rollout.priority)
    check_whole("max_attempts", rollout.max_attempts, 1)
    if rollout.timeout_s is not None:
        check_seconds("timeout_s", rollout.timeout_s)
    if rollout.reward is not None:
        check_finite("reward", rollout.reward)
    for name, version in rollout.resources.items():
        check_whole(f"the version of {name}", version, 1)
    values = {field.name: getattr(rollout, field.name) for field in fields(Rollout)}
    values["resources"] = dict(rollout.resources)
    return values | {name: json.dumps(values[name]) for name in _JSON}


def expire_attempt(connection: "Connection", row: "sa.Row[Any]", now_ns: int) -> None:
    """End the attempt of a locked row whose lease is over."""
    if row.deadline_ns is not None and row.deadline_ns <= now_ns:
        finish_attempt(connection, row, "timeout", describe_timeout(row.timeout_s), now_ns)
    else:
        reason = f"worker {row.worker_id} was not heard of in time"
        finish_attempt(connection, row, "unresponsive", reason, now_ns)


def finish_attempt(
    connection: "Connection",
    row: "sa.Row[Any]",
    status: AttemptStatus,
    reason: str,
    now_ns: int,
    **values: Any,
) -> None:
    """End the attempt that runs, and set the status of its rollout."""
    outcome = {"status": status, "reason": clean_reason(reason), "ended_ns": now_ns}
    mine = (ATTEMPTS.c.rollout_id == row.rollout_id, ATTEMPTS.c.attempt == row.attempts)
    connection.execute(sa.update(ATTEMPTS).where(*mine).values(**outcome))
    outcome["status"] = choose_status(status, row.attempts, row.max_attempts)
    if outcome["status"] == "queuing":
        outcome = {"status": "queuing"}
    update_rollout(connection, row, **outcome, **values)


def choose_status(status: AttemptStatus, attempts: int, max_attempts: int) -> RolloutStatus:
    """Return the status of a rollout after an attempt: it waits where it may be tried again."""
    if status == "succeeded" or status == "cancelled":
        return status
    return "queuing" if attempts < max_attempts else "failed"


def unknown_rollout(rollout_id: str) -> NotFoundError:
    """Return the error for an id that nothing in the queue has."""
    return NotFoundError(f"no rollout {rollout_id!r} is in the queue; put() gives the ids")


def update_rollout(connection: "Connection", row: "sa.Row[Any]", **values: Any) -> None:
    """Set columns of a rollout."""
    mine = ROLLOUTS.c.rollout_id == row.rollout_id
    connection.execute(sa.update(ROLLOUTS).where(mine).values(**values))


def delete_rollouts(state: "State", rollout_ids: Sequence[str]) -> int:
    """Delete rollouts that are over, with their tasks; return how many wait or run, and stay.

    SQLite's log, which has them still, goes with the last connection, and none lasts.
    """
    state.ensure(ROLLOUTS, ATTEMPTS)
    stay = 0
    for ids in id_batches(rollout_ids):
        mine, is_over = ROLLOUTS.c.rollout_id.in_(ids), ROLLOUTS.c.status.in_(FINAL)
        with state.change() as connection:
            over = connection.scalars(sa.select(ROLLOUTS.c.rollout_id).where(mine, is_over)).all()
            for table in (ATTEMPTS, ROLLOUTS):
                connection.execute(sa.delete(table).where(table.c.rollout_id.in_(over)))
            stay += connection.scalar(sa.select(sa.func.count()).where(mine)) or 0
    return stay


def worker_conditions(
    agents: Collection[str] | None, modes: Collection[Mode] | None
) -> "Iterator[sa.ColumnElement[bool]]":
    """Yield the conditions of what a worker with these agents may take."""
    if agents is not None:
        yield sa.or_(ROLLOUTS.c.agent.is_(None), ROLLOUTS.c.agent.in_(list(agents)))
    if modes is not None:
        yield ROLLOUTS.c.mode.in_(list(modes))


def column_conditions(**values: str | None) -> "Iterator[sa.ColumnElement[bool]]":
    """Return the conditions that columns of a rollout have these values; None is any."""
    return (ROLLOUTS.c[name] == value for name, value in values.items() if value is not None)


def read_page(
    state: "State",
    limit: int,
    offset: int = 0,
    *,
    status: RolloutStatus | None = None,
    mode: Mode | None = None,
    agent: str | None = None,
) -> tuple[list[Rollout], int]:
    """Return a part of the rollouts as last written, the newest first, and the number of all."""
    where = list(column_conditions(status=status, mode=mode, agent=agent))
    query = sa.select(sa.func.count()).select_from(ROLLOUTS).where(*where)
    part = sa.select(ROLLOUTS).where(*where).order_by(ROLLOUTS.c.position.desc())
    with state.read() as connection:
        rows = connection.execute(part.limit(limit).offset(offset)).all()
        return [rollout_of(row) for row in rows], connection.scalar(query) or 0


def paused_since_ns(state: "State") -> int | None:
    """Return the start of the queue's pause, Unix nanoseconds; None if there is none."""
    with state.read() as connection:
        since: int | None = connection.scalar(sa.select(sa.func.min(PAUSES.c.since_ns)))
    return since
