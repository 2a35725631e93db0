"""Curves of what training runs logged, such as their loss: by SQL on the runs' metrics."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa

from lightning_otel.plot.curves import Chart, Point, Series
from lightning_otel.runs.tables import METRICS

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection

    from lightning_otel.state import State

MOST_RUNS: Final = 6
"""Runs in one chart: as many as there are colours."""
_SCALE: Final = float(1 << 40)
"""Means are taken of that part of each value: sums of huge ones would be infinite."""


def logged(state: "State", runs: Sequence[str] = ()) -> list[str]:
    """The names of all metrics that the runs logged, in order.

    Args:
        state: Where they are.
        runs: Beginnings of run ids; all, if none is named.
    """
    query = sa.select(METRICS.c.name).distinct().where(_is_named(runs)).order_by(METRICS.c.name)
    with state.read() as connection:
        if not sa.inspect(connection).has_table(METRICS.name):
            return []
        return list(connection.scalars(query))


def newest(state: "State") -> str:
    """The id of the run that logged last; empty if none did."""
    query = sa.select(METRICS.c.run_id).order_by(METRICS.c.time_ns.desc()).limit(1)
    with state.read() as connection:
        is_any = sa.inspect(connection).has_table(METRICS.name)
        return (connection.scalar(query) if is_any else None) or ""


def charts(
    state: "State",
    metrics: Sequence[str],
    *,
    runs: Sequence[str] = (),
    window: int | None = None,
    bins: int = 400,
) -> list[Chart]:
    """A chart a metric over the steps, with a line a run; of the newest runs if there are many.

    Args:
        state: Where the metrics are.
        metrics: Their names.
        runs: Beginnings of run ids; all, if none is named.
        window: Values in a moving mean; None for a tenth of those of the longest run.
        bins: Points of a line at most.
    """
    with state.read() as connection:
        if not sa.inspect(connection).has_table(METRICS.name):
            return [Chart(name, name, "step", ()) for name in metrics]
        return [_chart(connection, name, runs, window, bins) for name in metrics]


def _chart(
    connection: "Connection", name: str, runs: Sequence[str], window: int | None, bins: int
) -> Chart:
    every = connection.execute(_counts(name, runs)).all()
    drawn = [row for row in every if row.numbers][-MOST_RUNS:]
    size = window or max([1, *(row.numbers // 10 for row in drawn)])
    points: dict[str, list[Point]] = {row.run_id: [] for row in drawn}
    for row in connection.execute(_points(name, list(points), size, bins)):
        points[row.run_id].append(_point(row))
    notes = []
    if lacking := sum(row.every - row.numbers for row in every):
        notes.append(f"{lacking:,} value{'' if lacking == 1 else 's'} that are no number")
    if left := sum(1 for row in every if row.numbers) - len(drawn):
        notes.append(f"{left:,} earlier run{'' if left == 1 else 's'} not drawn; name one")
    series = tuple(Series(run, tuple(held), size) for run, held in points.items())
    return Chart(name, name, "step", series, tuple(notes))


def _is_named(runs: Sequence[str]) -> "sa.ColumnElement[bool]":
    if not runs:
        return sa.true()
    return sa.or_(*(METRICS.c.run_id.startswith(run, autoescape=True) for run in runs))


def _is_number() -> "sa.ColumnElement[bool]":
    # SQLite keeps NaN as NULL; PostgreSQL has it above every number.
    return METRICS.c.value.between(-sys.float_info.max, sys.float_info.max)


def _counts(name: str, runs: Sequence[str]) -> "sa.Select[Any]":
    """One row a run, the oldest first: how many values it logged, and how many are numbers."""
    return (
        sa.select(
            METRICS.c.run_id,
            sa.func.count().label("every"),
            sa.func.count(sa.case((_is_number(), 1))).label("numbers"),
        )
        .where(METRICS.c.name == name, _is_named(runs))
        .group_by(METRICS.c.run_id)
        .order_by(sa.func.min(METRICS.c.time_ns), METRICS.c.run_id)
    )


def _points(name: str, runs: Sequence[str], window: int, bins: int) -> "sa.Select[Any]":
    """One row a run and bin, in order, with the moving mean at its last value."""
    run = METRICS.c.run_id
    value = METRICS.c.value / _SCALE
    near: Any = {
        "partition_by": run,
        "order_by": (METRICS.c.step, METRICS.c.time_ns),
        "rows": (1 - window, 0),
    }
    held = (
        sa.select(
            run,
            METRICS.c.step,
            METRICS.c.value,
            sa.func.row_number().over(partition_by=run, order_by=near["order_by"]).label("place"),
            sa.func.count().over(partition_by=run).label("total"),
            (sa.func.avg(value).over(**near) * _SCALE).label("mean"),
            sa.func.count().over(**near).label("mean_count"),
        )
        .where(METRICS.c.name == name, run.in_(runs), _is_number())
        .cte("held")
    )
    places = sa.case((held.c.total < bins, held.c.total), else_=bins)
    bin_ = ((held.c.place - 1) * places // held.c.total).label("bin")
    binned = sa.select(held, bin_).cte("binned")
    last = sa.func.row_number().over(
        partition_by=(binned.c.run_id, binned.c.bin), order_by=binned.c.place.desc()
    )
    marked = sa.select(binned, last.label("from_last")).cte("marked")
    is_last = marked.c.from_last == 1
    return (
        sa.select(
            marked.c.run_id,
            sa.func.max(marked.c.step).label("x"),
            (sa.func.avg(marked.c.value / _SCALE) * _SCALE).label("value"),
            sa.func.min(marked.c.value).label("low"),
            sa.func.max(marked.c.value).label("high"),
            sa.func.count().label("values"),
            sa.func.max(sa.case((is_last, marked.c.mean))).label("mean"),
            sa.func.max(sa.case((is_last, marked.c.mean_count))).label("mean_count"),
        )
        .group_by(marked.c.run_id, marked.c.bin)
        .order_by(marked.c.run_id, marked.c.bin)
    )


def _point(row: Any) -> Point:
    value, low, high = float(row.value), float(row.low), float(row.high)
    count, mean_count = int(row.values), int(row.mean_count)
    return Point(int(row.x), value, low, high, count, float(row.mean), mean_count)
