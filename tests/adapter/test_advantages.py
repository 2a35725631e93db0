"""Advantages: the formulas against others' written out, groups, attempts and weights."""

import json
import math
from typing import Any, TypeAlias

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.adapter.forest import Forest, draw, said, steps_of

from lightning_otel.adapter import Adaptation, Advantage, Composition, TripletAdapter
from lightning_otel.errors import ConfigError
from lightning_otel.types import Credit, Estimator, Span
from lightning_otel.types import conventions as c


def explain(*rollouts: list[Span], **options: Any) -> Adaptation:
    """The adaptation of several rollouts, with advantages."""
    options.setdefault("advantage", "grpo")
    return TripletAdapter(**options).explain([span for spans in rollouts for span in spans])


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


# Rewards are added in decimals, nine places of them.
scores_of_a_group = st.lists(
    st.floats(-100, 100).map(lambda score: round(score, 9)), min_size=2, max_size=12
)


def advantages_of(scores: list[float], estimator: Estimator) -> list[float | None]:
    """The advantages of a task's rollouts, of one call each."""
    text = ", ".join(f"r{number} t {score!r}" for number, score in enumerate(scores))
    steps = steps_of(explain(*drawn(text), advantage=estimator))
    found = {step.rollout_id: step.advantage for step in steps}
    return [found[f"r{number}"] for number in range(len(scores))]


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
        found = advantages_of(values, estimator)
        # Scores that are alike but for rounding have a deviation of 1e-14, which 1e-6 damps.
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)


@settings(deadline=None)
@given(scores_of_a_group.filter(lambda values: np.std(values) > 0.1))
def test_grpo_is_what_trl_computes_but_for_its_epsilon(values: list[float]) -> None:
    """TRL adds 1e-4 where verl adds 1e-6: at a deviation above 0.1 that is 0.1 % at most."""
    found = advantages_of(values, "grpo")

    np.testing.assert_allclose(found, trl_grpo(np.array(values)), rtol=1e-3, atol=1e-9)


# --- from spans ----------------------------------------------------------------------------------

CASES: dict[str, tuple[str, Any, str]] = {
    "grpo among those of a task": (
        "a sum 1, b sum 0, c sum 0.5, d sum 0, e sort 3, f sort 1",
        "grpo",
        "a=1.31 b=-0.783 c=0.261 d=-0.783 e=0.707 f=-0.707",
    ),
    "rloo": ("a sum 1, b sum 0, c sum 0.5, d sum 0", "rloo", "a=0.833 b=-0.5 c=0.167 d=-0.5"),
    "dr_grpo": (
        "a sum 1, b sum 0, c sum 0.5, d sum 0",
        "dr_grpo",
        "a=0.625 b=-0.375 c=0.125 d=-0.375",
    ),
    "nobody asks": ("a t 1, b t 0", None, "a=- b=-"),
    "no reward is not 0": (
        "a t 1, b t 0, c t",
        "dr_grpo",
        "a=0.5 b=-0.5 c=- ! its rollout has no reward",
    ),
    "a group of one": (
        "a t 1, b t, c - 1",
        "grpo",
        "a=- b=- c=- ! its rollout has no reward, no other rollout of its group has a reward,"
        " nothing says which task its rollout is about",
    ),
    "a group that is not whole": (
        "a t 0, b t 1, c t 2, d u 1, e u 0, f u",
        Advantage("dr_grpo", size=3),
        "a=-1 b=0 c=1 d=- e=- f=- ! its group has a reward in 2 of 3 rollouts,"
        " its group has a reward in 2 of 3 rollouts, its rollout has no reward",
    ),
    "the last attempt counts": (
        "a t 0, a.2 t 1, b t 0, c t 5, c.2 t",
        "dr_grpo",
        "a=- a.2=0.5 b=-0.5 c=- c.2=- ! another attempt at its rollout counts,"
        " another attempt at its rollout counts, its rollout has no reward",
    ),
    "rewards too large to compare": (
        "a t 1.7e308, b t -1.7e308, c t 1.7e308",
        "grpo",
        "a=- b=- c=-"
        + " ! "
        + ", ".join(["the rewards of its group are too large to compare"] * 3),
    ),
    "a group by an attribute": (
        "a x 1 easy, b y 0 easy, c z 0 hard",
        Advantage("dr_grpo", group_by="level"),
        "a=0.5 b=-0.5 c=- ! no other rollout of its group has a reward",
    ),
    "a group by a function": (
        "a x 1 easy, b y 0 easy, c z 0 hard",
        Advantage("dr_grpo", group_by=lambda own: str(len(own[0].attributes["level"]))),
        "a=0.667 b=-0.333 c=-0.333",
    ),
    "a function that knows no group": (
        "a x 1, b y 0",
        Advantage(group_by=lambda own: None),
        "a=- b=- ! " + ", ".join(["nothing says which task its rollout is about"] * 2),
    ),
    "an estimator of one's own": (
        "a t 5, b t 9, c t 7",
        Advantage(lambda values: [float(sorted(values).index(value)) for value in values]),
        "a=0 b=2 c=1",
    ),
    "rewards for steps add up": ("a t 0.5 1, b t 0.25 0.25", "dr_grpo", "a=0.5 b=-0.5"),
}


def drawn(text: str) -> list[list[Span]]:
    """Rollouts as words: name and attempt, task, rewards, level; each reward follows two calls."""
    found = []
    for number, each in enumerate(text.split(", ")):
        name, task, *values = each.split()
        rollout_id, _, attempt = name.partition(".")
        levels = [value for value in values if value.isalpha()]
        marks = {"level": levels[0]} if levels else {}
        forest = Forest(
            rollout_id=rollout_id,
            attempt_id=attempt or "1",
            trace_id=f"{number:032x}",
            process=name,
            tick=100 * number,
        )
        if task != "-":
            marks[c.TASK] = json.dumps(task)
        with forest.inside(c.SPAN_ROLLOUT, **marks):
            for value in [value for value in values if value not in levels] or [""]:
                with forest.inside("step"):
                    forest.call("one")
                    forest.call("two")
                    if value:
                        forest.reward(float(value))
        found.append(forest.spans)
    return found


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("rule", ["previous", "step", "discounted"])
def test_all_steps_of_a_rollout_have_its_advantage(name: str, rule: Credit) -> None:
    """Computed once a rollout among those of its group, then spread; else there is a reason."""
    drawing, advantage, expected = CASES[name]

    found = explain(*drawn(drawing), advantage=advantage, credit=rule)

    made: dict[str, set[float | None]] = {}
    for step in steps_of(found):
        attempt = "" if step.attempt_id == "1" else f".{step.attempt_id}"
        made.setdefault(f"{step.rollout_id}{attempt}", set()).add(step.advantage)
    assert all(len(values) == 1 for values in made.values())
    told = [
        f"{name}={'-' if value is None else format(value, '.3g')}"
        for name, (value,) in sorted(made.items())
    ]
    reasons = [each.reason.partition(": ")[2] for each in found.report.dropped]
    left = f" ! {', '.join(sorted(reasons))}" if reasons else ""
    assert " ".join(told) + left == expected


@pytest.mark.pain(22)
def test_weights_of_an_agents_steps_in_a_rollout_add_up_to_one() -> None:
    """A chatty rollout weighs as much as a short one; a shared step weighs once."""
    text = (
        f"{c.SPAN_ROLLOUT}@{c.TASK}=t( A[ a b d ] B[ e ] plan +x +y +z -x -y -z !1 )"
        f" #rollout=r2,trace=b {c.SPAN_ROLLOUT}@{c.TASK}=t( A[ f ] !0 )"
    )

    found = explain(draw(text).spans)

    weights: dict[tuple[str, str], list[float]] = {}
    for step in steps_of(found):
        weights.setdefault((step.rollout_id, step.agent), []).append(step.weight)
    assert {key: len(held) for key, held in weights.items()} == {
        ("r1", "A"): 3, ("r1", "B"): 1, ("r1", ""): 4, ("r2", "A"): 1,
    }  # fmt: skip
    assert all(math.fsum(held) == pytest.approx(1.0) for held in weights.values())
    assert found.report.transitions == len(steps_of(found))


def test_the_task_is_told_by_its_id_else_its_text_on_whatever_span() -> None:
    """An id goes before the text; the order of a JSON object's keys tells no tasks apart."""
    marks: list[dict[str, Any]] = [
        {c.TASK: '{"x": 1, "y": 2}'},
        {c.TASK: '{"y": 2, "x": 1}'},
        {c.TASK: '{"other": 1}', c.TASK_ID: "task 1"},
        {c.TASK_ID: "task 1"},
        {c.TASK: '"' + "long " * 100 + '"'},
    ]
    spans = []
    for number, mark in enumerate(marks):
        forest = Forest(rollout_id=f"{number}", trace_id=f"{number:032x}", process=f"{number}")
        with forest.inside("work" if number == 3 else c.SPAN_ROLLOUT, **mark):
            forest.call("a")
            forest.reward(float(number % 2))
        spans.append(forest.spans)

    found = explain(*spans, advantage="dr_grpo")

    groups = [step.group_id for step in steps_of(found)]
    assert groups[:4] == ['{"x": 1, "y": 2}'] * 2 + ["task 1"] * 2
    assert groups[4].startswith("sha256:")
    assert [step.advantage for step in steps_of(found)] == [-0.5, 0.5, -0.5, 0.5, None]


def test_several_named_rewards_are_composed_over_the_whole_rollout() -> None:
    """Parts given at different steps make one number of the rollout, on a common scale."""
    rows = {"a": (1.0, 100.0), "b": (0.0, 300.0), "c": (1.0, 200.0)}
    text = " ".join(
        f"#rollout={name},trace={name},process=p{name} {c.SPAN_ROLLOUT}@{c.TASK}=t("
        f" first !tokens={tokens} second !correct={correct} )"
        for name, (correct, tokens) in rows.items()
    )
    made = Composition({"correct": 1.0, "tokens": -0.5}, is_normalised=True)

    found = explain(draw(text).spans, compose=made, advantage="dr_grpo")

    table = np.array(list(rows.values()))
    scaled = (table - table.mean(axis=0)) / (table.std(axis=0, ddof=1) + 1e-6)
    expected = scaled @ [1.0, -0.5]
    made = {step.rollout_id: step.advantage for step in steps_of(found)}
    assert list(made.values()) == pytest.approx(expected.tolist())
    assert {step.reward for step in steps_of(found)} == {None}


@pytest.mark.parametrize("answer", [[], [1.0], [1.0, math.nan], ["1", "2"]])
def test_a_function_that_gives_no_advantages_is_an_error(answer: Any) -> None:
    """It must give one finite number for each reward."""
    with pytest.raises(ConfigError, match="one finite number for each"):
        explain(*drawn("a t 1, b t 0"), advantage=Advantage(lambda _: answer))


def test_a_group_cannot_be_of_one() -> None:
    """A size below two would ask for nothing to compare with."""
    with pytest.raises(ConfigError, match="size is 1"):
        Advantage(size=1)


def test_steps_that_saw_the_same_are_compared() -> None:
    """By their returns; random ids of calls and the way arguments are printed tell none apart."""
    spans: list[Span] = []
    for number, (arguments, reward) in enumerate((({}, 1.0), ("", 0.0), ({"d": 1}, 0.5))):
        forest = Forest(rollout_id=f"r{number}", trace_id=f"{number:032x}", process=f"{number}")
        call = {"type": "tool_call", "id": f"random {number}", "name": "ls", "arguments": arguments}
        answers = [{"role": "assistant", "parts": [call]}, said("assistant", f"done {number}")]
        result = {"type": "tool_call_response", "id": f"random {number}", "response": "files"}
        history = [said("user", "go")]
        with forest.inside(c.SPAN_ROLLOUT, **{c.TASK_ID: "t"}):
            for answer in answers:
                forest.make("chat", {
                    c.OPERATION: c.CHAT,
                    c.INPUT_MESSAGES: json.dumps(history),
                    c.OUTPUT_MESSAGES: json.dumps([{**answer, "finish_reason": "stop"}]),
                })  # fmt: skip
                history = [*history, answer, {"role": "tool", "parts": [result]}]
            forest.reward(reward)
        spans += forest.spans
    how = Advantage("dr_grpo", group_by="state")

    found = explain(spans, advantage=how, credit="discounted", gamma=1.0)
    bare = explain(spans, advantage=how)

    steps = {(step.rollout_id, step.step): step for step in steps_of(found)}
    assert [steps[f"r{number}", 0].advantage for number in range(3)] == [0.5, -0.5, 0.0]
    assert [steps[f"r{number}", 1].advantage for number in range(3)] == [0.5, -0.5, None]
    groups = [step.group_id for _, step in sorted(steps.items())]
    assert len(set(groups)) == 3
    assert groups[0] == groups[2] == groups[4]
    alone = "no advantage: no other rollout of its group has a reward"
    no_reward = "no advantage: its step has no reward; credit 'discounted' gives each one"
    assert found.report.reasons() == {alone: 1}
    assert bare.report.reasons() == {no_reward: 3, alone: 1}


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
    words = [
        f"r{index} task{task} {'' if value is None else value}"
        for index, (task, value) in enumerate(given_rollouts)
    ]
    made = drawn(", ".join(words)) if words else []
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
    first, second, third = drawn("a t 1, b t 0, c t 1")
    estimates = adapter.estimate(adapter.outcomes([*first, *second]))

    found = adapter.explain([*first, *second, *third], estimates=estimates)

    assert {step.advantage for step in steps_of(found) if step.rollout_id == "c"} == {None}
    assert found.report.reasons() == {
        "no advantage: its rollout came while the others were compared": 1
    }
    assert ("a", "1") in estimates
