"""Agent Lightning's names, as programs write them: ``import lightning_otel.agl as agl``.

Each name stands for one of ours; ``docs/comparison.md`` has them side by side. ``auto_trace`` and
``context`` apply published resources by default, as Agent Lightning's documents promise.
"""

from importlib import import_module
from typing import Any, Final

import lightning_otel

_HOMES: Final = {
    "APO": "agl.algorithms",
    "AgentLightning": "agl.trainer:Trainer",
    "AgentOpsTracer": "agl.tracer:Tracer",
    "Algorithm": "algorithms:BaseAlgorithm",
    "Attempt": "state.rollouts",
    "AttemptedRollout": "state.rollouts:Lease",
    "Baseline": "agl.algorithms",
    "InMemoryLightningStore": "agl.store:MemoryLightningStore",
    "LLM": "types:Endpoint",
    "LightningEventRecord": "types:Span",
    "LightningRuntimeConfig": "agl.trainer",
    "LightningStore": "agl.store",
    "LightningStoreClient": "agl.store:LightningStore",
    "LightningTracer": "agl.tracer:Tracer",
    "LightningTrainingRequest": "agl.trainer",
    "LightningTrainingResult": "trainer:Fit",
    "LitAgentRunner": "runner.worker:Runner",
    "LlmProxyTraceToTriplet": "adapter:TripletAdapter",
    "MemoryLightningStore": "agl.store",
    "MicrosoftLightningStore": "agl.store",
    "OtelTracer": "agl.tracer:Tracer",
    "ParallelConfig": "agl.trainer",
    "PromptTemplate": "types:Prompt",
    "ProxyLLM": "types:Endpoint",
    "RewardSignal": "types:Reward",
    "Rollout": "types",
    "Task": "types:Rollout",
    "TraceAdapter": "adapter",
    "TraceToTriplet": "adapter:TripletAdapter",
    "Tracer": "agl.tracer",
    "TracerTraceToTriplet": "adapter:TripletAdapter",
    "Trainer": "agl.trainer",
    "TrajectoryAdapter": "adapter:TripletAdapter",
    "Triplet": "types:Transition",
    "VERL": "agl.algorithms",
    "auto_trace": "agl.tracer",
    "calculate_reward_from_feedback": "agl.reward",
    "context": "agl.tracer",
    "get_learned_optimizations": "rewards.keywords:learned_optimizations",
    "resolve_lightning_store": "agl.store",
    "train_with_lightning_backend": "agl.trainer",
}
"""Where the names stand that are not called so in ``lightning_otel`` itself."""

_OTHERWISE: Final = {
    "LLMProxy": "none is needed: auto_trace(enable_retokenization_fix=True) asks for token ids",
    "LightningStoreServer": "run: lightning-otel serve",
    "emit_annotation": "emit_span(name, metadata={…})",
    "find_final_reward": "store.rollouts() has each rollout's final_reward",
}
"""Names of Agent Lightning's that nothing here stands for, and what does the job."""

__all__ = [*_HOMES, *(name for name in lightning_otel.__all__ if name not in _HOMES)]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        home, _, real = _HOMES[name].partition(":")
        return getattr(import_module(f"lightning_otel.{home}"), real or name)
    if name in lightning_otel.__all__:
        return getattr(lightning_otel, name)
    hint = f"; here it is: {_OTHERWISE[name]}" if name in _OTHERWISE else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    return list(__all__)
