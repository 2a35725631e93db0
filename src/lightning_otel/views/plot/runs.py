"""Curves of what training runs logged, such as their loss."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import sqlalchemy as sa

from lightning_otel.state.tables import METRICS
from lightning_otel.types.text import count_noun
from lightning_otel.views.plot.curves import MOST_POINTS, Chart, Value, make_series

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection

    from lightning_otel.state import State

MOST_RUNS: Final = 6
"""Runs in one chart: as many as there are colours."""


def logged_metrics(state: "State", runs: Sequence[str] = ()) -> list[str]:
    """Return the names of all metrics of runs, by prefixes of their ids; by default of all runs."""
    query = sa.select(METRICS.c.name).distinct().where(_is_named(runs)).order_by(METRICS.c.name)
    with state.read() as connection:
        if not sa.inspect(connection).has_table(METRICS.name):
            return []
        return list(connection.scalars(query))


def newest_run(state: "State") -> str:
    """Return the id of the run that logged last; empty if none did."""
    query = sa.select(METRICS.c.run_id).order_by(METRICS.c.time_ns.desc()).limit(1)
    with state.read() as connection:
        is_any = sa.inspect(connection).has_table(METRICS.name)
        return (connection.scalar(query) if is_any else None) or ""


def read_charts(
    state: "State", metrics: Sequence[str], *, runs: Sequence[str] = (), window: int | None = None
) -> list[Chart]:
    """Read a chart a metric over the steps, with a line a run; of the newest runs if many."""
    with state.read() as connection:
        if not sa.inspect(connection).has_table(METRICS.name):
            return [Chart(name, name, "step", ()) for name in metrics]
        return [_make_chart(connection, name, runs, window) for name in metrics]


def _make_chart(
    connection: "Connection", name: str, runs: Sequence[str], window: int | None
) -> Chart:
    # SQLite keeps NaN as NULL; PostgreSQL has it above every number.
    is_number = METRICS.c.value.between(-sys.float_info.max, sys.float_info.max)
    of_metric = sa.and_(METRICS.c.name == name, _is_named(runs))
    counts = (
        sa.select(METRICS.c.run_id, sa.func.count(), sa.func.count(sa.case((is_number, 1))))
        .where(of_metric)
        .group_by(METRICS.c.run_id)
        .order_by(sa.func.min(METRICS.c.time_ns), METRICS.c.run_id)
    )
    rows = connection.execute(counts).all()
    numbers = {run_id: count for run_id, _, count in rows if count}
    drawn = list(numbers)[-MOST_RUNS:]
    chosen = (
        sa.select(METRICS.c.run_id, METRICS.c.step, METRICS.c.value)
        .where(of_metric, is_number, METRICS.c.run_id.in_(drawn))
        .order_by(METRICS.c.step, METRICS.c.time_ns)
    )
    values: dict[str, list[Value]] = {run_id: [] for run_id in drawn}
    for run_id, step, value in connection.execute(chosen):
        points, total = values[run_id], numbers[run_id]
        points.append((len(points) * min(MOST_POINTS, total) // total, step, value))
    notes = []
    if lacking := sum(count - finite for _, count, finite in rows):
        notes.append(f"{count_noun(lacking, 'value')} that are no number")
    if omitted := len(numbers) - len(drawn):
        notes.append(f"{count_noun(omitted, 'earlier run')} not drawn; name one")
    size = window or max([1, *(numbers[run_id] // 10 for run_id in drawn)])
    series = tuple(make_series(run_id, points, size) for run_id, points in values.items())
    return Chart(name, name, "step", series, tuple(notes))


def _is_named(runs: Sequence[str]) -> "sa.ColumnElement[bool]":
    if not runs:
        return sa.true()
    return sa.or_(*(METRICS.c.run_id.startswith(run, autoescape=True) for run in runs))
