"""``triplets``: transitions as they are, one a row; nothing is lost, and they can be read again."""

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, Final

from lightning_otel.formats.format import Format, Made, Row, distinct
from lightning_otel.types import Trajectory, Transition

COLUMNS: Final[Mapping[str, str]] = {
    "rollout_id": "VARCHAR",
    "attempt_id": "VARCHAR",
    "agent": "VARCHAR",
    "branch": "INTEGER",
    "step": "INTEGER",
    "observation": "JSON",
    "action": "JSON",
    "reward": "DOUBLE",
    "next_observation": "JSON",
    "done": "BOOLEAN",
    "rewards": "JSON",
    "is_shared": "BOOLEAN",
    "tools": "JSON",
    "prompt_ids": "INTEGER[]",
    "response_ids": "INTEGER[]",
    "logprobs": "DOUBLE[]",
    "capture": "VARCHAR",
    "resource_version": "VARCHAR",
    "resources": "JSON",
    "model": "VARCHAR",
    "response_id": "VARCHAR",
    "finish_reason": "VARCHAR",
    "trace_id": "VARCHAR",
    "span_id": "VARCHAR",
    "start_ns": "BIGINT",
    "end_ns": "BIGINT",
    "input_tokens": "BIGINT",
    "output_tokens": "BIGINT",
    "sampling": "JSON",
    "group_id": "VARCHAR",
    "advantage": "DOUBLE",
    "weight": "DOUBLE",
    "mode": "VARCHAR",
    "inexact": "VARCHAR",
}
_ARRAYS: Final = ("prompt_ids", "response_ids", "logprobs")
_MESSAGES: Final = ("observation", "action", "next_observation", "tools")
_FIELDS: Final = frozenset(each.name for each in fields(Transition))


def make(trajectories: Iterable[Trajectory]) -> Made:
    """One row a transition; one that several branches share appears once, on the first of them."""
    for step, trajectory in distinct(trajectories):
        row: Row = {
            name: trajectory.branch if name == "branch" else getattr(step, name) for name in COLUMNS
        }
        for name in _ARRAYS:
            row[name] = list(row[name])
        yield row


def transition(row: Mapping[str, Any]) -> Transition:
    """The transition that a row was made of, read back from JSON or Parquet.

    Args:
        row: Values by column; JSON columns as values or as text.
    """
    import json

    found = {name: value for name, value in row.items() if name in _FIELDS}
    for name, kind in COLUMNS.items():
        if kind == "JSON" and isinstance(found.get(name), str):
            found[name] = json.loads(found[name])
    for name in (*_ARRAYS, *_MESSAGES):
        if found.get(name) is not None:
            found[name] = tuple(found[name])
    return Transition(**found)


FORMAT: Final = Format(
    make, COLUMNS, used_by="pandas, polars, DuckDB, your own code", needs="nothing"
)
