"""Curves of what training runs logged, by SQL on a real state; and what is asked where."""

import io
import math
from collections.abc import Iterable
from typing import Any

import pytest
import sqlalchemy as sa
from tests.plot.made import fill
from tests.trainer.made import Better, polite

from lightning_otel import Progress, Store, plot_training_metrics
from lightning_otel.errors import ConfigError, NotFoundError, StoreMissingError
from lightning_otel.state import State
from lightning_otel.state.runs import Runs
from lightning_otel.state.tables import METRICS
from lightning_otel.trainer import Trainer
from lightning_otel.views.plot import Chart


def log(store: Store, run_id: str, name: str, values: Iterable[float | None], at: int = 0) -> None:
    """Log a metric of a run, from step 1 on."""
    state = State.beside(store)
    state.ensure(METRICS)
    rows = [
        {"run_id": run_id, "step": step, "name": name, "value": value, "time_ns": at + step}
        for step, value in enumerate(values, 1)
    ]
    with state.change() as connection:
        connection.execute(sa.insert(METRICS), rows)


def drawn(store: Store, metrics: Any = "loss", **options: Any) -> list[Chart]:
    return list(plot_training_metrics(store, metrics, **options))


def test_loss_is_a_line_a_run_over_its_steps(store: Store) -> None:
    """The oldest run first; each with its own moving mean."""
    fill(store, [1.0])
    log(store, "run-b", "loss", [3.0, 2.0, 1.0], at=0)
    log(store, "run-a", "loss", [9.0], at=100)

    (chart,) = drawn(store, window=2)

    assert (chart.axis, [series.name for series in chart.series]) == ("step", ["run-b", "run-a"])
    assert [(point.x, point.value, point.mean, point.mean_count)
            for point in chart.series[0].points] == [
        (1, 3, 3, 1), (2, 2, 2.5, 2), (3, 1, 1.5, 2),
    ]  # fmt: skip


def test_what_a_run_logs_is_drawn(store: Store) -> None:
    """By way of the runs themselves; a value that was measured again stands once."""
    fill(store, [1.0])
    runs = Runs(State.beside(store))
    run = runs.start("baseline")
    for step, loss in ((1, 2.0), (2, 9.0), (2, 1.0), (3, math.nan)):
        runs.log(run.run_id, step, {"loss": loss})

    (chart,) = drawn(store, runs=run.run_id)

    assert [(point.x, point.value) for point in chart.series[0].points] == [(1, 2.0), (2, 1.0)]


def test_loss_is_among_the_usual_curves_where_it_was_logged(store: Store) -> None:
    """A run's own reward is drawn where its steps, or the run, are asked for."""
    fill(store, [1.0, 0.0])
    log(store, "run-1", "loss", [3.0, 2.0])
    log(store, "run-1", "reward", [0.1, 0.2])

    usual, by_step = drawn(store, ()), drawn(store, (), by="step")
    (of_run,) = drawn(store, "reward", runs="run-1")

    assert [chart.metric for chart in usual] == [
        "reward", "success_rate", "length", "tokens", "loss",
    ]  # fmt: skip
    assert [(chart.metric, chart.axis) for chart in by_step] == [
        ("reward", "step"), ("loss", "step"),
    ]  # fmt: skip
    assert [point.value for point in of_run.series[0].points] == [0.1, 0.2]


def test_many_steps_are_binned_and_what_is_no_number_is_counted(store: Store) -> None:
    """As many points as can be drawn, every value in one; what is infinite is told, not drawn."""
    fill(store, [1.0])
    log(store, "run-1", "many", [float(step) for step in range(5000)])
    log(store, "run-1", "odd", [1.0, math.inf, -math.inf, 1.7e308, 1.7e308])

    many, odd = drawn(store, ["many", "odd"])

    (series,) = many.series
    assert (len(series.points), series.count, series.window) == (400, 5000, 500)
    assert series.points[-1].mean == pytest.approx(sum(range(4500, 5000)) / 500)
    assert series.points[-1].high == 4999
    assert [point.value for point in odd.series[0].points] == [1.0, 1.7e308, 1.7e308]
    assert odd.notes == ("2 values that are no number",)


def test_the_newest_runs_are_drawn(store: Store) -> None:
    """As many as there are colours; the others are counted; the last one logged last."""
    fill(store, [1.0])
    for number in range(8):
        log(store, f"run-{number}", "loss", [1.0], at=number * 100)

    every, named, last = (drawn(store, runs=runs)[0] for runs in ((), ["run-0", "run-7"], "@last"))

    assert [series.name for series in every.series] == [f"run-{number}" for number in range(2, 8)]
    assert every.notes == ("2 earlier runs not drawn; name one",)
    assert [series.name for series in named.series] == ["run-0", "run-7"]
    assert [series.name for series in last.series] == ["run-7"]


@pytest.mark.parametrize(
    ("metrics", "options", "error", "words"),
    [
        *(("loss", {"runs": run}, NotFoundError, "no training run .* has logged anything")
          for run in ("%", "run_1", "' OR 1=1 --", "run-c", ["run-1", "run-c"])),
        ("los", {}, ConfigError, r"no metric 'los'; there are reward, .*duration"),
        ((), {"save_path": "c.gif"}, ConfigError, "c.gif is no picture; name one .svg or .png"),
        ((), {"by": "colour"}, ConfigError, "by 'colour'; by rollout, time, step, version"),
        ((), {"window": 0}, ConfigError, "window is 0"),
        ((), {"runs": "r", "by": "time"}, ConfigError, "a run has steps"),
    ],
)  # fmt: skip
def test_what_cannot_be_drawn_is_told(
    store: Store, metrics: Any, options: Any, error: type[Exception], words: str
) -> None:
    """Signs that SQL takes for others are themselves; what is asked in vain leaves no file."""
    fill(store, [1.0])
    if "runs" in options:
        log(store, "run-1", "loss", [1.0])

    with pytest.raises(error, match=words):
        drawn(store, metrics, **options)

    assert store.layout is not None
    assert (store.layout.root / "state.sqlite").exists() == ("runs" in options)


def test_where_nothing_is_nothing_is_drawn(store: Store) -> None:
    """No store, and no run that logged."""
    with pytest.raises(StoreMissingError):
        drawn(store, ())
    fill(store, [1.0])
    with pytest.raises(NotFoundError, match="no training run '@last' has logged anything"):
        drawn(store, (), runs="@last")


def test_a_real_run_is_drawn_by_step_and_by_version(store: Store) -> None:
    """What the trainer logs and stamps is what the curves show, and its progress is told."""
    stream = io.StringIO()
    with Progress(stream=stream) as progress:
        Trainer(
            polite, Better(), store=store, resources={"prompt": "good"}, max_iterations=3,
            progress=progress,
        ).fit(["a", "b"])  # fmt: skip

    reward, loss = plot_training_metrics(store, by="step")
    (versions,) = plot_training_metrics(store, "reward", by="version", mode="train")

    assert [point.value for point in reward.series[0].points] == pytest.approx([0.1, 0.2, 0.3])
    assert [point.value for point in loss.series[0].points] == pytest.approx([1, 1 / 2, 1 / 3])
    found = [(point.label, point.count) for point in versions.series[0].points]
    assert found == [("prompt@1", 2), ("prompt@2", 2), ("prompt@3", 2)]
    assert "step 1/3" in stream.getvalue()
    assert "100%  reward 0.3  loss 0.3333" in stream.getvalue()
