"""Rollouts of one step, as a traced program leaves them."""

from collections.abc import Mapping
from typing import Any

from lightning_otel import Store, auto_trace, emit_action, emit_observation, emit_reward


def act(
    store: Store,
    rollout_id: str | None = None,
    reward: float | Mapping[str, float] | None = None,
    *,
    seen: str = "",
    said: str = "done",
    **block: Any,
) -> None:
    """Record an observation and a reward, where they are given, and the action between them."""
    with auto_trace(store=store, rollout_id=rollout_id, **block):
        if seen:
            emit_observation(seen)
        emit_action(said)
        if reward is not None:
            emit_reward(reward)
