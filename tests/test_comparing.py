"""Comparisons of versions: paired by task, with an interval, refused where little is known."""

import random

import pytest

from lightning_otel import Store, auto_trace, emit_action, emit_reward
from lightning_otel.errors import ConfigError, NotFoundError
from lightning_otel.resources import Resources
from lightning_otel.resources.comparing import compared, t_quantile
from lightning_otel.state import State


class Traffic:
    """Rollouts that were made with a version and rewarded."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def run(self, version: int, reward: float | None, task: object = None, name: str = "p") -> None:
        """One rollout of one step."""
        with auto_trace(store=self.store, task=task, resources={"*": {name: version}}):
            emit_action("what was done")
            if reward is not None:
                emit_reward(reward)


@pytest.fixture
def traffic(store: Store) -> Traffic:
    """Makes rollouts."""
    return Traffic(store)


def test_pairs_are_compared_by_task(store: Store, traffic: Traffic) -> None:
    """Each task counts once, however often it was done; what tells nothing is left out and told."""
    for task in range(10):
        for reward in (0.0, 0.2):
            traffic.run(1, reward + task / 10, task)
        traffic.run(2, 0.5 + task / 10 + (task % 2) / 10, task)
    traffic.run(2, 9.0, "done with one only")
    traffic.run(2, 9.0)
    traffic.run(2, None, 0)
    traffic.run(3, 9.0, 0)

    found = compared("p", 1, 2, store)

    assert (found.tasks, found.rollouts_a, found.rollouts_b) == (10, 20, 10)
    assert found.mean_a == pytest.approx(0.55)
    assert found.mean_b == pytest.approx(1.0)
    assert found.difference == pytest.approx(0.45)
    # Differences are 0.4 and 0.5 in turn: their deviation is 0.0527, over the root of ten.
    assert (found.high - found.low) / 2 == pytest.approx(2.2622 * 0.052705 / 10**0.5, abs=1e-4)
    assert found.is_better
    assert not found.is_worse
    assert found.left_out == {
        "without a reward": 1,
        "without a task": 1,
        "of tasks that were done with one version only": 1,
    }
    assert str(found).startswith("p@2 − p@1 = +0.450 [+0.412, +0.488] (10 tasks; 10 and 20")


def test_unpaired_rollouts_are_compared_by_welch(store: Store, traffic: Traffic) -> None:
    """Where no task comes twice all rollouts count, and the interval is wider."""
    for n in range(8):
        traffic.run(1, float(n % 2), f"a{n}")
        traffic.run(2, 0.5, f"b{n}")

    with pytest.raises(ConfigError, match="there are 0 tasks that were done with both"):
        compared("p", 1, 2, store)
    found = compared("p", 2, 1, store, is_paired=False)

    assert (found.tasks, found.rollouts_a, found.rollouts_b) == (0, 8, 8)
    assert found.difference == 0
    assert found.high == pytest.approx(2.3646 * (2 / 7) ** 0.5 / 8**0.5, abs=1e-3)
    assert not found.is_better
    assert not found.is_worse


def test_too_few_are_refused_with_the_reasons(store: Store, traffic: Traffic) -> None:
    """Seven pairs say nothing; the error counts them, and what was left out."""
    for task in range(7):
        traffic.run(1, 0.0, task)
        traffic.run(2, 1.0, task)
    traffic.run(1, None, 8)

    with pytest.raises(ConfigError, match=r"there are 7 tasks .* 8 are the fewest .*1 without a"):
        compared("p", 1, 2, store)
    with pytest.raises(ConfigError, match="compared with itself"):
        compared("p", 1, 1, store)


def test_interval_covers_what_is_true() -> None:
    """Of intervals around means of 10 draws 95 % hold the true mean, within what chance allows."""
    from lightning_otel.resources.comparing import _interval

    draw = random.Random(7)
    held = 0
    for _ in range(2000):
        drawn = [draw.gauss(1.0, 2.0) for _ in range(10)]
        mean = sum(drawn) / 10
        spread = (sum((each - mean) ** 2 for each in drawn) / 9 / 10) ** 0.5
        low, high = _interval(mean, spread, 9)
        held += low <= 1.0 <= high

    assert abs(held / 2000 - 0.95) < 4 * (0.95 * 0.05 / 2000) ** 0.5


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(5, 2.5706), (7, 2.3646), (30, 2.0423), (1000, 1.9623)]
)
def test_t_quantile_is_that_of_the_tables(freedom: int, quantile: float) -> None:
    """To three digits."""
    assert t_quantile(0.975, freedom) == pytest.approx(quantile, abs=1e-3)


def test_canary_is_compared_and_shown(store: Store, traffic: Traffic) -> None:
    """From publication to promotion: the canary's rewards tell that it is better."""
    resources = Resources(State(store.name))
    resources.publish("system_prompt", "Be brief.\nAnswer.")
    resources.publish("system_prompt", "Be kind.\nAnswer.", alias="canary", weight=0.5)
    for task in range(8):
        given = {}
        for n in range(40):
            version = resources.assigned(f"{task}-{n}")["system_prompt"].version
            given[version] = given.get(version, 0) + 1
        assert given.keys() == {1, 2}
        for version in given:
            traffic.run(version, version - 1.0, task, name="system_prompt")

    found = resources.compare("system_prompt", store=store)
    promoted = resources.promote("system_prompt")

    assert (found.a, found.b, found.is_better) == (1, 2, True)
    assert promoted.version == 2
    assert resources.diff("system_prompt", 1, 2).splitlines() == [
        "--- system_prompt@1", "+++ system_prompt@2", "@@ -1,2 +1,2 @@",
        "-Be brief.", "+Be kind.", " Answer.",
    ]  # fmt: skip
    assert resources.diff("system_prompt", 2, 2) == ""
    with pytest.raises(NotFoundError):
        resources.compare("system_prompt", 1, 9, store)
