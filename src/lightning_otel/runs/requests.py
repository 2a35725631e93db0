"""Training that was asked for: a durable queue of runs, which workers take one at a time.

Whoever asks trains nothing; a worker claims a request under a lease, says now and then that it
lives, and ends it. A request of a worker that died is there again when the lease has run out, with
the run that was begun for it, so that the next worker goes on where that one was.
"""

import contextlib
import json
import secrets
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, get_args

import sqlalchemy as sa

from lightning_otel.errors import ConfigError, NotFoundError, StateError
from lightning_otel.state import METADATA, State, be_alone

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection

RequestStatus: TypeAlias = Literal["waiting", "running", "succeeded", "failed"]
STATUSES: Final[tuple[RequestStatus, ...]] = get_args(RequestStatus)
LEASE_S: Final = 60.0
MOST_WAITING: Final = 1_000
_MOST_TRIES: Final = 3
_LOCK: Final = 0x6C6F7472

REQUESTS: Final = sa.Table(
    "lightning_training_requests",
    METADATA,
    sa.Column("position", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("request_id", sa.String(64), nullable=False, unique=True),
    sa.Column("idempotency_key", sa.String(255), unique=True),
    sa.Column("algorithm", sa.String(128), nullable=False),
    sa.Column("category", sa.String(255), nullable=False),
    sa.Column("settings", sa.Text, nullable=False),
    sa.Column("status", sa.String(16), nullable=False),
    sa.Column("tries", sa.Integer, nullable=False),
    sa.Column("worker_id", sa.String(128), nullable=False),
    sa.Column("run_id", sa.String(64), nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("created_ns", sa.BigInteger, nullable=False),
    sa.Column("until_ns", sa.BigInteger, nullable=False),
    sa.Column("ended_ns", sa.BigInteger),
)


@dataclass(frozen=True, slots=True)
class TrainingRequest:
    """Training that somebody asked for.

    Attributes:
        request_id: Its id.
        idempotency_key: What the asker knows it by; None if by nothing.
        algorithm: What is to learn; empty leaves it to the worker.
        category: The kind of task it was asked for; empty is all.
        settings: What the algorithm is told, and how long the run is.
        status: Where it stands.
        tries: How often a worker has taken it.
        worker_id: Who took it last; empty if nobody did.
        run_id: The run that was begun for it; empty before.
        reason: Why it failed; empty otherwise.
        created_ns: When it was asked for.
        ended_ns: When it was over; None before.
    """

    request_id: str
    idempotency_key: str | None
    algorithm: str
    category: str
    settings: Mapping[str, Any]
    status: RequestStatus
    tries: int
    worker_id: str
    run_id: str
    reason: str
    created_ns: int
    ended_ns: int | None


class Requests:
    """The training that was asked for in a state; any number of processes ask and work at once."""

    def __init__(self, state: State, *, lease_s: float = LEASE_S) -> None:
        """Name the state; a table is made there if it is not there.

        Args:
            state: Where it lies.
            lease_s: How long a worker may be silent before its request is there again, seconds.

        Raises:
            StateError: The state cannot be read or made.
        """
        state.ensure(REQUESTS)
        self._state = state
        self._lease_ns = int(lease_s * 1e9)

    def put(
        self,
        algorithm: str = "",
        *,
        category: str = "",
        settings: Mapping[str, Any] | None = None,
        idempotency_key: str | None = None,
    ) -> tuple[TrainingRequest, bool]:
        """Ask for training, and say whether that is new; the same key asks for the same.

        Args:
            algorithm: What is to learn; empty leaves it to the worker.
            category: The kind of task; empty is all.
            settings: What the algorithm is told.
            idempotency_key: With one, it is asked for once, however often this is called.

        Raises:
            ConfigError: The key asked for something else before.
            StateError: Too many wait already, or it cannot be kept.
        """
        text = json.dumps(dict(settings or {}), sort_keys=True, allow_nan=False)
        with self._alone() as connection:
            found = None if idempotency_key is None else _by_key(connection, idempotency_key)
            if found is not None:
                if (found.algorithm, found.category, found.settings) != (algorithm, category, text):
                    raise ConfigError(
                        f"{idempotency_key!r} asked for other training before, as "
                        f"{found.request_id}; give a key of its own to what is asked for now"
                    )
                return _request_of(found), False
            self._refuse_too_many(connection)
            now_ns = self._state.now_ns()
            values = {
                "request_id": f"training-{secrets.token_hex(6)}",
                "idempotency_key": idempotency_key,
                "algorithm": algorithm,
                "category": category,
                "settings": text,
                "status": "waiting",
                "tries": 0,
                "worker_id": "",
                "run_id": "",
                "reason": "",
                "created_ns": now_ns,
                "until_ns": 0,
                "ended_ns": None,
            }
            connection.execute(sa.insert(REQUESTS).values(**values))
            made = REQUESTS.c.request_id == values["request_id"]
            return _request_of(connection.execute(sa.select(REQUESTS).where(made)).one()), True

    def claim(
        self, worker_id: str, algorithms: Collection[str] | None = None
    ) -> TrainingRequest | None:
        """Take the request that waits longest; None if none does.

        One whose worker has been silent for a lease waits, too; after three of those it failed.

        Args:
            worker_id: Who takes it.
            algorithms: What this worker can run, beside what is left to it; None is anything.
        """
        with self._alone() as connection:
            now_ns = self._state.now_ns()
            self._expire(connection, now_ns)
            query = sa.select(REQUESTS).where(REQUESTS.c.status == "waiting")
            if algorithms is not None:
                query = query.where(REQUESTS.c.algorithm.in_(["", *algorithms]))
            row = connection.execute(query.order_by(REQUESTS.c.position).limit(1)).one_or_none()
            if row is None:
                return None
            values = {
                "status": "running",
                "tries": row.tries + 1,
                "worker_id": worker_id,
                "until_ns": now_ns + self._lease_ns,
            }
            mine = REQUESTS.c.position == row.position
            connection.execute(sa.update(REQUESTS).where(mine).values(**values))
            return _request_of(connection.execute(sa.select(REQUESTS).where(mine)).one())

    def heartbeat(self, request: TrainingRequest, *, run_id: str = "") -> bool:
        """Say that its worker lives, and which run it began; False if it is another's by now.

        Args:
            request: What was claimed.
            run_id: The run; empty if none is begun yet.
        """
        values: dict[str, Any] = {"until_ns": self._state.now_ns() + self._lease_ns}
        if run_id:
            values["run_id"] = run_id
        return self._change(request, values)

    def finish(self, request: TrainingRequest, *, run_id: str = "", reason: str = "") -> bool:
        """End a request; False, and nothing is changed, if it is another's by now.

        Args:
            request: What was claimed.
            run_id: The run that was made for it.
            reason: Why it failed; empty if it did not.
        """
        values = {
            "status": "failed" if reason else "succeeded",
            "reason": reason,
            "ended_ns": self._state.now_ns(),
            "run_id": run_id or request.run_id,
        }
        return self._change(request, values)

    def release(self, request: TrainingRequest, *, run_id: str = "") -> bool:
        """Give a request back, such as when its worker is told to stop; it is no try.

        Args:
            request: What was claimed.
            run_id: The run that was begun for it, which goes on.
        """
        values = {
            "status": "waiting",
            "tries": request.tries - 1,
            "run_id": run_id or request.run_id,
        }
        return self._change(request, values)

    def get(self, request_id: str) -> TrainingRequest:
        """One request as it stands.

        Raises:
            NotFoundError: There is none.
        """
        with self._looking() as connection:
            mine = REQUESTS.c.request_id == request_id
            row = connection.execute(sa.select(REQUESTS).where(mine)).one_or_none()
        if row is None:
            raise NotFoundError(f"no training was asked for as {request_id!r}")
        return _request_of(row)

    def all(self, limit: int | None = None) -> list[TrainingRequest]:
        """What was asked for, the newest first."""
        query = sa.select(REQUESTS).order_by(REQUESTS.c.position.desc()).limit(limit)
        with self._looking() as connection:
            return [_request_of(row) for row in connection.execute(query)]

    def counts(self) -> dict[RequestStatus, int]:
        """How many stand where; every status is named."""
        query = sa.select(REQUESTS.c.status, sa.func.count()).group_by(REQUESTS.c.status)
        with self._looking() as connection:
            found = {row[0]: int(row[1]) for row in connection.execute(query)}
        return {status: found.get(status, 0) for status in STATUSES}

    @contextlib.contextmanager
    def _alone(self) -> "Iterator[Connection]":
        """A transaction in which nobody else takes or asks."""
        with self._state.change() as connection:
            be_alone(connection, _LOCK)
            yield connection

    @contextlib.contextmanager
    def _looking(self) -> "Iterator[Connection]":
        """A connection to read from, to which nothing runs whose worker has been silent."""
        now_ns = self._state.now_ns()
        with self._state.read() as connection:
            if (
                connection.execute(sa.select(REQUESTS).where(_is_over(now_ns)).limit(1)).first()
                is None
            ):
                yield connection
                return
        with self._alone() as connection:
            self._expire(connection, now_ns)
        with self._state.read() as connection:
            yield connection

    def _change(self, request: TrainingRequest, values: Mapping[str, Any]) -> bool:
        mine = sa.and_(
            REQUESTS.c.request_id == request.request_id,
            REQUESTS.c.status == "running",
            REQUESTS.c.worker_id == request.worker_id,
            REQUESTS.c.tries == request.tries,
        )
        with self._alone() as connection:
            self._expire(connection, self._state.now_ns())
            done = connection.execute(sa.update(REQUESTS).where(mine).values(**values))
            return bool(done.rowcount)

    def _expire(self, connection: "Connection", now_ns: int) -> None:
        """Let what a silent worker holds wait again, or end it where that came too often."""
        is_over = _is_over(now_ns)
        ended = {
            "status": "failed",
            "reason": f"its worker died {_MOST_TRIES} times",
            "ended_ns": now_ns,
        }
        too_often = sa.and_(is_over, REQUESTS.c.tries >= _MOST_TRIES)
        connection.execute(sa.update(REQUESTS).where(too_often).values(**ended))
        connection.execute(sa.update(REQUESTS).where(is_over).values(status="waiting"))

    def _refuse_too_many(self, connection: "Connection") -> None:
        query = sa.select(sa.func.count()).where(REQUESTS.c.status == "waiting")
        count = connection.scalar(query) or 0
        if count >= MOST_WAITING:
            raise StateError(
                f"{count} requests for training wait already; is there a worker? "
                "lightning-otel train --worker is one"
            )


def _is_over(now_ns: int) -> "sa.ColumnElement[bool]":
    return sa.and_(REQUESTS.c.status == "running", REQUESTS.c.until_ns < now_ns)


def _by_key(connection: "Connection", key: str) -> "sa.Row[Any] | None":
    return connection.execute(
        sa.select(REQUESTS).where(REQUESTS.c.idempotency_key == key)
    ).one_or_none()


def _request_of(row: "sa.Row[Any]") -> TrainingRequest:
    return TrainingRequest(
        request_id=row.request_id,
        idempotency_key=row.idempotency_key,
        algorithm=row.algorithm,
        category=row.category,
        settings=json.loads(row.settings),
        status=row.status,
        tries=row.tries,
        worker_id=row.worker_id,
        run_id=row.run_id,
        reason=row.reason,
        created_ns=row.created_ns,
        ended_ns=row.ended_ns,
    )
