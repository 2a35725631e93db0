"""The tables of the queue, of training runs and of the training that is asked for."""

from typing import Final

import sqlalchemy as sa

from lightning_otel.state import METADATA

# SQLite counts up only what it calls an INTEGER.
_COUNTED: Final = sa.BigInteger().with_variant(sa.Integer(), "sqlite")

ROLLOUTS: Final = sa.Table(
    "lightning_rollouts",
    METADATA,
    sa.Column("position", _COUNTED, primary_key=True, autoincrement=True),
    sa.Column("rollout_id", sa.Text, nullable=False, unique=True),
    sa.Column("task", sa.Text, nullable=False),
    sa.Column("status", sa.Text, nullable=False),
    sa.Column("mode", sa.Text, nullable=False),
    sa.Column("agent", sa.Text),
    sa.Column("group_id", sa.Text, nullable=False),
    sa.Column("priority", sa.BigInteger, nullable=False),
    sa.Column("max_attempts", sa.BigInteger, nullable=False),
    sa.Column("timeout_s", sa.Double),
    sa.Column("resources", sa.Text, nullable=False),
    sa.Column("attempts", sa.BigInteger, nullable=False),
    sa.Column("reward", sa.Double),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("created_ns", sa.BigInteger, nullable=False),
    sa.Column("ended_ns", sa.BigInteger),
    # Of the attempt that runs: who is at it, and until when that is believed.
    sa.Column("worker_id", sa.Text),
    sa.Column("until_ns", sa.BigInteger),
    sa.Column("deadline_ns", sa.BigInteger),
    sa.Index("lightning_rollouts_waiting", "status", sa.desc("priority"), "position"),
)
ATTEMPTS: Final = sa.Table(
    "lightning_attempts",
    METADATA,
    sa.Column("rollout_id", sa.Text, primary_key=True),
    sa.Column("attempt", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("worker_id", sa.Text, nullable=False),
    sa.Column("status", sa.Text, nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("started_ns", sa.BigInteger, nullable=False),
    sa.Column("ended_ns", sa.BigInteger),
    sa.Index("lightning_attempts_workers", "worker_id"),
)
PAUSES: Final = sa.Table(
    "lightning_pauses",
    METADATA,
    sa.Column("number", _COUNTED, primary_key=True, autoincrement=True),
    sa.Column("since_ns", sa.BigInteger, nullable=False),
)
"""The queue is paused while there is a row; two who pause it at once do not collide."""
RUNS: Final = sa.Table(
    "lightning_runs",
    METADATA,
    sa.Column("run_id", sa.String(64), primary_key=True),
    sa.Column("algorithm", sa.String(128), nullable=False),
    sa.Column("consumer", sa.String(128), nullable=False),
    sa.Column("status", sa.String(16), nullable=False),
    sa.Column("config", sa.JSON, nullable=False),
    sa.Column("step", sa.Integer, nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("created_ns", sa.BigInteger, nullable=False),
    sa.Column("seen_ns", sa.BigInteger, nullable=False),
    sa.Column("ended_ns", sa.BigInteger),
)
METRICS: Final = sa.Table(
    "lightning_metrics",
    METADATA,
    sa.Column("run_id", sa.String(64), primary_key=True),
    sa.Column("step", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("name", sa.String(128), primary_key=True),
    sa.Column("value", sa.Double, nullable=False),
    sa.Column("time_ns", sa.BigInteger, nullable=False),
)
CHECKPOINTS: Final = sa.Table(
    "lightning_checkpoints",
    METADATA,
    sa.Column("run_id", sa.String(64), primary_key=True),
    sa.Column("step", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("place", sa.Text, nullable=False),
    sa.Column("unpublished", sa.JSON, nullable=False),
    sa.Column("versions", sa.JSON, nullable=False),
    sa.Column("time_ns", sa.BigInteger, nullable=False),
)
CLAIMS: Final = sa.Table(
    "lightning_claims",
    METADATA,
    sa.Column("consumer", sa.String(128), primary_key=True),
    sa.Column("rollout_id", sa.String(255), primary_key=True),
    sa.Column("group_id", sa.String(255), nullable=False),
    sa.Column("run_id", sa.String(64), nullable=False),
    sa.Column("holder", sa.String(128), nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("step", sa.Integer),
    sa.Column("reward", sa.Double),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("until_ns", sa.BigInteger, nullable=False),
)
WORKERS: Final = sa.Table(
    "lightning_training_workers",
    METADATA,
    sa.Column("worker_id", sa.String(128), primary_key=True),
    sa.Column("algorithm", sa.String(128), nullable=False),
    sa.Column("seen_ns", sa.BigInteger, nullable=False),
)
REQUESTS: Final = sa.Table(
    "lightning_training_requests",
    METADATA,
    sa.Column("position", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("request_id", sa.String(64), nullable=False, unique=True),
    sa.Column("idempotency_key", sa.String(255), unique=True),
    sa.Column("algorithm", sa.String(128), nullable=False),
    sa.Column("category", sa.String(255), nullable=False),
    sa.Column("settings", sa.Text, nullable=False),
    sa.Column("status", sa.String(16), nullable=False, default="waiting"),
    sa.Column("tries", sa.Integer, nullable=False, default=0),
    sa.Column("worker_id", sa.String(128), nullable=False, default=""),
    sa.Column("run_id", sa.String(64), nullable=False, default=""),
    sa.Column("reason", sa.Text, nullable=False, default=""),
    sa.Column("created_ns", sa.BigInteger, nullable=False),
    sa.Column("until_ns", sa.BigInteger, nullable=False, default=0),
    sa.Column("ended_ns", sa.BigInteger),
)
