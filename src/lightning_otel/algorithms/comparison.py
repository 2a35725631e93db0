"""Batches compared: each step with its group's id, its advantage and its weight."""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from lightning_otel.adapter import Advantage, composition
from lightning_otel.adapter.advantages import Outcome, estimate_advantages, stamp_steps
from lightning_otel.adapter.attempts import AttemptKey
from lightning_otel.algorithms.base import Batch
from lightning_otel.types import Trajectory, Transition


class Compared(NamedTuple):
    """Trajectories whose steps know how well their rollout did, and why others do not.

    Attributes:
        trajectories: All of the batch.
        reasons: Why steps have no advantage: how many, by reason.
    """

    trajectories: list[Trajectory]
    reasons: Counter[str]


def compared(batch: Batch, how: Advantage) -> Compared:
    """The trajectories of a batch, each rollout compared with the others of its group.

    Args:
        batch: Whole groups.
        how: How advantages are computed; the groups are the batch's.
    """
    groups = {each: group_id for group_id, ids in batch.groups.items() for each in ids}
    outcomes: dict[AttemptKey, Outcome] = {}
    for path in batch:
        key = AttemptKey(path.rollout_id, path.attempt_id)
        start_ns = path.transitions[0].start_ns if path.transitions else 0
        group_id, reward = groups.get(path.rollout_id, ""), batch.rewards.get(path.rollout_id)
        outcomes.setdefault(key, Outcome(key, group_id, start_ns, {}, reward))
    estimates = estimate_advantages(outcomes.values(), how, composition.primary)
    found, _ = stamp_steps([path for path in batch if path.transitions], estimates)
    reasons: Counter[str] = Counter()
    for step in distinct(found):
        if step.advantage is None:
            key = AttemptKey(step.rollout_id, step.attempt_id)
            reasons[estimates[key].reason] += 1
    return Compared(found, reasons)


def distinct(trajectories: Iterable[Trajectory]) -> list[Transition]:
    """Each step once, however many trajectories run through it."""
    return list({id(step): step for path in trajectories for step in path.transitions}.values())
