"""Input and results of a reward function, without any store."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from lightning_otel import Trajectory, Transition
from lightning_otel.errors import ConfigError
from lightning_otel.messages import message, text_part
from lightning_otel.rewards.functions import Case, Failure, RewardFunction
from lightning_otel.types import Rollout

STEP = Transition(
    "r1", "1", "calc", 0, (), (message("assistant", [text_part("4")]),), None, None, done=True
)
PATH = Trajectory("r1", "1", "calc", 0, (STEP,))
CASE = Case(Rollout("r1", {"want": "4"}, "succeeded"), "1", (PATH,), {"tone": 0.25}, PATH)


def judged(function: Any, version: str = "") -> object:
    """What a function says of the case."""
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
        ("1", "", Failure("no number, but str", "judge is '1', no number")),
        ([1.0], "", Failure("no number, but list", "judge is [1.0], no number")),
        (float("nan"), "", Failure("not finite", "judge is nan; a reward must be finite")),
        ({"ok": 1.0, "x": None}, "", Failure("no number, but NoneType", "x is None, no number")),
        (KeyError("no\nsuch"), "", Failure("KeyError", "KeyError: 'no\\nsuch'")),
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
    """Asks for what there is not."""
    return 1.0


def positional(answer: str, /, task: str) -> float:
    """Cannot be asked by name."""
    return 1.0


def nothing() -> float:
    """Asks for nothing."""
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
