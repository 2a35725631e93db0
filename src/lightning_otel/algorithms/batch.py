"""What an algorithm is given at a step, and what it gives back."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from lightning_otel.errors import ConfigError
from lightning_otel.types import Trajectory

_ELSEWHERE: Final = {
    "spans": "for each in batch: each.transitions, or context.store.spans(rollout_id=…)",
    "rewards": "batch.rewards has them by rollout id",
}


class Batch(list[Trajectory]):
    """The trajectories of whole groups of rollouts, each with its reward.

    Attributes:
        number: Which step it is for, from 1.
        rewards: Reward by rollout id; of all its steps together.
        groups: Rollout ids by group.
    """

    def __init__(
        self,
        trajectories: Iterable[Trajectory],
        *,
        number: int,
        rewards: Mapping[str, float],
        groups: Mapping[str, Sequence[str]],
    ) -> None:
        super().__init__(trajectories)
        self.number = number
        self.rewards = dict(rewards)
        self.groups = {group_id: tuple(ids) for group_id, ids in groups.items()}

    if not TYPE_CHECKING:  # whoever reads types is told that it is a list

        def __getitem__(self, index: Any) -> Any:
            """A trajectory by its place; of a name, it says what that is here."""
            if isinstance(index, str):
                said = _ELSEWHERE.get(index, "iterate it, or see batch.rewards and batch.groups")
                raise ConfigError(f"a batch is a list of trajectories, without {index!r}; {said}")
            return super().__getitem__(index)

    @property
    def rollout_ids(self) -> list[str]:
        """Its rollouts, group by group."""
        return [rollout_id for ids in self.groups.values() for rollout_id in ids]

    def metrics(self) -> dict[str, float]:
        """What can be told of it whatever the algorithm: means over its rollouts."""
        rollouts = len(self.rollout_ids)
        steps = {id(step): step for path in self for step in path.transitions}.values()
        found = {"rollouts": float(rollouts)}
        if rollouts:
            found["length"] = len(steps) / rollouts
            found["tokens"] = sum(step.output_tokens or 0 for step in steps) / rollouts
        if self.rewards:
            values = self.rewards.values()
            found["reward"] = sum(values) / len(values)
            found["success_rate"] = sum(value > 0 for value in values) / len(values)
        return found


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step came to.

    Attributes:
        metrics: Numbers by name, such as ``{"loss": 0.3}``.
        resources: Bodies by name of what it made better; published once the step is kept.
    """

    metrics: Mapping[str, float] = field(default_factory=dict)
    resources: Mapping[str, Any] = field(default_factory=dict)
