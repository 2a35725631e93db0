"""What is kept of rollouts and their attempts, and how a row reads."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import sqlalchemy as sa

from lightning_otel.state import METADATA
from lightning_otel.types import Rollout

# SQLite counts up only what it calls an INTEGER.
_COUNTED: Final = sa.BigInteger().with_variant(sa.Integer(), "sqlite")

ROLLOUTS: Final = sa.Table(
    "lightning_rollouts",
    METADATA,
    sa.Column("position", _COUNTED, primary_key=True, autoincrement=True),
    sa.Column("rollout_id", sa.Text, nullable=False, unique=True),
    sa.Column("task", sa.Text, nullable=False),
    sa.Column("status", sa.Text, nullable=False),
    sa.Column("mode", sa.Text, nullable=False),
    sa.Column("agent", sa.Text),
    sa.Column("group_id", sa.Text, nullable=False),
    sa.Column("priority", sa.BigInteger, nullable=False),
    sa.Column("max_attempts", sa.BigInteger, nullable=False),
    sa.Column("timeout_s", sa.Double),
    sa.Column("resources", sa.Text, nullable=False),
    sa.Column("attempts", sa.BigInteger, nullable=False),
    sa.Column("reward", sa.Double),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("created_ns", sa.BigInteger, nullable=False),
    sa.Column("ended_ns", sa.BigInteger),
    # Of the attempt that runs: who is at it, and until when that is believed.
    sa.Column("worker_id", sa.Text),
    sa.Column("until_ns", sa.BigInteger),
    sa.Column("deadline_ns", sa.BigInteger),
    sa.Index("lightning_rollouts_waiting", "status", sa.desc("priority"), "position"),
)
ATTEMPTS: Final = sa.Table(
    "lightning_attempts",
    METADATA,
    sa.Column("rollout_id", sa.Text, primary_key=True),
    sa.Column("attempt", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("worker_id", sa.Text, nullable=False),
    sa.Column("status", sa.Text, nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("started_ns", sa.BigInteger, nullable=False),
    sa.Column("ended_ns", sa.BigInteger),
    sa.Index("lightning_attempts_workers", "worker_id"),
)
PAUSES: Final = sa.Table(
    "lightning_pauses",
    METADATA,
    sa.Column("number", _COUNTED, primary_key=True, autoincrement=True),
    sa.Column("since_ns", sa.BigInteger, nullable=False),
)
"""The queue is paused while there is a row; two who pause it at once do not collide."""

AttemptStatus: TypeAlias = Literal[
    "running", "succeeded", "failed", "timeout", "unresponsive", "cancelled"
]
"""How an attempt stands. *Timeout*: it took longer than it may; *unresponsive*: its worker was not
heard of in time, or is known to be dead.

Source: Agent Lightning 0.3, ``AttemptStatus``.
"""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try at a rollout.

    Attributes:
        attempt_id: Its number from 1, as text; its spans carry it.
        worker_id: Who tried.
        reason: Why it did not succeed; empty if it did, or runs.
        ended_ns: When it was over; None before.
    """

    rollout_id: str
    attempt_id: str
    worker_id: str
    status: AttemptStatus
    reason: str
    started_ns: int
    ended_ns: int | None


@dataclass(frozen=True, slots=True)
class Lease:
    """A rollout that one worker holds for a while, to make one attempt at it.

    Attributes:
        attempt_id: The attempt, a number from 1 as text.
        until_ns: When it ends unless a heartbeat prolongs it.
        lease_s: How long a heartbeat prolongs it, seconds.
        deadline_ns: When the attempt is timed out, whatever heartbeats say; None is never.
    """

    rollout: Rollout
    attempt_id: str
    worker_id: str
    until_ns: int
    lease_s: float
    deadline_ns: int | None = None


def rollout_of(row: "sa.Row[Any]") -> Rollout:
    """The rollout in a row of ``ROLLOUTS``."""
    found = row._mapping
    return Rollout(
        rollout_id=found["rollout_id"],
        task=json.loads(found["task"]),
        status=found["status"],
        mode=found["mode"],
        agent=found["agent"],
        group_id=found["group_id"],
        priority=found["priority"],
        max_attempts=found["max_attempts"],
        timeout_s=found["timeout_s"],
        resources=json.loads(found["resources"]),
        attempts=found["attempts"],
        reward=found["reward"],
        reason=found["reason"],
        created_ns=found["created_ns"],
        ended_ns=found["ended_ns"],
    )


def row_of(rollout: Rollout, task: str) -> dict[str, Any]:
    """The row of a rollout that waits.

    Args:
        rollout: The rollout.
        task: Its task as JSON.
    """
    return {
        "rollout_id": rollout.rollout_id,
        "task": task,
        "status": rollout.status,
        "mode": rollout.mode,
        "agent": rollout.agent,
        "group_id": rollout.group_id,
        "priority": rollout.priority,
        "max_attempts": rollout.max_attempts,
        "timeout_s": rollout.timeout_s,
        "resources": json.dumps(dict(rollout.resources)),
        "attempts": 0,
        "reason": "",
        "created_ns": rollout.created_ns,
    }


def attempts_of(rows: "Iterable[sa.Row[Any]]") -> list[Attempt]:
    """The attempts in rows of ``ATTEMPTS``."""
    return [_attempt(row._mapping) for row in rows]


def _attempt(found: "Mapping[Any, Any]") -> Attempt:
    return Attempt(
        rollout_id=found["rollout_id"],
        attempt_id=str(found["attempt"]),
        worker_id=found["worker_id"],
        status=found["status"],
        reason=found["reason"],
        started_ns=found["started_ns"],
        ended_ns=found["ended_ns"],
    )
