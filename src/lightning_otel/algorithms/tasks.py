"""The rollouts of a run's agent, run here or by workers elsewhere."""

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from lightning_otel.algorithms.groups import load_groups, make_member
from lightning_otel.algorithms.options import RunConfig
from lightning_otel.dataset.query import TransitionQuery
from lightning_otel.errors import ConfigError, LightningOtelError
from lightning_otel.runner import pool, worker
from lightning_otel.state.queue import FINAL
from lightning_otel.state.rollouts import make_rollouts
from lightning_otel.types import Mode, Rollout, Trajectory

POLL_S: Final = 0.5
"""Seconds to wait at least before looking for more."""
STOPPED: Final = "whoever asked for it was stopped"


class RolloutResult(NamedTuple):
    """The outcome of a task: its rollout and recorded trajectories."""

    rollout: Rollout
    trajectories: list[Trajectory]


def require_agent(config: RunConfig) -> None:
    """Raise ConfigError if there is no agent, and no runner elsewhere is announced."""
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
    """Run tasks; return outcomes in order. Rollouts left when the run stops are cancelled."""
    require_agent(config)
    rollouts = make_task_rollouts(config, tasks, versions, mode, samples)
    try:
        outcomes = run_rollouts(config, rollouts)
    except BaseException as exc:
        with contextlib.suppress(LightningOtelError):  # the first failure is the one to tell
            _cancel_rest(config, rollouts, f"whoever asked for it failed: {type(exc).__name__}")
        raise
    if any(rollout.status not in FINAL for rollout in outcomes):
        outcomes = _cancel_rest(config, outcomes, STOPPED)
    query = TransitionQuery.of({**config.select, "mode": None})  # type: ignore[typeddict-item]  # as given
    loaded = load_groups(
        config.store, query, {rollout.rollout_id: [make_member(rollout)] for rollout in outcomes}
    )
    return [
        RolloutResult(
            rollout
            if rollout.status != "succeeded"
            else replace(rollout, reward=loaded.rewards.get(rollout.rollout_id, rollout.reward)),
            list(loaded.trajectories.get(rollout.rollout_id, ())),
        )
        for rollout in outcomes
    ]


def make_task_rollouts(
    config: RunConfig,
    tasks: Sequence[Any],
    versions: Mapping[str, int],
    mode: Mode,
    samples: int,
    group_ids: Sequence[str] | None = None,
) -> list[Rollout]:
    """Return rollouts of tasks, pinned to versions by name."""
    return make_rollouts(
        tasks,
        samples,
        group_ids,
        mode=mode,
        agent=None if config.agent is None else config.agent.name,
        max_attempts=config.max_attempts,
        timeout_s=config.timeout_s,
        resources=dict(versions),
        created_ns=time.time_ns(),
    )


def run_rollouts(config: RunConfig, rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Return the rollouts once they are over, or as they stand when it is time to stop."""
    if _runs_here(config):
        settings = _runner_settings(config)
        runners = [worker.Runner(config.agent, **settings) for _ in range(config.workers)]
        return worker.run_rollouts(rollouts, runners, config.stop)
    queue, ids = config.queue, [rollout.rollout_id for rollout in rollouts]
    queue_ids = {rollout.rollout_id for rollout in queue.rollouts(ids=ids)}
    queue.add([rollout for rollout in rollouts if rollout.rollout_id not in queue_ids])
    while not config.stop.is_set():
        if all(rollout.status in FINAL for rollout in queue.rollouts(ids=ids)):
            break
        if config.agent is not None and config.workers:
            pool.run_workers(
                config.workers, config.agent, queue=config.queue, kind=config.kind,
                stop=config.stop, **_runner_settings(config),
            )  # fmt: skip
        # The rollout of a killed worker is there again once its lease has run out.
        queue.wait(ids, timeout_s=POLL_S)
    return queue.rollouts(ids=ids)


def _runs_here(config: RunConfig) -> bool:
    return config.agent is not None and bool(config.workers) and config.kind == "threads"


def _runner_settings(config: RunConfig) -> dict[str, Any]:
    names = ("store", "resources", "hooks", "reward_evaluator", "apply")
    return {name: getattr(config, name) for name in names}


def _cancel_rest(config: RunConfig, rollouts: Sequence[Rollout], reason: str) -> list[Rollout]:
    if not _runs_here(config):
        for rollout in rollouts:
            config.queue.cancel(rollout.rollout_id, reason)
        return config.queue.rollouts(ids=[rollout.rollout_id for rollout in rollouts])
    return [
        rollout
        if rollout.status in FINAL
        else replace(rollout, status="cancelled", reason=reason, ended_ns=time.time_ns())
        for rollout in rollouts
    ]
