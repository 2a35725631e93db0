"""Training runs: settings, metrics and checkpoints; files lie in a folder, facts in the state."""

import contextlib
import math
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

# Before SQLAlchemy, for it names the extra where that is missing.
from lightning_otel.state import State

# isort: split
import sqlalchemy as sa

from lightning_otel.errors import NotFoundError
from lightning_otel.state.leases import Claimable, Claims
from lightning_otel.state.tables import CHECKPOINTS, CLAIMS, METRICS, RUNS
from lightning_otel.types import html

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection

__all__ = ["Claimable", "Claims", "KeptCheckpoint", "Metric", "RunStatus", "Runs", "TrainingRun"]

RunStatus: TypeAlias = Literal["running", "succeeded", "failed", "stopped"]
"""Status of a run; that of a killed process stays ``running`` and is not seen any more."""


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """One execution of an algorithm."""

    run_id: str
    algorithm: str
    consumer: str
    status: RunStatus
    config: Mapping[str, Any]
    step: int
    reason: str
    created_ns: int
    seen_ns: int
    ended_ns: int | None

    def _repr_html_(self) -> str:
        end_ns = self.seen_ns if self.ended_ns is None else self.ended_ns
        pairs = [
            ("status", self.status),
            ("reason", self.reason),
            ("steps", self.step),
            ("seconds", f"{(end_ns - self.created_ns) / 1e9:.1f}"),
            *((name, value) for name, value in self.config.items() if value not in (None, {}, [])),
        ]
        return html.render_facts(f"{self.run_id}, {self.algorithm}", pairs)


class Metric(NamedTuple):
    """One number that was measured."""

    run_id: str
    step: int
    name: str
    value: float
    time_ns: int


class KeptCheckpoint(NamedTuple):
    """A checkpoint that counts."""

    step: int
    place: str  # its folder
    unpublished: Sequence[Mapping[str, Any]]  # resources of its step: names, bodies and metrics
    versions: Mapping[str, int]  # of the resources that the run goes on with


class Runs:
    """Every training run of a place."""

    def __init__(self, state: State) -> None:
        self._state = state
        state.ensure(RUNS, METRICS, CHECKPOINTS, CLAIMS)

    def start(
        self, algorithm: str, config: Mapping[str, Any] | None = None, *, consumer: str = ""
    ) -> TrainingRun:
        """Begin a run; by default it works with claims of its own."""
        now_ns = self._state.now_ns()
        run_id = f"run-{secrets.token_hex(6)}"
        run = TrainingRun(
            run_id, algorithm, consumer or run_id, "running", dict(config or {}), 0, "", now_ns,
            now_ns, None,
        )  # fmt: skip
        with self._state.change() as connection:
            values = {column.name: getattr(run, column.name) for column in RUNS.c}
            connection.execute(sa.insert(RUNS).values(**values))
        return run

    def get(self, run_id: str) -> TrainingRun:
        """Return a run, by its id or a prefix of it, or ``@last``."""
        runs = self.all()
        if run_id == "@last" and runs:
            return runs[0]
        matches = [run for run in runs if run.run_id.startswith(run_id) and run_id]
        exact = [run for run in matches if run.run_id == run_id]
        if len(matches) == 1 or exact:
            return (exact or matches)[0]
        what = f"{len(matches)} training runs begin with" if matches else "no training run"
        raise NotFoundError(f"{what} {run_id!r}; lightning-otel train --list shows them")

    def all(self) -> list[TrainingRun]:
        """Return every run, the newest first."""
        with self._state.read() as connection:
            order = (RUNS.c.created_ns.desc(), RUNS.c.run_id)
            rows = connection.execute(sa.select(RUNS).order_by(*order)).mappings()
            return [TrainingRun(**row) for row in rows]

    def set_status(self, run_id: str, status: RunStatus, reason: str = "") -> None:
        """Set the status of a run, and the reason of a failure or stop."""
        now_ns = self._state.now_ns()
        ended_ns = None if status == "running" else now_ns
        with self._change_run(
            run_id, status=status, reason=reason, seen_ns=now_ns, ended_ns=ended_ns
        ):
            pass

    def heartbeat(self, run_id: str) -> None:
        """Say that a run's process is alive."""
        with self._change_run(run_id, seen_ns=self._state.now_ns()):
            pass

    def log(self, run_id: str, step: int, metrics: Mapping[str, float]) -> None:
        """Keep the finite metrics of a step, in place of those it had by the same names."""
        rows = [
            {"run_id": run_id, "step": step, "name": name, "value": float(value)}
            for name, value in metrics.items()
            if math.isfinite(value)
        ]
        if not rows:
            return
        names = [row["name"] for row in rows]
        now_ns = self._state.now_ns()
        with self._change_run(run_id, seen_ns=now_ns) as connection:
            at = sa.and_(METRICS.c.run_id == run_id, METRICS.c.step == step)
            connection.execute(sa.delete(METRICS).where(at, METRICS.c.name.in_(names)))
            connection.execute(sa.insert(METRICS), [{**row, "time_ns": now_ns} for row in rows])

    def metrics(
        self, run_id: str | None = None, *, names: Iterable[str] | None = None
    ) -> list[Metric]:
        """Return metrics, in order of runs' ids, steps and names."""
        chosen = sa.select(METRICS).order_by(METRICS.c.run_id, METRICS.c.step, METRICS.c.name)
        if run_id is not None:
            chosen = chosen.where(METRICS.c.run_id == run_id)
        if names is not None:
            chosen = chosen.where(METRICS.c.name.in_(list(names)))
        with self._state.read() as connection:
            return [Metric(**row) for row in connection.execute(chosen).mappings()]

    def claims(
        self, run: TrainingRun, *, holder: str | None = None, lease_s: float = 120.0
    ) -> Claims:
        """Return the claims of a run's consumer, for a new holder unless one is named."""
        holder = holder or f"{run.run_id}/{secrets.token_hex(4)}"
        return Claims(self._state, run.consumer, run_id=run.run_id, holder=holder, lease_s=lease_s)

    def keep_checkpoint(
        self,
        run_id: str,
        step: int,
        place: str,
        *,
        claims: Claims | None = None,
        rollout_ids: Sequence[str] = (),
        unpublished: Sequence[Mapping[str, Any]] = (),
        versions: Mapping[str, int] | None = None,
    ) -> None:
        """Make a checkpoint count, and what was trained on in it acknowledged: both or neither."""
        now_ns = self._state.now_ns()
        with self._change_run(run_id, step=step, seen_ns=now_ns) as connection:
            if claims is not None:
                claims.acknowledge(connection, rollout_ids, step)
            at = sa.and_(CHECKPOINTS.c.run_id == run_id, CHECKPOINTS.c.step == step)
            connection.execute(sa.delete(CHECKPOINTS).where(at))
            connection.execute(
                sa.insert(CHECKPOINTS).values(
                    run_id=run_id,
                    step=step,
                    place=place,
                    unpublished=[dict(entry) for entry in unpublished],
                    versions=dict(versions or {}),
                    time_ns=now_ns,
                )
            )

    def mark_published(self, run_id: str, step: int, versions: Mapping[str, int]) -> None:
        """Say that what a checkpoint's step made is published, as the versions to go on with."""
        at = sa.and_(CHECKPOINTS.c.run_id == run_id, CHECKPOINTS.c.step == step)
        with self._state.change() as connection:
            connection.execute(
                sa.update(CHECKPOINTS).where(at).values(unpublished=[], versions=dict(versions))
            )

    def checkpoints(self, run_id: str) -> list[KeptCheckpoint]:
        """Return the checkpoints of a run that count, the latest first."""
        columns = (CHECKPOINTS.c[name] for name in KeptCheckpoint._fields)
        chosen = sa.select(*columns).where(CHECKPOINTS.c.run_id == run_id)
        with self._state.read() as connection:
            rows = connection.execute(chosen.order_by(CHECKPOINTS.c.step.desc()))
            return [KeptCheckpoint(*row) for row in rows]

    def rewind(self, run_id: str, step: int) -> None:
        """Take back what was measured and kept after a step: the run goes on from there."""
        values = {"step": step, "status": "running", "reason": "", "ended_ns": None}
        with self._change_run(run_id, **values) as connection:
            for table in (METRICS, CHECKPOINTS):
                condition = sa.and_(table.c.run_id == run_id, table.c.step > step)
                connection.execute(sa.delete(table).where(condition))

    def delete_checkpoint(self, run_id: str, step: int) -> None:
        """Take a checkpoint from those that count, such as one whose folder is to go."""
        at = sa.and_(CHECKPOINTS.c.run_id == run_id, CHECKPOINTS.c.step == step)
        with self._state.change() as connection:
            connection.execute(sa.delete(CHECKPOINTS).where(at))

    @contextlib.contextmanager
    def _change_run(self, run_id: str, **values: Any) -> "Iterator[Connection]":
        """Open a transaction that changes a run first: two wait for each other at its row."""
        with self._state.change() as connection:
            connection.execute(sa.update(RUNS).where(RUNS.c.run_id == run_id).values(**values))
            yield connection
