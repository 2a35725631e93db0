"""The input and the result of a training step."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from lightning_otel.adapter.composition import SUCCESS
from lightning_otel.errors import ConfigError
from lightning_otel.types import Span, Trajectory

if TYPE_CHECKING:
    from lightning_otel.dataset import Store

UPDATE: Final = "resource_update"
TARGET: Final = "system_prompt"
"""What a text is a version of, where a step gives back no name for it."""


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
        store: "Store | None" = None,
    ) -> None:
        super().__init__(trajectories)
        self.number = number
        self.rewards = dict(rewards)
        self._store = store
        self.groups = {group_id: tuple(ids) for group_id, ids in groups.items()}

    def __getitem__(self, index: Any) -> Any:
        """A trajectory by its place; of a name, ``spans`` or ``rewards``."""
        if index == "spans":
            return self.spans()
        if index == "rewards":
            return self.rewards
        if isinstance(index, str):
            raise ConfigError(f"a batch has no {index!r}; it has 'spans' and 'rewards'")
        return super().__getitem__(index)

    def spans(self) -> list[Span]:
        """Every span of its rollouts, rollout by rollout, read from the store now."""
        if self._store is None:
            return []
        return [
            span
            for rollout_id in self.rollout_ids
            for span in self._store.spans(rollout_id=rollout_id)
        ]

    @property
    def rollout_ids(self) -> list[str]:
        """Its rollouts, group by group."""
        return [rollout_id for ids in self.groups.values() for rollout_id in ids]

    def metrics(self) -> dict[str, float]:
        """Return the metrics that any algorithm has: means over its rollouts."""
        rollouts = len(self.rollout_ids)
        steps = {id(step): step for path in self for step in path.transitions}.values()
        found = {"rollouts": float(rollouts)}
        if rollouts:
            found["length"] = len(steps) / rollouts
            found["tokens"] = sum(step.output_tokens or 0 for step in steps) / rollouts
        if self.rewards:
            values = self.rewards.values()
            found["reward"] = sum(values) / len(values)
            found["success_rate"] = sum(value >= SUCCESS for value in values) / len(values)
        return found


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step.

    Attributes:
        metrics: Numbers by name, such as ``{"loss": 0.3}``.
        resources: Bodies by name of what it made better; published once the step is kept.
    """

    metrics: Mapping[str, float] = field(default_factory=dict)
    resources: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, given: object) -> "StepResult":
        """Convert the result of a step.

        Args:
            given: A result, None, or a mapping of metrics with the resources under
                ``resource_update``: bodies by name, or a text.

        Raises:
            ConfigError: It is none of these.
        """
        if given is None or isinstance(given, StepResult):
            return given or cls()
        if not isinstance(given, Mapping):
            raise ConfigError(
                f"train_step gave back a {type(given).__name__}; give StepResult(metrics, "
                "{'name of the resource': body}), a mapping, or None"
            )
        made = given.get(UPDATE)
        resources = made if isinstance(made, Mapping) else {} if made is None else {TARGET: made}
        metrics = {name: value for name, value in given.items() if name != UPDATE}
        for name, value in metrics.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ConfigError(
                    f"train_step gave back {name}={value!r:.80}; metrics are numbers, and what is "
                    f"to be published stands under {UPDATE!r}"
                )
        return cls(metrics, resources)
