"""The queue of rollouts: waiting, running and finished ones, with their attempts.

One worker at a time holds a rollout, under a lease that ends if the worker dies.
"""

import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, get_args

# Before SQLAlchemy, for it names the extra where that is missing.
from lightning_otel.state import State

# isort: split
import sqlalchemy as sa

from lightning_otel.state.leases import Leases, id_batches
from lightning_otel.state.rollouts import (
    Attempt,
    AttemptStatus,
    Lease,
    clean_reason,
    column_conditions,
    expire_attempt,
    finish_attempt,
    make_rollouts,
    rollout_of,
    row_of,
    unknown_rollout,
    update_rollout,
    worker_conditions,
)
from lightning_otel.state.tables import ATTEMPTS, PAUSES, ROLLOUTS
from lightning_otel.types import Mode, Rollout, RolloutStatus
from lightning_otel.types.rollouts import FINAL
from lightning_otel.types.values import check_finite, check_seconds, check_types

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection

__all__ = ["FINAL", "Attempt", "AttemptStatus", "Lease", "Queue"]

_SHORTEST_WAIT_S: Final = 0.01
_LONGEST_WAIT_S: Final = 0.25


class Queue:
    """The waiting, running and finished rollouts of a state."""

    def __init__(self, state: State) -> None:
        """Open the queue of a state, and create missing tables.

        Raises:
            ConfigError: It is no state.
            StateError: The state cannot be read or made.
        """
        check_types({"state": state}, Queue.__init__.__annotations__)
        state.ensure(ROLLOUTS, ATTEMPTS, PAUSES)
        self.state = state
        self._leases = Leases(state, ROLLOUTS, leased="running", on_expired=expire_attempt)

    def __reduce__(self) -> "tuple[type[Queue], tuple[State]]":
        return Queue, (self.state,)

    def put(
        self,
        tasks: Iterable[Any],
        *,
        mode: Mode = "train",
        agent: str | None = None,
        samples: int = 1,
        priority: int = 0,
        max_attempts: int = 1,
        timeout_s: float | None = None,
        resources: Mapping[str, int] | None = None,
        group_ids: Sequence[str] | None = None,
    ) -> list[Rollout]:
        """Put rollouts at the end of the queue: all of them, or none.

        Args:
            tasks: Any JSON values.
            mode: Their purpose.
            agent: The agent that takes them; None is any.
            samples: Rollouts of each task; several are one group.
            priority: Higher ones are taken first.
            max_attempts: Attempts at each, at most.
            timeout_s: Limit of an attempt, seconds; None is none.
            resources: Pinned versions by resource name.
            group_ids: A group for each task, such as one that has rollouts already.

        Returns:
            The rollouts in the order of the tasks, those of one task beside each other.

        Raises:
            ConfigError: A task is no JSON value, or a number makes no sense.
        """
        rollouts = make_rollouts(
            tasks,
            samples,
            group_ids,
            mode=mode,
            agent=agent,
            priority=priority,
            max_attempts=max_attempts,
            timeout_s=timeout_s,
            resources=dict(resources or {}),
            created_ns=self.state.now_ns(),
        )
        self.add(rollouts)
        return rollouts

    def add(self, rollouts: Sequence[Rollout]) -> None:
        """Put rollouts with ids of their own at the end of the queue: all of them, or none."""
        if rollouts:
            with self.state.change() as connection:
                connection.execute(sa.insert(ROLLOUTS), [row_of(rollout) for rollout in rollouts])

    def lease(
        self,
        worker_id: str,
        *,
        agents: Collection[str] | None = None,
        modes: Collection[Mode] | None = None,
        lease_s: float = 30.0,
    ) -> Lease | None:
        """Take the next rollout for one attempt; return None if none waits, or in a pause.

        Args:
            worker_id: Unique among workers.
            agents: Only rollouts for one of these or for any; None is all.
            modes: Only rollouts of these modes; None is all.
            lease_s: Seconds that the lease lasts without a heartbeat.

        Raises:
            ConfigError: That is no length of time.
        """
        check_seconds("lease_s", lease_s)
        query = (
            sa.select(ROLLOUTS)
            .where(ROLLOUTS.c.status == "queuing", *worker_conditions(agents, modes))
            .order_by(ROLLOUTS.c.priority.desc(), ROLLOUTS.c.position)
        )
        with self._leases.read() as connection:  # who finds nothing keeps nobody waiting
            if _is_paused(connection) or connection.execute(query.limit(1)).first() is None:
                return None
        with self.state.change() as connection:
            if _is_paused(connection):
                return None
            tries = {"attempts": ROLLOUTS.c.attempts + 1}
            row = self._leases.claim(connection, worker_id, query, lease_s, **tries)
            if row is None:
                return None
            attempt = {"rollout_id": row.rollout_id, "attempt": row.attempts, "status": "running"}
            attempt |= {"worker_id": worker_id, "reason": "", "started_ns": self.state.now_ns()}
            connection.execute(sa.insert(ATTEMPTS).values(**attempt))
            number, until_ns = str(row.attempts), row.until_ns
            return Lease(rollout_of(row), number, worker_id, until_ns, lease_s, row.deadline_ns)

    def heartbeat(self, lease: Lease) -> bool:
        """Extend a lease; return False if it is lost: cancelled, timed out, or taken away."""
        until_ns = self._leases.end_ns(lease.lease_s)
        return self._leases.change(self._held_condition(lease), until_ns=until_ns)

    def succeed(self, lease: Lease, reward: float | None = None) -> bool:
        """End a rollout with success; return False, and change nothing, if the lease was lost.

        Raises:
            ConfigError: The reward is no finite number.
        """
        value = None if reward is None else check_finite("reward", reward)
        return self._finish_lease(lease, "succeeded", reward=value)

    def fail(self, lease: Lease, reason: str) -> bool:
        """End an attempt without success; it may be tried again. False: the lease was lost."""
        return self._finish_lease(lease, "failed", reason)

    def fail_worker(self, worker_id: str, reason: str) -> int:
        """End the attempts of a worker that died, at once; return their number."""
        query = sa.select(ROLLOUTS).where(self._leases.is_held(worker_id))
        with self.state.change() as connection:
            rows = connection.execute(query.with_for_update()).all()
            for row in rows:
                finish_attempt(connection, row, "unresponsive", reason, self.state.now_ns())
            return len(rows)

    def cancel(self, rollout_id: str, reason: str = "") -> bool:
        """Cancel a rollout that waits or runs; return False if it was over.

        Raises:
            NotFoundError: There is no such rollout.
        """
        with self.state.change() as connection:
            self._leases.expire(connection)
            query = sa.select(ROLLOUTS).where(ROLLOUTS.c.rollout_id == rollout_id)
            row = connection.execute(query.with_for_update()).one_or_none()
            if row is None:
                raise unknown_rollout(rollout_id)
            if row.status in FINAL:
                return False
            now_ns, why = self.state.now_ns(), clean_reason(reason or "cancelled")
            if row.status == "running":
                finish_attempt(connection, row, "cancelled", why, now_ns)
            else:
                update_rollout(connection, row, status="cancelled", reason=why, ended_ns=now_ns)
            return True

    def pause(self) -> None:
        """Pause the queue until :meth:`resume`; running rollouts continue."""
        with self.state.change() as connection:
            if not _is_paused(connection):
                connection.execute(sa.insert(PAUSES).values(since_ns=self.state.now_ns()))

    def resume(self) -> None:
        """End a pause."""
        with self.state.change() as connection:
            connection.execute(sa.delete(PAUSES))

    @property
    def is_paused(self) -> bool:
        """Return True while the queue is paused."""
        with self.state.read() as connection:
            return _is_paused(connection)

    def is_empty(
        self, *, agents: Collection[str] | None = None, modes: Collection[Mode] | None = None
    ) -> bool:
        """Return True if nothing waits, nor runs and may be tried again."""
        may_return = sa.and_(
            ROLLOUTS.c.status == "running", ROLLOUTS.c.attempts < ROLLOUTS.c.max_attempts
        )
        unfinished = sa.or_(ROLLOUTS.c.status == "queuing", may_return)
        query = sa.select(ROLLOUTS.c.position).where(unfinished, *worker_conditions(agents, modes))
        with self._leases.read() as connection:
            return connection.execute(query.limit(1)).first() is None

    def get(self, rollout_id: str) -> Rollout:
        """Return one rollout as it stands.

        Raises:
            NotFoundError: There is no such rollout.
        """
        rollouts = self.rollouts(ids=[rollout_id])
        if not rollouts:
            raise unknown_rollout(rollout_id)
        return rollouts[0]

    def rollouts(
        self,
        status: RolloutStatus | None = None,
        mode: Mode | None = None,
        ids: Iterable[str] | None = None,
    ) -> list[Rollout]:
        """Return rollouts in the order they were put in; by ``ids`` those that exist, in order."""
        query = sa.select(ROLLOUTS).where(*column_conditions(status=status, mode=mode))
        query = query.order_by(ROLLOUTS.c.position)
        with self._leases.read() as connection:
            if ids is None:
                return [rollout_of(row) for row in connection.execute(query)]
            id_list = list(ids)
            rows = [
                row
                for some in id_batches(id_list)
                for row in connection.execute(query.where(ROLLOUTS.c.rollout_id.in_(some)))
            ]
        by_id = {row.rollout_id: rollout_of(row) for row in rows}
        return [by_id[key] for key in id_list if key in by_id]

    def attempts(self, rollout_id: str) -> list[Attempt]:
        """Return every attempt at a rollout, in order; empty if there was none."""
        query = sa.select(ATTEMPTS).where(ATTEMPTS.c.rollout_id == rollout_id)
        with self._leases.read() as connection:
            rows = connection.execute(query.order_by(ATTEMPTS.c.attempt)).mappings().all()
        return [
            Attempt(attempt_id=str(row["attempt"]), **{k: row[k] for k in row if k != "attempt"})
            for row in rows
        ]

    def counts(self, mode: Mode | None = None) -> dict[RolloutStatus, int]:
        """Return the number of rollouts by status; every status is named."""
        return self._leases.count(get_args(RolloutStatus), *column_conditions(mode=mode))

    def reasons(self) -> Counter[tuple[AttemptStatus, str]]:
        """Return the number of attempts that did not succeed, by status and reason."""
        query = (
            sa.select(ATTEMPTS.c.status, ATTEMPTS.c.reason, sa.func.count())
            .where(ATTEMPTS.c.status.not_in(("running", "succeeded")))
            .group_by(ATTEMPTS.c.status, ATTEMPTS.c.reason)
        )
        with self._leases.read() as connection:
            rows = connection.execute(query).all()
        return Counter({(status, reason): count for status, reason, count in rows})

    def wait(self, ids: Iterable[str], timeout_s: float | None = None) -> list[Rollout]:
        """Return the rollouts as soon as all are over; as they stand when time is up.

        Raises:
            NotFoundError: One of them is not there.
        """
        id_list = list(ids)
        wait_s = None if timeout_s is None else check_finite("timeout_s", timeout_s)
        until_s = None if wait_s is None else time.monotonic() + wait_s
        pause_s = _SHORTEST_WAIT_S
        while True:
            rollouts = self.rollouts(ids=id_list)
            if len(rollouts) < len(id_list):
                known = {rollout.rollout_id for rollout in rollouts}
                raise unknown_rollout(next(key for key in id_list if key not in known))
            left_s = _LONGEST_WAIT_S if until_s is None else until_s - time.monotonic()
            if left_s <= 0 or all(rollout.status in FINAL for rollout in rollouts):
                return rollouts
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, _LONGEST_WAIT_S)

    def count_attempts(self, worker_ids: Iterable[str]) -> int:
        """Return the number of attempts that some workers have made or begun."""
        count = sa.select(sa.func.count()).select_from(ATTEMPTS)
        with self.state.read() as connection:
            return sum(
                connection.scalar(count.where(ATTEMPTS.c.worker_id.in_(some))) or 0
                for some in id_batches(worker_ids)
            )

    def _finish_lease(
        self, lease: Lease, status: AttemptStatus, reason: str = "", **values: Any
    ) -> bool:
        with self.state.change() as connection:
            row = self._leases.lock(connection, self._held_condition(lease))
            if row is not None:
                finish_attempt(connection, row, status, reason, self.state.now_ns(), **values)
            return row is not None

    def _held_condition(self, lease: Lease) -> "sa.ColumnElement[bool]":
        return self._leases.is_held(
            lease.worker_id,
            ROLLOUTS.c.rollout_id == lease.rollout.rollout_id,
            ROLLOUTS.c.attempts == int(lease.attempt_id),
        )


def _is_paused(connection: "Connection") -> bool:
    return connection.execute(sa.select(PAUSES.c.number).limit(1)).first() is not None
