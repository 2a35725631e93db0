"""Rollouts put into the queue are worked off: by workers of this run, or by runners elsewhere."""

import threading
from collections.abc import Sequence

from lightning_otel.algorithms.setting import Setting
from lightning_otel.types import Rollout


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
        if all(each.status in ("succeeded", "failed", "cancelled") for each in rollouts):
            return rollouts
        if setting.agent is not None and setting.workers:
            _run(setting, stop)
        queue.wait(rollout_ids, timeout_s=setting.poll_s)
    return queue.rollouts(ids=rollout_ids)


def _run(setting: Setting, stop: threading.Event) -> None:
    from lightning_otel.runner import run_workers

    run_workers(
        setting.workers,
        setting.agent,
        store=setting.store,
        queue=setting.queue,
        resources=setting.resources,
        kind=setting.kind,
        stop=stop,
    )
