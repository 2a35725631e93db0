"""Reward functions over stored traces: what they see, what is kept, and that it is kept once."""

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from lightning_otel import (
    Composition,
    Store,
    Trajectory,
    apply_rewards,
    auto_trace,
    context,
    emit_action,
)
from lightning_otel.errors import StoreMissingError
from lightning_otel.types import Rollout


def exact_match(task: Mapping[str, str], answer: str) -> float:
    """Whether the answer is what was wanted."""
    return float(answer == task["want"])


def length(trajectory: Trajectory) -> float:
    """How many steps a trajectory has."""
    return float(len(trajectory.transitions))


@pytest.fixture
def told(store: Store) -> Store:
    """A store with three rollouts of marks: two of whose answers are wanted."""
    for name, answers in (("r1", ["2", "4"]), ("r2", ["5"]), ("r3", ["4"])):
        with auto_trace(store=store, rollout_id=name, task={"want": "4"}, agent="calc"):
            for answer in answers:
                emit_action("say", answer)
    return store


def rewards_of(store: Store, **keywords: Any) -> list[tuple[str, int, dict[str, float]]]:
    """Rollout, step and rewards of every transition."""
    return [
        (step.rollout_id, step.step, dict(step.rewards)) for step in store.transitions(**keywords)
    ]


def test_function_judges_each_rollout_once(told: Store) -> None:
    """A number is the reward of the last step, under the function's name; again adds nothing."""
    first = apply_rewards(told, exact_match)
    with auto_trace(store=told, rollout_id="r4", task={"want": "4"}):
        emit_action("say", "4")
    dry = apply_rewards(told, exact_match, is_dry_run=True)
    second = apply_rewards(told, exact_match)

    assert (first.rewards, first.attempts) == (3, 3)
    assert first.mean == pytest.approx(2 / 3)
    assert (dry.rewards, dry.held) == (second.rewards, second.held) == (1, 3)
    assert rewards_of(told) == [
        ("r1", 0, {}),
        ("r1", 1, {"exact_match": 1.0}),
        ("r2", 0, {"exact_match": 0.0}),
        ("r3", 0, {"exact_match": 1.0}),
        ("r4", 0, {"exact_match": 1.0}),
    ]


def test_raising_function_loses_nothing(told: Store) -> None:
    """The others keep their rewards; what it raised on is counted, and asked about again."""
    heard: list[Any] = []
    broken = {"r2"}

    def fragile(task: Mapping[str, str], rollout: Rollout) -> object:
        if rollout.rollout_id in broken:
            raise RuntimeError("the judge is down")
        return {"r1": 0.5, "r3": "much"}.get(rollout.rollout_id, 1.0)

    first = apply_rewards(told, fragile, told=heard.append)
    broken.clear()
    second = apply_rewards(told, fragile)

    assert (first.rewards, dict(first.failed)) == (1, {"RuntimeError": 1, "no number, but str": 1})
    assert [each.failure for each in heard if each.failure] == [
        "RuntimeError: the judge is down",
        "fragile is 'much', no number",
    ]
    assert (second.rewards, second.held) == (1, 1)


def test_changed_function_keeps_what_it_gave(told: Store, tmp_path: Path) -> None:
    """Another text is told of; another version judges anew, beside the first, under its name."""
    spaces: list[dict[str, Any]] = [{}, {}]
    for index, space in enumerate(spaces):
        path = tmp_path / f"rewards_{index}.py"
        path.write_text(f"def judge(answer):\n    return {index}\n")
        exec(compile(path.read_text(), path, "exec"), space)
    old, new = (space["judge"] for space in spaces)

    apply_rewards(told, old, rollout_id="r3")
    same = apply_rewards(told, new, rollout_id="r3")
    other = apply_rewards(told, new, rollout_id="r3", version="2")

    newer = Composition({"judge@2": 2.0})
    (step,) = told.transitions(rollout_id="r3", compose=newer)
    assert (same.rewards, same.held, same.changed) == (0, 1, 1)
    assert (other.rewards, other.held) == (1, 0)
    assert (step.reward, dict(step.rewards)) == (2.0, {"judge": 0.0, "judge@2": 1.0})


def test_two_that_apply_at_once_give_each_reward_once(told: Store) -> None:
    """Of two that judged before either had written, one's rewards count."""
    both = threading.Barrier(2, timeout=20)

    def slow(answer: str) -> float:
        if answer == "4" and both.n_waiting < 2:
            both.wait()
        return 1.0

    others = threading.Thread(target=lambda: apply_rewards(told, slow, rollout_id="r1"))
    others.start()
    apply_rewards(told, slow, rollout_id="r1")
    others.join(20)

    assert rewards_of(told, rollout_id="r1") == [("r1", 0, {}), ("r1", 1, {"slow": 1.0})]


def test_running_rollout_waits_for_the_next_time(told: Store) -> None:
    """What has not ended is not judged by halves; once it ended, it is."""
    with auto_trace(store=told, rollout_id="r4", task={"want": "4"}):
        emit_action("say", "3")

        during = apply_rewards(told, exact_match)

        emit_action("say", "4")
    after = apply_rewards(told, exact_match)

    assert (during.rewards, during.running) == (3, 1)
    assert (after.rewards, after.held, after.mean) == (1, 3, 1.0)


def test_function_of_a_trajectory_judges_each_one(store: Store) -> None:
    """With several agents, each one's last step gets what the function said of its trajectory."""
    with auto_trace(store=store, rollout_id="team"):
        with context(agent="planner"):
            emit_action("plan", "a")
            emit_action("plan", "b")
        with context(agent="writer"):
            emit_action("write", "c")

    done = apply_rewards(store, length)

    found = [(s.agent, s.step, dict(s.rewards)) for s in store.transitions()]
    assert (done.rewards, done.attempts) == (2, 1)
    assert found == [
        ("planner", 0, {}),
        ("planner", 1, {"length": 2.0}),
        ("writer", 0, {"length": 1.0}),
    ]
    assert apply_rewards(store, length).held == 2


def test_each_attempt_is_judged_by_itself(store: Store) -> None:
    """A rollout that was tried twice has two rewards, each in its attempt."""
    for attempt, answer in (("1", "3"), ("2", "4")):
        with auto_trace(store=store, rollout_id="again", attempt_id=attempt, task={"want": "4"}):
            emit_action("say", answer)

    apply_rewards(store, exact_match)

    found = [(step.attempt_id, step.reward) for step in store.transitions()]
    assert found == [("1", 0.0), ("2", 1.0)]


def test_missing_store_is_said(tmp_path: Path) -> None:
    """Where no store is, none is made."""
    with pytest.raises(StoreMissingError):
        apply_rewards(Store(tmp_path / "none.duckdb"), exact_match)
    assert not (tmp_path / "none.duckdb").exists()


def test_served_store_is_judged_from_elsewhere(told: Store, served: Callable[..., str]) -> None:
    """By its URL a store is judged as on its own disk, and once from both places."""
    elsewhere = Store(served(told))

    first = apply_rewards(elsewhere, exact_match)
    second = apply_rewards(told, exact_match)

    assert (first.rewards, second.rewards, second.held) == (3, 0, 3)
    assert [step.reward for step in told.transitions()] == [None, 1.0, 0.0, 1.0]


KILLED = """
import os, signal, sys
from lightning_otel import Store, apply_rewards
count = 0
def judge(answer):
    global count
    count += 1
    if count == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0
apply_rewards(Store(sys.argv[1]), judge)
"""


def test_killed_application_goes_on_where_it_was(told: Store) -> None:
    """What was given before a kill is kept; the next run gives the rest, and each once."""
    command = [sys.executable, "-c", KILLED, told.name]

    killed = subprocess.run([*command, "3"], timeout=50)
    kept = [step.reward for step in told.transitions() if step.reward is not None]
    whole = subprocess.run([*command, "9"], timeout=50)

    assert (killed.returncode, whole.returncode) == (-signal.SIGKILL, 0)
    assert kept == [1.0, 1.0]
    assert [row["value"] for row in told.sql("SELECT value FROM rewards")] == [1.0] * 3


WRITER = """
import sys, time
from lightning_otel import Store, auto_trace, emit_action
store = Store(sys.argv[1])
for index in range(40):
    with auto_trace(store=store, rollout_id=f"w{index}", task={"want": "4"}):
        emit_action("say", "4" if index % 2 else "5")
    print(index, flush=True)
    time.sleep(0.02)
"""


def test_another_process_goes_on_writing(store: Store) -> None:
    """While an agent writes, what ended is judged; in the end each rollout has one reward."""
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, store.name], stdout=subprocess.PIPE, text=True
    ) as agent:
        assert agent.stdout is not None
        agent.stdout.readline()
        counts: list[int] = []
        while agent.poll() is None and len(counts) < 50:
            counts.append(apply_rewards(store, exact_match).rewards)
        assert agent.wait(30) == 0
    counts.append(apply_rewards(store, exact_match).rewards)

    assert sum(counts) == 40
    rewards = [step.reward for step in store.transitions()]
    assert sorted(reward for reward in rewards if reward is not None) == [0.0] * 20 + [1.0] * 20
