"""The settings of a training run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_otel.agents import Agent
    from lightning_otel.dataset import Store
    from lightning_otel.resources import Resources
    from lightning_otel.runner import Hook
    from lightning_otel.runner.crew import Kind
    from lightning_otel.state.queue import Queue
    from lightning_otel.state.runs import Runs
    from lightning_otel.tracing import RewardEvaluator


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The settings that a trainer gives a run.

    Attributes:
        store: Where rollouts are recorded.
        queue: Where rollouts are put to be run.
        resources: What is tuned.
        runs: Where the run is written down.
        agent: What is run on tasks; None if that is done elsewhere, or not at all.
        train: Tasks to learn from; empty to learn from what is recorded.
        val: Held-out tasks.
        select: Which rollouts, and how their spans become transitions: keywords of
            ``store.transitions``.
        samples: Rollouts of each task, which are one group.
        min_batch_size: The fewest rollouts a step learns from.
        max_iterations: How many steps at most; None is as many as there is experience for.
        workers: How many rollouts run at once; 0 where runners elsewhere take them.
        kind: ``threads``, ``processes`` or ``ray``.
        hooks: Told of what the workers do.
        reward_evaluator: Judges a rollout whose agent does not.
        apply: Whether requests of an agent that takes a task alone are made with the resources.
        max_attempts: How often a rollout is tried.
        timeout_s: How long an attempt may take, seconds; None is any time.
        reward_timeout_s: How long a group waits for the reward of a rollout that is over, seconds.
        seed: Decides the order of tasks.
        follows: Whether to wait for more experience once there is none.
        poll_s: How long to wait at least before looking for more, seconds.
        progress: Told after each step of how many, and what was measured.
    """

    store: "Store"
    queue: "Queue"
    resources: "Resources"
    runs: "Runs"
    agent: "Agent | None" = None
    train: Sequence[Any] = ()
    val: Sequence[Any] = ()
    select: Mapping[str, Any] = field(default_factory=dict)
    samples: int = 1
    min_batch_size: int | None = None
    max_iterations: int | None = None
    workers: int = 1
    kind: "Kind" = "threads"
    hooks: "Sequence[Hook]" = ()
    reward_evaluator: "RewardEvaluator | None" = None
    apply: bool | None = None
    max_attempts: int = 2
    timeout_s: float | None = None
    reward_timeout_s: float = 30.0
    seed: int = 0
    follows: bool = False
    poll_s: float = 0.5
    progress: "Callable[[int, int | None, Mapping[str, float]], None] | None" = None
