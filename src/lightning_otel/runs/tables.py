"""The tables of training runs: what was begun, measured, kept and consumed."""

from typing import Final

import sqlalchemy as sa

from lightning_otel.state import METADATA

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
