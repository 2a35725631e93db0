"""The runner: each rollout becomes a recorded, rewarded attempt, whatever the agent does."""

import asyncio
import contextvars
import os
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

import openai
import pytest

import lightning_otel as lo
from lightning_otel import Hook, Queue, Resources, Router, Runner, Store
from lightning_otel.agl import AttemptedRollout
from lightning_otel.demo.server import DemoServer
from lightning_otel.errors import StateError, WorkerError
from lightning_otel.types import Resource, Rollout, Span
from lightning_otel.types import conventions as c


def ran(queue: Queue, runner: Runner, tasks: list[Any], **how: Any) -> list[Rollout]:
    """Rollouts that were put in and run."""
    ids = [each.rollout_id for each in queue.put(tasks, **how)]
    runner.run()
    return queue.wait(ids, 0)


def raises(task: object) -> None:
    raise ValueError("no such thing: sk-" + "a1B2" * 12)


async def rewards_itself(task: object) -> None:
    """Emit rewards, and give none back."""
    lo.emit_reward(0.1)
    await asyncio.sleep(0)
    lo.emit_reward(0.6)
    lo.emit_reward({"ok": 0.7, "short": 0.2}, primary="ok")


@pytest.mark.parametrize(
    ("agent", "reward", "reason"),
    [
        (lambda task: 0.5, 0.5, ""),
        (lambda task: {"ok": 1, "short": 0.25}, 1.0, ""),
        (lambda task: True, 1.0, ""),
        (lambda task: 0, 0.0, ""),
        (lambda task: None, None, ""),
        (rewards_itself, 0.7, ""),
        (raises, None, "ValueError: no such thing: "),
        (lambda task: sys.exit(3), None, "SystemExit: 3"),
        (lambda task: "text", None, "ConfigError: the agent gave back a str, which is no reward"),
        (lambda task: float("nan"), None, "ConfigError: reward 'primary' is nan"),
        (lambda task: object(), None, "ConfigError: the agent gave back a object"),
    ],
)
def test_attempt_has_a_reward_or_a_reason(
    store: Store, queue: Queue, agent: Any, reward: float | None, reason: str
) -> None:
    """Failure is data: the runner goes on, and each attempt is recorded under its number."""
    runner = Runner(agent, store=store, queue=queue)
    rollouts = ran(queue, runner, ["a", "b"], max_attempts=2, mode="val")

    status, attempts = ("failed", 2) if reason else ("succeeded", 1)
    for each in rollouts:
        assert (each.status, each.attempts, each.reward) == (status, attempts, reward)
        assert each.reason.startswith(reason)
        assert "a1B2" not in each.reason
    assert sum(queue.reasons().values()) == (4 if reason else 0)
    rows = [row for row in store.rollouts() if row["task"] == '"a"']
    assert [row["attempt_id"] for row in rows] == ["1", "2"][:attempts]
    assert {row["status"] for row in rows} == {status}
    spans = store.spans(rollout_id=rollouts[0].rollout_id).rows()
    assert spans[0].name == c.SPAN_ROLLOUT
    assert {span.attributes[c.MODE] for span in spans} == {"val"}


def test_unchanged_agent_is_judged_by_an_evaluator(store: Store, queue: Queue) -> None:
    """What the agent gives back is an answer; within a recording and a loop, as in a notebook."""

    async def agent(task: str) -> str:
        await asyncio.sleep(0)
        return task.upper()

    runner = Runner(
        agent,
        store=store,
        queue=queue,
        reward_evaluator=lambda recording: float(recording.result == "A"),
    )

    async def notebook() -> list[Rollout]:
        return ran(queue, runner, ["a", "b"])

    with lo.auto_trace(store=Store(":memory:")) as outer:
        rollouts = asyncio.run(notebook())

    assert [each.reward for each in rollouts] == [1.0, 0.0]
    assert len(outer.spans()) == 1  # attempts are no part of the recording around the runner
    assert outer.trace_id not in {span.trace_id for span in store.spans()}


def test_async_agent_that_takes_too_long_is_cancelled(store: Store, queue: Queue) -> None:
    """It learns of it where it waits, and the runner goes on with the same thread."""
    seen: list[object] = []

    async def agent(task: float) -> float:
        seen.append(threading.current_thread())
        try:
            await asyncio.sleep(task)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise
        return 1.0

    runner = Runner(agent, store=store, queue=queue)
    queue.put([30], timeout_s=0.2)
    (quick,) = ran(queue, runner, [0])
    slow, _ = queue.rollouts()

    assert (slow.status, slow.reason) == (
        "failed",
        "timed out: the attempt took longer than 0.2 s",
    )
    assert quick.status == "succeeded"
    assert seen[1] == "cancelled"
    assert seen[0] is seen[2]
    assert runner.hanging == 0


def test_sync_agent_that_hangs_is_left_behind(
    store: Store, queue: Queue, caplog: pytest.LogCaptureFixture
) -> None:
    """The next rollout goes on in another thread; what the old one gives back does not count."""
    freed = threading.Event()

    def agent(task: int) -> float:
        if task == 0:
            freed.wait(30)
        return 1.0

    runner = Runner(agent, store=store, queue=queue)
    queue.put([0], timeout_s=0.2)
    (quick,) = ran(queue, runner, [1])
    hung, _ = queue.rollouts()

    assert (hung.status, quick.status) == ("failed", "succeeded")
    assert runner.hanging == 1
    assert "a thread that cannot be ended" in caplog.text
    freed.set()
    for _ in range(200):
        if not runner.hanging:
            break
        time.sleep(0.01)
    assert runner.hanging == 0
    assert queue.get(hung.rollout_id).reward is None


def test_runner_stops_when_too_many_threads_hang(
    store: Store, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not fill the process with them, and says what to do."""
    monkeypatch.setattr("lightning_otel.runner.worker._MOST_HANGING", 2)
    freed = threading.Event()
    queue.put(range(4), timeout_s=0.05)

    with pytest.raises(WorkerError, match=r"2 attempts of agent .*kind='processes'"):
        Runner(
            lo.rollout(lambda task: freed.wait(30), name="agent"), store=store, queue=queue
        ).run()

    freed.set()
    assert queue.counts()["queuing"] == 2


def test_state_that_fails_for_a_moment_costs_no_attempt(
    store: Store, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A heartbeat that does not get through is tried again; an attempt may outlast its lease.

    The fault is made up: no real database fails when it is told to.
    """
    calls: list[object] = []
    beat = queue.heartbeat

    def heartbeat(lease: AttemptedRollout) -> bool:
        calls.append(lease)
        if len(calls) == 1:
            raise StateError("the state does not answer")
        return beat(lease)

    monkeypatch.setattr(queue, "heartbeat", heartbeat)

    def agent(task: str) -> float:
        time.sleep(2)
        return 1.0

    (rollout,) = ran(queue, Runner(agent, store=store, queue=queue, lease_s=1.5), ["a"])

    assert rollout.status == "succeeded"
    assert len(calls) > 1


def test_cancel_reaches_an_agent_at_work(store: Store, queue: Queue) -> None:
    """The attempt is given up within a heartbeat, and its result is not counted."""
    started = threading.Event()

    async def agent(task: str) -> float:
        started.set()
        await asyncio.sleep(30)
        return 1.0

    (rollout,) = queue.put(["a"], max_attempts=5)
    runner = Runner(agent, store=store, queue=queue, lease_s=1.5)
    thread = threading.Thread(target=runner.run)
    thread.start()
    assert started.wait(10)
    queue.cancel(rollout.rollout_id, "enough")
    thread.join(10)

    assert not thread.is_alive()
    found = queue.get(rollout.rollout_id)
    assert (found.status, found.reason, found.attempts) == ("cancelled", "enough", 1)


def test_runner_waits_for_the_end_of_a_pause(store: Store, queue: Queue) -> None:
    (rollout,) = queue.put(["a"])
    queue.pause()
    thread = threading.Thread(target=Runner(lambda task: 1.0, store=store, queue=queue).run)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    assert queue.get(rollout.rollout_id).status == "queuing"
    queue.resume()
    thread.join(10)

    assert queue.get(rollout.rollout_id).status == "succeeded"


def test_resources_are_assigned_and_stamped(store: Store, queue: Queue) -> None:
    """The agent works with what is its, pinned versions first, and every span says which."""
    resources = Resources(queue.state)
    for text in ("{task}", "{task}!"):
        resources.publish("prompt", text, alias="live")
    resources.publish("planner/prompt", "plan {task}")

    def solver(task: str, resources: Mapping[str, Resource]) -> float:
        lo.emit_action("act", task)
        return float(resources["prompt"].version)

    def planner(task: str, resources: Mapping[str, Resource]) -> float:
        lo.emit_action("act", task)
        return 10 + float(resources["prompt"].body["template"] == "plan {task}")

    router = Router([solver, planner])
    runner = Runner(router, store=store, queue=queue, resources=resources)
    (free,) = ran(queue, runner, ["a"], agent="solver")
    (pinned,) = ran(queue, runner, ["a"], agent="solver", resources={"prompt": 1})
    (own,) = ran(queue, runner, ["a"], agent="planner")
    (absent,) = ran(queue, runner, ["a"], agent="solver", resources={"prompt": 9})

    assert (free.reward, pinned.reward, own.reward) == (2.0, 1.0, 11.0)
    assert (absent.status, absent.reason.split(":")[0]) == ("failed", "NotFoundError")
    used = {(step.rollout_id, step.agent): dict(step.resources) for step in store.transitions()}
    assert used[free.rollout_id, "solver"]["prompt"] == "2"
    assert used[pinned.rollout_id, "solver"]["prompt"] == "1"
    assert set(used[own.rollout_id, "planner"].values()) == {"1"}


@pytest.mark.parametrize(
    ("agent", "has_resources", "why"),
    [
        (lambda task, resources: 1.0, False, "give Runner(resources=…)"),
        (
            lo.rollout(lambda task: 1.0, name="plain"),
            True,
            "pinned to prompt, which plain does not take; write it as (task, resources)",
        ),
    ],
)
def test_pinned_rollout_that_cannot_be_is_refused(
    store: Store, queue: Queue, agent: Any, has_resources: bool, why: str
) -> None:
    """It never runs with something else in silence."""
    resources = Resources(queue.state)
    resources.publish("prompt", "Be brief.")
    given = resources if has_resources else None
    runner = Runner(agent, store=store, queue=queue, resources=given)

    (rollout,) = ran(queue, runner, ["a"], resources={"prompt": 1})

    assert rollout.status == "failed"
    assert why in rollout.reason


class Telling(Hook):
    """Keeps what it is told of."""

    def __init__(self) -> None:
        self.told: list[object] = []

    def on_rollout_start(self, *, agent: Any, runner: Runner, rollout: Rollout) -> None:
        self.told.append(("start", agent.name, rollout.status))

    def on_trace_start(
        self, *, agent: Any, runner: Runner, rollout: Rollout, recording: Any
    ) -> None:
        """Emit into the rollout."""
        lo.emit_message("from a hook")

    async def on_trace_end(
        self, *, agent: Any, runner: Runner, rollout: Rollout, recording: Any
    ) -> None:
        """Keep it, later."""
        self.told.append(("traced", recording.result, type(recording.error).__name__))

    def on_rollout_end(
        self, *, agent: Any, runner: Runner, rollout: Rollout, spans: list[Span]
    ) -> None:
        """Keep it, and fail."""
        self.told.append(("end", rollout.status, len(spans)))
        raise RuntimeError("a hook's own")


def test_hooks_look_on_and_disturb_nothing(
    store: Store, queue: Queue, caplog: pytest.LogCaptureFixture
) -> None:
    """They are called around each attempt, sync and async; one that fails is told of."""
    hook = Telling()

    def agent(task: int) -> float:
        return 1 / task

    rollouts = ran(queue, Runner(agent, store=store, queue=queue, hooks=[hook]), [1, 0])

    assert hook.told == [
        ("start", "agent", "running"),
        ("traced", 1.0, "NoneType"),
        ("end", "succeeded", 3),
        ("start", "agent", "running"),
        ("traced", None, "ZeroDivisionError"),
        ("end", "failed", 2),
    ]
    assert [each.status for each in rollouts] == ["succeeded", "failed"]
    assert "on_rollout_end of Telling failed" in caplog.text


def test_groups_are_those_of_the_queue(store: Store, queue: Queue) -> None:
    """The adapter compares rollouts of one group, whatever their tasks look like."""

    def agent(task: str) -> float:
        lo.emit_action("act", task)
        return float(len(task))

    rollouts = ran(queue, Runner(agent, store=store, queue=queue), ["a", "bc"], group_ids=["g"] * 2)

    found = lo.TripletAdapter(advantage="grpo").adapt(store.spans())
    assert {path.transitions[0].group_id for path in found} == {"g"}
    assert len(rollouts) == len(found) == 2


_VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="none")


def test_attempts_know_nothing_of_each_other(store: Store, queue: Queue) -> None:
    """What one sets in its context is not there in the next, though they share a loop."""

    async def agent(task: str) -> float:
        seen = _VARIABLE.get()
        _VARIABLE.set(task)
        asyncio.get_running_loop().create_task(asyncio.sleep(30))
        return float(seen == "none")

    rollouts = ran(queue, Runner(agent, store=store, queue=queue), ["a", "b", "c"])

    assert [each.reward for each in rollouts] == [1.0, 1.0, 1.0]


def test_forked_child_is_a_worker_of_its_own(store: Store, queue: Queue) -> None:
    """It goes on with the runner under another name, and disturbs nothing of its parent's."""
    rollouts = queue.put(range(4))
    runner = Runner(lambda task: 1.0, store=store, queue=queue)
    assert runner.step() is not None

    child = os.fork()
    if not child:
        done = runner.step()
        os._exit(0 if done is not None and done.status == "succeeded" else 1)
    _, code = os.waitpid(child, 0)
    runner.run()

    assert code == 0
    assert {each.status for each in queue.rollouts()} == {"succeeded"}
    workers = [queue.attempts(each.rollout_id)[0].worker_id for each in rollouts]
    assert workers[0] == workers[2] == workers[3] != workers[1]
    assert len(store.rollouts().rows()) == 4


def test_unchanged_agent_is_given_its_resources_in_its_requests(
    store: Store, queue: Queue, server: DemoServer, client: openai.OpenAI
) -> None:
    """Where that is asked for; the version a rollout is pinned to goes before the live one."""
    resources = Resources(queue.state)
    for text in ("Be brief.", "Be kind."):
        resources.publish("system_prompt", text, alias="live")

    def agent(task: str) -> float:
        said: Any = [{"role": "system", "content": "Be."}, {"role": "user", "content": task}]
        client.chat.completions.create(model="toy", messages=said)
        return 1.0

    how: dict[str, Any] = {"store": store, "queue": queue, "resources": resources}
    ran(queue, Runner(agent, **how), ["a"])
    ran(queue, Runner(agent, **how, apply=True), ["b"], resources={"system_prompt": 1})
    ran(queue, Runner(agent, **how, apply=True), ["c"])

    requests = [each.request or {} for each in server.log]
    assert [each["messages"][0]["content"] for each in requests] == ["Be.", "Be brief.", "Be kind."]
    assert [dict(step.resources) for step in store.transitions()] == [
        {},
        {"system_prompt": "1"},
        {"system_prompt": "2"},
    ]
