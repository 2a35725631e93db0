"""Rollouts put into the queue are worked off: by workers of this run, or by runners elsewhere."""

import contextlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from lightning_otel.algorithms.groups import queued
from lightning_otel.algorithms.loading import load
from lightning_otel.algorithms.setting import Setting
from lightning_otel.dataset.query import Asked
from lightning_otel.errors import ConfigError, LightningOtelError
from lightning_otel.state.queue import FINAL
from lightning_otel.types import Mode, Rollout, Trajectory

if TYPE_CHECKING:
    from lightning_otel.state.queue import Queue


STOPPED: Final = "whoever asked for it was stopped"
"""Why a rollout was cancelled that nobody waits for any more."""


class Ran(NamedTuple):
    """The outcome of a task: its rollout and recorded trajectories."""

    rollout: Rollout
    trajectories: list[Trajectory]


def run_tasks(
    setting: Setting,
    tasks: Sequence[Any],
    versions: Mapping[str, int],
    stop: threading.Event,
    *,
    mode: Mode,
    samples: int = 1,
) -> list[Ran]:
    """Run tasks and return their outcomes in order; a failed rollout has a reason and no reward.

    What is not over when it is time to stop, or something fails, is cancelled: nobody would look at
    it any more.

    Args:
        setting: Who works, and on what.
        tasks: Any JSON values.
        versions: The version of each resource that the agent is given.
        stop: When to give up.
        mode: What the rollouts are for.
        samples: How many rollouts of each task.

    Raises:
        ConfigError: There is no agent, and nobody was said to run one elsewhere.
    """
    require_agent(setting)
    rollouts = setting.queue.put(
        list(tasks),
        mode=mode,
        agent=None if setting.agent is None else setting.agent.name,
        samples=samples,
        max_attempts=setting.max_attempts,
        timeout_s=setting.timeout_s,
        resources=versions,
    )
    ids = [each.rollout_id for each in rollouts]
    try:
        done = work(setting, ids, stop)
    except BaseException as exc:
        with contextlib.suppress(LightningOtelError):  # what went wrong is told, and first
            _cancel_rollouts(
                setting.queue, ids, f"whoever asked for it failed: {type(exc).__name__}"
            )
        raise
    if any(each.status not in FINAL for each in done):
        _cancel_rollouts(setting.queue, ids, STOPPED)
        done = setting.queue.rollouts(ids=ids)
    return _read_recorded(setting, done)


def _read_recorded(setting: Setting, done: Sequence[Rollout]) -> list[Ran]:
    """Rollouts that are over with what the store holds of them, and the rewards given there."""
    asked = Asked.of({**setting.select, "mode": None})  # type: ignore[typeddict-item]  # as given
    found = load(setting.store, asked, {each.rollout_id: [queued(each)] for each in done})
    return [
        Ran(
            each
            if each.status != "succeeded"
            else replace(each, reward=found.rewards.get(each.rollout_id, each.reward)),
            list(found.trajectories.get(each.rollout_id, ())),
        )
        for each in done
    ]


def _cancel_rollouts(queue: "Queue", rollout_ids: Sequence[str], reason: str) -> None:
    for rollout_id in rollout_ids:
        queue.cancel(rollout_id, reason)


def require_agent(setting: Setting) -> None:
    """Check that somebody runs rollouts.

    Raises:
        ConfigError: There is no agent, and nobody was said to run one elsewhere.
    """
    if setting.agent is None and setting.workers:
        raise ConfigError(
            "tasks are to be run, and there is no agent; give Trainer(agent, …), or workers=0 if "
            "a runner elsewhere takes them out of the queue"
        )


def work(setting: Setting, rollout_ids: Sequence[str], stop: threading.Event) -> list[Rollout]:
    """The rollouts, once they are over, or as they stand when it is time to stop.

    Args:
        setting: Who works, and on what.
        rollout_ids: Which rollouts.
        stop: When to give up.
    """
    queue = setting.queue
    while not stop.is_set():
        rollouts = queue.rollouts(ids=rollout_ids)
        if all(each.status in FINAL for each in rollouts):
            return rollouts
        if setting.agent is not None and setting.workers:
            _run_worker(setting, stop)
        # What a worker held that was killed is there again once its lease has run out.
        queue.wait(rollout_ids, timeout_s=setting.poll_s)
    return queue.rollouts(ids=rollout_ids)


def _run_worker(setting: Setting, stop: threading.Event) -> None:
    from lightning_otel.runner import run_workers

    run_workers(
        setting.workers,
        setting.agent,
        store=setting.store,
        queue=setting.queue,
        resources=setting.resources,
        kind=setting.kind,
        hooks=setting.hooks,
        reward_evaluator=setting.reward_evaluator,
        apply=setting.apply,
        stop=stop,
    )
