"""lightning-otel: every agent you already run is training data.

OpenTelemetry spans in, reinforcement-learning transitions out. The names below are the public API;
each is imported when it is first used, so that importing this package costs next to nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_otel.adapter import Advantage, Composition, TripletAdapter
    from lightning_otel.algorithms import BaseAlgorithm, StepResult
    from lightning_otel.dataset import Store
    from lightning_otel.debugging import set_debug_mode
    from lightning_otel.errors import ConfigError
    from lightning_otel.exporters.duckdb import DuckDBSpanExporter, LightningSpanProcessor
    from lightning_otel.provider import instrument, uninstrument
    from lightning_otel.resources import Resources
    from lightning_otel.rewards import apply_rewards
    from lightning_otel.rewards.best_version import learned
    from lightning_otel.rewards.feedback import emit_feedback, reward_from_feedback
    from lightning_otel.rewards.worth import Worth
    from lightning_otel.runner.agents import LitAgent, Router, llm_rollout, prompt_rollout, rollout
    from lightning_otel.runner.attempt import Hook
    from lightning_otel.runner.pool import run_workers
    from lightning_otel.runner.worker import Runner
    from lightning_otel.state import State
    from lightning_otel.state.queue import Queue
    from lightning_otel.store.follow import Follower
    from lightning_otel.store.prices import Price
    from lightning_otel.store.transforms import add_transform, remove_transform
    from lightning_otel.tracing import Recording, auto_trace, carried, context, operation
    from lightning_otel.tracing.emitters import (
        emit_action,
        emit_exception,
        emit_message,
        emit_object,
        emit_observation,
        emit_reward,
        emit_span,
        emit_state,
        retract_reward,
    )
    from lightning_otel.tracing.langchain import wrap_langchain
    from lightning_otel.trainer import Trainer
    from lightning_otel.types import Prompt, Report, Resource, Span, Trajectory, Transition
    from lightning_otel.views.analysis import analyze_episode
    from lightning_otel.views.plot import Progress, plot_training_metrics

_HOMES = {
    name: home
    for home, names in {
        "adapter": ("Advantage", "Composition", "TripletAdapter"),
        "algorithms": ("BaseAlgorithm", "StepResult"),
        "dataset": ("Store",),
        "debugging": ("set_debug_mode",),
        "errors": ("ConfigError",),
        "exporters.duckdb": ("DuckDBSpanExporter", "LightningSpanProcessor"),
        "provider": ("instrument", "uninstrument"),
        "resources": ("Resources",),
        "rewards": ("apply_rewards",),
        "rewards.best_version": ("learned",),
        "rewards.feedback": ("emit_feedback", "reward_from_feedback"),
        "rewards.worth": ("Worth",),
        "runner.agents": ("LitAgent", "Router", "llm_rollout", "prompt_rollout", "rollout"),
        "runner.attempt": ("Hook",),
        "runner.pool": ("run_workers",),
        "runner.worker": ("Runner",),
        "state": ("State",),
        "state.queue": ("Queue",),
        "store.follow": ("Follower",),
        "store.prices": ("Price",),
        "store.transforms": ("add_transform", "remove_transform"),
        "tracing": ("Recording", "auto_trace", "carried", "context", "operation"),
        "tracing.emitters": (
            "emit_action",
            "emit_exception",
            "emit_message",
            "emit_object",
            "emit_observation",
            "emit_reward",
            "emit_span",
            "emit_state",
            "retract_reward",
        ),
        "tracing.langchain": ("wrap_langchain",),
        "trainer": ("Trainer",),
        "types": ("Prompt", "Report", "Resource", "Span", "Trajectory", "Transition"),
        "views.analysis": ("analyze_episode",),
        "views.plot": ("Progress", "plot_training_metrics"),
    }.items()
    for name in names
}

__version__ = "0.1.0"
__all__ = [
    "Advantage",
    "BaseAlgorithm",
    "Composition",
    "ConfigError",
    "DuckDBSpanExporter",
    "Follower",
    "Hook",
    "LightningSpanProcessor",
    "LitAgent",
    "Price",
    "Progress",
    "Prompt",
    "Queue",
    "Recording",
    "Report",
    "Resource",
    "Resources",
    "Router",
    "Runner",
    "Span",
    "State",
    "StepResult",
    "Store",
    "Trainer",
    "Trajectory",
    "Transition",
    "TripletAdapter",
    "Worth",
    "add_transform",
    "analyze_episode",
    "apply_rewards",
    "auto_trace",
    "carried",
    "context",
    "emit_action",
    "emit_exception",
    "emit_feedback",
    "emit_message",
    "emit_object",
    "emit_observation",
    "emit_reward",
    "emit_span",
    "emit_state",
    "instrument",
    "learned",
    "llm_rollout",
    "operation",
    "plot_training_metrics",
    "prompt_rollout",
    "remove_transform",
    "retract_reward",
    "reward_from_feedback",
    "rollout",
    "run_workers",
    "set_debug_mode",
    "uninstrument",
    "wrap_langchain",
]


def __getattr__(name: str) -> Any:
    """Import a public name from its home, once."""
    home = _HOMES.get(name)
    if home is None:
        hint = "" if name.startswith("_") else f"; Agent Lightning's names are in {__name__}.agl"
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
    value = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, imported or not."""
    return [*__all__, "__version__"]
