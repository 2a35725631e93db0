"""What the queue's tables are asked."""

from collections.abc import Collection, Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa

from lightning_otel.errors import NotFoundError
from lightning_otel.queue.tables import PAUSES, ROLLOUTS
from lightning_otel.types import Mode

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection

_MANY: Final = 5000  # ids in one statement; PostgreSQL takes 65,535 values


def fitting(
    agents: Collection[str] | None, modes: Collection[Mode] | None
) -> "Iterator[sa.ColumnElement[bool]]":
    """What a worker with these agents may take."""
    if agents is not None:
        yield sa.or_(ROLLOUTS.c.agent.is_(None), ROLLOUTS.c.agent.in_(list(agents)))
    if modes is not None:
        yield ROLLOUTS.c.mode.in_(list(modes))


def waiting_for(
    agents: Collection[str] | None, modes: Collection[Mode] | None
) -> "sa.Select[tuple[Any, ...]]":
    """Those a worker may take, the next one first."""
    waiting = sa.select(ROLLOUTS).where(ROLLOUTS.c.status == "queuing", *fitting(agents, modes))
    return waiting.order_by(ROLLOUTS.c.priority.desc(), ROLLOUTS.c.position)


def named(rollout_id: str) -> "sa.Select[tuple[Any, ...]]":
    """One rollout's row."""
    return sa.select(ROLLOUTS).where(ROLLOUTS.c.rollout_id == rollout_id)


def is_paused(connection: "Connection") -> bool:
    """Whether nobody may take anything."""
    return connection.execute(sa.select(PAUSES.c.number).limit(1)).first() is not None


def pieces(ids: Iterable[str]) -> Iterator[list[str]]:
    """Ids in lists that one statement takes."""
    rest = iter(ids)
    while some := list(islice(rest, _MANY)):
        yield some


def unknown(rollout_id: str) -> NotFoundError:
    """The error for an id that nobody knows."""
    return NotFoundError(f"no rollout {rollout_id!r} is in the queue; put() gives the ids")
