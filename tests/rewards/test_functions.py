"""Reward functions: what they get and give, and how several numbers become one."""

import asyncio
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.adapter.forest import draw, steps_of, text_of

from lightning_otel import (
    Composition,
    Price,
    Store,
    Trajectory,
    Transition,
    Worth,
    apply_rewards,
    auto_trace,
    emit_action,
    emit_reward,
)
from lightning_otel.adapter import TripletAdapter, advantages
from lightning_otel.errors import ConfigError
from lightning_otel.messages import message, text_part
from lightning_otel.rewards.functions import Case, RewardFailure, RewardFunction
from lightning_otel.types import Rollout

STEP = Transition(
    "r1", "1", "calc", 0, (), (message("assistant", [text_part("4")]),), None, None, done=True
)
PATH = Trajectory("r1", "1", "calc", 0, (STEP,))
CASE = Case(Rollout("r1", {"want": "4"}, "succeeded"), "1", (PATH,), {"tone": 0.25}, PATH)


def judged(function: Any, version: str = "") -> object:
    return RewardFunction.of(function, version).judge(CASE)


def test_function_gets_what_it_asks_for() -> None:
    """By the names of its parameters; what has another name and a default keeps that."""
    asked: dict[str, object] = {}

    def judge(
        task: object, answer: str, *, trajectory: Trajectory, trajectories: Any,
        rewards: Mapping[str, float], rollout: Rollout, tolerance: float = 0.5, **more: object,
    ) -> float:  # fmt: skip
        asked.update(locals())
        return rewards["tone"] + tolerance

    def steps(path: Trajectory) -> int:  # a sole parameter gets the trajectory
        return len(path.transitions)

    assert judged(judge) == {"judge": 0.75}
    assert {name: asked[name] for name in ("task", "answer", "trajectory", "trajectories")} == {
        "task": {"want": "4"}, "answer": "4", "trajectory": PATH, "trajectories": (PATH,)
    }  # fmt: skip
    assert asked["rollout"] is CASE.rollout
    assert judged(steps) == {"steps": 1.0}
    assert RewardFunction.of(steps).judges_each_trajectory


@pytest.mark.parametrize(
    ("result", "version", "expected"),
    [
        (None, "", None),
        ({}, "", None),
        ({"ok": True, "short": 0.5}, "", {"ok": 1.0, "short": 0.5}),
        ({"ok": True, "short": 0.5}, "2", {"ok@2": 1.0, "short@2": 0.5}),
        ("1", "", RewardFailure("no number, but str", "judge is '1', no number")),
        ([1.0], "", RewardFailure("no number, but list", "judge is [1.0], no number")),
        (float("nan"), "", RewardFailure("not finite", "judge is nan; a reward must be finite")),
        (
            {"ok": 1.0, "x": None},
            "",
            RewardFailure("no number, but NoneType", "x is None, no number"),
        ),
        (KeyError("no\nsuch"), "", RewardFailure("KeyError", "KeyError: 'no\\nsuch'")),
    ],
)
def test_result_is_rewards_or_a_failure(result: object, version: str, expected: object) -> None:
    """The first number is the primary one; async as sync, also where a loop runs already."""

    def judge(answer: str) -> object:
        if isinstance(result, Exception):
            raise result
        return result

    async def judge_async(answer: str) -> object:
        await asyncio.sleep(0)
        return judge(answer)

    async def notebook() -> object:
        return judged(judge_async, version)

    judge_async.__name__ = "judge"
    assert judged(judge, version) == expected
    assert judged(judge_async, version) == asyncio.run(notebook()) == expected


def unknown(answer: str, completion: str) -> float:
    return 1.0


def positional(answer: str, /, task: str) -> float:
    """Cannot be asked by name."""
    return 1.0


def nothing() -> float:
    return 1.0


@pytest.mark.parametrize(
    ("function", "fault"),
    [
        (lambda task: 1.0, "has no name, by which its rewards are known again"),
        (3, "is called, and 3 cannot be"),
        (unknown, r"unknown\(\) takes completion; it may ask by name for task, answer"),
        (positional, r"positional\(\) takes answer; it may ask by name"),
        (nothing, r"nothing\(\) takes nothing that it could judge"),
    ],
)
def test_unfit_function_is_refused(function: Any, fault: str) -> None:
    """Before anything is judged it is said what a function may ask for."""
    with pytest.raises(ConfigError, match=fault):
        RewardFunction.of(function)


PAID = Transition(
    "r1", "1", "calc", 0, (), (), None, None, done=False,
    model="big-2026", input_tokens=1_000, output_tokens=200,
    start_ns=1_000_000_000, end_ns=2_000_000_000,
)  # fmt: skip
PRICES = {"big-*": Price(input=10.0, output=50.0), "small": Price(input=1.0, output=2.0)}


def paths(*steps: Transition) -> tuple[Trajectory, ...]:
    """One trajectory of the steps."""
    return (Trajectory("r1", "1", "calc", 0, steps),)


LATER = replace(PAID, model="small", start_ns=3_000_000_000, end_ns=5_500_000_000)
COST = (1_000 * 10 + 200 * 50 + 1_000 * 1 + 200 * 2) / 1e6
ALL = Composition({"ok": 1.0, "cost": -10.0, "seconds": -0.1})
GATED = Composition({"ok": 1.0, "cost": -1.0}, gates={"ok": 0.5}, floor=-1.0)
OK_AND_TIME = Composition({"ok": 1.0, "seconds": -1.0})


@pytest.mark.parametrize(
    ("weights", "trajectories", "rewards", "expected"),
    [
        # Tokens have their model's price; time runs from the first start to the last end.
        (ALL, paths(PAID, LATER), {"ok": 1.0, "tone": 0.5},
         {"worth": 1.0 - 10 * COST - 0.1 * 4.5, "cost": COST, "seconds": 4.5}),
        # A step that two branches run through was paid once.
        (Composition({"tokens": 1.0}), (*paths(PAID), *paths(PAID, replace(PAID, step=1))), {},
         {"worth": 2_400.0, "tokens": 2_400.0}),
        # What is wrong is not made up for by being cheap.
        (GATED, paths(PAID), {"ok": 0.0}, {"worth": -1.0, "cost": 0.02}),
        # Without a reward it weighs there is none; what one is named is not measured.
        (OK_AND_TIME, paths(PAID), {}, None),
        (OK_AND_TIME, paths(PAID), {"ok": 1.0, "seconds": 0.25}, {"worth": 0.75}),
    ],
)  # fmt: skip
def test_worth_weighs_what_is_rewarded_and_measured(
    weights: Composition, trajectories: Any, rewards: Any, expected: Any
) -> None:
    """Quality against cost, time and tokens; what was measured stands beside it."""
    found = Worth(weights, prices=PRICES)(trajectories, rewards)

    assert found == (expected if expected is None else pytest.approx(expected))


def test_what_cannot_be_known_is_told() -> None:
    """No price and no token is made up, and a price is a number."""
    cost = Composition({"cost": -1.0})
    worth = Worth(cost, prices=PRICES)
    with pytest.raises(
        ConfigError, match=r"'other' has no price; there are prices of big-\*, small"
    ):
        worth(paths(replace(PAID, model="other")), {})
    with pytest.raises(ConfigError, match="not say how many tokens the model 'big-2026' took"):
        worth(paths(replace(PAID, output_tokens=None)), {})
    with pytest.raises(ConfigError, match="nothing has a price; give prices="):
        Worth(cost)
    with pytest.raises(ConfigError, match="a price for output is -1"):
        Price(input=1.0, output=-1.0)


def test_worth_is_applied_to_what_is_stored(store: Store, client: openai.OpenAI) -> None:
    """After the functions it builds on it is applied as they are, to real calls."""
    with auto_trace(store=store, rollout_id="r1"):
        client.chat.completions.create(model="toy", messages=[{"role": "user", "content": "hi"}])
        emit_reward("ok", 1.0)
    with auto_trace(store=store, rollout_id="r2"):
        emit_action("say", "by hand, of no model")
        emit_reward("ok", 1.0)
    weights = Composition({"ok": 1.0, "cost": -1.0})

    done = apply_rewards(store, Worth(weights, prices={"toy*": Price(input=1e6, output=0.0)}))

    first = next(iter(store.transitions(rollout_id="r1")))
    assert (done.rewards, dict(done.failed)) == (1, {"ConfigError": 1})
    assert first.input_tokens
    assert dict(first.rewards) == {
        "ok": 1.0, "worth": 1.0 - first.input_tokens, "cost": first.input_tokens
    }  # fmt: skip


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

    assert {text_of(step.action): step.reward for step in steps_of(found)} == expected
    if drawing.startswith("root"):
        assert found.report.reasons() == {advantages.MISSING_PART.format("b"): 1}
        assert (found.report.rewards, found.report.rewards_placed) == (2, 2)
        assert found.trajectories[0].transitions[1].rewards == {"a": 1.0}
