"""The queue of rollouts: what waits to be run, who runs it, and what came of it.

Any number of threads, processes and machines put rollouts in and take them out; one is held by one
worker at a time, under a lease that ends by itself when its worker dies.
"""

import contextlib
import json
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, get_args

# Before SQLAlchemy, for it names the extra where that is missing.
from lightning_otel.state import State

# isort: split
import sqlalchemy as sa

from lightning_otel.errors import ConfigError
from lightning_otel.queue import attempts
from lightning_otel.queue.given import check_put, finite, groups_of, new_ids, task_json
from lightning_otel.queue.questions import fitting, is_paused, named, pieces, unknown, waiting_for
from lightning_otel.queue.tables import (
    ATTEMPTS,
    PAUSES,
    ROLLOUTS,
    Attempt,
    AttemptStatus,
    Lease,
    attempts_of,
    rollout_of,
    row_of,
)
from lightning_otel.types import Mode, Rollout, RolloutStatus

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection

__all__ = ["FINAL", "Attempt", "AttemptStatus", "Lease", "Queue"]

FINAL: Final = frozenset({"succeeded", "failed", "cancelled"})
"""The statuses in which a rollout stays."""
_SHORTEST_WAIT_S: Final = 0.01
_LONGEST_WAIT_S: Final = 0.25


class Queue:
    """Rollouts that wait, run and are over, in the state beside a store."""

    def __init__(self, state: "State") -> None:
        """Open the queue of a state; its tables are made if they are not there.

        Raises:
            StateError: The state cannot be read or made.
        """
        state.ensure(ROLLOUTS, ATTEMPTS, PAUSES)
        self.state = state

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
            tasks: What the agent is given, any JSON values.
            mode: What the rollouts are for.
            agent: Which agent is to take them; None is any.
            samples: How many rollouts of each task; several are one group.
            priority: Higher ones are taken first.
            max_attempts: How often each may be tried.
            timeout_s: How long an attempt may take, seconds; None is any time.
            resources: Versions by resource name that they are pinned to.
            group_ids: For each task the group its rollouts are compared in, such as one that
                others are in already.

        Returns:
            The rollouts in the order of the tasks, those of one task beside each other.

        Raises:
            ConfigError: A task is no JSON value, or a number makes no sense.
        """
        check_put(tasks, mode, samples, max_attempts, timeout_s)
        texts = [task_json(task) for task in tasks]
        if group_ids is not None and len(group_ids) != len(texts):
            raise ConfigError(
                f"there are {len(group_ids)} group_ids for {len(texts)} tasks; give one each"
            )
        shared = Rollout(
            rollout_id="",
            task=None,
            mode=mode,
            agent=agent,
            priority=priority,
            max_attempts=max_attempts,
            timeout_s=timeout_s,
            resources=dict(resources or {}),
            created_ns=self.state.now_ns(),
        )
        made = [
            replace(shared, rollout_id=each, task=json.loads(text), group_id=group_id)
            for text, group_id in zip(texts, groups_of(group_ids, samples, len(texts)), strict=True)
            for each in new_ids("rollout", samples)
        ]
        rows = [row_of(each, texts[index // samples]) for index, each in enumerate(made)]
        if rows:
            with self.state.change() as connection:
                connection.execute(sa.insert(ROLLOUTS), rows)
        return made

    def lease(
        self,
        worker_id: str,
        *,
        agents: Collection[str] | None = None,
        modes: Collection[Mode] | None = None,
        lease_s: float = 30.0,
    ) -> Lease | None:
        """Take the rollout that is next, for one attempt at it; None if none waits, or in a pause.

        Args:
            worker_id: Who takes it; no two workers may have the same.
            agents: Names of the agents it has; it takes what is for one of them or for any. None
                takes everything.
            modes: What it takes rollouts for; None is all.
            lease_s: How long the lease lasts without a heartbeat, seconds.
        """
        waiting = waiting_for(agents, modes).limit(1)
        with self._looking() as connection:  # who finds nothing keeps nobody waiting
            if is_paused(connection) or connection.execute(waiting).first() is None:
                return None
        with self.state.change() as connection:
            row = connection.execute(waiting.with_for_update(skip_locked=True)).first()
            if row is None or is_paused(connection):
                return None
            now_ns = self.state.now_ns()
            return attempts.begin(connection, row, worker_id, lease_s=lease_s, now_ns=now_ns)

    def heartbeat(self, lease: Lease) -> bool:
        """Prolong a lease; False if it is lost: cancelled, timed out, or taken away."""
        with self.state.change() as connection:
            now_ns = self.state.now_ns()
            if attempts.held(connection, lease, now_ns) is None:
                return False
            attempts.prolong(connection, lease, now_ns)
            return True

    def succeed(self, lease: Lease, reward: float | None = None) -> bool:
        """End a rollout with success; False, and nothing is changed, if the lease was lost.

        Args:
            lease: What its worker holds.
            reward: Its reward, if it is known; it must be finite.
        """
        value = None if reward is None else finite(reward)
        with self.state.change() as connection:
            now_ns = self.state.now_ns()
            row = attempts.held(connection, lease, now_ns)
            if row is None:
                return False
            attempts.succeed(connection, row, value, now_ns)
            return True

    def fail(self, lease: Lease, reason: str) -> bool:
        """End an attempt without success; False, and nothing is changed, if the lease was lost.

        The rollout waits again if it may be tried again; else it failed, with this reason.
        """
        with self.state.change() as connection:
            now_ns = self.state.now_ns()
            row = attempts.held(connection, lease, now_ns)
            if row is None:
                return False
            attempts.fail(connection, row, "failed", reason, now_ns)
            return True

    def lost(self, worker_id: str, reason: str) -> int:
        """End the attempts of a worker that is known to be dead, at once; gives their number."""
        own = sa.select(ROLLOUTS).where(
            ROLLOUTS.c.status == "running", ROLLOUTS.c.worker_id == worker_id
        )
        with self.state.change() as connection:
            now_ns = self.state.now_ns()
            rows = connection.execute(own.with_for_update()).all()
            for row in rows:
                attempts.fail(connection, row, "unresponsive", reason, now_ns)
            return len(rows)

    def cancel(self, rollout_id: str, reason: str = "") -> bool:
        """End a rollout that waits or runs, whose worker learns of it; False if it was over.

        Raises:
            NotFoundError: There is no such rollout.
        """
        with self.state.change() as connection:
            now_ns = self.state.now_ns()
            self._expire(connection, now_ns)
            row = connection.execute(named(rollout_id).with_for_update()).one_or_none()
            if row is None:
                raise unknown(rollout_id)
            if row.status in FINAL:
                return False
            attempts.cancel(connection, row, reason or "cancelled", now_ns)
            return True

    def reward(self, rollout_id: str, reward: float) -> None:
        """Keep what a rollout is worth, where that is learnt when it is over.

        Raises:
            NotFoundError: There is no such rollout.
            ConfigError: The reward is no finite number.
        """
        value = finite(reward)
        with self.state.change() as connection:
            found = connection.execute(
                sa.update(ROLLOUTS).where(ROLLOUTS.c.rollout_id == rollout_id).values(reward=value)
            )
            if not found.rowcount:
                raise unknown(rollout_id)

    def pause(self) -> None:
        """Let nobody take anything until :meth:`resume`; what runs goes on."""
        with self.state.change() as connection:
            if not is_paused(connection):
                connection.execute(sa.insert(PAUSES).values(since_ns=self.state.now_ns()))

    def resume(self) -> None:
        """End a pause."""
        with self.state.change() as connection:
            connection.execute(sa.delete(PAUSES))

    @property
    def is_paused(self) -> bool:
        """Whether nobody may take anything."""
        with self.state.read() as connection:
            return is_paused(connection)

    def is_empty(
        self, *, agents: Collection[str] | None = None, modes: Collection[Mode] | None = None
    ) -> bool:
        """Whether nothing waits, nor runs that may have to be tried again.

        Args:
            agents: As :meth:`lease` takes them.
            modes: As :meth:`lease` takes them.
        """
        may_return = sa.and_(
            ROLLOUTS.c.status == "running", ROLLOUTS.c.attempts < ROLLOUTS.c.max_attempts
        )
        unfinished = sa.or_(ROLLOUTS.c.status == "queuing", may_return)
        wanted = sa.select(ROLLOUTS.c.position).where(unfinished, *fitting(agents, modes))
        with self._looking() as connection:
            return connection.execute(wanted.limit(1)).first() is None

    def get(self, rollout_id: str) -> Rollout:
        """One rollout as it stands.

        Raises:
            NotFoundError: There is no such rollout.
        """
        with self._looking() as connection:
            row = connection.execute(named(rollout_id)).one_or_none()
        if row is None:
            raise unknown(rollout_id)
        return rollout_of(row)

    def rollouts(
        self,
        status: RolloutStatus | None = None,
        mode: Mode | None = None,
        ids: Iterable[str] | None = None,
    ) -> list[Rollout]:
        """Rollouts as they stand, in the order they were put in; those asked for by id as asked.

        Args:
            status: Only those that stand there.
            mode: Only those of one mode.
            ids: Only these; what is not there is left out.
        """
        query = sa.select(ROLLOUTS).order_by(ROLLOUTS.c.position)
        if status is not None:
            query = query.where(ROLLOUTS.c.status == status)
        if mode is not None:
            query = query.where(ROLLOUTS.c.mode == mode)
        if ids is None:
            with self._looking() as connection:
                return [rollout_of(row) for row in connection.execute(query)]
        asked = list(ids)
        found: dict[str, Rollout] = {}
        with self._looking() as connection:
            for some in pieces(asked):
                rows = connection.execute(query.where(ROLLOUTS.c.rollout_id.in_(some)))
                found.update((row.rollout_id, rollout_of(row)) for row in rows)
        return [found[each] for each in asked if each in found]

    def attempts(self, rollout_id: str) -> list[Attempt]:
        """Every attempt at a rollout, in order; empty if there was none."""
        wanted = sa.select(ATTEMPTS).where(ATTEMPTS.c.rollout_id == rollout_id)
        with self._looking() as connection:
            return attempts_of(connection.execute(wanted.order_by(ATTEMPTS.c.attempt)))

    def counts(self, mode: Mode | None = None) -> dict[RolloutStatus, int]:
        """How many rollouts stand where; every status is named."""
        query = sa.select(ROLLOUTS.c.status, sa.func.count()).group_by(ROLLOUTS.c.status)
        if mode is not None:
            query = query.where(ROLLOUTS.c.mode == mode)
        with self._looking() as connection:
            found = {row[0]: row[1] for row in connection.execute(query)}
        return {status: found.get(status, 0) for status in get_args(RolloutStatus)}

    def reasons(self) -> Counter[tuple[AttemptStatus, str]]:
        """How many attempts did not succeed, by how they ended and why."""
        query = (
            sa.select(ATTEMPTS.c.status, ATTEMPTS.c.reason, sa.func.count())
            .where(ATTEMPTS.c.status.not_in(("running", "succeeded")))
            .group_by(ATTEMPTS.c.status, ATTEMPTS.c.reason)
        )
        with self._looking() as connection:
            rows = connection.execute(query).all()
        return Counter({(status, reason): count for status, reason, count in rows})

    def wait(self, ids: Iterable[str], timeout_s: float | None = None) -> list[Rollout]:
        """The rollouts, in this order, as soon as all are over; as they stand when time is up.

        Args:
            ids: Which; all of them are to be there.
            timeout_s: How long at most, seconds; None is as long as it takes.

        Raises:
            NotFoundError: One of them is not there.
        """
        asked = list(ids)
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        pause_s = _SHORTEST_WAIT_S
        while self._unfinished(asked):
            left_s = _LONGEST_WAIT_S if until_s is None else until_s - time.monotonic()
            if left_s <= 0:
                break
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, _LONGEST_WAIT_S)
        return self.rollouts(ids=asked)

    def taken(self, worker_ids: Iterable[str]) -> int:
        """How many attempts some workers have made or begun."""
        count = sa.select(sa.func.count()).select_from(ATTEMPTS)
        with self.state.read() as connection:
            return sum(
                connection.scalar(count.where(ATTEMPTS.c.worker_id.in_(some))) or 0
                for some in pieces(worker_ids)
            )

    def _unfinished(self, ids: Sequence[str]) -> bool:
        column = ROLLOUTS.c.rollout_id
        status: dict[str, str] = {}
        with self._looking() as connection:
            for some in pieces(ids):
                query = sa.select(column, ROLLOUTS.c.status).where(column.in_(some))
                status.update((each, where) for each, where in connection.execute(query))
        for each in ids:
            if each not in status:
                raise unknown(each)
        return any(where not in FINAL for where in status.values())

    @contextlib.contextmanager
    def _looking(self) -> "Iterator[Connection]":
        """A connection to read from, to which no attempt runs whose time has run out."""
        over = sa.select(ROLLOUTS.c.position).where(attempts.is_over(self.state.now_ns())).limit(1)
        with self.state.read() as connection:
            if connection.execute(over).first() is None:
                yield connection
                return
        with self.state.change() as connection:
            self._expire(connection, self.state.now_ns())
        with self.state.read() as connection:
            yield connection

    def _expire(self, connection: "Connection", now_ns: int) -> None:
        """End the attempts whose time has run out, of whichever worker."""
        over = sa.select(ROLLOUTS).where(attempts.is_over(now_ns))
        rows = connection.execute(over.with_for_update(skip_locked=True)).all()
        attempts.expire(connection, rows, now_ns)
