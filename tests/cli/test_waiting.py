"""What waits in vain says so, at each door where somebody looks."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
from tests.acting import act

from lightning_otel import BaseAlgorithm, Resources, Store, Trainer
from lightning_otel.errors import ConfigError
from lightning_otel.state import State

NAME = "system_prompt"


class Better(BaseAlgorithm):
    """Makes a canary in each step."""

    def train_step(self, batch: Any) -> Any:
        return {"resource_update": {NAME: f"better {len(batch)}"}}


def record(store: Store, count: int, *, is_applied: bool = False, is_rewarded: bool = True) -> None:
    resources = {"*": {NAME: "1"}} if is_applied else None
    for _ in range(count):
        act(store, None, 1.0 if is_rewarded else None, resources=resources)


def canary(store: Store, weight: float = 0.1) -> Resources:
    resources = Resources(State.beside(store))
    resources.publish(NAME, "one")
    resources.publish(NAME, "two", alias="canary", weight=weight)
    return resources


CASES = {
    "no apply": ({}, 0.1, f"0 of 3 rollouts had apply: none was made with a version of {NAME}"),
    "no share": ({"is_applied": True}, 0.0, f"nobody is given {NAME}@2, whose share is 0 %"),
    "no reward": (
        {"is_applied": True, "is_rewarded": False}, 0.1, "0 of 3 rollouts have a reward"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_canary_that_nothing_decides(store: Store, cli: Callable[..., Any], case: str) -> None:
    """compare(), promote --if-better, resources list and show, diff and doctor say the same."""
    options, weight, reason = CASES[case]
    record(store, 3, **options)
    resources = canary(store, weight)

    with pytest.raises(ConfigError, match=reason):
        resources.compare(NAME, store=store)
    for command in (
        ["resources", "promote", NAME, "--if-better"], ["resources", "list"],
        ["resources", "show", NAME], ["resources", "diff", NAME], ["doctor"],
    ):  # fmt: skip
        done = cli(*command, "--store", store.name)
        assert reason in done.stdout + done.stderr, command


def test_canary_that_is_tried_is_not_named(store: Store, cli: Callable[..., Any]) -> None:
    """Some rollouts are given the live version: the canary's turn will come."""
    record(store, 3, is_applied=True)
    canary(store)

    assert "in vain" not in cli("resources", "list", "--store", store.name).stderr


def test_train_says_what_it_waits_for(store: Store) -> None:
    """The verdict names the missing apply; the run why its steps are fewer than was asked for."""
    record(store, 4)
    Resources(State.beside(store)).publish(NAME, "one")

    fit = Trainer(algorithm=Better(), store=store, max_iterations=10).train()

    assert f"so far 0 of 4 rollouts had apply: none was made with a version of {NAME}" in (
        fit.verdict.reason
    )
    assert fit.run.status == "succeeded"
    assert fit.run.reason == (
        "1 of 10 steps: each recorded rollout trains once; record more, or lower min_batch_size"
    )


def test_run_without_a_reward_in_sight_says_so(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """A run that follows a store waits for ever, and is told once what for."""
    record(store, 2, is_rewarded=False)
    fitting = Trainer(algorithm=Better(), store=store, reward_timeout_s=0.0).fit_async()
    while not caplog.records and fitting.wait(0.2) is None:
        pass
    fitting.wait(1.0)
    fitting.stop()
    fitting.wait(30)

    said = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert len(said) == 1
    assert "the run waits: " in said[0]
    assert "2 new ones, 2 of them over and 0 with a reward" in said[0]
