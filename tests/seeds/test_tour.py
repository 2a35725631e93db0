"""The snippets of document 003, a user's tour, as written: only the import is changed.

Its SQL agent, customer service and research assistant call what other snippets call, and are left
out. The document lost its indentation, which is restored.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from tests.pages import DOCS, part, python
from tests.pages import ran as ran_page
from tests.seeds.snippets import ran

import lightning_otel.agl as agl
from lightning_otel import Store
from lightning_otel.errors import ConfigError, LightningOtelError
from lightning_otel.state import State
from lightning_otel.testing import ScriptedServer, scripted_server, tool_call
from lightning_otel.trainer import Fitting

MARKS = """
import lightning_otel.agl as agl

agl.emit_action("user_query", query_text)
agl.emit_observation("api_response", response_data)
agl.emit_reward("task_success", score)

with agl.auto_trace():
    agent.run(task)
"""
SIMPLE_AGENT = """
from openai import OpenAI
import lightning_otel.agl as agl

client = OpenAI()

def simple_agent(user_query):
    response = client.chat.completions.create(
        model="gpt-4",
        messages=[
            {"role": "system", "content": "You are a helpful assistant."},
            {"role": "user", "content": user_query}
        ]
    )

    agl.emit_action("user_query", user_query)
    agl.emit_observation("llm_response", response.choices[0].message.content)
    agl.emit_reward("success", 1.0 if response else 0.0)

    return response.choices[0].message.content

store = agl.LightningStore(backend="local")

with agl.context(store=store):
    result = simple_agent("What is reinforcement learning?")
    print(result)
"""
TRAINING = """
from lightning_otel.agl.algorithms import APO

trainer = agl.Trainer(
    store=store,
    algorithm=APO(
        model="gpt-4",
        optimization_target="system_prompt"
    ),
    max_iterations=10
)

trainer.train()
"""
LANGCHAIN = """
from langchain.agents import initialize_agent
from langchain.tools import Tool
import lightning_otel.agl as agl

tools = [Tool(name="Search", func=search_function)]
agent = initialize_agent(tools, llm, agent_type="zero-shot-react-description")

agent = agl.wrap_langchain(agent, store=store)

agent.run("Find the latest AI research papers")
"""
MANUAL = """
agl.emit_action("api_call", {"endpoint": "/users", "method": "GET"})

agl.emit_observation("api_response", {"status": 200, "data": users})

agl.emit_reward("task_completion", score=0.95)
"""
AUTOMATIC = """
@agl.auto_trace()
def my_agent_function(task):
    return agent.execute(task)

with agl.auto_trace():
    agent.run_task()
"""
SELECTIVE = """
class MultiAgentSystem:
    def __init__(self):
        self.planner = PlannerAgent()
        self.executor = ExecutorAgent()
        self.reviewer = ReviewerAgent()

    def run(self, task):
        with agl.context(store=store, track_only=["planner"]):
            plan = self.planner.create_plan(task)

        result = self.executor.execute(plan)
        review = self.reviewer.review(result)

        return result
"""
ALGORITHMS = (
    "algorithm=PPO(learning_rate=3e-4, gamma=0.99, batch_size=64)",
    'algorithm=APO(model="gpt-4", evaluation_metric="task_success_rate", num_candidates=5)',
    "algorithm=SupervisedFineTuning(base_model='llama-3-8b', epochs=3, learning_rate=2e-5)",
    "algorithm=PPO(), parallelization=agl.ParallelConfig(num_workers=4, "
    "distributed_backend='nccl', gradient_accumulation_steps=4)",
    "algorithm=PPO(), min_batch_size=1000",
    "algorithm=PPO(learning_rate=1e-4, reward_shaping=True), max_iterations=1000",
)
SQL_TRAINING = """
trainer = agl.Trainer(
    store=store,
    algorithm=APO(optimization_target="system_prompt")
)
trainer.train()
"""
RESEARCH_TRAINING = """
trainer = agl.Trainer(
    store=store,
    algorithm=APO(optimization_target="retriever.search_strategy")
)
trainer.train()
"""
DEBUGGING = """
agl.set_debug_mode(True)

from lightning_otel.agl.visualization import plot_training_metrics

plot_training_metrics(
    store=store,
    metrics=["reward", "loss", "success_rate"],
    save_path="training_curves.png"
)

tracer = agl.Tracer(store=store)
tracer.analyze_episode(episode_id="ep_123")
"""
FIX = """
from lightning_otel.agl.fixes import enable_retokenization_fix

trainer = agl.Trainer(
    store=store,
    algorithm=PPO(),
    fixes=[enable_retokenization_fix()]
)
"""
CUSTOM = """
from lightning_otel.agl.algorithms import BaseAlgorithm

class CustomOptimizer(BaseAlgorithm):
    def __init__(self, my_param):
        super().__init__()
        self.my_param = my_param

    def train_step(self, batch):
        spans = batch["spans"]
        rewards = batch["rewards"]

        optimized_resource = self.my_optimization_logic(spans, rewards)

        return {"resource_update": optimized_resource}

trainer = agl.Trainer(
    store=store,
    algorithm=CustomOptimizer(my_param=0.5)
)
"""
COLLECT = """
with agl.context(store=remote_store):
    agent.run_production_tasks()
"""
TRAIN = """
trainer = agl.Trainer(store=remote_store)
trainer.train_async()
"""
RESUME = """
trainer.resume_from_checkpoint("checkpoint_epoch_10.pt")
"""
PIPELINE = """
class ProductionPipeline:
    def __init__(self):
        self.store = agl.LightningStore(backend="redis")
        self.trainer = agl.Trainer(store=self.store)

    def collect_phase(self, duration_hours=24):
        with agl.context(store=self.store):
            run_agent_for_duration(duration_hours)

    def train_phase(self):
        self.trainer.train()
        self.trainer.save_checkpoint("latest.pt")

    def evaluate_phase(self):
        test_metrics = evaluate_on_test_set(self.store)
        if test_metrics["success_rate"] > 0.85:
            return True
        return False

    def deploy_phase(self):
        if self.evaluate_phase():
            deploy_to_production(self.store)
            log_deployment("version_1.2.3", metrics)
        else:
            rollback_to_previous_version()
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a snippet writes goes into the test's folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def default(tmp_path: Path) -> Store:
    """The store that is used where none is named."""
    return Store()


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedServer]:
    """The model that the snippets ask, whatever they call it."""
    with scripted_server(lambda body: "SELECT 1") as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
        monkeypatch.setenv("OPENAI_API_KEY", "none")
        yield server


class Acts:
    """An agent that has every method the snippets call, and says something in each."""

    def __getattr__(self, name: str) -> Callable[..., str]:
        def act(*given: object) -> str:
            agl.emit_observation(str(given))
            agl.emit_action(name)
            return name

        return act


def read_runs(store: Store) -> list[Any]:
    """The training runs, as they stand in the store's state."""
    with State.beside(store).read() as connection:
        rows = connection.exec_driver_sql("SELECT reason, step FROM lightning_runs")
        return list(rows.mappings())


def steps(store: Store, **wanted: Any) -> list[tuple[Any, ...]]:
    """Of each transition what was done and its reward."""
    return [
        (step.action[0]["parts"][0]["content"], step.reward) for step in store.transitions(**wanted)
    ]


def test_marks_and_blocks(default: Store) -> None:
    """Marks make a step with their reward; the block is a rollout."""
    with agl.auto_trace(store=default):
        ran(MARKS, query_text="q", response_data={"a": 1}, score=0.7, agent=Acts(), task="t")

    assert steps(default) == [("q", 0.7), ("run", None)]


def test_simple_agent(model: ScriptedServer, default: Store) -> None:
    """One request, one transition, with the reward; the marks beside it make no step."""
    after = ran(SIMPLE_AGENT)

    (step,) = default.transitions()
    assert (after["result"], step.reward, dict(step.rewards)) == ("SELECT 1", 1.0, {"success": 1.0})
    assert len(model.requests) == 1
    assert [row["status"] for row in default.rollouts()] == ["succeeded"]


@pytest.mark.parametrize(
    ("snippet", "agent", "target"),
    [
        (TRAINING, None, "system_prompt"),
        (SQL_TRAINING, None, "system_prompt"),
        (RESEARCH_TRAINING, "retriever", "retriever/search_strategy"),
    ],
)
def test_training_on_recorded_runs(
    default: Store, monkeypatch: pytest.MonkeyPatch, snippet: str, agent: str | None, target: str
) -> None:
    """The recorded system message is version 1; what the model writes of it is the canary.

    Where no model is named, the one that was recorded writes.
    """
    from lightning_otel import Resources

    def answer(body: Mapping[str, Any]) -> str:
        is_writer = "helpful assistant" in body["messages"][-1]["content"]
        return "```\nYou are a terse assistant.\n```" if is_writer else "A bad answer."

    with scripted_server(answer) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
        monkeypatch.setenv("OPENAI_API_KEY", "none")
        for _ in range(4):
            with agl.context(agent=agent):
                ran(SIMPLE_AGENT.replace("1.0 if response", "0.2 if response"))
        ran(snippet, agl=agl, store=default, APO=agl.APO)
        assert {request["model"] for request in server.requests} == {"gpt-4"}
        if "max_iterations" in snippet:
            (run,) = read_runs(default)
            assert run["reason"].startswith("1 of 10 steps: apo ended by itself; once its canary")

    resources = Resources(State.beside(default))
    assert resources.aliases(target) == {"live": 1, "canary": 2}
    assert [version.prompt.template for version in resources.versions(target)] == [
        "You are a helpful assistant.", "You are a terse assistant.",
    ]  # fmt: skip


def test_langchain(store: Store) -> None:
    """``initialize_agent``, ``agent.run`` and ``langchain.tools.Tool`` are not in LangChain 1."""
    agents = pytest.importorskip("langchain.agents")
    core = pytest.importorskip("langchain_core.tools")
    from langchain_openai import ChatOpenAI

    near = (
        LANGCHAIN.replace("from langchain.agents import initialize_agent\n", "")
        .replace("from langchain.tools import Tool\n", "")
        .replace("func=search_function)", 'func=search_function, description="Searches.")')
        .replace('initialize_agent(tools, llm, agent_type="zero-shot-react-description")',
                 "create_agent(llm, tools)")
        .replace("agent.run(", "agent.invoke(asked(").replace('papers")', 'papers"))')
    )  # fmt: skip
    script = [tool_call("Search", __arg1="AI"), "Here they are."]
    with scripted_server(script) as server:
        llm = ChatOpenAI(model="m", base_url=server.base_url, api_key="k")
        ran(
            near, Tool=core.Tool, create_agent=agents.create_agent, llm=llm, store=store,
            search_function=lambda query: "a paper",
            asked=lambda text: {"messages": [("user", text)]},
        )  # fmt: skip
        assert len(server.requests) == 2

    assert len(list(store.transitions())) == 2
    assert len(list(store.rollouts())) == 1


def test_manual_marks(store: Store) -> None:
    """An action, then what came of it: one step, with the reward."""
    with agl.context(store=store):
        ran(MANUAL, agl=agl, users=["a"])

    (step,) = store.transitions()
    assert dict(step.rewards) == {"task_completion": 0.95}


def test_automatic_tracing(default: Store) -> None:
    """A call of the function and the block are a rollout each."""
    after = ran(AUTOMATIC, agl=agl, agent=Acts())
    after["my_agent_function"]("t")

    assert sorted(steps(default)) == [("execute", None), ("run_task", None)]
    assert len(list(default.rollouts())) == 2


def test_one_agent_of_several_is_tracked(store: Store) -> None:
    """What the agent of that name does is training data, and nothing of the other two is."""

    class Planner(Acts):
        def __getattr__(self, name: str) -> Callable[..., str]:
            return agl.context(agent="planner")(super().__getattr__(name))

    agents = {"PlannerAgent": Planner, "ExecutorAgent": Acts, "ReviewerAgent": Acts}
    ran(SELECTIVE, agl=agl, store=store, **agents)["MultiAgentSystem"]().run("t")

    assert [step.agent for step in store.transitions()] == ["planner"]


@pytest.mark.parametrize("options", ALGORITHMS)
def test_algorithm_is_made(store: Store, options: str, model: ScriptedServer) -> None:
    """Each trainer is made with the options as they are written."""
    imports = "from lightning_otel.agl.algorithms import APO, PPO, SupervisedFineTuning\n"
    after = ran(f"{imports}trainer = agl.Trainer(store=store, {options})", agl=agl, store=store)

    assert after["trainer"].store is store


def test_debugging(store: Store, tmp_path: Path) -> None:
    """A PNG with the two metrics there are, the third named as missing, and the episode."""
    with agl.auto_trace(store=store, rollout_id="ep_123"):
        agl.emit_action("said", "hi")
        agl.emit_reward(0.5)
    try:
        ran(DEBUGGING, agl=agl, store=store)
    finally:
        agl.set_debug_mode(False)

    picture = (tmp_path / "training_curves.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(picture) > 10_000
    drawn = agl.plot_training_metrics(store, ["reward", "loss", "success_rate"])
    assert [(chart.metric, len(chart.series)) for chart in drawn] == [
        ("reward", 1), ("loss", 0), ("success_rate", 1),
    ]  # fmt: skip
    assert agl.Tracer(store=store).analyze_episode("ep_123").rollout_id == "ep_123"


def test_retokenization_fix(store: Store, server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it is called, requests ask the server for the token ids it works with."""
    monkeypatch.setenv("LIGHTNING_OTEL_RETOKENIZATION_FIX", "0")
    ran(f"from lightning_otel.agl.algorithms import PPO\n{FIX}", agl=agl, store=store)

    with agl.auto_trace(store=store), openai.OpenAI(base_url=server.base_url, api_key="k") as asks:
        asks.chat.completions.create(
            model="toy-model", messages=[{"role": "user", "content": "What is 2+2?"}]
        )

    (step,) = store.transitions()
    assert step.capture == "exact"


def test_custom_algorithm(store: Store) -> None:
    """It is given spans and rewards, and what it gives back becomes a canary."""
    for number in range(3):
        with agl.auto_trace(store=store, rollout_id=f"r{number}"):
            agl.emit_action("said", number)
            agl.emit_reward(number / 2)
    after = ran(CUSTOM, agl=agl, store=store)
    seen: dict[str, Any] = {}

    def logic(spans: list[Any], rewards: list[float]) -> str:
        pairs = list(zip(spans, rewards, strict=True))
        seen.update(
            spans={span.rollout_id for span in spans},
            rewards=[(span.rollout_id, reward) for span, reward in pairs if reward],
        )
        return "Say the largest number."

    after["trainer"].algorithm.my_optimization_logic = logic

    made = after["trainer"].train()

    assert seen == {"spans": {"r0", "r1", "r2"}, "rewards": [("r1", 0.5), ("r2", 1.0)]}
    assert made.resources["system_prompt"].prompt.template == "Say the largest number."


def test_collecting_apart_from_training(store: Store) -> None:
    """What one process records, the other trains on, and goes on from where it was."""
    ran(COLLECT, agl=agl, remote_store=store, agent=Rewarded())
    fittings: list[Fitting] = []

    class Trainer(agl.Trainer):  # type: ignore[misc]  # which is told by its name alone
        def train_async(self) -> Fitting:
            fittings.append(super().train_async())
            return fittings[0]

    ran(TRAIN, agl=SimpleNamespace(Trainer=Trainer), remote_store=store)
    while not any(run["step"] for run in read_runs(store)):
        assert fittings[0].is_running
        time.sleep(0.05)
    fittings[0].stop()
    with pytest.raises(LightningOtelError, match=r"checkpoint_epoch_10\.pt"):
        ran(RESUME, trainer=agl.Trainer(store=store))

    trainer = agl.Trainer(store=store)
    trainer.train()
    trainer.save_checkpoint("checkpoint_epoch_10.pt")
    ran(RESUME, trainer=trainer)

    assert fittings[0].wait().metrics["reward"] == 1.0


class Rewarded:
    """An agent whose run earns a reward."""

    def run_production_tasks(self) -> None:
        """Act once."""
        agl.emit_action("said", "hi")
        agl.emit_reward(1.0)


def test_production_pipeline(store: Store) -> None:
    """Redis is refused with what to take; with a local store every phase runs."""
    log: list[Any] = []
    names = {
        "run_agent_for_duration": lambda hours: Rewarded().run_production_tasks(),
        "evaluate_on_test_set": lambda store: {"success_rate": 1.0},
        "deploy_to_production": log.append,
        "log_deployment": lambda *given: log.append(given),
        "metrics": {},
    }
    with pytest.raises(ConfigError, match=r"redis.*name a local path"):
        ran(PIPELINE, agl=agl, **names)["ProductionPipeline"]()

    local = PIPELINE.replace('backend="redis"', 'backend="local"')
    pipeline = ran(local, agl=agl, **names)["ProductionPipeline"]()
    pipeline.collect_phase()
    pipeline.train_phase()
    pipeline.deploy_phase()

    assert log == [pipeline.store, ("version_1.2.3", {})]
    assert (Path("latest.pt")).is_dir()


def test_the_page_has_every_name(tmp_path: Path) -> None:
    """The page of those who come from there names what the room has, and its code runs."""
    page = DOCS / "comparison.md"
    text = page.read_text()

    assert [name for name in agl._HOMES if f"`{name}" not in text] == []
    ran_page(python(part(page, __file__)), tmp_path)
