"""Advantages: the formulas against others' written out, groups, attempts and weights."""

import json
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.adapter.forest import Forest

from lightning_otel import conventions as c
from lightning_otel.adapter import Adaptation, Advantage, Composition, TripletAdapter, advantages
from lightning_otel.adapter.attempts import AttemptKey
from lightning_otel.errors import ConfigError
from lightning_otel.types import Estimator, Span, Transition


def rollout(
    name: str,
    task: object,
    *values: float,
    calls: int = 2,
    attempt: str = "1",
    agents: Sequence[str] = ("",),
    is_root: bool = True,
    **attributes: Any,
) -> list[Span]:
    """A rollout on a task: calls of each agent, and rewards at its end."""
    forest = Forest(
        rollout_id=name,
        attempt_id=attempt,
        trace_id=f"{name}{attempt}".ljust(32, "0"),
        process=f"{name}{attempt}",
        tick=1000 * int(attempt),
    )
    marked = {**attributes, **({} if task is None else {c.TASK: json.dumps(task)})}
    with forest.inside(c.SPAN_ROLLOUT if is_root else "root", **marked):
        for agent in agents:
            with forest.agent(agent) if agent else forest.inside("work"):
                for index in range(calls):
                    forest.call(f"{name} {agent} {index}")
        for index, value in enumerate(values):
            forest.reward((f"name {index}", value))
    return forest.spans


def explain(*rollouts: list[Span], **options: Any) -> Adaptation:
    """The adaptation of several rollouts, with advantages."""
    options.setdefault("advantage", "grpo")
    return TripletAdapter(**options).explain([span for spans in rollouts for span in spans])


def steps(found: Adaptation) -> list[Transition]:
    """Every step once."""
    every = [step for path in found.trajectories for step in path.transitions]
    return list({id(step): step for step in every}.values())


def by_rollout(found: Adaptation) -> dict[str, float | None]:
    """The one advantage that all steps of a rollout have."""
    made: dict[str, set[float | None]] = {}
    for step in steps(found):
        made.setdefault(step.rollout_id, set()).add(step.advantage)
    assert all(len(values) == 1 for values in made.values())
    return {name: values.pop() for name, values in made.items()}


Scores: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"

# --- the formulas --------------------------------------------------------------------------------


def verl_grpo(scores: Scores, *, is_scaled: bool) -> Scores:
    """Source: verl 0.9.1, ``core_algos.compute_grpo_outcome_advantage``, of one group.

    ``norm_adv_by_std_in_grpo=False`` is Dr. GRPO.
    """
    centred = scores - np.mean(scores)
    return centred / (np.std(scores, ddof=1) + 1e-6) if is_scaled else centred


def verl_rloo(scores: Scores) -> Scores:
    """Source: verl 0.9.1, ``core_algos.compute_rloo_outcome_advantage``, of one group."""
    number = len(scores)
    return scores * number / (number - 1) - np.mean(scores) * number / (number - 1)


def trl_grpo(rewards: Scores) -> Scores:
    """Source: TRL 1.16, ``GRPOTrainer._generate_and_score_completions``, of one group."""
    return (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)


scores_of_a_group = st.lists(st.floats(-100, 100), min_size=2, max_size=12)


@settings(deadline=None)
@given(scores_of_a_group)
def test_estimators_give_what_verl_computes(values: list[float]) -> None:
    """The three estimators against verl's formulas, written out."""
    scores = np.array(values)

    for estimator, expected in (
        ("grpo", verl_grpo(scores, is_scaled=True)),
        ("dr_grpo", verl_grpo(scores, is_scaled=False)),
        ("rloo", verl_rloo(scores)),
    ):
        found = advantages.NAMED[estimator](values)
        # Scores that are alike but for rounding have a deviation of 1e-14, which 1e-6 damps.
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)


@settings(deadline=None)
@given(scores_of_a_group.filter(lambda values: np.std(values) > 0.1))
def test_grpo_is_what_trl_computes_but_for_its_epsilon(values: list[float]) -> None:
    """TRL adds 1e-4 where verl adds 1e-6: at a deviation above 0.1 that is 0.1 % at most."""
    found = advantages.NAMED["grpo"](values)

    np.testing.assert_allclose(found, trl_grpo(np.array(values)), rtol=1e-3, atol=1e-9)


@settings(deadline=None)
@given(scores_of_a_group)
def test_leave_one_out_is_each_less_the_mean_of_the_others(values: list[float]) -> None:
    """RLOO as its paper defines it, one by one."""
    found = advantages.NAMED["rloo"](values)

    for index, value in enumerate(values):
        others = values[:index] + values[index + 1 :]
        assert found[index] == pytest.approx(value - sum(others) / len(others), abs=1e-9)


# --- from spans ----------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "dr_grpo"])
def test_all_steps_of_a_rollout_have_its_advantage(estimator: Estimator) -> None:
    """Computed once a rollout among those of its task, then spread, whoever got the reward."""
    values = {"a": 1.0, "b": 0.0, "c": 0.5, "d": 0.0}
    group = [rollout(name, "sum", value) for name, value in values.items()]
    other = [rollout("e", "sort", 3.0), rollout("f", "sort", 1.0)]

    found = explain(*group, *other, advantage=estimator)

    scores = np.array(list(values.values()))
    expected = {
        "grpo": verl_grpo(scores, is_scaled=True),
        "rloo": verl_rloo(scores),
        "dr_grpo": verl_grpo(scores, is_scaled=False),
    }[estimator]
    made = by_rollout(found)
    assert [made[name] for name in values] == pytest.approx(expected.tolist())
    assert {step.group_id for step in steps(found)} == {'"sum"', '"sort"'}
    assert found.report.reasons() == {}


def test_a_rollouts_reward_is_the_sum_of_its_steps() -> None:
    """Rewards for steps add up, under discounted credit too; one for a whole step counts once."""
    spans = []
    for name, values in (("a", [0.5, 1.0]), ("b", [0.25, 0.25])):
        forest = Forest(rollout_id=name, trace_id=name * 32, process=name)
        with forest.inside(c.SPAN_ROLLOUT, **{c.TASK: '"t"'}):
            for value in values:
                with forest.inside("step"):
                    forest.call("one")
                    forest.call("two")
                    forest.reward(value)
        spans.append(forest.spans)

    for rule in ("next", "step", "discounted"):
        found = explain(*spans, credit=rule, advantage="dr_grpo")
        assert by_rollout(found) == {"a": 0.5, "b": -0.5}


@pytest.mark.pain(22)
def test_weights_of_an_agents_steps_in_a_rollout_add_up_to_one() -> None:
    """A chatty rollout weighs as much as a short one."""
    chatty = rollout("a", "t", 1.0, calls=8, agents=("planner", "worker"))
    short = rollout("b", "t", 0.0, calls=1, agents=("planner", "worker"))

    found = explain(chatty, short)

    weights: dict[tuple[str, str], list[float]] = {}
    for step in steps(found):
        weights.setdefault((step.rollout_id, step.agent), []).append(step.weight)
    assert {key: len(held) for key, held in weights.items()} == {
        ("a", "planner"): 8, ("a", "worker"): 8, ("b", "planner"): 1, ("b", "worker"): 1,
    }  # fmt: skip
    assert all(math.fsum(held) == pytest.approx(1.0) for held in weights.values())


def test_a_shared_step_stays_one_and_weighs_once() -> None:
    """Branches keep running through one step, with one advantage."""
    groups = []
    for name, value in (("a", 1.0), ("b", 0.0)):
        forest = Forest(rollout_id=name, trace_id=name * 32, process=name)
        with forest.inside(c.SPAN_ROLLOUT, **{c.TASK: '"t"'}):
            forest.call("plan")
            forest.close(*[forest.open_call(f"part {index}") for index in range(3)])
            forest.reward(value)
        groups.append(forest.spans)

    found = explain(*groups)

    assert found.report.transitions == len(steps(found)) == 8
    assert {step.weight for step in steps(found)} == {0.25}


def test_without_being_asked_for_there_is_no_advantage() -> None:
    """By default every step weighs 1 and has neither group nor advantage."""
    found = explain(rollout("a", "t", 1.0), rollout("b", "t", 0.0), advantage=None)

    assert {(s.group_id, s.advantage, s.weight) for s in steps(found)} == {("", None, 1.0)}


# --- what cannot be compared ---------------------------------------------------------------------


def test_a_rollout_without_a_reward_is_left_out_and_reported() -> None:
    """A missing reward is not 0: the others are compared without it."""
    found = explain(
        rollout("a", "t", 1.0), rollout("b", "t", 0.0), rollout("c", "t"), advantage="dr_grpo"
    )

    assert by_rollout(found) == {"a": 0.5, "b": -0.5, "c": None}
    assert found.report.reasons() == {advantages.NO_REWARD: 1}


def test_a_group_of_one_has_no_advantage() -> None:
    """There is nothing to compare with, which is not the same as being average."""
    found = explain(rollout("a", "t", 1.0), rollout("b", "t"), rollout("c", None, 1.0))

    assert set(by_rollout(found).values()) == {None}
    assert found.report.reasons() == {
        advantages.ALONE: 1, advantages.NO_REWARD: 1, advantages.NO_TASK: 1,
    }  # fmt: skip


def test_a_group_that_is_not_whole_has_no_advantage() -> None:
    """Where a size is asked for, an incomplete group waits, and says how far it is."""
    whole = [rollout(f"w{index}", "whole", float(index)) for index in range(3)]
    part = [rollout("p0", "part", 1.0), rollout("p1", "part", 0.0), rollout("p2", "part")]

    found = explain(*whole, *part, advantage=Advantage("dr_grpo", size=3))

    made = by_rollout(found)
    assert [made[f"w{index}"] for index in range(3)] == [-1.0, 0.0, 1.0]
    assert [made[f"p{index}"] for index in range(3)] == [None] * 3
    assert found.report.reasons() == {
        advantages.NOT_WHOLE.format(2, 3): 2, advantages.NO_REWARD: 1,
    }  # fmt: skip


def test_of_several_attempts_the_last_one_counts() -> None:
    """A rollout is compared once, however often it was tried, and by its last attempt alone."""
    found = explain(
        rollout("a", "t", 0.0, attempt="1"),
        rollout("a", "t", 1.0, attempt="2"),
        rollout("b", "t", 0.0),
        rollout("c", "t", 5.0, attempt="1"),
        rollout("c", "t", attempt="2"),
        advantage="dr_grpo",
    )

    made = {(step.rollout_id, step.attempt_id): step.advantage for step in steps(found)}
    assert made == {
        ("a", "1"): None, ("a", "2"): 0.5, ("b", "1"): -0.5, ("c", "1"): None, ("c", "2"): None,
    }  # fmt: skip
    assert found.report.reasons() == {advantages.OTHER_ATTEMPT: 2, advantages.NO_REWARD: 1}


def test_rewards_too_large_to_compare_are_reported() -> None:
    """Numbers whose differences no float holds give no advantage, and no exception."""
    found = explain(
        rollout("a", "t", 1.7e308), rollout("b", "t", -1.7e308), rollout("c", "t", 1.7e308)
    )

    assert set(by_rollout(found).values()) == {None}
    assert found.report.reasons() == {advantages.TOO_LARGE: 3}


# --- groups --------------------------------------------------------------------------------------


def test_groups_are_told_by_an_attribute_or_a_function() -> None:
    """Any attribute of a rollout's spans, or what a function makes of them."""
    spans = [
        rollout("a", "x", 1.0, level="easy"),
        rollout("b", "y", 0.0, level="easy"),
        rollout("c", "z", 0.0, level="hard"),
    ]

    by_attribute = explain(*spans, advantage=Advantage("dr_grpo", group_by="level"))
    by_function = explain(
        *spans,
        advantage=Advantage("dr_grpo", group_by=lambda own: str(len(own[0].attributes["level"]))),
    )
    by_none = explain(*spans, advantage=Advantage("dr_grpo", group_by=lambda own: None))

    assert by_rollout(by_attribute) == {"a": 0.5, "b": -0.5, "c": None}
    assert {step.group_id for step in steps(by_attribute)} == {"easy", "hard"}
    assert by_rollout(by_function)["a"] == pytest.approx(2 / 3)
    assert by_none.report.reasons() == {advantages.NO_TASK: 3}


def test_the_task_is_told_by_its_id_else_its_text_on_whatever_span() -> None:
    """An id goes before the text; the order of a JSON object's keys tells no tasks apart."""
    spans = [
        rollout("a", {"x": 1, "y": 2}, 1.0),
        rollout("b", {"y": 2, "x": 1}, 0.0),
        rollout("c", {"other": "text"}, 1.0, **{c.TASK_ID: "task 1"}),
        rollout("d", None, 0.0, is_root=False, **{c.TASK_ID: "task 1"}),
        rollout("e", "long " * 100, 0.0),
    ]

    found = explain(*spans, advantage="dr_grpo")

    groups = {step.rollout_id: step.group_id for step in steps(found)}
    assert groups["a"] == groups["b"] == '{"x": 1, "y": 2}'
    assert groups["c"] == groups["d"] == "task 1"
    assert groups["e"].startswith("sha256:")
    assert by_rollout(found) == {"a": 0.5, "b": -0.5, "c": 0.5, "d": -0.5, "e": None}


def test_several_named_rewards_are_composed_over_the_whole_rollout() -> None:
    """Parts given at different steps make one number of the rollout, on a common scale."""
    groups = []
    rows = {"a": (1.0, 100.0), "b": (0.0, 300.0), "c": (1.0, 200.0)}
    for name, (correct, tokens) in rows.items():
        forest = Forest(rollout_id=name, trace_id=name * 32, process=name)
        with forest.inside(c.SPAN_ROLLOUT, **{c.TASK: '"t"'}):
            forest.call("first")
            forest.reward(("tokens", tokens))
            forest.call("second")
            forest.reward(("correct", correct))
        groups.append(forest.spans)
    made = Composition({"correct": 1.0, "tokens": -0.5}, is_normalised=True)

    found = explain(*groups, compose=made, advantage="dr_grpo")

    table = np.array(list(rows.values()))
    scaled = (table - table.mean(axis=0)) / (table.std(axis=0, ddof=1) + 1e-6)
    expected = scaled @ [1.0, -0.5]
    assert list(by_rollout(found).values()) == pytest.approx(expected.tolist())
    assert {step.reward for step in steps(found)} == {None}


def test_a_function_of_ones_own_estimates() -> None:
    """The rewards of a group in order of their rollouts' start, to one number each."""

    def ranks(values: Sequence[float]) -> list[float]:
        return [float(sorted(values).index(value)) for value in values]

    found = explain(
        *[rollout(name, "t", value) for name, value in (("a", 5.0), ("b", 9.0), ("c", 7.0))],
        advantage=Advantage(ranks),
    )

    assert by_rollout(found) == {"a": 0.0, "b": 2.0, "c": 1.0}


@pytest.mark.parametrize("answer", [[], [1.0], [1.0, math.nan], ["1", "2"]])
def test_a_function_that_gives_no_advantages_is_an_error(answer: Any) -> None:
    """It must give one finite number for each reward."""
    with pytest.raises(ConfigError, match="one finite number for each"):
        explain(
            rollout("a", "t", 1.0), rollout("b", "t", 0.0), advantage=Advantage(lambda _: answer)
        )


def test_a_group_cannot_be_of_one() -> None:
    """A size below two would ask for nothing to compare with."""
    with pytest.raises(ConfigError, match="size is 1"):
        Advantage(size=1)


# --- parts of a store ----------------------------------------------------------------------------


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.one_of(st.none(), st.integers(-3, 3))), max_size=9),
    st.integers(1, 4),
    st.sampled_from(["grpo", "rloo", "dr_grpo"]),
)
def test_two_passes_over_parts_give_what_one_pass_gives(
    given_rollouts: list[tuple[int, int | None]], size: int, estimator: Estimator
) -> None:
    """However rollouts are divided, each has the same advantage, or the same reason for none."""
    made = [
        rollout(f"r{index}", f"task {task}", *([] if value is None else [float(value)]), calls=1)
        for index, (task, value) in enumerate(given_rollouts)
    ]
    adapter = TripletAdapter(advantage=estimator)

    whole = adapter.explain([span for spans in made for span in spans])
    parts = [
        [span for spans in made[start : start + size] for span in spans]
        for start in range(0, len(made), size)
    ]
    estimates = adapter.estimate(each for part in parts for each in adapter.outcomes(part))
    divided = [adapter.explain(part, estimates=estimates) for part in parts]

    assert [path for each in divided for path in each.trajectories] == sorted(
        whole.trajectories, key=lambda path: int(path.rollout_id[1:])
    )
    reasons = [each.reason for found in divided for each in found.report.dropped]
    assert sorted(reasons) == sorted(each.reason for each in whole.report.dropped)


def test_a_rollout_that_came_between_two_passes_is_reported() -> None:
    """What was not compared has no advantage, and says so."""
    adapter = TripletAdapter(advantage="grpo")
    first = [*rollout("a", "t", 1.0), *rollout("b", "t", 0.0)]
    estimates = adapter.estimate(adapter.outcomes(first))

    found = adapter.explain([*first, *rollout("c", "t", 1.0)], estimates=estimates)

    assert by_rollout(found)["c"] is None
    assert found.report.reasons() == {advantages.CAME_LATER: 1}
    assert AttemptKey("a", "1") in estimates
