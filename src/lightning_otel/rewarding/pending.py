"""Feedback that came before what it judges: kept until the store holds that, then given once.

It lies in the state beside the store, so that no restart or kill loses it. It is no reward until
then: nothing else gets it meanwhile.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple, TypeAlias

# Before SQLAlchemy, for it names the extra where that is missing.
from lightning_otel.state import METADATA, State

# isort: split
import sqlalchemy as sa

from lightning_otel import conventions as c
from lightning_otel.dataset import Store
from lightning_otel.errors import ConfigError, StateError
from lightning_otel.rewarding.giving import Clash, Feedback, Given, Keep, digest, give

FEEDBACK: Final = sa.Table(
    "lightning_feedback",
    METADATA,
    sa.Column("feedback_id", sa.String(255), primary_key=True),
    sa.Column("noun", sa.String(16), nullable=False),
    sa.Column("target", sa.Text, nullable=False),
    sa.Column("value", sa.Double, nullable=False),
    sa.Column("attributes", sa.Text, nullable=False),
    sa.Column("given_ns", sa.BigInteger, nullable=False),
)
MOST: Final = 100_000
"""Feedback that may wait; whoever sends more is refused, rather than the disk filled."""
OPEN_SHARE: Final = 0.5
"""How much of that may be from senders without a key: the rest is for those who have one."""
LONGEST_NS: Final = 30 * 86_400 * 1_000_000_000
"""For how long feedback waits."""
OPEN: Final = "http:"
"""What the origin of feedback begins with that came without a key."""
_AT_ONCE: Final = 2_000

Answer: TypeAlias = Given | Clash | None


@dataclass(frozen=True, slots=True)
class Waiting:
    """The feedback that waits.

    Attributes:
        count: How much feedback.
        oldest_ns: When the oldest was given; None if none waits.
    """

    count: int
    oldest_ns: int | None


class Settled(NamedTuple):
    """The result of delivering feedback that waited.

    Attributes:
        given: It was given to what it judges, now or before.
        refused: Its id was given to other feedback meanwhile; it is gone, and not given.
        waiting: It still waits.
    """

    given: int = 0
    refused: int = 0
    waiting: int = 0


class Pending:
    """The feedback of a state that waits."""

    def __init__(self, state: State) -> None:
        """Name the state; a table is made there if it is not there.

        Raises:
            StateError: It cannot be read or made.
        """
        state.ensure(FEEDBACK)
        self._state = state

    def give(
        self,
        store: Store,
        feedback: Feedback,
        keep: Keep | None = None,
        known: Mapping[str, str] = MappingProxyType({}),
    ) -> Answer:
        """Give feedback, or keep it until what it judges is there; None says that it waits.

        When this returns, it is on disk either way.

        Args:
            store: Where what it judges is, or will be.
            feedback: It has an id.
            keep: Keeps spans; by default the store does.
            known: As :func:`give` takes it.

        Raises:
            ConfigError: It has no id.
            StateError: Too much waits already, or it cannot be kept.
            StoreError: The store cannot be read or written; the feedback waits.
        """
        if not feedback.feedback_id:
            raise ConfigError("feedback without an id cannot wait; give feedback_id")
        with self._state.read() as connection:
            held = self._find_held(connection, feedback)
        if isinstance(held, Clash):
            return held
        (answer,) = give(store, [feedback], keep, known)
        if answer is None:
            return self._put_feedback(feedback)
        if held:
            self._delete_feedback([feedback.feedback_id])
        return answer

    def settle(self, store: Store, keep: Keep | None = None) -> Settled:
        """Give what waits to what it judges, as far as that is there; after 30 days it is gone.

        Any number of processes may do so at once: each reward has one span id, and is kept once.

        Args:
            store: Where it is looked for.
            keep: Keeps spans; by default the store does.

        Raises:
            StoreError: The store cannot be read or written; all of it goes on waiting.
        """
        total, until_ns = Settled(), time.time_ns() - LONGEST_NS
        for some in self._read_parts():
            answers = give(store, some, keep)
            done = [each for each, answer in zip(some, answers, strict=True) if answer is not None]
            over = [
                each
                for each, answer in zip(some, answers, strict=True)
                if answer is None and each.given_ns < until_ns
            ]
            self._delete_feedback([each.feedback_id for each in [*done, *over]])
            refused = sum(isinstance(answer, Clash) for answer in answers)
            total = Settled(
                total.given + len(done) - refused,
                total.refused + refused,
                total.waiting + len(some) - len(done) - len(over),
            )
        return total

    def waiting(self) -> Waiting:
        """Count the waiting feedback, and find the oldest."""
        with self._state.read() as connection:
            query = sa.select(sa.func.count(), sa.func.min(FEEDBACK.c.given_ns))
            count, oldest_ns = connection.execute(query).one()
        return Waiting(int(count), oldest_ns)

    def all(self, limit: int | None = None) -> list[Feedback]:
        """List the waiting feedback, the oldest first."""
        query = sa.select(FEEDBACK).order_by(FEEDBACK.c.given_ns, FEEDBACK.c.feedback_id)
        with self._state.read() as connection:
            return [_feedback_of(row) for row in connection.execute(query.limit(limit))]

    @staticmethod
    def _find_held(connection: "sa.Connection", feedback: Feedback) -> Clash | bool:
        """Return whether the same feedback waits; a clash if other feedback has its id."""
        mine = FEEDBACK.c.feedback_id == feedback.feedback_id
        row = connection.execute(sa.select(FEEDBACK).where(mine)).one_or_none()
        if row is None or digest(_feedback_of(row)) == digest(feedback):
            return row is not None
        return Clash(f"other feedback waits as {feedback.feedback_id!r} already")

    def _put_feedback(self, feedback: Feedback) -> Clash | None:
        """Keep feedback, unless the same waits already; says if other feedback has its id."""
        with self._state.change() as connection:
            held = self._find_held(connection, feedback)
            if held:
                return held if isinstance(held, Clash) else None
            connection.execute(
                sa.delete(FEEDBACK).where(FEEDBACK.c.given_ns < time.time_ns() - LONGEST_NS)
            )
            _check_room(connection, feedback)
            values = {
                "feedback_id": feedback.feedback_id,
                "noun": feedback.noun,
                "target": feedback.target,
                "value": feedback.value,
                "attributes": json.dumps(dict(feedback.attributes)),
                "given_ns": feedback.given_ns,
            }
            connection.execute(sa.insert(FEEDBACK).values(**values))
        return None

    def _delete_feedback(self, feedback_ids: Sequence[str]) -> None:
        if not feedback_ids:
            return
        with self._state.change() as connection:
            for start in range(0, len(feedback_ids), _AT_ONCE // 4):
                some = list(feedback_ids[start : start + _AT_ONCE // 4])
                connection.execute(sa.delete(FEEDBACK).where(FEEDBACK.c.feedback_id.in_(some)))

    def _read_parts(self) -> Iterator[list[Feedback]]:
        """Yield the waiting feedback in parts, by id; later arrivals may be missed."""
        last = ""
        while True:
            query = sa.select(FEEDBACK).where(FEEDBACK.c.feedback_id > last)
            with self._state.read() as connection:
                rows = connection.execute(
                    query.order_by(FEEDBACK.c.feedback_id).limit(_AT_ONCE)
                ).all()
            if not rows:
                return
            last = rows[-1].feedback_id
            yield [_feedback_of(row) for row in rows]


def _check_room(connection: "sa.Connection", feedback: Feedback) -> None:
    """Refuse what would be too much; nobody without a key takes the room of those who have one."""
    query, most = sa.select(sa.func.count()).select_from(FEEDBACK), MOST
    if str(feedback.attributes.get(c.RECEIVED, "")).startswith(OPEN):
        mark = json.dumps({c.RECEIVED: OPEN})[1:-2]
        query = query.where(FEEDBACK.c.attributes.contains(mark, autoescape=True))
        most = int(MOST * OPEN_SHARE)
    count = connection.scalar(query) or 0
    if count >= most:
        raise StateError(
            f"{count} pieces of feedback wait for what they judge; is it this store that "
            "the agent records into? lightning-otel doctor says what they judge"
        )


def settle_waiting(store: Store) -> Settled:
    """Give what waits beside a store, where anything does; nothing is made for it.

    Raises:
        StateError: The state cannot be read.
        StoreError: The store cannot be read or written.
    """
    if store.layout is None:
        return Settled()  # whoever serves it gives it
    state = State.beside(store)
    if not state.is_made or not _is_any_waiting(state):
        return Settled()
    return Pending(state).settle(store)


def _is_any_waiting(state: State) -> bool:
    """Found out without making a table, so that it can be asked where nothing may be written."""
    with state.read() as connection:
        if not sa.inspect(connection).has_table(FEEDBACK.name):
            return False
        return connection.execute(sa.select(FEEDBACK.c.feedback_id).limit(1)).first() is not None


def _feedback_of(row: "sa.Row[tuple[object, ...]]") -> Feedback:
    return Feedback(
        noun=row.noun,
        target=row.target,
        value=row.value,
        given_ns=row.given_ns,
        attributes=json.loads(row.attributes),
        feedback_id=row.feedback_id,
    )
