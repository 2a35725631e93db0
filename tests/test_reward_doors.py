"""One rollout's reward where the table of rewards does not look; and rewards retracted."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from tests.viewer.client import AskingOf

import lightning_otel as lo
from lightning_otel import Queue, Resources, Runner, Store, learned
from lightning_otel.errors import ConfigError
from lightning_otel.state import State

TRIES: list[int] = []


def act(task: str, resources: object) -> None:
    """Three calls, which earn 0.2, 0.1 and 0.4; the first try earns 0.5 and fails."""
    lo.emit_action("say", "hi")
    if not TRIES:
        TRIES.append(1)
        lo.emit_reward(0.5)
        raise ValueError("broken")
    for value in (0.2, 0.1, 0.4):
        lo.emit_observation("heard", "ho")
        lo.emit_action("say", "hi")
        lo.emit_reward(value)


@pytest.fixture
def run_cli(store: Store, spawn: Callable[..., Any]) -> Callable[..., str]:
    return lambda *args: str(spawn(*args, "--store", store.name).stdout)


def test_reward_is_one_number_at_the_other_doors(
    store: Store, asking: AskingOf, run_cli: Callable[..., str]
) -> None:
    """0.7: of the last attempt, in the queue, in sums, and with its trace."""
    TRIES.clear()
    resources = Resources(State(store.name))
    resources.publish("style", "Be kind.")
    queue = Queue(State(store.name))
    (put,) = queue.put(["a"], max_attempts=2)
    Runner(act, store=store, queue=queue, resources=resources).run()
    traces = json.loads(run_cli("ls", "traces", "--json"))
    asked = asking(store)

    rewards = {
        "queue": queue.get(put.rollout_id).reward,
        "learned": learned("", "style", min_rollouts=1, resources=resources, store=store)
        .versions[0].mean,
        "ls traces": traces[0]["reward"],
        "/training/status": json.loads(asked.get("/training/status").body)["average_reward"],
    }  # fmt: skip
    assert rewards == dict.fromkeys(rewards, pytest.approx(0.7))
    assert " 0.7 " in asked.get("/traces").words


@pytest.mark.parametrize("is_named", [True, False])
@pytest.mark.parametrize("is_settled", [True, False])
def test_a_retracted_reward_counts_at_no_door(
    store: Store,
    asking: AskingOf,
    run_cli: Callable[..., str],
    run_python: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    is_named: bool,
    is_settled: bool,
) -> None:
    """The reward beside it takes its place; the rollout is no longer than before."""
    with lo.auto_trace(store=store, rollout_id="r1", task="a"):
        lo.emit_action("say", "hi")
        wrong = lo.emit_reward(0.1)
        lo.emit_reward(0.7)
    (before,) = store.rollouts()
    if is_settled:
        store.writer().seal()
        store.settle()
    monkeypatch.setenv("LIGHTNING_OTEL_STORE", store.name)
    rollout_id = "rollout_id='r1'" if is_named else ""
    run_python(f"import lightning_otel as lo; lo.retract_reward({wrong!r}, {rollout_id})")
    asked = asking(store)

    (rollout,) = store.rollouts()
    changed = {key for key in rollout if rollout[key] != before[key]}
    assert changed == {"rewards", "reward", "named_rewards", "spans"}
    assert (rollout["rewards"], rollout["reward"]) == (1, 0.7)
    assert [step.reward for step in store.transitions()] == [0.7]
    assert [row["reward"] for row in store.transitions(bodies=False).dicts()] == [0.7]
    assert store.report().reasons() == {"it was retracted": 1}
    assert [row["value"] for row in store.sql("FROM rewards")] == [0.7]
    (traced,) = json.loads(run_cli("ls", "traces", "--json"))
    assert (traced["reward"], traced["end_ns"]) == (0.7, before["end_ns"])
    assert "it was retracted" in run_cli("show", "@last")
    assert asked.get("/traces").words.endswith(" 0.7")
    assert "it was retracted" in asked.get(f"/traces/{traced['trace_id']}").words
    assert json.loads(asked.get("/v1/rollouts").body)["rollouts"][0]["reward"] == 0.7
    assert store.sql("SELECT count(reward) AS kept FROM spans").rows() == [{"kept": 2}]


@pytest.mark.parametrize("span_id", ["", "r1", "AB" * 8, "0x" + "ab" * 8, 7])
def test_a_retraction_names_a_span_id(span_id: Any) -> None:
    """Anything else would retract nothing, in silence."""
    with pytest.raises(ConfigError, match="no span id; name a reward by the 16 hex digits"):
        lo.retract_reward(span_id)


def test_what_a_reward_function_passed_over_is_counted(store: Store, asking: AskingOf) -> None:
    """A rollout of ``emit_span`` alone has no step to judge, and no average stands over nothing."""
    with lo.auto_trace(store=store, rollout_id="r1", task={"category": "images"}):
        span = lo.emit_span("optimised", metadata={"quality": 0.9})
        lo.emit_reward(0.93, span_id=span)

    def exact(answer: str) -> float:
        return 1.0

    done = lo.apply_rewards(store, exact)

    assert [json.loads(row["named_rewards"]) for row in store.rollouts()] == [{"primary": 0.93}]
    assert (done.attempts, done.stepless) == (0, 1)
    answer = asking(store).get("/training/status")
    total = json.loads(answer.body)["categories"]["images"]
    assert (total["rewarded_rollouts"], total["steps"], total["average_reward"]) == (1, 0, None)
