"""Transitions as the rows of a table, and back; ``triplets`` holds them as they are."""

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from typing import Any, Final

from lightning_otel.dataset.formats.format import Format, Made, Row
from lightning_otel.types import Trajectory, Transition
from lightning_otel.types.transitions import TRANSITION_BODIES, TRANSITION_COLUMNS, distinct

_ARRAYS: Final = TRANSITION_BODIES[-3:]
_FIELDS: Final = frozenset(field.name for field in fields(Transition))


def row(step: Transition, branch: int, columns: Collection[str] = TRANSITION_COLUMNS) -> Row:
    """Return a transition as a flat row of JSON values, in the order of the columns."""
    values: Row = {name: branch if name == "branch" else getattr(step, name) for name in columns}
    return {name: list(value) if name in _ARRAYS else value for name, value in values.items()}


def transition(values: Mapping[str, Any]) -> Transition:
    """Return the transition that a row was made of, read back from JSON or Parquet."""
    kwargs = {name: value for name, value in values.items() if name in _FIELDS}
    for name, value in kwargs.items():
        if TRANSITION_COLUMNS.get(name) == "JSON" and isinstance(value, str):
            kwargs[name] = json.loads(value)
        if name in TRANSITION_BODIES and kwargs[name] is not None:
            kwargs[name] = tuple(kwargs[name])
    return Transition(**kwargs)


def make_triplets(trajectories: Iterable[Trajectory]) -> Made:
    """Yield one row a transition; one that several branches share is on the first of them."""
    for step, trajectory in distinct(trajectories):
        yield row(step, trajectory.branch)


TRIPLETS: Final = Format(
    make_triplets,
    TRANSITION_COLUMNS,
    used_by="pandas, polars, DuckDB, your own code",
    needs="nothing",
)
