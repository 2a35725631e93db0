"""Selections of spans, as SQL over ``spans``."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

from lightning_otel.store.schema import COLUMNS, NARROW_COLUMNS
from lightning_otel.store.sql import ROLLOUT
from lightning_otel.store.views import IS_ANNOTATION

REWARD_ATTRIBUTES: Final = "reward_attributes"
"""Stands for ``attributes`` of rewards and annotations; empty on other spans."""
INDEX_COLUMNS: Final = (*NARROW_COLUMNS, REWARD_ATTRIBUTES)
"""What tells rollouts, and the rewards given to them from elsewhere: no content."""
SpanKey = tuple[str, str]
"""Trace and span id."""


@dataclass(frozen=True, slots=True)
class Selection:
    """A selection of spans; an empty tuple or None selects all.

    Attributes:
        rollout_ids: Whole ids.
        trace_ids: Whole ids.
        since_ns: Spans that start at this time or later.
        until_ns: Spans that start at this time or earlier.
        only: Names of the spans wanted.
        without: Names of spans not wanted.
        also: What is fetched besides.
        is_ordered: Whether order matters; sorting wide rows costs more than reading them.
        columns: Which columns; ``REWARD_ATTRIBUTES`` may be among them.
    """

    rollout_ids: Sequence[str] = ()
    trace_ids: Sequence[str] = ()
    since_ns: int | None = None
    until_ns: int | None = None
    only: Sequence[SpanKey] = ()
    without: Sequence[SpanKey] = ()
    also: "Selection | None" = None
    is_ordered: bool = False
    columns: Collection[str] = tuple(COLUMNS)

    def query(self) -> tuple[str, list[Any]]:
        """Return the selection as a SQL query and its parameters."""
        parts = [self] if self.also is None else [self, self.also]
        clauses = [part._where_sql() for part in parts]
        # Not one condition with OR: that would keep DuckDB from leaving out whole row groups.
        select = f"SELECT {columns_sql(self.columns)} FROM spans"
        text = " UNION ALL ".join(f"{select} WHERE {where}" for where, _ in clauses)
        if self.is_ordered:
            text = f"SELECT * FROM ({text}) ORDER BY start_ns, process, sequence"
        return text, [value for _, values in clauses for value in values]

    def _where_sql(self) -> tuple[str, list[Any]]:
        terms: list[str] = ["true"]
        values: list[Any] = []
        for column, ids in ((ROLLOUT, self.rollout_ids), ("trace_id", self.trace_ids)):
            if ids:
                terms.append(f"{column} IN (SELECT unnest(?))")
                values.append(list(ids))
        for word, names in (("IN", self.only), ("NOT IN", self.without)):
            if names:
                terms.append(f"(trace_id, span_id) {word} (SELECT unnest(?), unnest(?))")
                values += [list(ids) for ids in zip(*names, strict=True)]
        for sign, time_ns in ((">=", self.since_ns), ("<=", self.until_ns)):
            if time_ns is not None:
                terms.append(f"start_ns {sign} ?")
                values.append(time_ns)
        return " AND ".join(terms), values


def columns_sql(columns: Collection[str]) -> str:
    """Return the columns of a SELECT from ``spans``, in the store's order, in plain SQL."""
    chosen = [name for name in COLUMNS if name in columns]
    if REWARD_ATTRIBUTES in columns and "attributes" not in columns:
        chosen.append(f"CASE WHEN {IS_ANNOTATION} THEN attributes END AS attributes")
    return ", ".join(chosen)
