"""Curves of rollouts, by SQL on a real store: by order, time and version, binned and counted.

``LIGHTNING_TEST_ROLLOUTS`` is how many the largest curve is made of.
"""

import os
import random
import statistics
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from tests.plot.made import SECOND, START_NS, fill, rollout

from lightning_otel import Store
from lightning_otel import conventions as c
from lightning_otel.plot import Chart, Curves, plot_training_metrics
from lightning_otel.plot.curves import Axis, Point

MANY = int(os.environ.get("LIGHTNING_TEST_ROLLOUTS", "1000"))


def points(chart: Chart) -> tuple[Point, ...]:
    """The points of a chart that has one line."""
    (series,) = chart.series
    return series.points


def only(found: Curves) -> Chart:
    """The one chart."""
    (chart,) = found
    return chart


def test_reward_by_rollout_is_a_point_each_with_its_moving_mean(store: Store) -> None:
    """In the order they began; the mean says of how many values it is."""
    values = [0.0, 1.0, 1.0, 0.5, -2.0, 3.0]
    fill(store, values)

    found = points(only(plot_training_metrics(store, "reward", window=3)))

    assert [point.x for point in found] == [1, 2, 3, 4, 5, 6]
    assert [point.value for point in found] == values
    assert [point.mean for point in found] == pytest.approx([0, 0.5, 2 / 3, 2.5 / 3, -0.5 / 3, 0.5])
    assert [point.mean_count for point in found] == [1, 2, 3, 3, 3, 3]


def test_the_usual_curves(store: Store) -> None:
    """Reward, success, length and tokens, from one look at the store; duration if asked for."""
    fill(store, [0.2, 0.5, 1.0], calls=3)

    found = {chart.metric: chart for chart in plot_training_metrics(store)}
    (duration,) = plot_training_metrics(store, ["duration"])

    assert list(found) == ["reward", "success_rate", "length", "tokens"]
    assert [point.value for point in points(found["success_rate"])] == [0, 1, 1]
    assert [point.value for point in points(found["length"])] == [3, 3, 3]
    assert [point.value for point in points(found["tokens"])] == [45, 45, 45]
    assert points(duration)[0].value == pytest.approx(0.3)


def test_what_has_no_value_is_counted_and_never_nought(store: Store) -> None:
    """Rollouts without a reward, and without tokens that a server counted, are not in the curve."""
    fill(store, [1.0, None, None], tokens=None)

    reward, tokens = plot_training_metrics(store, ["reward", "tokens"])

    assert [point.value for point in points(reward)] == [1.0]
    assert reward.notes == ("2 rollouts without a reward",)
    assert tokens.series == ()
    assert tokens.notes == ("3 rollouts not over yet, or without counted tokens",)


def test_many_rollouts_are_binned_and_none_is_lost(store: Store) -> None:
    """More than can be drawn become means of neighbours; the last moving mean is the exact one."""
    chance = random.Random(1)
    values = [chance.uniform(-1, 1) for _ in range(MANY)]
    fill(store, values)

    chart = only(plot_training_metrics(store, "reward"))

    found = points(chart)
    assert len(found) == 400
    assert sum(point.count for point in found) == MANY
    assert found[-1].x == MANY
    assert found[-1].mean == pytest.approx(statistics.fmean(values[-MANY // 10 :]))
    assert found[0].value == pytest.approx(statistics.fmean(values[: found[0].count]))
    assert min(point.low for point in found) == min(values)


def test_time_has_bins_of_equal_length(store: Store) -> None:
    """Where nothing began there is no point."""
    store.add(span for at in (0, 1, 2, 1000) for span in rollout(at, 1.0))

    found = points(only(plot_training_metrics(store, "reward", by="time")))

    assert [point.count for point in found] == [3, 1]
    assert found[-1].x == START_NS + 1000 * SECOND


def test_versions_are_compared_with_their_error(store: Store) -> None:
    """In the order they first acted, each with mean, count and standard error."""
    stamps: list[dict[str, Any]] = [
        {c.RESOURCE_VERSION: "b"},
        {c.RESOURCE_VERSION: "a"},
        {c.RESOURCES: '{"*":{"prompt":3},"calc":{"model":"m"}}'},
        {},
    ]
    number = 0
    for stamp in stamps:
        for reward in (0.0, 1.0, 1.0, None):
            number += 1
            store.add(rollout(number, reward, stamps=stamp))

    chart = only(plot_training_metrics(store, "reward", by="version"))

    found = points(chart)
    assert [point.label for point in found] == ["b", "a", "prompt@3, calc/model@m"]
    assert [point.count for point in found] == [3, 3, 3]
    assert found[0].error == pytest.approx(statistics.stdev([0, 1, 1]) / 3**0.5)
    assert chart.notes == (
        "3 rollouts without a reward",
        "4 rollouts without a resource version",
    )


def test_versions_beyond_the_most_are_counted(store: Store) -> None:
    """The latest are drawn."""
    for number in range(1, 411):
        store.add(rollout(number, 1.0, stamps={c.RESOURCE_VERSION: f"v{number}"}))

    chart = only(plot_training_metrics(store, "reward", by="version"))

    assert points(chart)[0].label == "v11"
    assert chart.notes == ("10 earlier versions are not drawn",)


def versions(store: Store, names: str, values: Iterable[float | None]) -> Store:
    """The store with a rollout a letter, which is its version; a space is none."""
    for number, (name, value) in enumerate(zip(names, values, strict=True), 1):
        stamps = {} if name == " " else {c.RESOURCE_VERSION: name}
        store.add(rollout(number, value, stamps=stamps))
    return store


@pytest.mark.parametrize("axis", ["rollout", "time"])
def test_versions_side_by_side_have_a_line_each(store: Store, axis: Axis) -> None:
    """In the order they first acted, each with its own moving mean; the rest is a line too."""
    versions(store, "ab ab a", [0.0, 1.0, 0.5, 0.2, 0.8, None, 0.4])

    chart = only(plot_training_metrics(store, "reward", by=axis, window=2))

    drawn = [(line.name, [point.value for point in line.points]) for line in chart.series]
    assert drawn == [("a", [0.0, 0.2, 0.4]), ("b", [1.0, 0.8]), ("others", [0.5])]
    assert [point.mean for point in chart.series[0].points] == pytest.approx([0.0, 0.1, 0.3])
    assert chart.series[0].points[-1].x == (6 if axis == "rollout" else START_NS + 7 * SECOND)
    assert chart.notes == (
        "1 rollout without a reward",
        "others: 1 rollout without a resource version",
    )


@pytest.mark.parametrize(
    ("names", "notes"),
    [
        ("aaaa", ()),
        (" a a", ()),
        ("abbc", ("3 versions, one after the other; by version they are compared",)),
    ],
)
def test_versions_one_after_the_other_are_one_line(
    store: Store, names: str, notes: tuple[str, ...]
) -> None:
    """As is one version, be it beside rollouts without any: their succession is the curve."""
    versions(store, names, [0.0, 0.5, 0.5, 1.0])

    chart = only(plot_training_metrics(store, "reward"))

    assert [point.x for point in points(chart)] == [1, 2, 3, 4]
    assert chart.series[0].name == ""
    assert chart.notes == notes


@pytest.mark.parametrize(
    ("names", "own", "notes"),
    [
        ("abcdef", "abcdef", ()),
        ("abcdefgh", "defgh", ("others: 3 earlier versions",)),
        (
            "abcdef ", "bcdef",
            ("others: 1 earlier version and 2 rollouts without a resource version",),
        ),
    ],
)  # fmt: skip
def test_the_newest_versions_have_lines(
    store: Store, names: str, own: str, notes: tuple[str, ...]
) -> None:
    """Six at most, as there are colours; all others are one, and every value is in some line."""
    versions(store, names * 2, [0.5] * len(names) * 2)

    chart = only(plot_training_metrics(store, "reward"))

    assert [line.name for line in chart.series] == [*own, *(["others"] if notes else [])]
    assert sum(line.count for line in chart.series) == 2 * len(names)
    assert chart.notes == notes


def test_versions_share_the_points_of_a_chart(store: Store) -> None:
    """Together they are no more than one line would be, and lie over each other in time."""
    versions(store, "ab" * 500, [0.0, 1.0] * 500)

    chart = only(plot_training_metrics(store, "reward"))

    one, other = chart.series
    assert (len(one.points), len(other.points)) == (200, 200)
    assert (one.points[-1].x, other.points[-1].x) == (999, 1000)
    assert (one.window, one.points[-1].mean, other.points[-1].mean) == (50, 0, 1)


def test_mode_and_time_select(store: Store) -> None:
    """Rollouts for training and for validation are different curves."""
    store.add(rollout(1, 0.0, stamps={c.MODE: "train"}))
    store.add(rollout(2, 1.0, stamps={c.MODE: "val"}))
    store.add(rollout(3, 0.5))

    val = only(plot_training_metrics(store, "reward", mode="val"))
    late = only(plot_training_metrics(store, "reward", since=START_NS + 2 * SECOND))
    early = only(plot_training_metrics(store, "reward", until=START_NS + 2 * SECOND))

    assert [point.value for point in points(val)] == [1.0]
    assert [point.value for point in points(late)] == [1.0, 0.5]
    assert [point.value for point in points(early)] == [0.0]


def test_the_latest_attempt_counts_once(store: Store) -> None:
    """A rollout that was tried again is one value: the latest reward, and that attempt's length."""
    for attempt, at, reward, calls in (("1", 1, 0.0, 4), ("2", 50, 1.0, 2)):
        stamps = {c.ROLLOUT_ID: "same", c.ATTEMPT_ID: attempt}
        store.add(rollout(at, reward, calls=calls, stamps=stamps))

    rewards, length = plot_training_metrics(store, ["reward", "length"])

    assert [point.value for point in points(rewards)] == [1.0]
    assert [point.value for point in points(length)] == [2.0]


def test_huge_rewards_have_a_mean(store: Store) -> None:
    """Their sum is beyond any number; their mean is not."""
    fill(store, [1.7e308, 1.7e308, -1.7e308, -1.7e308])

    found = points(only(plot_training_metrics(store, "reward", window=4)))

    assert found[1].mean == 1.7e308
    assert found[-1].mean == 0


def test_a_store_without_rollouts_has_empty_charts(store: Store) -> None:
    """Made, and nothing recorded: every chart says that there is nothing."""
    store.writer()

    found = plot_training_metrics(store)

    assert [chart.series for chart in found] == [(), (), (), ()]
    assert str(found).startswith("reward: nothing to draw\nsuccess rate")


def test_a_store_behind_a_server_has_the_same_curves(
    store: Store, served: Callable[..., str]
) -> None:
    """What is asked of it is SQL on the views, whichever engine holds the spans."""
    fill(store, [0.0, 1.0, None, 0.5], stamps={c.RESOURCE_VERSION: "v1", c.MODE: "val"})
    elsewhere = Store(served(store))

    for options in ({}, {"by": "version"}, {"by": "time", "mode": "val"}):
        metrics = ["reward", "length", "tokens", "duration"]
        here = plot_training_metrics(store, metrics, **options)  # type: ignore[arg-type]  # of each its own type
        assert plot_training_metrics(elsewhere, metrics, **options) == here  # type: ignore[arg-type]  # likewise
        assert here[0].series[0].count == 3
