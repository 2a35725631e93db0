"""The names of document 000, and the snippets of 002, core concepts: only the import is changed.

Its AutoGen team leaves its arguments out; ``tests/instrumentors/autogen`` runs such teams.
"""

import ast
import asyncio
import importlib
from collections.abc import Iterable
from typing import Any

import pytest
from tests.seeds.snippets import ran

import lightning_otel.agl as agl
from lightning_otel import Store
from lightning_otel.errors import ConfigError

AGENT = """
class MyAgent(LitAgent):
    async def rollout(self, task, resources, rollout):
        result = await self.process_task(task, resources)
        return result

trainer = Trainer()
trainer.add_agent(MyAgent())

await trainer.run(train_dataset, val_dataset)
"""
ADAPTER = """
class CustomAdapter(TraceAdapter):
    def adapt(self, spans):
        return custom_trajectory_format(spans)
"""
ALGORITHMS = """
from lightning_otel.agl.algorithm.apo import APO

apo = APO()
apo.set_store(store)
apo.set_adapter(adapter)

from lightning_otel.agl.algorithm.verl import VERL

verl = VERL()
verl.set_store(store)
verl.set_adapter(adapter)
"""


def test_agent_and_trainer() -> None:
    """Three tasks are three rollouts of the default store, with the reward each returned."""
    from lightning_otel import LitAgent

    class Base(LitAgent[int]):
        async def process_task(self, task: int, resources: Any) -> float:
            await asyncio.sleep(0)
            agl.emit_action("said", task)
            return task / 2

    code = compile(AGENT, "<seed>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    names = {
        "__name__": "seed", "LitAgent": Base, "Trainer": agl.Trainer,
        "train_dataset": [0, 1], "val_dataset": [2],
    }  # fmt: skip
    asyncio.run(eval(code, names))

    assert sorted(step.reward for step in Store().transitions()) == [0.0, 0.5]
    assert {row["status"] for row in Store().rollouts()} == {"succeeded"}


def test_adapter_of_any_form(store: Store) -> None:
    """It gives whatever it makes of the spans."""

    def custom(spans: Iterable[Any]) -> dict[str, int]:
        return {"spans": len(list(spans))}

    with agl.auto_trace(store=store):
        agl.emit_action("said", "hi")
    after = ran(ADAPTER, TraceAdapter=agl.TraceAdapter, custom_trajectory_format=custom)

    assert after["CustomAdapter"]().adapt(store.spans()) == {"spans": 2}


def test_algorithms_take_store_and_adapter(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer that is given no store takes the algorithm's."""
    monkeypatch.setenv("OPENAI_API_KEY", "none")

    after = ran(ALGORITHMS, store=store, adapter=agl.TripletAdapter())

    for name in ("apo", "verl"):
        assert agl.Trainer(algorithm=after[name]).store is store


def test_nothing_is_on_unless_it_is_said() -> None:
    """Neither is anything recorded nor trained by default."""
    off = agl.LightningRuntimeConfig()

    assert agl.resolve_lightning_store(off) is None
    unasked = agl.LightningRuntimeConfig(enable_collection=False, enable_training=False)
    assert agl.resolve_lightning_store(unasked) is None
    assert agl.train_with_lightning_backend(agl.LightningTrainingRequest(), off) is None


def test_backends_are_resolved() -> None:
    """``auto`` falls back to ours where Agent Lightning is not installed; ``microsoft`` refuses."""
    auto = agl.LightningRuntimeConfig(enabled=True, store="here.duckdb")
    strict = agl.LightningRuntimeConfig(enabled=True, backend="microsoft")

    assert isinstance(agl.resolve_lightning_store(auto), Store)
    assert agl.resolve_lightning_store().name == agl.resolve_lightning_store("builtin").name
    collecting = agl.LightningRuntimeConfig(enable_collection=True, store="here.duckdb")
    assert agl.resolve_lightning_store(collecting).name.endswith("here.duckdb")
    with pytest.raises(ConfigError, match="backend is 'redis'; it must be one of auto"):
        agl.resolve_lightning_store("redis")
    with pytest.raises(ConfigError, match="agentlightning is not installed"):
        agl.resolve_lightning_store("microsoft")
    with pytest.raises(ConfigError, match="agentlightning is not installed"):
        agl.resolve_lightning_store(strict)
    assert agl.MicrosoftLightningStore(path="x").hand_over is not None


def test_engine_trains_on_its_runs(store: Store) -> None:
    """Events with a terminal reward become (s, a, r, s'), on which the backend trains."""
    with agl.LightningTracer(store).trace_context("run"):
        agl.emit_observation("code", "print 1")
        agl.emit_action("migrate", "print(1)")
        agl.emit_reward("quality", 0.9)
    config = agl.LightningRuntimeConfig(enabled=True, enable_training=True, store=store.name)

    fit = agl.train_with_lightning_backend(agl.LightningTrainingRequest("baseline"), config)

    (path,) = agl.TrajectoryAdapter().adapt(store.spans())
    (step,) = path.transitions
    assert (step.reward, step.done, step.next_observation) == (0.9, True, None)
    assert isinstance(fit, agl.LightningTrainingResult)
    assert fit.metrics["mean_reward"] == 0.9


def test_memory_store() -> None:
    """It lives in the process alone."""
    memory = agl.MemoryLightningStore()
    with agl.auto_trace(store=memory):
        agl.emit_action("said", "hi")

    assert len(list(memory.transitions())) == 1
    assert agl.LightningStore(backend="memory").name == ":memory:"


@pytest.mark.parametrize("module", ["types", "runner", "adapter"])
def test_modules_of_theirs(module: str) -> None:
    """Each has the names that stand in it there."""
    names = {
        "types": ["Attempt", "AttemptedRollout", "Rollout", "Span", "Triplet"],
        "runner": ["LitAgentRunner"],
        "adapter": ["TraceAdapter", "TracerTraceToTriplet"],
    }
    home = importlib.import_module(f"lightning_otel.agl.{module}")

    assert all(getattr(home, name) is getattr(agl, name) for name in names[module])
