"""Numbers that make no sense, at every door that takes one: refused, and nothing is kept."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import pytest
from tests.command import invoke

from lightning_otel import Queue, Resources, Runner, Store, emit_reward, run_workers
from lightning_otel.errors import ConfigError, NotFoundError
from lightning_otel.state import State
from lightning_otel.state.requests import Requests
from lightning_otel.state.runs import Runs
from lightning_otel.trainer import Trainer
from lightning_otel.types import Rollout

Door = Callable[[Store, State, Any], object]
HUGE: Final = (2**70, 10**5000)
NONE: Final = (math.nan, math.inf, -math.inf, "1", None)
WHOLE: Final = (*HUGE, *NONE, True, 1.5, -1, 0)
SECONDS: Final = (*HUGE, math.nan, math.inf, "1", True, -5, 0)
FINITE: Final = (10**5000, math.nan, math.inf, -math.inf, "1")


def agent(task: object) -> None:
    """Do nothing."""


def rollout(state: State, **numbers: Any) -> None:
    """Put a rollout with an id of its own."""
    Queue(state).add([Rollout("r", "task", **numbers)])


DOORS: Final[Mapping[str, tuple[Door, tuple[Any, ...]]]] = {
    "samples": (lambda _, state, v: Queue(state).put(["t"], samples=v), (*WHOLE, 10**9)),
    "priority": (
        lambda _, state, v: Queue(state).put(["t"], priority=v), (*HUGE, *NONE, True, 1.5)
    ),
    "max_attempts": (lambda _, state, v: Queue(state).put(["t"], max_attempts=v), WHOLE),
    "timeout_s": (lambda _, state, v: Queue(state).put(["t"], timeout_s=v), (*SECONDS, 1e12)),
    "version": (lambda _, state, v: Queue(state).put(["t"], resources={"p": v}), WHOLE),
    "max_attempts of add": (lambda _, state, v: rollout(state, max_attempts=v), WHOLE),
    "priority of add": (lambda _, state, v: rollout(state, priority=v), HUGE),
    "reward of add": (lambda _, state, v: rollout(state, reward=v), FINITE),
    "lease_s": (lambda _, state, v: Queue(state).lease("w", lease_s=v), SECONDS),
    "lease_s of requests": (lambda _, state, v: Requests(state, lease_s=v), SECONDS),
    "lease_s of claims": (
        lambda _, state, v: Runs(state).claims(Runs(state).start("a"), lease_s=v), SECONDS
    ),
    "lease_s of a runner": (lambda store, _, v: Runner(agent, store=store, lease_s=v), SECONDS),
    "n": (lambda store, _, v: run_workers(v, agent, store=store), WHOLE),
    "wait": (lambda _, state, v: Queue(state).wait([], v), FINITE),
    "reward": (lambda _, __, v: emit_reward(v), (*FINITE, None)),
    "parent": (
        lambda _, state, v: Resources(state).publish("p", "second", parent=v),
        (*HUGE, True, "1", 1.5, -1),
    ),
    "weight": (
        lambda _, state, v: Resources(state).publish("p", "x", alias="canary", weight=v),
        (*HUGE, math.nan, math.inf, "1", -1, 2),
    ),
    "metric": (lambda _, state, v: Resources(state).publish("p", "x", metrics={"m": v}), FINITE),
    "alias": (
        lambda _, state, v: Resources(state).set_alias("p", "live", v), (*HUGE, True, "1", 1.5)
    ),
    "max_iterations": (
        lambda store, state, v: Trainer(store=store, state=state, max_iterations=v),
        (*HUGE, math.nan, "1", True, -1, 0),
    ),
    "workers": (
        lambda store, state, v: Trainer(store=store, state=state, workers=v),
        (*HUGE, math.nan, "1", True, -1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("door", DOORS)
def test_numbers_that_make_no_sense_are_refused(store: Store, door: str) -> None:
    """By errors of ours; the queue, the resources and their aliases stay as they were."""
    state = State.beside(store)
    Resources(state).publish("p", "first")
    give, numbers = DOORS[door]

    for number in numbers:
        with pytest.raises((ConfigError, NotFoundError), match=r"\w"):
            give(store, state, number)

    assert Queue(state).rollouts() == []
    assert [each.version for each in Resources(state).versions("p")] == [1]
    assert Resources(state).aliases("p") == {"live": 1}
    state.close()


def test_a_task_has_a_bound(store: Store) -> None:
    """A task of 50 MB would be cut on its rollout's span; the error says what to do."""
    queue = Queue(State.beside(store))

    with pytest.raises(ConfigError, match=r"50,000,002 characters .* into a file"):
        queue.put(["ok", "x" * 50_000_000])

    assert queue.rollouts() == []


@pytest.mark.parametrize("number", ["nan", "inf", "-inf", "1e999", str(2**70), "true", "-5"])
@pytest.mark.parametrize(
    "command",
    ["ls --limit {}", "queue --limit {}", "train --samples {}", "train --max-iterations {}",
     "resources publish p x --alias canary --weight {}", "resources publish p x --parent {}"],
)  # fmt: skip
def test_the_command_line_refuses_it(store: Store, command: str, number: str) -> None:
    """With the code of wrong usage, or of nothing found; never as a bug of ours."""
    done = invoke(*command.format(number).split(), "--store", store.name)

    assert done.returncode in (2, 3), done.stderr
    assert "bug" not in done.stderr
