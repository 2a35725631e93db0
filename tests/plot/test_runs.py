"""Curves of what training runs logged, by SQL on a real state; and what is asked where."""

import io
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
import sqlalchemy as sa
from tests.plot.made import fill

from lightning_otel import Store, emit_action
from lightning_otel.algorithms import BaseAlgorithm, Batch, StepResult
from lightning_otel.errors import ConfigError, NotFoundError, StoreMissingError
from lightning_otel.plot import Progress, plot_training_metrics
from lightning_otel.state import State
from lightning_otel.state.runs import Runs
from lightning_otel.state.tables import METRICS
from lightning_otel.trainer import Trainer
from lightning_otel.types import Resource


def log(store: Store, run_id: str, name: str, values: Iterable[float | None], at: int = 0) -> None:
    """Log a metric of a run, from step 1 on."""
    assert store.layout is not None
    state = State(store.layout.catalogue)
    state.ensure(METRICS)
    rows = [
        {"run_id": run_id, "step": step, "name": name, "value": value, "time_ns": at + step}
        for step, value in enumerate(values, 1)
    ]
    with state.change() as connection:
        connection.execute(sa.insert(METRICS), rows)


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


def test_what_a_run_logs_is_drawn(store: Store) -> None:
    """By way of the runs themselves; a value that was measured again stands once."""
    fill(store, [1.0])
    assert store.layout is not None
    runs = Runs(State(store.layout.catalogue))
    run = runs.start("baseline")
    for step, loss in ((1, 2.0), (2, 9.0), (2, 1.0), (3, math.nan)):
        runs.log(run.run_id, step, {"loss": loss})

    (chart,) = plot_training_metrics(store, "loss", runs=run.run_id)

    assert [(point.x, point.value) for point in chart.series[0].points] == [(1, 2.0), (2, 1.0)]


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
    """What another program logged as infinite is told and not drawn."""
    fill(store, [1.0])
    log(store, "run-1", "loss", [1.0, math.inf, -math.inf, 1.7e308, 1.7e308])

    (chart,) = plot_training_metrics(store, "loss")

    assert [point.value for point in chart.series[0].points] == [1.0, 1.7e308, 1.7e308]
    assert chart.notes == ("2 values that are no number",)


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

    with pytest.raises(NotFoundError, match=r"no training run .* has logged anything"):
        plot_training_metrics(store, "loss", runs=run)


def test_the_last_run_is_the_one_that_logged_last(store: Store) -> None:
    """Where none did, that is said, as of any run that is named and not there."""
    fill(store, [1.0])
    with pytest.raises(NotFoundError, match="no training run '@last' has logged anything"):
        plot_training_metrics(store, runs="@last")
    log(store, "run-b", "loss", [1.0], at=100)
    log(store, "run-a", "loss", [2.0], at=0)

    (chart,) = plot_training_metrics(store, runs="@last")

    assert [series.name for series in chart.series] == ["run-b"]
    with pytest.raises(NotFoundError, match="no training run 'run-c' has"):
        plot_training_metrics(store, runs=["run-a", "run-c"])


def test_an_unknown_metric_is_told_with_those_there_are(store: Store) -> None:
    """What is asked in vain leaves no file behind."""
    fill(store, [1.0])

    with pytest.raises(ConfigError, match=r"no metric 'los'; there are reward, .*duration"):
        plot_training_metrics(store, "los")

    assert store.layout is not None
    assert not (store.layout.root / "state.sqlite").exists()


def test_what_cannot_be_drawn_is_said_first(store: Store, tmp_path: Path) -> None:
    """A wrong axis, window or name of a picture, before anything is read."""
    with pytest.raises(ConfigError, match=r"curves.gif is no picture; name one .svg or .png"):
        plot_training_metrics(store, save_path=tmp_path / "curves.gif")
    with pytest.raises(ConfigError, match="by 'colour'; by rollout, time, step, version"):
        plot_training_metrics(store, by="colour")  # type: ignore[arg-type]  # what is refused
    with pytest.raises(ConfigError, match="window is 0"):
        plot_training_metrics(store, window=0)
    with pytest.raises(ConfigError, match="a run has steps"):
        plot_training_metrics(store, runs="r", by="time")
    with pytest.raises(StoreMissingError):
        plot_training_metrics(store)


class _Better(BaseAlgorithm):
    """Makes the prompt one word longer at each step."""

    def train_step(self, batch: Batch) -> StepResult:
        return StepResult({"loss": 1 / batch.number}, {"prompt": "good " * (batch.number + 1)})


def _polite(task: object, resources: Mapping[str, Resource]) -> float:
    """Earn a tenth for each good word."""
    prompt = resources["prompt"].format()
    emit_action("say", prompt)
    return prompt.count("good") / 10


def test_a_real_run_is_drawn_by_step_and_by_version(store: Store) -> None:
    """What the trainer logs and stamps is what the curves show, and its progress is told."""
    stream = io.StringIO()
    with Progress(stream=stream) as progress:
        Trainer(
            _polite, _Better(), store=store, resources={"prompt": "good"}, max_iterations=3,
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
