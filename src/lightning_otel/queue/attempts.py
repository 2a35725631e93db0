"""An attempt's beginning and end, each within a transaction that is under way.

Whether an attempt counts is decided by the clock alone, not by who looked first: from the moment
its lease or its time has run out, its result is refused.
"""

from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa

from lightning_otel import capture
from lightning_otel.queue.tables import ATTEMPTS, ROLLOUTS, AttemptStatus, Lease, rollout_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sqlalchemy.engine import Connection

_SECOND_NS: Final = 1_000_000_000
_LONGEST_REASON: Final = 2000


def reason_of(text: str) -> str:
    """A reason as it is kept: without secrets, of bounded length, and text in any database."""
    found = capture.scrubbed(capture.clean(text)).replace("\0", "�").strip()
    return found if len(found) <= _LONGEST_REASON else found[: _LONGEST_REASON - 1] + "…"


def is_over(now_ns: int) -> "sa.ColumnElement[bool]":
    """Whether a rollout's attempt runs no longer, by the clock."""
    return sa.and_(
        ROLLOUTS.c.status == "running",
        sa.or_(ROLLOUTS.c.until_ns <= now_ns, ROLLOUTS.c.deadline_ns <= now_ns),
    )


def begin(
    connection: "Connection", row: "sa.Row[Any]", worker_id: str, *, lease_s: float, now_ns: int
) -> Lease:
    """Give a waiting rollout, whose row is locked, to a worker."""
    attempt = row.attempts + 1
    until_ns = now_ns + int(lease_s * _SECOND_NS)
    timeout_s = row.timeout_s
    deadline_ns = None if timeout_s is None else now_ns + int(timeout_s * _SECOND_NS)
    changed = {
        "status": "running",
        "attempts": attempt,
        "worker_id": worker_id,
        "until_ns": until_ns,
        "deadline_ns": deadline_ns,
    }
    connection.execute(_update(row.rollout_id).values(**changed))
    connection.execute(
        sa.insert(ATTEMPTS).values(
            rollout_id=row.rollout_id,
            attempt=attempt,
            worker_id=worker_id,
            status="running",
            reason="",
            started_ns=now_ns,
        )
    )
    taken = connection.execute(
        sa.select(ROLLOUTS).where(ROLLOUTS.c.rollout_id == row.rollout_id)
    ).one()
    return Lease(rollout_of(taken), str(attempt), worker_id, until_ns, lease_s, deadline_ns)


def held(connection: "Connection", lease: Lease, now_ns: int) -> "sa.Row[Any] | None":
    """The locked row of a lease; None if it is lost, which is made to be so where time ran out."""
    row = connection.execute(
        sa.select(ROLLOUTS)
        .where(
            ROLLOUTS.c.rollout_id == lease.rollout.rollout_id,
            ROLLOUTS.c.status == "running",
            ROLLOUTS.c.attempts == int(lease.attempt_id),
            ROLLOUTS.c.worker_id == lease.worker_id,
        )
        .with_for_update()
    ).one_or_none()
    if row is not None and min(row.until_ns, row.deadline_ns or row.until_ns) <= now_ns:
        expire(connection, [row], now_ns)
        return None
    return row


def prolong(connection: "Connection", lease: Lease, now_ns: int) -> None:
    """Let a lease that is held end later."""
    until_ns = now_ns + int(lease.lease_s * _SECOND_NS)
    connection.execute(_update(lease.rollout.rollout_id).values(until_ns=until_ns))


def expire(connection: "Connection", rows: "Iterable[sa.Row[Any]]", now_ns: int) -> None:
    """End the attempts of locked rows whose time has run out."""
    for row in rows:
        if row.deadline_ns is not None and row.deadline_ns <= now_ns:
            reason = f"timed out: the attempt took longer than {row.timeout_s:g} s"
            fail(connection, row, "timeout", reason, now_ns)
        else:
            reason = f"worker {row.worker_id} was not heard of in time"
            fail(connection, row, "unresponsive", reason, now_ns)


def fail(
    connection: "Connection",
    row: "sa.Row[Any]",
    status: AttemptStatus,
    reason: str,
    now_ns: int,
) -> None:
    """End an attempt without success: the rollout is tried again if it may be, else it failed."""
    end_attempt(connection, row, status, reason, now_ns)
    if row.attempts < row.max_attempts:
        connection.execute(_update(row.rollout_id).values(status="queuing", **_FREE))
    else:
        _end(connection, row, now_ns, status="failed", reason=reason_of(reason))


def succeed(
    connection: "Connection", row: "sa.Row[Any]", reward: float | None, now_ns: int
) -> None:
    """End an attempt with success, and its rollout."""
    end_attempt(connection, row, "succeeded", "", now_ns)
    _end(connection, row, now_ns, status="succeeded", reason="", reward=reward)


def cancel(connection: "Connection", row: "sa.Row[Any]", reason: str, now_ns: int) -> None:
    """End a rollout that waits or runs, for good."""
    if row.status == "running":
        end_attempt(connection, row, "cancelled", reason, now_ns)
    _end(connection, row, now_ns, status="cancelled", reason=reason_of(reason))


def end_attempt(
    connection: "Connection", row: "sa.Row[Any]", status: AttemptStatus, reason: str, now_ns: int
) -> None:
    """Write down how the attempt that runs came out."""
    connection.execute(
        sa.update(ATTEMPTS)
        .where(ATTEMPTS.c.rollout_id == row.rollout_id, ATTEMPTS.c.attempt == row.attempts)
        .values(status=status, reason=reason_of(reason), ended_ns=now_ns)
    )


_FREE: Final = {"worker_id": None, "until_ns": None, "deadline_ns": None}


def _end(connection: "Connection", row: "sa.Row[Any]", now_ns: int, **changed: Any) -> None:
    connection.execute(_update(row.rollout_id).values(ended_ns=now_ns, **changed, **_FREE))


def _update(rollout_id: str) -> "sa.Update":
    return sa.update(ROLLOUTS).where(ROLLOUTS.c.rollout_id == rollout_id)
