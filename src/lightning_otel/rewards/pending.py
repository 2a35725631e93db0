"""Feedback that arrives before its target: kept in the state beside the store, then stored once."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from types import MappingProxyType
from typing import Final, NamedTuple

# Before SQLAlchemy, for it names the extra where that is missing.
from lightning_otel.state import METADATA, State, take_lock

# isort: split
import sqlalchemy as sa

from lightning_otel.dataset import Store
from lightning_otel.errors import ConfigError, StateError
from lightning_otel.rewards.feedback import Conflict, Feedback, Keep, StoredReward, give
from lightning_otel.state.leases import id_batches
from lightning_otel.types import conventions as c

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
"""The most feedback that may wait; more is refused, rather than the disk filled."""
OPEN_SHARE: Final = 0.5
"""The share of that for senders without a key: the rest is for those who have one."""
LONGEST_NS: Final = 30 * 86_400 * 1_000_000_000
"""The longest time that feedback waits."""
OPEN: Final = "http:"
"""The beginning of the origin of feedback that came without a key."""
_AT_ONCE: Final = 2_000
_LOCK: Final = 0x6C6F7466


@dataclass(frozen=True, slots=True)
class Waiting:
    """The number of feedback that waits, and the time of the oldest; None if none waits."""

    count: int
    oldest_ns: int | None


class Settled(NamedTuple):
    """Counts of feedback: delivered, rejected (its id is another's) and pending."""

    given: int = 0
    refused: int = 0
    waiting: int = 0


class Pending:
    """The waiting feedback of a state."""

    def __init__(self, state: State) -> None:
        state.ensure(FEEDBACK)
        self._state = state

    def give(
        self,
        store: Store,
        feedback: Feedback,
        keep: Keep | None = None,
        known: Mapping[str, str] = MappingProxyType({}),
    ) -> StoredReward | Conflict | None:
        """Store feedback, or keep it on disk until its target is there; None if it waits."""
        if not feedback.feedback_id:
            raise ConfigError("feedback without an id cannot wait; give feedback_id")
        with self._state.read() as connection:
            duplicate = _find_held(connection, feedback)
        if isinstance(duplicate, Conflict):
            return duplicate
        (answer,) = give(store, [feedback], keep, known)
        if answer is None:
            return self._put_feedback(feedback)
        if duplicate:
            self._delete_feedback([feedback.feedback_id])
        return answer

    def settle(self, store: Store, keep: Keep | None = None) -> Settled:
        """Store the waiting feedback whose targets are there; drop what waited for 30 days.

        Any number of processes may do so at once: each reward has one span id, and is kept once.
        """
        counts, until_ns = [0, 0, 0], time.time_ns() - LONGEST_NS
        for part in self._read_parts():
            gone = []
            part.sort(key=attrgetter("given_ns"))  # of a person's labels the last counts
            for feedback, answer in zip(part, give(store, part, keep), strict=True):
                counts[0] += isinstance(answer, StoredReward)
                counts[1] += isinstance(answer, Conflict)
                if answer is not None or feedback.given_ns < until_ns:
                    gone.append(feedback.feedback_id)
            counts[2] += len(part) - len(gone)
            self._delete_feedback(gone)
        return Settled(*counts)

    def waiting(self) -> Waiting:
        """Count the waiting feedback, and find the oldest."""
        with self._state.read() as connection:
            query = sa.select(sa.func.count(), sa.func.min(FEEDBACK.c.given_ns))
            return Waiting(*connection.execute(query).one())

    def all(self, limit: int | None = None) -> list[Feedback]:
        """List the waiting feedback, the oldest first."""
        query = sa.select(FEEDBACK).order_by(FEEDBACK.c.given_ns, FEEDBACK.c.feedback_id)
        with self._state.read() as connection:
            return [_feedback_of(row) for row in connection.execute(query.limit(limit))]

    def _put_feedback(self, feedback: Feedback) -> Conflict | None:
        with self._state.change() as connection:
            take_lock(connection, _LOCK)
            duplicate = _find_held(connection, feedback)
            if duplicate:
                return duplicate if isinstance(duplicate, Conflict) else None
            oldest_ns = time.time_ns() - LONGEST_NS
            connection.execute(sa.delete(FEEDBACK).where(FEEDBACK.c.given_ns < oldest_ns))
            _check_room(connection, feedback)
            values = {column.name: getattr(feedback, column.name) for column in FEEDBACK.c}
            values["attributes"] = json.dumps(dict(feedback.attributes))
            connection.execute(sa.insert(FEEDBACK).values(**values))
        return None

    def _delete_feedback(self, feedback_ids: Sequence[str]) -> None:
        if not feedback_ids:
            return
        with self._state.change() as connection:
            for ids in id_batches(feedback_ids):
                connection.execute(sa.delete(FEEDBACK).where(FEEDBACK.c.feedback_id.in_(ids)))

    def _read_parts(self) -> Iterator[list[Feedback]]:
        last = ""
        while True:
            query = sa.select(FEEDBACK).where(FEEDBACK.c.feedback_id > last)
            query = query.order_by(FEEDBACK.c.feedback_id).limit(_AT_ONCE)
            with self._state.read() as connection:
                part = [_feedback_of(row) for row in connection.execute(query)]
            if not part:
                return
            last = part[-1].feedback_id
            yield part


def settle_pending(store: Store) -> Settled:
    """Store the feedback that waits beside a store, if any; make no state for it."""
    # A store elsewhere is settled by whoever serves it.
    if store.layout is None or not (state := State.beside(store)).is_made:
        return Settled()
    first = sa.select(FEEDBACK.c.feedback_id).limit(1)
    with state.read() as connection:  # makes no table: nothing may be writable here
        has_table = sa.inspect(connection).has_table(FEEDBACK.name)
        is_waiting = has_table and connection.execute(first).first() is not None
    return Pending(state).settle(store) if is_waiting else Settled()


def _find_held(connection: "sa.Connection", feedback: Feedback) -> Conflict | bool:
    """Return True if it waits already; a conflict if other feedback has its id."""
    mine = FEEDBACK.c.feedback_id == feedback.feedback_id
    row = connection.execute(sa.select(FEEDBACK).where(mine)).one_or_none()
    if row is None or _content_of(_feedback_of(row)) == _content_of(feedback):
        return row is not None
    return Conflict(f"other feedback waits as {feedback.feedback_id!r} already")


def _content_of(feedback: Feedback) -> tuple[object, ...]:
    attributes = {key: value for key, value in feedback.attributes.items() if key != c.RECEIVED}
    return feedback.noun, feedback.target, feedback.value, attributes


def _check_room(connection: "sa.Connection", feedback: Feedback) -> None:
    """Refuse feedback above the limits; keyless senders have their own."""
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


def _feedback_of(row: "sa.Row[tuple[object, ...]]") -> Feedback:
    values = dict(row._mapping)
    return Feedback(**values | {"attributes": json.loads(row.attributes)})
