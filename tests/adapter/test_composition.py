"""One number of several named rewards: weights, gates, and a group's scale."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.adapter.forest import draw, rewards

from lightning_otel.adapter import Composition, TripletAdapter, advantages
from lightning_otel.errors import ConfigError

QUALITY = Composition({"correct": 1.0, "short": 0.5}, gates={"safe": 1.0}, floor=-1.0)


@pytest.mark.parametrize(
    ("given_rewards", "expected"),
    [
        ({"correct": 1.0, "short": 0.5, "safe": 1.0}, 1.25),
        ({"correct": 0.0, "short": 0.0, "safe": 1.0}, 0.0),
        ({"correct": 1.0, "short": 0.5, "safe": 0.0, "other": 9.0}, -1.0),
        ({"safe": 0.0}, -1.0),
        ({"correct": 1.0, "safe": 1.0}, None),
        ({"correct": 1.0, "short": 0.5}, None),
        ({}, None),
    ],
)
def test_composition_weighs_behind_gates(
    given_rewards: dict[str, float], expected: float | None
) -> None:
    """A failed gate gives the floor whatever else is there; a missing part leaves no number."""
    assert QUALITY(given_rewards) == expected


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"weights": {}}, "needs weights"),
        ({"weights": {"a": math.nan}}, "'a' is nan"),
        ({"weights": {"a": "1"}}, "'a' is '1'"),
        ({"weights": {"a": 1.0}, "gates": {"b": math.inf}}, "'b' is inf"),
        ({"weights": {"a": 1.0}, "floor": math.nan}, "'floor' is nan"),
    ],
)
def test_composition_refuses_what_is_no_number(options: dict[str, object], says: str) -> None:
    """A weight, gate or floor that is none is said when the composition is made."""
    with pytest.raises(ConfigError, match=says):
        Composition(**options)  # type: ignore[arg-type]  # wrong on purpose


def test_normalised_rewards_weigh_alike_whatever_their_scale() -> None:
    """Each name is brought to mean 0 and deviation 1 in the group before it is weighted.

    Source: TRL 1.16, ``GRPOTrainer``, ``multi_objective_aggregation="normalize_then_sum"``.
    """
    made = Composition({"correct": 1.0, "tokens": 0.5}, is_normalised=True)
    group = [{"correct": c, "tokens": t} for c, t in ((1, 900), (0, 100), (1, 300), (0, 700))]

    found = made.of_group(group)

    table = np.array([[row["correct"], row["tokens"]] for row in group], dtype=float)
    scaled = (table - table.mean(axis=0)) / (table.std(axis=0, ddof=1) + 1e-6)
    np.testing.assert_allclose(np.array(found, dtype=float), scaled @ [1.0, 0.5], rtol=1e-12)


def test_normalised_rewards_leave_out_who_lacks_one_and_gate_before() -> None:
    """A missing part leaves its rollout without a number; a failed gate counts as the floor."""
    made = Composition({"a": 1.0}, gates={"ok": 1.0}, is_normalised=True)

    found = made.of_group([{"a": 2.0, "ok": 1.0}, {"a": 8.0, "ok": 0.0}, {"ok": 1.0}])

    assert found[0] == pytest.approx(math.sqrt(0.5))
    assert found[1] == pytest.approx(-math.sqrt(0.5))
    assert found[2] is None


@settings(deadline=None)
@given(
    st.lists(st.dictionaries(st.sampled_from("abg"), st.floats(-1e6, 1e6)), max_size=8),
    st.booleans(),
)
def test_a_composed_reward_is_missing_exactly_where_it_cannot_be_known(
    group: list[dict[str, float]], is_normalised: bool
) -> None:
    """In a group and alone, with or without a scale, the same rewards are missing."""
    made = Composition({"a": 1.0, "b": -2.0}, gates={"g": 0.0}, is_normalised=is_normalised)

    together = made.of_group(group)

    for rewards_of_one, value in zip(group, together, strict=True):
        is_shut = rewards_of_one.get("g", 0.0) < 0
        is_known = is_shut or {"a", "b", "g"} <= set(rewards_of_one)
        assert (value is not None) == (made(rewards_of_one) is not None) == is_known


@pytest.mark.parametrize(
    ("drawing", "options", "expected"),
    [
        (
            "root( a !a=1,b=.5 b !a=1 d )",
            {"compose": Composition({"a": 1.0, "b": 2.0})},
            {"a": 2.0, "b": None, "d": None},
        ),
        ("a !a=.5,b=4", {"compose": lambda named: min(named.values())}, {"a": 0.5}),
        ("a !a=.5,b=4", {"compose": lambda named: math.inf}, {"a": None}),
        (
            "a b !a=1,b=.5",
            {"credit": "discounted", "gamma": 0.5, "compose": Composition({"a": 1.0, "b": 2.0})},
            {"a": 1.0, "b": 2.0},
        ),
    ],
)
def test_the_adapter_composes_each_steps_reward(
    drawing: str, options: Any, expected: dict[str, float | None]
) -> None:
    """By weights or a plain function, before it is discounted; what is missing is reported."""
    found = TripletAdapter(**options).explain(draw(drawing).spans)

    assert rewards(found.trajectories) == expected
    if drawing.startswith("root"):
        assert found.report.reasons() == {advantages.MISSING_PART.format("b"): 1}
        assert (found.report.rewards, found.report.rewards_placed) == (2, 2)
        assert found.trajectories[0].transitions[1].rewards == {"a": 1.0}
