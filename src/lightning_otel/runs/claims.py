"""Claims: which rollouts a consumer works on, has trained on, or left, and why.

A claim is a lease: one that is neither extended nor acknowledged runs out, and its rollouts are
there again. Claims of different consumers know nothing of each other.
"""

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

import sqlalchemy as sa

from lightning_otel.errors import StateError
from lightning_otel.runs.tables import CLAIMS
from lightning_otel.state import State, be_alone

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection

_LOCK: Final = 0x6C6F7463

ClaimState: TypeAlias = Literal["claimed", "trained", "left"]

_FEW: Final = 500
"""Ids in one statement: SQLite takes 32,766 parameters, older ones 999."""


class Claimable(NamedTuple):
    """A rollout that can be claimed.

    Attributes:
        rollout_id: Its id.
        reward: What it is trained with; None if it has none.
    """

    rollout_id: str
    reward: float | None = None


class Claims:
    """What one consumer has taken of a store's rollouts, as one holder of its claims sees it."""

    def __init__(
        self, state: State, consumer: str, *, run_id: str, holder: str, lease_s: float = 120.0
    ) -> None:
        """Name a consumer.

        Args:
            state: Where claims are kept.
            consumer: Whose claims; each consumer may train on a rollout once.
            run_id: The training run that claims.
            holder: Who holds the claims made here: one process of that run.
            lease_s: How long a claim lasts that is not extended, seconds.
        """
        self._state = state
        self.consumer = consumer
        self.run_id = run_id
        self.holder = holder
        self._lease_ns = int(lease_s * 1e9)
        state.ensure(CLAIMS)

    def claim(self, groups: Mapping[str, Sequence[Claimable]]) -> list[str]:
        """Claim whole groups; one of which another holds a member, or trained on it, is not.

        Args:
            groups: Rollouts by group.

        Returns:
            The groups that are now claimed.
        """
        claimed: list[str] = []
        ids = [each.rollout_id for members in groups.values() for each in members]
        with self._changing() as connection:
            taken = self._taken(connection, ids)
            for group_id, members in groups.items():
                if members and taken.isdisjoint(each.rollout_id for each in members):
                    self._put(connection, group_id, members, "claimed")
                    claimed.append(group_id)
        return claimed

    def leave(self, group_id: str, members: Iterable[Claimable], reason: str) -> None:
        """Leave rollouts out for good: they are counted with the reason and not offered again.

        Args:
            group_id: Their group.
            members: The rollouts; those that are taken already stay as they are.
            reason: Why.
        """
        given = list(members)
        with self._changing() as connection:
            held = self._own(connection, [each.rollout_id for each in given])
            taken = self._taken(connection, [each.rollout_id for each in given])
            free = [e for e in given if e.rollout_id not in taken or e.rollout_id in held]
            self._put(connection, group_id, free, "left", reason)

    def extend(self) -> None:
        """Hold what is held for another lease."""
        with self._state.change() as connection:
            until_ns = self._state.now_ns() + self._lease_ns
            connection.execute(sa.update(CLAIMS).where(self._held()).values(until_ns=until_ns))

    def acknowledge(self, connection: "Connection", rollout_ids: Sequence[str], step: int) -> None:
        """Say within a transaction that rollouts were trained on: they never come again.

        Args:
            connection: Of the transaction that also keeps the checkpoint they are in.
            rollout_ids: What is held.
            step: The training step they were in.

        Raises:
            StateError: One of them is not held any more; the transaction is to be given up.
        """
        done = 0
        for ids in _parts(rollout_ids):
            statement = sa.update(CLAIMS).where(self._held(), CLAIMS.c.rollout_id.in_(ids))
            done += connection.execute(statement.values(state="trained", step=step)).rowcount
        if done != len(set(rollout_ids)):
            raise StateError(
                f"{len(set(rollout_ids)) - done} of {len(set(rollout_ids))} rollouts of step {step}"
                f" are claimed by another process of consumer {self.consumer!r}; resume from the "
                "checkpoint before it, with one process a consumer"
            )

    def release(self, rollout_ids: Sequence[str]) -> int:
        """Give back what is held and was not trained on; how many rollouts that were."""
        with self._state.change() as connection:
            return sum(
                connection.execute(
                    sa.delete(CLAIMS).where(self._held(), CLAIMS.c.rollout_id.in_(ids))
                ).rowcount
                for ids in _parts(rollout_ids)
            )

    def rewind(self, step: int) -> int:
        """Give back what this run took and a checkpoint does not hold; how many rollouts that were.

        For a run that nobody else is at work on: what a killed process of it held is there again
        at once.

        Args:
            step: The steps that the checkpoint holds.
        """
        with self._state.change() as connection:
            mine = sa.and_(
                CLAIMS.c.consumer == self.consumer,
                CLAIMS.c.run_id == self.run_id,
                sa.or_(CLAIMS.c.state == "claimed", CLAIMS.c.step > step),
            )
            return connection.execute(sa.delete(CLAIMS).where(mine)).rowcount

    def reopen(self, rollout_ids: Iterable[str]) -> int:
        """Let rollouts be trained on once more, such as after a reward that came late.

        Args:
            rollout_ids: Those that were trained on, or left.

        Returns:
            How many were.
        """
        count = 0
        with self._state.change() as connection:
            for ids in _parts(list(rollout_ids)):
                found = sa.and_(
                    CLAIMS.c.consumer == self.consumer,
                    CLAIMS.c.state != "claimed",
                    CLAIMS.c.rollout_id.in_(ids),
                )
                count += connection.execute(sa.delete(CLAIMS).where(found)).rowcount
        return count

    def taken(self) -> dict[str, float | None]:
        """Rollouts that cannot be claimed now, each with the reward it was taken with."""
        with self._state.read() as connection:
            rows = connection.execute(
                sa.select(CLAIMS.c.rollout_id, CLAIMS.c.reward).where(
                    CLAIMS.c.consumer == self.consumer, self._is_taken()
                )
            )
            return {row.rollout_id: row.reward for row in rows}

    def trained(self) -> dict[str, float | None]:
        """Rollouts that were trained on, each with the reward it then had."""
        with self._state.read() as connection:
            rows = connection.execute(
                sa.select(CLAIMS.c.rollout_id, CLAIMS.c.reward).where(
                    CLAIMS.c.consumer == self.consumer, CLAIMS.c.state == "trained"
                )
            )
            return {row.rollout_id: row.reward for row in rows}

    def counts(self) -> dict[str, int]:
        """How many rollouts are ``claimed`` and ``trained``, and how many left, by reason."""
        found: Counter[str] = Counter()
        with self._state.read() as connection:
            rows = connection.execute(
                sa.select(CLAIMS.c.state, CLAIMS.c.reason, sa.func.count())
                .where(CLAIMS.c.consumer == self.consumer)
                .group_by(CLAIMS.c.state, CLAIMS.c.reason)
            )
            for state, reason, count in rows:
                found[reason if state == "left" else state] += count
        return dict(found.most_common())

    @contextlib.contextmanager
    def _changing(self) -> "Iterator[Connection]":
        """A transaction that nobody else claims in: two would both find a rollout free."""
        with self._state.change() as connection:
            be_alone(connection, _LOCK)
            yield connection

    def _held(self) -> "sa.ColumnElement[bool]":
        return sa.and_(
            CLAIMS.c.consumer == self.consumer,
            CLAIMS.c.holder == self.holder,
            CLAIMS.c.state == "claimed",
        )

    def _is_taken(self) -> "sa.ColumnElement[bool]":
        return sa.or_(CLAIMS.c.state != "claimed", CLAIMS.c.until_ns > self._state.now_ns())

    def _taken(self, connection: "Connection", rollout_ids: Sequence[str]) -> set[str]:
        """Of these, what cannot be claimed."""
        found: set[str] = set()
        for ids in _parts(rollout_ids):
            chosen = sa.and_(CLAIMS.c.consumer == self.consumer, CLAIMS.c.rollout_id.in_(ids))
            statement = sa.select(CLAIMS.c.rollout_id).where(chosen, self._is_taken())
            found.update(connection.scalars(statement))
        return found

    def _own(self, connection: "Connection", rollout_ids: Sequence[str]) -> set[str]:
        found: set[str] = set()
        for ids in _parts(rollout_ids):
            chosen = sa.and_(self._held(), CLAIMS.c.rollout_id.in_(ids))
            found.update(connection.scalars(sa.select(CLAIMS.c.rollout_id).where(chosen)))
        return found

    def _put(
        self,
        connection: "Connection",
        group_id: str,
        members: Sequence[Claimable],
        state: ClaimState,
        reason: str = "",
    ) -> None:
        rows: list[dict[str, Any]] = [
            {
                "consumer": self.consumer,
                "rollout_id": each.rollout_id,
                "group_id": group_id,
                "run_id": self.run_id,
                "holder": self.holder,
                "state": state,
                "step": None,
                "reward": each.reward,
                "reason": reason,
                "until_ns": self._state.now_ns() + self._lease_ns,
            }
            for each in members
        ]
        for ids in _parts([each.rollout_id for each in members]):
            old = sa.and_(CLAIMS.c.consumer == self.consumer, CLAIMS.c.rollout_id.in_(ids))
            connection.execute(sa.delete(CLAIMS).where(old))
        if rows:
            connection.execute(sa.insert(CLAIMS), rows)


def _parts(ids: Sequence[str]) -> Iterable[Sequence[str]]:
    return (ids[start : start + _FEW] for start in range(0, len(ids), _FEW))
