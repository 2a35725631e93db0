"""The lease: one holder has a row until a time, even if its process dies.

The clock alone ends a lease. A claim is the lease of a rollout that a consumer works on; one that
was trained on or excluded has no end.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeVar

import sqlalchemy as sa

from lightning_otel.errors import StateError
from lightning_otel.state import State, take_lock
from lightning_otel.state.tables import CLAIMS
from lightning_otel.types.values import check_seconds

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection

_SECOND_NS: Final = 1_000_000_000
_MOST_IDS: Final = 500
"""Ids in one statement: SQLite takes 32,766 parameters, older ones 999."""
_LOCK: Final = 0x6C6F7463
"""Of claims: two could find the same rollout free."""

S = TypeVar("S", bound=str)


def id_batches(ids: Iterable[str]) -> Iterator[list[str]]:
    """Yield ids in lists that one statement takes."""
    items = list(ids)
    return (items[start : start + _MOST_IDS] for start in range(0, len(items), _MOST_IDS))


class Leases:
    """The leases of a table with ``until_ns``, a status, a holder; maybe timeout and deadline."""

    def __init__(
        self,
        state: State,
        table: sa.Table,
        *,
        leased: str,
        status: str = "status",
        holder: str = "worker_id",
        on_expired: "Callable[[Connection, sa.Row[Any], int], object]" = lambda *_: None,
    ) -> None:
        """Name the table, the status of a leased row, and the columns.

        ``on_expired`` gives each locked row whose lease is over another status, in a transaction.
        """
        self._state = state
        self._table = table
        self._held = leased
        self._status = table.c[status]
        self._holder = table.c[holder]
        self._on_expired = on_expired

    def is_over(self, now_ns: int) -> "sa.ColumnElement[bool]":
        """Return the condition that a row is held by a lease that is over."""
        ends = [self._table.c.until_ns <= now_ns]
        if "deadline_ns" in self._table.c:
            ends.append(self._table.c.deadline_ns <= now_ns)
        return sa.and_(self._status == self._held, sa.or_(*ends))

    def is_held(self, holder: str, *of_row: "sa.ColumnElement[bool]") -> "sa.ColumnElement[bool]":
        """Return the condition that a holder still has a row, even if its lease is over."""
        return sa.and_(self._status == self._held, self._holder == holder, *of_row)

    def end_ns(self, duration_s: float) -> int:
        """Return the end of a time that begins now, Unix nanoseconds."""
        return self._state.now_ns() + int(duration_s * _SECOND_NS)

    def claim(
        self, connection: "Connection", holder: str, query: "sa.Select[Any]", lease_s: float,
        **values: Any,
    ) -> "sa.Row[Any] | None":  # fmt: skip
        """Lease the first row of a query to a holder; return None if there is none."""
        free = query.limit(1).with_for_update(skip_locked=True)
        row = connection.execute(free).first()
        if row is None:
            return None
        mine = self._table.c.position == row.position
        if "deadline_ns" in self._table.c:
            values["deadline_ns"] = row.timeout_s and self.end_ns(row.timeout_s)
        changed: dict[str, Any] = {self._status.name: self._held, self._holder.name: holder}
        changed |= {"until_ns": self.end_ns(lease_s), **values}
        connection.execute(sa.update(self._table).where(mine).values(**changed))
        return connection.execute(sa.select(self._table).where(mine)).one()

    def lock(
        self, connection: "Connection", condition: "sa.ColumnElement[bool]"
    ) -> "sa.Row[Any] | None":
        """Lock a held row until the transaction ends; return None if its lease ended."""
        self.expire(connection)
        is_alive = sa.not_(sa.func.coalesce(self.is_over(self._state.now_ns()), sa.false()))
        query = sa.select(self._table).where(condition, is_alive)
        return connection.execute(query.with_for_update()).one_or_none()

    def update(
        self, connection: "Connection", condition: "sa.ColumnElement[bool]", **values: Any
    ) -> int:
        """Set columns of held rows, such as the end of a lease; return their number."""
        result = connection.execute(sa.update(self._table).where(condition).values(**values))
        return result.rowcount

    def change(self, condition: "sa.ColumnElement[bool]", **values: Any) -> bool:
        """Set columns of a held row; return False, and change nothing, if its lease ended."""
        with self._state.change() as connection:
            if self.lock(connection, condition) is None:
                return False
            return bool(self.update(connection, condition, **values))

    def count(self, statuses: Sequence[S], *where: "sa.ColumnElement[bool]") -> dict[S, int]:
        """Return the number of rows by status; every status is named."""
        query = sa.select(self._status, sa.func.count()).where(*where).group_by(self._status)
        with self.read() as connection:
            counts = {row[0]: int(row[1]) for row in connection.execute(query)}
        return {status: counts.get(status, 0) for status in statuses}

    def expire(self, connection: "Connection") -> None:
        """End all leases that are over."""
        now_ns = self._state.now_ns()
        over = sa.select(self._table).where(self.is_over(now_ns))
        rows: Sequence[sa.Row[Any]] = connection.execute(
            over.with_for_update(skip_locked=True)
        ).all()
        for row in rows:
            self._on_expired(connection, row, now_ns)

    @contextlib.contextmanager
    def read(self) -> "Iterator[Connection]":
        """Open a connection to read from, after ended leases were expired."""
        over = sa.select(self._table.c.until_ns).where(self.is_over(self._state.now_ns())).limit(1)
        with self._state.read() as connection:
            if connection.execute(over).first() is None:
                yield connection
                return
        with self._state.change() as connection:
            self.expire(connection)
        with self._state.read() as connection:
            yield connection


class Claimable(NamedTuple):
    """A rollout that can be claimed."""

    rollout_id: str
    reward: float | None = None


class Claims:
    """The rollouts that a consumer has claimed, trained on or excluded, for one holder."""

    def __init__(
        self, state: State, consumer: str, *, run_id: str, holder: str, lease_s: float = 120.0
    ) -> None:
        check_seconds("lease_s", lease_s)
        self._state = state
        self.consumer = consumer
        self.run_id = run_id
        self.holder = holder
        self._lease_s = lease_s
        self._leases = Leases(state, CLAIMS, leased="claimed", status="state", holder="holder")
        self._mine = CLAIMS.c.consumer == consumer
        self._held = self._leases.is_held(holder, self._mine)
        state.ensure(CLAIMS)

    def claim(self, groups: Mapping[str, Sequence[Claimable]]) -> list[str]:
        """Claim whole groups; skip those of which a member is claimed or trained on already."""
        claimed: list[str] = []
        ids = [member.rollout_id for members in groups.values() for member in members]
        with self._state.change() as connection:
            take_lock(connection, _LOCK)
            conflicts = self._find_claims(connection, ids, self._is_taken())
            for group_id, members in groups.items():
                if members and conflicts.isdisjoint(member.rollout_id for member in members):
                    self._put_claims(connection, group_id, members, "claimed")
                    claimed.append(group_id)
        return claimed

    def exclude(self, group_id: str, members: Sequence[Claimable], reason: str) -> None:
        """Exclude rollouts for good: they are counted by reason and never offered again."""
        ids = [member.rollout_id for member in members]
        of_others = sa.and_(self._is_taken(), sa.not_(self._held))
        with self._state.change() as connection:
            take_lock(connection, _LOCK)
            conflicts = self._find_claims(connection, ids, of_others)
            free = [member for member in members if member.rollout_id not in conflicts]
            self._put_claims(connection, group_id, free, "left", reason)

    def extend(self) -> None:
        """Extend all claims of this holder."""
        with self._state.change() as connection:
            until_ns = self._leases.end_ns(self._lease_s)
            self._leases.update(connection, self._held, until_ns=until_ns)

    def acknowledge(self, connection: "Connection", rollout_ids: Sequence[str], step: int) -> None:
        """Mark rollouts as trained on, within a transaction: they never come again."""
        count = sum(
            self._leases.update(
                connection, sa.and_(self._held, CLAIMS.c.rollout_id.in_(ids)),
                state="trained", step=step,
            )
            for ids in id_batches(rollout_ids)
        )  # fmt: skip
        if count != len(set(rollout_ids)):
            raise StateError(
                f"{len(set(rollout_ids)) - count} of {len(set(rollout_ids))} rollouts of step "
                f"{step} are claimed by another process of consumer {self.consumer!r}; resume from "
                "the checkpoint before it, with one process a consumer"
            )

    def release(self, rollout_ids: Sequence[str]) -> int:
        """Release claims that were not trained on, and return the number of rollouts."""
        with self._state.change() as connection:
            return self._release_claims(connection, self._held, rollout_ids)

    def rewind(self, step: int) -> int:
        """Release a run's rollouts after a checkpoint, alone at work; return their number."""
        is_later = sa.or_(CLAIMS.c.state == "claimed", CLAIMS.c.step > step)
        condition = sa.and_(self._mine, CLAIMS.c.run_id == self.run_id, is_later)
        with self._state.change() as connection:
            return connection.execute(sa.delete(CLAIMS).where(condition)).rowcount

    def reopen(self, rollout_ids: Iterable[str]) -> int:
        """Allow rollouts to be trained on again, such as after a late reward."""
        is_closed = sa.and_(self._mine, CLAIMS.c.state != "claimed")
        with self._state.change() as connection:
            return self._release_claims(connection, is_closed, rollout_ids)

    def read_taken(self) -> dict[str, float | None]:
        """Return the rollouts that cannot be claimed now, each with its reward when taken."""
        return self._read_rewards(self._is_taken())

    def read_trained(self) -> dict[str, float | None]:
        """Return the rollouts that were trained on, each with the reward it then had."""
        return self._read_rewards(CLAIMS.c.state == "trained")

    def counts(self) -> dict[str, int]:
        """Return the numbers of rollouts ``claimed`` and ``trained``, and left, by reason."""
        counts: Counter[str] = Counter()
        query = sa.select(CLAIMS.c.state, CLAIMS.c.reason, sa.func.count()).where(self._mine)
        with self._state.read() as connection:
            rows = connection.execute(query.group_by(CLAIMS.c.state, CLAIMS.c.reason))
            for state, reason, count in rows:
                counts[reason if state == "left" else state] += count
        return dict(counts.most_common())

    def _is_taken(self) -> "sa.ColumnElement[bool]":
        return sa.and_(self._mine, sa.not_(self._leases.is_over(self._state.now_ns())))

    def _read_rewards(self, where: "sa.ColumnElement[bool]") -> dict[str, float | None]:
        query = sa.select(CLAIMS.c.rollout_id, CLAIMS.c.reward).where(self._mine, where)
        with self._state.read() as connection:
            return {row.rollout_id: row.reward for row in connection.execute(query)}

    def _find_claims(
        self, connection: "Connection", rollout_ids: Sequence[str], where: "sa.ColumnElement[bool]"
    ) -> set[str]:
        query = sa.select(CLAIMS.c.rollout_id).where(where)
        return {
            rollout_id
            for ids in id_batches(rollout_ids)
            for rollout_id in connection.scalars(query.where(CLAIMS.c.rollout_id.in_(ids)))
        }

    def _release_claims(
        self, connection: "Connection", where: "sa.ColumnElement[bool]", rollout_ids: Iterable[str]
    ) -> int:
        delete = sa.delete(CLAIMS).where(where)
        return sum(
            connection.execute(delete.where(CLAIMS.c.rollout_id.in_(ids))).rowcount
            for ids in id_batches(rollout_ids)
        )

    def _put_claims(
        self,
        connection: "Connection",
        group_id: str,
        members: Sequence[Claimable],
        state: Literal["claimed", "left"],
        reason: str = "",
    ) -> None:
        rows: list[dict[str, Any]] = [
            {
                "consumer": self.consumer,
                "rollout_id": member.rollout_id,
                "group_id": group_id,
                "run_id": self.run_id,
                "holder": self.holder,
                "state": state,
                "step": None,
                "reward": member.reward,
                "reason": reason,
                "until_ns": self._leases.end_ns(self._lease_s),
            }
            for member in members
        ]
        self._release_claims(connection, self._mine, [member.rollout_id for member in members])
        if rows:
            connection.execute(sa.insert(CLAIMS), rows)
