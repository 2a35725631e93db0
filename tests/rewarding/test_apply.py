"""Reward functions over stored traces: what they see, what is kept, and that it is kept once."""

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import openai
import pytest

from lightning_otel import (
    Composition,
    Store,
    Trajectory,
    apply_rewards,
    auto_trace,
    context,
    emit_action,
    emit_reward,
)
from lightning_otel.demo.server import DemoServer
from lightning_otel.errors import ConfigError, StoreMissingError
from lightning_otel.rewarding import Judgement
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


def test_function_judges_every_rollout_by_task_and_answer(told: Store) -> None:
    """A number is the reward of the rollout's last step, under the function's name."""
    done = apply_rewards(told, exact_match)

    assert (done.rewards, done.attempts) == (3, 3)
    assert done.mean == pytest.approx(2 / 3)
    assert rewards_of(told) == [
        ("r1", 0, {}),
        ("r1", 1, {"exact_match": 1.0}),
        ("r2", 0, {"exact_match": 0.0}),
        ("r3", 0, {"exact_match": 1.0}),
    ]
    assert told.report().rewards_placed == 3


def test_applying_twice_adds_nothing(told: Store) -> None:
    """A function that was applied is not even called again; a new rollout is judged alone."""
    calls: list[object] = []

    def once(task: object) -> float:
        calls.append(task)
        return 1.0

    apply_rewards(told, once)
    with auto_trace(store=told, rollout_id="r4", task={"want": "4"}):
        emit_action("say", "4")

    done = apply_rewards(told, once)

    assert (done.rewards, done.held, done.attempts) == (1, 3, 4)
    assert len(calls) == 4
    assert len(told.sql("SELECT * FROM rewards").rows()) == 4


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


def test_raising_function_loses_nothing(told: Store) -> None:
    """The rollouts it did not raise on keep their rewards; why it raised is counted and told."""
    heard: list[Judgement] = []

    def fragile(task: Mapping[str, str], rollout: Rollout) -> object:
        return {"r1": 0.5, "r2": "much"}.get(rollout.rollout_id) or task["no"]

    def endless(answer: str) -> float:
        return float("nan" if answer == "5" else "1")

    done = apply_rewards(told, fragile, told=heard.append)
    other = apply_rewards(told, endless, told=heard.append)

    assert (done.rewards, dict(done.failed)) == (1, {"no number, but str": 1, "KeyError": 1})
    assert (other.rewards, dict(other.failed)) == (2, {"not finite": 1})
    assert [each.failure for each in heard if each.failure] == [
        "fragile is 'much', no number",
        "KeyError: 'no'",
        "endless is nan; a reward must be finite",
    ]
    assert [values for *_, values in rewards_of(told) if values] == [
        {"fragile": 0.5, "endless": 1.0},
        {"endless": 1.0},
    ]


def test_failed_rollout_is_asked_about_again(told: Store) -> None:
    """What a function raised on is no judgement: mended, it is asked again and alone."""
    broken = {"r2"}

    def judge(rollout: Rollout) -> float:
        if rollout.rollout_id in broken:
            raise RuntimeError("the judge is down")
        return 1.0

    first = apply_rewards(told, judge)
    broken.clear()
    second = apply_rewards(told, judge)

    assert (first.rewards, dict(first.failed)) == (2, {"RuntimeError": 1})
    assert (second.rewards, second.held) == (1, 2)


def test_named_rewards_keep_their_primary_one(told: Store) -> None:
    """Numbers by name are one reward, the first of them primary."""

    def judge(trajectories: tuple[Trajectory, ...]) -> dict[str, float]:
        return {"ok": 1.0, "steps": float(len(trajectories[0].transitions))}

    apply_rewards(told, judge, rollout_id="r1")

    (step,) = (each for each in told.transitions(rollout_id="r1") if each.reward is not None)
    assert (step.reward, dict(step.rewards)) == (1.0, {"ok": 1.0, "steps": 2.0})


def test_version_judges_anew_under_its_name(told: Store) -> None:
    """Another version stands beside the first, and the rewards of both are told apart."""
    apply_rewards(told, exact_match)

    done = apply_rewards(told, exact_match, version="2")

    assert (done.rewards, done.held) == (3, 0)
    by_new = rewards_of(told, rollout_id="r3")
    assert by_new == [("r3", 0, {"exact_match": 1.0, "exact_match@2": 1.0})]
    newer = Composition({"exact_match@2": 2.0})
    assert [step.reward for step in told.transitions(rollout_id="r3", compose=newer)] == [2.0]


def test_changed_function_is_told_of(told: Store, tmp_path: Path) -> None:
    """Where the text of a function that was applied is another now, the result says so."""
    first: dict[str, Any] = {}
    second: dict[str, Any] = {}
    for name, space, value in (("one.py", first, 0.0), ("two.py", second, 1.0)):
        path = tmp_path / name
        path.write_text(f"def judge(answer):\n    return {value}\n")
        exec(compile(path.read_text(), path, "exec"), space)

    apply_rewards(told, first["judge"])
    done = apply_rewards(told, second["judge"])

    assert (done.rewards, done.held, done.changed) == (0, 3, 3)


def test_dry_run_keeps_nothing(told: Store) -> None:
    """On a dry run the function is asked, and the store stays as it is."""
    heard: list[Judgement] = []

    done = apply_rewards(told, exact_match, is_dry_run=True, told=heard.append)

    assert done.rewards == 3
    assert [each.values for each in heard] == [{"exact_match": value} for value in (1.0, 0.0, 1.0)]
    assert told.sql("SELECT * FROM rewards").rows() == []


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


def test_function_sees_rewards_that_are_there(told: Store) -> None:
    """One that composes others gets them by name."""
    emit_reward("tone", 0.25, rollout_id="r2")  # into the default store: not here
    apply_rewards(told, exact_match)

    def doubled(rewards: Mapping[str, float]) -> float | None:
        return 2 * rewards["exact_match"] if "exact_match" in rewards else None

    apply_rewards(told, doubled)

    assert rewards_of(told, rollout_id="r3")[0][2] == {"exact_match": 1.0, "doubled": 2.0}


def test_async_function_is_awaited(told: Store) -> None:
    """A judge that asks somebody is awaited, also where a loop runs already, as in a notebook."""

    async def judge(answer: str) -> float:
        await asyncio.sleep(0)
        return float(len(answer))

    async def notebook() -> float | None:
        return apply_rewards(told, judge, rollout_id="r2").mean

    assert apply_rewards(told, judge, rollout_id="r1").mean == 1.0
    assert asyncio.run(notebook()) == 1.0


def test_model_calls_are_judged_by_their_answer(store: Store, server: DemoServer) -> None:
    """Of a real call the answer is the text that the model gave."""
    with (
        openai.OpenAI(base_url=server.base_url, api_key="k", max_retries=0) as client,
        auto_trace(store=store, rollout_id="live", task="hi"),
    ):
        client.chat.completions.create(model="toy", messages=[{"role": "user", "content": "hi"}])
    answers: list[str] = []

    def heard(answer: str, task: str) -> float:
        answers.append(answer)
        return float(task == "hi")

    done = apply_rewards(store, heard)

    (step,) = store.transitions()
    assert answers == [step.action[0]["parts"][0]["content"]]
    assert (done.mean, step.reward) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("function", "fault"),
    [
        (lambda task: 1.0, "has no name"),
        (3, "cannot be"),
        (dict.fromkeys, "may ask by name|nothing tells"),
    ],
)
def test_unfit_function_is_refused(told: Store, function: Any, fault: str) -> None:
    """Before anything is judged it is said what a function may ask for."""
    with pytest.raises(ConfigError, match=fault):
        apply_rewards(told, function)


def test_unknown_parameters_are_named(told: Store) -> None:
    """A parameter that nobody fills is named, with those that there are."""

    def judge(answer: str, completion: str) -> float:
        return 1.0

    with pytest.raises(ConfigError, match="takes completion; it may ask by name for task, answer"):
        apply_rewards(told, judge)


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
