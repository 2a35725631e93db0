"""Document 000 has no code but names, and what they are for: each does that here."""

import pytest

import lightning_otel.agl as agl
from lightning_otel import Store
from lightning_otel.errors import ConfigError


def test_nothing_is_on_unless_it_is_said() -> None:
    """Neither is anything recorded nor trained by default."""
    off = agl.LightningRuntimeConfig()

    assert agl.resolve_lightning_store(off) is None
    assert agl.train_with_lightning_backend(agl.LightningTrainingRequest(), off) is None


def test_backends_are_resolved() -> None:
    """``auto`` falls back to ours where Agent Lightning is not installed; ``microsoft`` refuses."""
    auto = agl.LightningRuntimeConfig(enabled=True, store="here.duckdb")
    strict = agl.LightningRuntimeConfig(enabled=True, backend="microsoft")

    assert isinstance(agl.resolve_lightning_store(auto), Store)
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
