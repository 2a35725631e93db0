"""A run's settings, and its agent's rollouts: run by its own workers, or by runners elsewhere."""

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from lightning_otel.algorithms.groups import load_groups, make_member
from lightning_otel.dataset.query import TransitionQuery
from lightning_otel.errors import ConfigError, LightningOtelError
from lightning_otel.state.queue import FINAL
from lightning_otel.types import Mode, Rollout, Trajectory

if TYPE_CHECKING:
    from lightning_otel.dataset import Store
    from lightning_otel.resources import Resources
    from lightning_otel.runner import Hook
    from lightning_otel.runner.agents import Agent
    from lightning_otel.runner.pool import Kind
    from lightning_otel.state.queue import Queue
    from lightning_otel.state.runs import Runs
    from lightning_otel.tracing import RewardEvaluator

POLL_S: Final = 0.5
"""Seconds to wait at least before looking for more."""
STOPPED: Final = "whoever asked for it was stopped"
"""The reason why a rollout was cancelled that nobody waits for any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """The settings of a training run; :class:`~lightning_otel.Trainer` says what they mean.

    Attributes:
        options: The algorithm's own options.
        follows: Wait for more experience once there is none.
        stop: Set when the run is to stop.
        progress: Called after each step with its number, of how many, and the metrics.
    """

    store: "Store"
    queue: "Queue"
    resources: "Resources"
    runs: "Runs"
    run_dir: Path
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
    consumer: str = ""
    min_gain: float = 0.0
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    report_to: tuple[str, ...] = ()
    follows: bool = False
    stop: threading.Event = field(default_factory=threading.Event)
    progress: "Callable[[int, int | None, Mapping[str, float]], None] | None" = None


class RolloutResult(NamedTuple):
    """The outcome of a task: its rollout and recorded trajectories."""

    rollout: Rollout
    trajectories: list[Trajectory]


def require_agent(config: RunConfig) -> None:
    """Check that somebody runs rollouts."""
    if config.agent is None and config.workers:
        raise ConfigError(
            "tasks are to be run, and there is no agent; give Trainer(agent, …), or workers=0 if "
            "a runner elsewhere takes them out of the queue"
        )


def run_tasks(
    config: RunConfig,
    tasks: Sequence[Any],
    versions: Mapping[str, int],
    *,
    mode: Mode,
    samples: int = 1,
) -> list[RolloutResult]:
    """Run tasks and return their outcomes in order; a failed rollout has a reason and no reward.

    What is not over when it is time to stop, or something fails, is cancelled: nobody would look at
    it any more.
    """
    require_agent(config)
    queue = config.queue
    rollouts = put_tasks(config, tasks, versions, mode=mode, samples=samples)
    ids = [each.rollout_id for each in rollouts]

    def cancel(reason: str) -> None:
        for rollout_id in ids:
            queue.cancel(rollout_id, reason)

    try:
        done = wait_rollouts(config, ids)
    except BaseException as exc:
        with contextlib.suppress(LightningOtelError):  # the first failure is the one to tell
            cancel(f"whoever asked for it failed: {type(exc).__name__}")
        raise
    if any(each.status not in FINAL for each in done):
        cancel(STOPPED)
        done = queue.rollouts(ids=ids)
    query = TransitionQuery.of({**config.select, "mode": None})  # type: ignore[typeddict-item]  # as given
    loaded = load_groups(
        config.store, query, {each.rollout_id: [make_member(each)] for each in done}
    )
    return [
        RolloutResult(
            each
            if each.status != "succeeded"
            else replace(each, reward=loaded.rewards.get(each.rollout_id, each.reward)),
            list(loaded.trajectories.get(each.rollout_id, ())),
        )
        for each in done
    ]


def put_tasks(
    config: RunConfig,
    tasks: Sequence[Any],
    versions: Mapping[str, int],
    *,
    mode: Mode,
    samples: int,
    group_ids: Sequence[str] | None = None,
) -> list[Rollout]:
    """Put tasks into the queue, pinned to versions by name."""
    return config.queue.put(
        list(tasks),
        mode=mode,
        agent=None if config.agent is None else config.agent.name,
        samples=samples,
        max_attempts=config.max_attempts,
        timeout_s=config.timeout_s,
        resources=versions,
        group_ids=group_ids,
    )


def wait_rollouts(config: RunConfig, rollout_ids: Sequence[str]) -> list[Rollout]:
    """Return the rollouts once they are over, or as they stand when it is time to stop."""
    from lightning_otel.runner.pool import run_workers

    while not config.stop.is_set():
        rollouts = config.queue.rollouts(ids=rollout_ids)
        if all(each.status in FINAL for each in rollouts):
            return rollouts
        if config.agent is not None and config.workers:
            run_workers(
                config.workers,
                config.agent,
                store=config.store,
                queue=config.queue,
                resources=config.resources,
                kind=config.kind,
                hooks=config.hooks,
                reward_evaluator=config.reward_evaluator,
                apply=config.apply,
                stop=config.stop,
            )
        # The rollout of a killed worker is there again once its lease has run out.
        config.queue.wait(rollout_ids, timeout_s=POLL_S)
    return config.queue.rollouts(ids=rollout_ids)
