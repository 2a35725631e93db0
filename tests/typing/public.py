"""The public API as users write it, for the type checker alone; nothing here is run."""

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, assert_type

import lightning_otel as lo
from lightning_otel.algorithms import Batch
from lightning_otel.testing import captured, failure, scripted_server, tool_call
from lightning_otel.tracing.blocks import OperationBlock
from lightning_otel.trainer import Fit
from lightning_otel.types import Call, Reward, Rollout


def agent(task: str) -> str:
    return task


def judge(recording: lo.Recording) -> float:
    return float(recording.result == "4" and recording.error is None)


async def judge_later(recording: lo.Recording) -> dict[str, float]:
    """Judge a rollout after asking somebody."""
    return {"ok": float(len(recording.spans()))}


def record_a_block() -> None:
    """The block of DESIGN.md, section 6."""
    with lo.auto_trace() as recording:
        answer = agent("2+2")
        lo.emit_reward(float(answer == "4"))

    for trajectory in recording.trajectories(credit="discounted", gamma=0.9):
        for step in trajectory.transitions:
            assert_type(step, lo.Transition)
            assert_type(step.reward, float | None)
            assert_type(step.action, tuple[Mapping[str, Any], ...])
    assert_type(recording, lo.Recording)
    assert_type(recording.spans(), list[lo.Span])
    assert_type(recording.report(), lo.Report)
    assert_type(recording.store, lo.Store)


async def record_an_async_block() -> None:
    """The same where things are awaited."""
    async with lo.auto_trace(reward_evaluator=judge_later) as recording:
        assert_type(recording.rollout_id, str)


@lo.auto_trace
def bare(task: str, *, retries: int = 0) -> int:
    """Decorated without arguments."""
    return len(task) + retries


@lo.auto_trace(
    enable_retokenization_fix=True, name="solve", agent="calc", store="here", reward_evaluator=judge
)
async def with_arguments(task: str) -> str:
    """Decorated with arguments."""
    return task


@lo.auto_trace()
def generator(count: int) -> Iterator[int]:
    """A generator."""
    yield from range(count)


@lo.context(track_only=["planner"])
async def async_generator(count: int) -> AsyncIterator[int]:
    """An async generator."""
    for number in range(count):
        yield number


async def decorated_functions_keep_their_types() -> None:
    """A decorated function is called as before."""
    assert_type(bare("x", retries=1), int)
    assert_type(await with_arguments("x"), str)
    assert_type(generator(2), Iterator[int])
    assert_type(async_generator(2), AsyncIterator[int])
    assert_type(lo.auto_trace(agent, store=lo.Store())("x"), str)
    bare(3)  # type: ignore[arg-type]  # the parameters are still checked
    lo.auto_trace(rolout_id="r1")  # type: ignore[call-overload]  # and so are the options
    lo.context(rolout_id="r1")  # type: ignore[call-arg]  # of both


def name_what_goes_on(store: lo.Store) -> None:
    """Options of ``context``, and every emitter."""
    with lo.context(rollout_id="r1", track_only=["planner"], store=store) as recording:
        assert_type(recording, lo.Recording)
        lo.emit_message("hello", attributes={"level": "info"})
        lo.emit_object({"any": object()})
        lo.emit_action("api_call", {"endpoint": "/users"})
        lo.emit_observation("api_response", {"status": 200})
        lo.emit_observation("alone")
        lo.emit_state("started", message="now")
        lo.emit_exception(ValueError("no"))
        lo.emit_reward({"ok": 1, "short": 0.4}, primary="ok")
        lo.emit_reward("task_success", 0.95)
        lo.emit_reward("task_completion", score=0.95)
        span_id = lo.emit_span("mine", metadata={"a": 1}, task_id="t1")
        assert_type(span_id.span_id, str | None)
        assert_type(lo.emit_reward(0.5, span_id=span_id), str | None)
    lo.emit_reward(0.0, response_id="chatcmpl-1")
    assert_type(lo.retract_reward("ab" * 8, rollout_id="r1"), str | None)
    lo.emit_state("paused")  # type: ignore[arg-type]  # one of three


@lo.operation
def operated(size: int) -> bytes:
    """An operation, decorated bare."""
    return bytes(size)


@lo.operation("named", top_k=5)
async def operated_later(size: int) -> bytes:
    """An operation, decorated with arguments."""
    return bytes(size)


async def operate() -> None:
    """Operations are blocks, too."""
    assert_type(operated(2), bytes)
    assert_type(await operated_later(2), bytes)
    with lo.operation("retrieve", top_k=5) as found:
        assert_type(found, OperationBlock)
        found.output = ["a"]
    lo.emit_reward(1.0, span_id=found.span_id)


def read(spans: list[lo.Span]) -> None:
    """Reading a store, and adapting spans."""
    store = lo.Store()
    store.connect()
    table = store.transitions(agents="planner*", credit="previous")
    for step in table:
        assert_type(step.reward, float | None)
    assert_type(lo.TripletAdapter(credit="previous").adapt(spans), list[lo.Trajectory])


def credit(store: lo.Store) -> None:
    """Rules, compositions and advantages, named and of one's own."""
    lo.emit_reward(1.0, match={"ticket": "T-1", "try": 2}, rollout_id="r1")
    lo.emit_reward([0.5, None, 1.0])
    lo.emit_reward("progress", [0.5, None])

    def newest(reward: Reward, calls: Sequence[Call]) -> Call | str:
        return calls[-1] if calls else "nothing yet"

    def ranks(rewards: Sequence[float]) -> list[float]:
        return [float(sorted(rewards).index(reward)) for reward in rewards]

    quality = lo.Composition({"correct": 1.0}, gates={"correct": 0.5})
    table = store.transitions(credit=newest, compose=quality, advantage="grpo")
    for step in table:
        assert_type(step.advantage, float | None)
        assert_type(step.weight, float)
    lo.TripletAdapter("step", compose=min_of, advantage=lo.Advantage(ranks, group_by="key", size=8))
    lo.TripletAdapter("agents", advantage=lo.Advantage(group_by=lambda spans: spans[0].name))
    lo.TripletAdapter("best")  # type: ignore[arg-type]  # no such rule


def resources(store: lo.Store) -> None:
    """Versions, aliases, who is given which, and whether one is better."""
    found = lo.Resources(lo.State("traces.duckdb"))
    assert_type(found.publish("system_prompt", lo.Prompt("Do {task}")), lo.Resource)
    assert_type(found.get("system_prompt").format(task="it"), str)
    assert_type(
        found.assigned("r1", agent="a", pinned={"system_prompt": 1}), dict[str, lo.Resource]
    )
    assert_type(found.compare("system_prompt", 1, "live", store).is_better, bool)
    found.publish("endpoint", {"model": "m"}, kind="model")  # type: ignore[arg-type]  # no kind
    with lo.auto_trace(apply=True, resources={"*": {"system_prompt": 1}}):
        pass


def min_of(rewards: Mapping[str, float]) -> float:
    """The least of several rewards."""
    return min(rewards.values())


def judged(store: lo.Store) -> None:
    """Reward functions, feedback and worth."""

    def exact_match(task: Mapping[str, str], answer: str) -> float:
        return float(answer == task["want"])

    async def asked(trajectory: lo.Trajectory) -> dict[str, float] | None:
        return {"steps": float(len(trajectory.transitions))}

    done = lo.apply_rewards(store, exact_match, since="2026-11-01", agents="planner*")
    assert_type(done.mean, float | None)
    lo.apply_rewards("traces.duckdb", asked, version="2", is_dry_run=True)
    assert_type(lo.reward_from_feedback(rating=5, satisfied=True), float)
    assert_type(lo.emit_feedback(rating=5, response_id="chatcmpl-1"), str | None)
    worth = lo.Worth(lo.Composition({"cost": -1.0}), prices={"m": lo.Price(input=1, output=2)})
    lo.apply_rewards(store, worth)
    assert_type(lo.learned("image").resource.version, int)
    lo.emit_feedback(stars=5)  # type: ignore[call-arg]  # no such thing is said


class Own(lo.BaseAlgorithm):
    """An algorithm of one's own."""

    group_size = 2

    def train_step(self, batch: Batch) -> lo.StepResult | None:
        """Learn nothing."""
        assert_type(batch.rewards, dict[str, float])
        return lo.StepResult({"loss": 0.5}, {"prompt": "better"}) if batch else None


def train(store: lo.Store) -> None:
    """Trainers, their algorithms and what comes of them."""
    trainer = lo.Trainer(store=store, algorithm=Own(), max_iterations=10)
    fit = trainer.fit(["a task"], val=["another"])
    assert_type(fit.promoted, tuple[str, ...])
    assert_type(trainer.train(), Fit)
    assert_type(trainer.evaluate(["a task"]).reward, float | None)
    assert_type(trainer.resume_from_checkpoint("latest"), lo.Trainer)
    with_agent = lo.Trainer(agent, "baseline", resources={"prompt": "a prompt"}, workers=2)
    fitting = with_agent.fit_async()
    fitting.stop()
    assert_type(fitting.wait(), Fit | None)
    lo.Trainer(agent, "apo", model="a model", seed=1)
    lo.Trainer(algorithm=3)  # type: ignore[call-overload]  # no algorithm
    lo.Trainer(algorithm=Own(), workers="two")  # type: ignore[call-overload]  # no number


@lo.rollout
def solve(task: str, resources: Mapping[str, lo.Resource]) -> float:
    """Act on a task."""
    return float(len(resources))


class Solver(lo.LitAgent[str]):
    """Act on a task, later."""

    async def training_rollout_async(
        self, task: str, resources: Mapping[str, lo.Resource], rollout: Rollout
    ) -> float:
        """Act to learn from it."""
        return 1.0


def run_agents(store: lo.Store) -> None:
    """The blocks of docs/rollouts.md."""
    queue = lo.Queue(lo.State.beside(store))
    rollouts = queue.put(["2+2"], samples=2, mode="val", timeout_s=60)
    assert_type(rollouts, list[Rollout])
    router = lo.Router({"solver": Solver(), "other": solve}, rule=lambda task: "solver")
    runner = lo.Runner(router, store=store, queue=queue, reward_evaluator=judge)
    assert_type(runner.step(), Rollout | None)
    assert_type(lo.run_workers(4, solve, kind="processes", store=store, queue=queue), int)
    for each in queue.wait([each.rollout_id for each in rollouts], timeout_s=60):
        assert_type(each.reward, float | None)


def test_an_agent() -> None:
    """As docs/testing.md has it."""
    with scripted_server([tool_call("add", a=1), "2", failure(429)]) as server, captured() as got:
        lo.set_debug_mode(True)
        assert_type(server.base_url, str)
    assert_type(got.calls[0].model, str)
    assert_type(got.transitions[0].reward, float | None)
    got.assert_complete()
