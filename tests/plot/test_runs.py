"""Curves of what training runs logged, by SQL on a real state; and what is asked where."""

import math
from collections.abc import Iterable
from pathlib import Path

import pytest
import sqlalchemy as sa
from tests.plot.made import fill

from lightning_otel import Store
from lightning_otel.errors import ConfigError, StoreMissingError
from lightning_otel.plot import plot_training_metrics
from lightning_otel.state import State

TABLE = sa.Table(
    "lightning_metrics", sa.MetaData(),
    sa.Column("run_id", sa.String), sa.Column("step", sa.Integer), sa.Column("name", sa.String),
    sa.Column("value", sa.Double), sa.Column("time_ns", sa.BigInteger),
)  # fmt: skip


def log(store: Store, run_id: str, name: str, values: Iterable[float | None], at: int = 0) -> None:
    """Log a metric of a run, from step 1 on."""
    assert store.layout is not None
    state = State(store.layout.catalogue)
    state.ensure()
    rows = [
        {"run_id": run_id, "step": step, "name": name, "value": value, "time_ns": at + step}
        for step, value in enumerate(values, 1)
    ]
    with state.change() as connection:
        TABLE.create(connection, checkfirst=True)
        connection.execute(sa.insert(TABLE), rows)


def test_loss_is_a_line_a_run_over_its_steps(store: Store) -> None:
    """The oldest run first; each with its own moving mean."""
    fill(store, [1.0])
    log(store, "run-b", "loss", [3.0, 2.0, 1.0], at=0)
    log(store, "run-a", "loss", [9.0], at=100)

    (chart,) = plot_training_metrics(store, "loss", window=2)

    assert (chart.axis, [series.name for series in chart.series]) == ("step", ["run-b", "run-a"])
    assert [point.x for point in chart.series[0].points] == [1, 2, 3]
    assert [point.value for point in chart.series[0].points] == [3, 2, 1]
    assert [point.mean for point in chart.series[0].points] == [3, 2.5, 1.5]
    assert [point.mean_count for point in chart.series[0].points] == [1, 2, 2]


def test_loss_is_among_the_usual_curves_where_it_was_logged(store: Store) -> None:
    """A run's own reward is drawn where its steps, or the run, are asked for."""
    fill(store, [1.0, 0.0])
    log(store, "run-1", "loss", [3.0, 2.0])
    log(store, "run-1", "reward", [0.1, 0.2])

    usual = plot_training_metrics(store)
    by_step = plot_training_metrics(store, by="step")
    of_run = plot_training_metrics(store, "reward", runs="run-1")

    assert [chart.metric for chart in usual] == [
        "reward", "success_rate", "length", "tokens", "loss",
    ]  # fmt: skip
    assert [(chart.metric, chart.axis) for chart in by_step] == [
        ("reward", "step"), ("loss", "step"),
    ]  # fmt: skip
    assert [point.value for point in of_run[0].series[0].points] == [0.1, 0.2]


def test_many_steps_are_binned(store: Store) -> None:
    """As many points as can be drawn, and every value in one."""
    fill(store, [1.0])
    log(store, "run-1", "loss", [float(step) for step in range(5000)])

    (chart,) = plot_training_metrics(store, "loss")

    (series,) = chart.series
    assert (len(series.points), series.count, series.window) == (400, 5000, 500)
    assert series.points[-1].mean == pytest.approx(sum(range(4500, 5000)) / 500)
    assert series.points[-1].high == 4999


def test_what_is_no_number_is_counted(store: Store) -> None:
    """NaN and infinity, as a loss may become, are told and not drawn."""
    fill(store, [1.0])
    log(store, "run-1", "loss", [1.0, math.nan, math.inf, -math.inf, 1.7e308, 1.7e308])

    (chart,) = plot_training_metrics(store, "loss")

    assert [point.value for point in chart.series[0].points] == [1.0, 1.7e308, 1.7e308]
    assert chart.notes == ("3 values that are no number",)


def test_the_newest_runs_are_drawn(store: Store) -> None:
    """As many as there are colours; the others are counted."""
    fill(store, [1.0])
    for number in range(8):
        log(store, f"run-{number}", "loss", [1.0], at=number * 100)

    (chart,) = plot_training_metrics(store, "loss")
    (named,) = plot_training_metrics(store, "loss", runs=["run-0", "run-7"])

    assert [series.name for series in chart.series] == [f"run-{number}" for number in range(2, 8)]
    assert chart.notes == ("2 earlier runs not drawn; name one",)
    assert [series.name for series in named.series] == ["run-0", "run-7"]


@pytest.mark.parametrize("run", ["%", "run_1", "' OR 1=1 --"])
def test_a_run_is_named_by_its_beginning_alone(store: Store, run: str) -> None:
    """Signs that SQL takes for others are themselves."""
    fill(store, [1.0])
    log(store, "run-1", "loss", [1.0])

    with pytest.raises(ConfigError, match="no metric 'loss'"):
        plot_training_metrics(store, "loss", runs=run)


def test_an_unknown_metric_is_told_with_those_there_are(store: Store) -> None:
    """What is asked in vain leaves no file behind."""
    fill(store, [1.0])

    with pytest.raises(ConfigError, match=r"no metric 'los'; there are reward, .*duration"):
        plot_training_metrics(store, "los")

    assert store.layout is not None
    assert not (store.layout.root / "state.sqlite").exists()


def test_what_cannot_be_drawn_is_said_first(store: Store, tmp_path: Path) -> None:
    """A wrong axis, window or name of a picture, before anything is read."""
    with pytest.raises(ConfigError, match=r"curves.png is no picture; name one .svg or .html"):
        plot_training_metrics(store, save_path=tmp_path / "curves.png")
    with pytest.raises(ConfigError, match="by 'colour'; by rollout, time, step, version"):
        plot_training_metrics(store, by="colour")  # type: ignore[arg-type]  # what is refused
    with pytest.raises(ConfigError, match="window is 0"):
        plot_training_metrics(store, window=0)
    with pytest.raises(ConfigError, match="a run has steps"):
        plot_training_metrics(store, runs="r", by="time")
    with pytest.raises(StoreMissingError):
        plot_training_metrics(store)
