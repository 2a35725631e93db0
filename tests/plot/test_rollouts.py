"""Curves of rollouts, by SQL on a real store: by order, time and version, binned and counted.

``LIGHTNING_TEST_ROLLOUTS`` is how many the largest curve is made of.
"""

import os
import random
import re
import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
from tests.plot.made import SECOND, START_NS, fill, rollout

from lightning_otel import Store, plot_training_metrics
from lightning_otel.errors import ConfigError
from lightning_otel.types import conventions as c

MANY = int(os.environ.get("LIGHTNING_TEST_ROLLOUTS", "1000"))
ORDERED = "{} versions in sequence (compare: by version)"
UNSTAMPED = "1 rollout without a resource version"


def drawn(store: Store, metrics: Any = (), **options: Any) -> list[Any]:
    return list(plot_training_metrics(store, metrics, **options))


def points(store: Store, metrics: Any = "reward", **options: Any) -> Any:
    """The points of the one line of the one chart."""
    ((series,),) = (chart.series for chart in drawn(store, metrics, **options))
    return series.points


def versions(store: Store, names: str, values: Iterable[float | None]) -> Store:
    """The store with a rollout a letter, which is its version; a space is none."""
    for number, (name, value) in enumerate(zip(names, values, strict=True), 1):
        stamps = {} if name == " " else {c.RESOURCE_VERSION: name}
        store.add(rollout(number, value, stamps=stamps))
    return store


def test_reward_by_rollout_is_a_point_each_with_its_moving_mean(store: Store) -> None:
    """In the order they began; the mean says of how many values it is."""
    values = [0.0, 1.0, 1.0, 0.5, -2.0, 3.0]

    found = points(fill(store, values), window=3)

    assert [(point.x, point.value) for point in found] == list(enumerate(values, 1))
    assert [point.mean for point in found] == pytest.approx([0, 0.5, 2 / 3, 2.5 / 3, -0.5 / 3, 0.5])
    assert [point.mean_count for point in found] == [1, 2, 3, 3, 3, 3]


def test_each_agent_has_a_line(store: Store) -> None:
    """Of the rollouts in which it took part, at their places; by rollout or time alone."""
    for number, agents in enumerate(("a", "b", "a b", "a"), 1):
        for rank, agent in enumerate(agents.split()):
            stamps = {c.AGENT_NAME: agent, c.ROLLOUT_ID: f"r{number}"}
            reward = number / 4 if rank == 0 else None
            store.add(rollout(number * 10 + rank, reward, stamps=stamps))

    (chart,) = drawn(store, "reward", split="agent")

    assert [(line.name, [point.x for point in line.points]) for line in chart.series] == [
        ("a", [1, 3, 4]), ("b", [2, 3]),
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="by rollout or by time"):
        drawn(store, "reward", split="agent", by="version")


@pytest.mark.parametrize(
    ("rewards", "options", "metrics", "expected"),
    [
        ([0.2, 0.5, 1.0], {"calls": 3}, (), {
            "reward": ([0.2, 0.5, 1.0], ()), "success_rate": ([0, 1, 1], ()),
            "length": ([3, 3, 3], ()), "tokens": ([45, 45, 45], ()),
        }),
        ([0.0], {"calls": 3}, ("duration",), {"duration": ([0.3], ())}),
        ([1.0, None, None], {"tokens": None}, ("reward", "tokens"), {
            "reward": ([1.0], ("2 rollouts without a reward",)),
            "tokens": ([], ("3 rollouts not over yet, or without counted tokens",)),
        }),
        ([], {}, (), {name: ([], ()) for name in ("reward", "success_rate", "length", "tokens")}),
    ],
    ids=["usual", "duration", "lacking", "empty"],
)  # fmt: skip
def test_what_has_no_value_is_counted_and_never_nought(
    store: Store, rewards: list[float | None], options: Mapping[str, Any], metrics: Any,
    expected: Mapping[str, Any],
) -> None:  # fmt: skip
    """Reward, success, length and tokens by default, each with a note on rollouts without it."""
    store.writer()

    found = drawn(fill(store, rewards, **options), metrics)

    assert {
        chart.metric: (
            pytest.approx([point.value for line in chart.series for point in line.points]),
            chart.notes,
        )
        for chart in found
    } == expected
    assert rewards or str(plot_training_metrics(store)).startswith("reward: nothing to draw\n")


def test_many_rollouts_are_binned_and_none_is_lost(store: Store) -> None:
    """More than can be drawn become means of neighbours; the last moving mean is the exact one."""
    chance = random.Random(1)
    values = [chance.uniform(-1, 1) for _ in range(MANY)]

    found = points(fill(store, values))

    assert (len(found), sum(point.count for point in found), found[-1].x) == (400, MANY, MANY)
    assert found[-1].mean == pytest.approx(statistics.fmean(values[-MANY // 10 :]))
    assert found[0].value == pytest.approx(statistics.fmean(values[: found[0].count]))
    assert min(point.low for point in found) == min(values)


def test_time_has_bins_of_equal_length(store: Store) -> None:
    """Where nothing began there is no point."""
    store.add(span for at in (0, 1, 2, 1000) for span in rollout(at, 1.0))

    found = points(store, by="time")

    assert [point.count for point in found] == [3, 1]
    assert found[-1].x == START_NS + 1000 * SECOND


def test_versions_are_compared_with_their_error(store: Store) -> None:
    """In the order they first acted, each with its count and standard error."""
    stamps: list[dict[str, Any]] = [
        {c.RESOURCE_VERSION: "b"}, {c.RESOURCE_VERSION: "a"},
        {c.RESOURCES: '{"*":{"prompt":3},"calc":{"model":"m"}}'}, {},
    ]  # fmt: skip
    rewards = (0.0, 1.0, 1.0, None)
    for number in range(16):
        store.add(rollout(number + 1, rewards[number % 4], stamps=stamps[number // 4]))

    (chart,) = drawn(store, "reward", by="version")

    found = chart.series[0].points
    labels = ["b", "a", "prompt@3, calc/model@m"]
    assert [(point.label, point.count) for point in found] == [(label, 3) for label in labels]
    assert found[0].error == pytest.approx(statistics.stdev([0, 1, 1]) / 3**0.5)
    assert chart.notes == (
        "3 rollouts without a reward", "4 rollouts without a resource version",
    )  # fmt: skip


def test_versions_beyond_the_most_are_counted(store: Store) -> None:
    """The latest are drawn."""
    for number in range(1, 411):
        store.add(rollout(number, 1.0, stamps={c.RESOURCE_VERSION: f"v{number}"}))

    (chart,) = drawn(store, "reward", by="version")

    assert chart.series[0].points[0].label == "v11"
    assert chart.notes == ("10 earlier versions are not drawn",)


@pytest.mark.parametrize(
    ("names", "lines", "notes"),
    [
        ("aaaa", [""], ()),
        (" a a", [""], ()),
        ("abbc", [""], (ORDERED.format(3),)),
        ("ab ab a", ["a", "b", "others"], (f"others: 2 rollouts{UNSTAMPED[9:]}",)),
        ("abcdef" * 2, [*"abcdef"], ()),
        ("abcdefgh" * 2, [*"defgh", "others"], ("others: 3 earlier versions",)),
        ("abcdefabcdef ", [*"bcdef", "others"],
         (f"others: 1 earlier version and {UNSTAMPED}",)),
    ],
)  # fmt: skip
def test_versions_side_by_side_have_a_line_each(
    store: Store, names: str, lines: list[str], notes: tuple[str, ...]
) -> None:
    """In the order they first acted, six at most; one after the other they are one curve."""
    (chart,) = drawn(versions(store, names, [0.5] * len(names)), "reward")

    assert [line.name for line in chart.series] == lines
    assert sum(line.count for line in chart.series) == len(names)
    assert chart.notes == notes


@pytest.mark.parametrize("axis", ["rollout", "time"])
def test_each_line_has_its_own_moving_mean(store: Store, axis: Any) -> None:
    """By order and by time; what has no value is in none."""
    versions(store, "ab ab a", [0.0, 1.0, 0.5, 0.2, 0.8, None, 0.4])

    (chart,) = drawn(store, "reward", by=axis, window=2)

    values = [[point.value for point in line.points] for line in chart.series]
    assert values == [[0.0, 0.2, 0.4], [1.0, 0.8], [0.5]]
    assert [point.mean for point in chart.series[0].points] == pytest.approx([0.0, 0.1, 0.3])
    assert chart.series[0].points[-1].x == (6 if axis == "rollout" else START_NS + 7 * SECOND)
    assert chart.notes == ("1 rollout without a reward", f"others: {UNSTAMPED}")


def test_a_line_has_a_gap_where_it_has_no_value(store: Store) -> None:
    """For long: lines that take turns have none; in the picture as in the terminal."""
    names = "   " + "ab" * 20 + "  "
    curves = plot_training_metrics(versions(store, names, [1.0, *[0.5] * 44]), "reward")

    lines = re.findall(r'class="mean s\d" d="(.*?)"', curves._repr_html_())
    marks = "".join(str(curves).splitlines()[1:9])

    assert [line.count("M") for line in lines[:3]] == [1, 1, 2]
    assert marks.count("*") + marks.count("+") > 60
    assert 4 <= marks.count("x") < 12


def test_versions_share_the_points_of_a_chart(store: Store) -> None:
    """Together they are no more than one line would be, and lie over each other in time."""
    ((one, other),) = (
        chart.series for chart in drawn(versions(store, "ab" * 500, [0.0, 1.0] * 500), "reward")
    )

    assert (len(one.points), len(other.points)) == (200, 200)
    assert (one.points[-1].x, other.points[-1].x) == (999, 1000)
    assert (one.window, one.points[-1].mean, other.points[-1].mean) == (50, 0, 1)


@pytest.mark.parametrize(
    ("options", "values"),
    [
        ({"mode": "val"}, [1.0]), ({"since": START_NS + 2 * SECOND}, [1.0, 0.5]),
        ({"until": START_NS + 2 * SECOND}, [0.0]),
    ],
)  # fmt: skip
def test_mode_and_time_select(store: Store, options: Any, values: list[float]) -> None:
    """Rollouts for training and for validation are different curves."""
    for number, reward, stamps in ((1, 0.0, {c.MODE: "train"}), (2, 1.0, {c.MODE: "val"}),
                                   (3, 0.5, {})):  # fmt: skip
        store.add(rollout(number, reward, stamps=stamps))

    assert [point.value for point in points(store, **options)] == values


def test_the_latest_attempt_counts_once(store: Store) -> None:
    """A rollout that was tried again is one value: the latest reward, and that attempt's length."""
    for attempt, at, reward, calls in (("1", 1, 0.0, 4), ("2", 50, 1.0, 2)):
        stamps = {c.ROLLOUT_ID: "same", c.ATTEMPT_ID: attempt}
        store.add(rollout(at, reward, calls=calls, stamps=stamps))

    for metric, value in (("reward", 1.0), ("length", 2.0)):
        assert [point.value for point in points(store, metric)] == [value]


def test_huge_rewards_have_a_mean(store: Store) -> None:
    """Their sum is beyond any number; their mean is not."""
    found = points(fill(store, [1.7e308, 1.7e308, -1.7e308, -1.7e308]), window=4)

    assert (found[1].mean, found[-1].mean) == (1.7e308, 0)


def test_a_store_behind_a_server_has_the_same_curves(
    store: Store, served: Callable[..., str]
) -> None:
    """What is asked of it is SQL on the views, whichever engine holds the spans."""
    fill(store, [0.0, 1.0, None, 0.5], stamps={c.RESOURCE_VERSION: "v1", c.MODE: "val"})
    elsewhere = Store(served(store))
    metrics = ["reward", "length", "tokens", "duration"]

    for options in ({}, {"by": "version"}, {"by": "time", "mode": "val"}):
        here = drawn(store, metrics, **options)
        assert drawn(elsewhere, metrics, **options) == here
        assert here[0].series[0].count == 3
