"""A part of what the queue holds, the newest first, and how much there is."""

from typing import NamedTuple

import sqlalchemy as sa

from lightning_otel.queue import Queue
from lightning_otel.queue.tables import PAUSES, ROLLOUTS, rollout_of
from lightning_otel.types import Mode, Rollout, RolloutStatus


class Listed(NamedTuple):
    """Rollouts to show.

    Attributes:
        rollouts: Some of them.
        total: How many there are that were asked for.
    """

    rollouts: list[Rollout]
    total: int


def listed(
    queue: Queue,
    *,
    limit: int,
    offset: int = 0,
    status: RolloutStatus | None = None,
    mode: Mode | None = None,
    agent: str | None = None,
) -> Listed:
    """Rollouts as they stand, the newest first.

    Args:
        queue: Where they are.
        limit: How many at most.
        offset: How many newer ones come before.
        status: Only those that stand there.
        mode: Only those of one mode.
        agent: Only those for one agent.
    """
    given = {"status": status, "mode": mode, "agent": agent}
    where = [ROLLOUTS.c[name] == value for name, value in given.items() if value is not None]
    every = sa.select(sa.func.count()).select_from(ROLLOUTS).where(*where)
    part = sa.select(ROLLOUTS).where(*where).order_by(ROLLOUTS.c.position.desc())
    queue.counts()  # what runs longer than it may has ended by now
    with queue.state.read() as connection:
        total = connection.scalar(every) or 0
        rows = connection.execute(part.limit(limit).offset(offset)).all()
    return Listed([rollout_of(row) for row in rows], total)


def paused_since_ns(queue: Queue) -> int | None:
    """Since when nobody may take anything, Unix nanoseconds; None if there is no pause."""
    with queue.state.read() as connection:
        found: int | None = connection.scalar(sa.select(sa.func.min(PAUSES.c.since_ns)))
    return found
