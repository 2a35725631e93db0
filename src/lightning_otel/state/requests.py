"""Training requests: a durable queue of runs, which workers take one at a time.

A request whose worker died waits again when its lease ends, with its run, which the next worker
continues.
"""

import json
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, get_args

import sqlalchemy as sa

from lightning_otel.errors import ConfigError, NotFoundError, StateError
from lightning_otel.state import State, take_lock
from lightning_otel.state.leases import Leases
from lightning_otel.state.tables import REQUESTS, WORKERS
from lightning_otel.types.values import check_seconds

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection

RequestStatus: TypeAlias = Literal["waiting", "running", "succeeded", "failed"]
STATUSES: Final[tuple[RequestStatus, ...]] = get_args(RequestStatus)
LEASE_S: Final = 60.0
MOST_WAITING: Final = 1_000
_MOST_TRIES: Final = 3
NO_WORKER: Final = "no worker takes it; start one: lightning-otel train {} --worker"
_LOCK: Final = 0x6C6F7471


@dataclass(frozen=True, slots=True)
class TrainingRequest:
    """A request for training."""

    request_id: str
    idempotency_key: str | None
    algorithm: str  # empty leaves it to the worker
    category: str  # empty is all
    settings: Mapping[str, Any]
    status: RequestStatus
    tries: int  # by workers
    worker_id: str  # the last of them
    run_id: str  # empty before one was begun
    reason: str  # of a failure, or why it waits in vain
    created_ns: int
    ended_ns: int | None


class Requests:
    """The training requests of a state; any number of processes put and claim at once."""

    def __init__(self, state: State, *, lease_s: float = LEASE_S) -> None:
        check_seconds("lease_s", lease_s)
        state.ensure(REQUESTS, WORKERS)
        self._state = state
        self._lease_s = lease_s
        self._leases = Leases(state, REQUESTS, leased="running", on_expired=_expire_request)

    def put(
        self,
        algorithm: str = "",
        *,
        category: str = "",
        settings: Mapping[str, Any] | None = None,
        idempotency_key: str | None = None,
    ) -> tuple[TrainingRequest, bool]:
        """Put a request; return it, and True if it is new. A key makes one request at most."""
        text = json.dumps(dict(settings or {}), sort_keys=True, allow_nan=False)
        by_key = sa.select(REQUESTS).where(REQUESTS.c.idempotency_key == idempotency_key)
        with self._state.change() as connection:
            take_lock(connection, _LOCK)
            row = connection.execute(by_key).one_or_none() if idempotency_key else None
            if row is not None:
                if (row.algorithm, row.category, row.settings) != (algorithm, category, text):
                    raise ConfigError(
                        f"{idempotency_key!r} asked for other training before, as "
                        f"{row.request_id}; give a key of its own to what is asked for now"
                    )
                return self._describe(connection, [row])[0], False
            _refuse_too_many(connection)
            values = {
                "request_id": f"training-{secrets.token_hex(6)}",
                "idempotency_key": idempotency_key,
                "algorithm": algorithm,
                "category": category,
                "settings": text,
                "created_ns": self._state.now_ns(),
            }
            connection.execute(sa.insert(REQUESTS).values(**values))
            by_id = REQUESTS.c.request_id == values["request_id"]
            rows = connection.execute(sa.select(REQUESTS).where(by_id)).all()
            return self._describe(connection, rows)[0], True

    def announce(self, worker_id: str, algorithm: str = "") -> None:
        """Note a worker of an algorithm, empty is any, as there for the length of a lease."""
        with self._state.change() as connection:
            connection.execute(sa.delete(WORKERS).where(WORKERS.c.worker_id == worker_id))
            row = {"worker_id": worker_id, "algorithm": algorithm, "seen_ns": self._state.now_ns()}
            connection.execute(sa.insert(WORKERS).values(**row))

    def dismiss(self, worker_id: str) -> None:
        """Note that a worker is there no more."""
        with self._state.change() as connection:
            connection.execute(sa.delete(WORKERS).where(WORKERS.c.worker_id == worker_id))

    def has_worker(self) -> bool:
        """Return whether some worker is there."""
        with self._leases.read() as connection:
            return bool(self._find_algorithms(connection))

    def claim(
        self, worker_id: str, algorithms: Collection[str] | None = None
    ) -> TrainingRequest | None:
        """Claim the oldest waiting request, or None; three lost leases fail a request."""
        query = sa.select(REQUESTS).where(REQUESTS.c.status == "waiting")
        if algorithms is not None:
            query = query.where(REQUESTS.c.algorithm.in_(["", *algorithms]))
        query = query.order_by(REQUESTS.c.position)
        tries = {"tries": REQUESTS.c.tries + 1}
        with self._state.change() as connection:
            self._leases.expire(connection)
            row = self._leases.claim(connection, worker_id, query, self._lease_s, **tries)
            return None if row is None else _request_of(row)

    def heartbeat(self, request: TrainingRequest, *, run_id: str = "") -> bool:
        """Extend a lease, and note the run; return False if another worker has the request."""
        run = {"run_id": run_id} if run_id else {}
        return self._change_request(request, until_ns=self._leases.end_ns(self._lease_s), **run)

    def finish(self, request: TrainingRequest, *, run_id: str = "", reason: str = "") -> bool:
        """End a request; return False, and change nothing, if another worker has it."""
        return self._change_request(
            request,
            status="failed" if reason else "succeeded",
            reason=reason,
            ended_ns=self._state.now_ns(),
            run_id=run_id or request.run_id,
        )

    def release(self, request: TrainingRequest, *, run_id: str = "") -> bool:
        """Give a request back, such as when its worker stops; that counts as no try."""
        back = {"status": "waiting", "tries": request.tries - 1}
        return self._change_request(request, **back, run_id=run_id or request.run_id)

    def get(self, request_id: str) -> TrainingRequest:
        """One request as it stands."""
        query = sa.select(REQUESTS).where(REQUESTS.c.request_id == request_id)
        with self._leases.read() as connection:
            for request in self._describe(connection, connection.execute(query).all()):
                return request
        raise NotFoundError(f"no training was asked for as {request_id!r}")

    def all(self, limit: int | None = None) -> list[TrainingRequest]:
        """List the requests, the newest first."""
        query = sa.select(REQUESTS).order_by(REQUESTS.c.position.desc()).limit(limit)
        with self._leases.read() as connection:
            return self._describe(connection, connection.execute(query).all())

    def counts(self) -> dict[RequestStatus, int]:
        """Count the requests by status, every status included."""
        return self._leases.count(STATUSES)

    def _find_algorithms(self, connection: "Connection") -> set[str]:
        since_ns = 2 * self._state.now_ns() - self._leases.end_ns(self._lease_s)
        query = sa.select(WORKERS.c.algorithm).where(WORKERS.c.seen_ns >= since_ns)
        return set(connection.scalars(query))

    def _describe(
        self, connection: "Connection", rows: "Sequence[sa.Row[Any]]"
    ) -> list[TrainingRequest]:
        algorithms = self._find_algorithms(connection)
        requests = []
        for request in map(_request_of, rows):
            # Who names no algorithm leaves it to the worker; a worker that names none takes all.
            takers = {"", request.algorithm} & algorithms if request.algorithm else algorithms
            is_vain = request.status == "waiting" and not takers
            reason = NO_WORKER.format(request.algorithm or "apo") if is_vain else request.reason
            requests.append(replace(request, reason=reason))
        return requests

    def _change_request(self, request: TrainingRequest, **values: Any) -> bool:
        condition = self._leases.is_held(
            request.worker_id,
            REQUESTS.c.request_id == request.request_id,
            REQUESTS.c.tries == request.tries,
        )
        return self._leases.change(condition, **values)


def _expire_request(connection: "Connection", row: "sa.Row[Any]", now_ns: int) -> None:
    values: dict[str, Any] = {"status": "waiting"}
    if row.tries >= _MOST_TRIES:
        reason = f"its worker died {_MOST_TRIES} times"
        values = {"status": "failed", "reason": reason, "ended_ns": now_ns}
    mine = REQUESTS.c.position == row.position
    connection.execute(sa.update(REQUESTS).where(mine).values(**values))


def _refuse_too_many(connection: "Connection") -> None:
    query = sa.select(sa.func.count()).where(REQUESTS.c.status == "waiting")
    count = connection.scalar(query) or 0
    if count >= MOST_WAITING:
        raise StateError(
            f"{count} requests for training wait already; is there a worker? "
            "lightning-otel train --worker is one"
        )


def _request_of(row: "sa.Row[Any]") -> TrainingRequest:
    values = {field.name: row._mapping[field.name] for field in fields(TrainingRequest)}
    return TrainingRequest(**values | {"settings": json.loads(values["settings"])})
