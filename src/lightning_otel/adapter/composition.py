"""One number of several named rewards: weights, hard gates, and a group's scale for each name.

A composed reward is missing (None, never 0) where a reward that it names is missing; only a gate
that fails decides alone, since whatever is missing could not change it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from lightning_otel.adapter.attributes import number as number_of
from lightning_otel.errors import ConfigError
from lightning_otel.types import Compose

MISSING_PART: Final = "its composed reward is missing, as one of its parts is: {}"
SUCCESS: Final = 0.5
"""The reward from which on a rollout has succeeded, where nothing else is said."""
EPSILON: Final = 1e-6
"""Added to a standard deviation before it divides, as verl does."""


def primary(rewards: Mapping[str, float]) -> float | None:
    """The primary reward, which stands first; None where there is none."""
    return next(iter(rewards.values()), None)


@dataclass(frozen=True, slots=True)
class Composition:
    """A weighted sum of named rewards, behind hard gates.

    Attributes:
        weights: How much each reward counts; all of them must be there.
        gates: The least value of each reward that gates the whole: where one lies below, or is
            missing, the weights do not count.
        floor: What the whole is where a gate fails.
        is_normalised: Whether advantages bring each reward to mean 0 and deviation 1 within its
            group before it is weighted, so that no reward counts more for its scale. A single
            step has no group: its reward is the plain sum.
    """

    weights: Mapping[str, float]
    gates: Mapping[str, float] = field(default_factory=dict)
    floor: float = 0.0
    is_normalised: bool = False

    def __post_init__(self) -> None:
        if not self.weights:
            raise ConfigError("a composition needs weights, such as {'correct': 1.0}")
        for given in (self.weights, self.gates, {"floor": self.floor}):
            for name, number in given.items():
                if number_of(number) is None:
                    raise ConfigError(f"{name!r} is {number!r}; give a finite number")

    def __call__(self, rewards: Mapping[str, float]) -> float | None:
        """The composed reward; None where a part is missing.

        Args:
            rewards: Rewards by name.
        """
        if self._is_shut(rewards):
            return self.floor
        if self.missing(rewards):
            return None
        return sum(weight * rewards[name] for name, weight in self.weights.items())

    def missing(self, rewards: Mapping[str, float]) -> list[str]:
        """Names of the rewards that it needs and that are not there."""
        return [name for name in dict.fromkeys([*self.gates, *self.weights]) if name not in rewards]

    def of_group(self, group: Sequence[Mapping[str, float]]) -> list[float | None]:
        """The composed reward of each rollout of a group.

        Where it is normalised, a rollout whose gate fails has the floor as each of its parts, and a
        reward is compared among those that have it.

        Args:
            group: Rewards by name of each rollout.
        """
        if not self.is_normalised:
            return [self(rewards) for rewards in group]
        held = [
            dict.fromkeys(self.weights, self.floor) if self._is_shut(rewards) else rewards
            for rewards in group
        ]
        found = [
            None if not self._is_shut(rewards) and self.missing(rewards) else 0.0
            for rewards in group
        ]
        for name, weight in self.weights.items():
            having = [index for index, rewards in enumerate(held) if name in rewards]
            scaled = standardised([held[index][name] for index in having])
            for index, number in zip(having, scaled, strict=True):
                so_far = found[index]
                if so_far is not None:
                    found[index] = so_far + weight * number
        return found

    def _is_shut(self, rewards: Mapping[str, float]) -> bool:
        """Return whether a gate fails."""
        return any(name in rewards and rewards[name] < least for name, least in self.gates.items())


def composed(compose: Compose, rewards: Mapping[str, float]) -> float | None:
    """One number of named rewards; None where a part is missing, or it is not finite."""
    value = compose(rewards)
    return value if value is not None and math.isfinite(value) else None


def compose_group(compose: Compose, group: Sequence[Mapping[str, float]]) -> list[float | None]:
    """One number for each rollout of a group; None where a part is missing.

    Args:
        compose: A composition, or a function of one rollout's named rewards.
        group: Rewards by name of each rollout.
    """
    if isinstance(compose, Composition):
        return compose.of_group(group)
    return [composed(compose, rewards) for rewards in group]


def missing_part(compose: Compose, rewards: Mapping[str, float]) -> str:
    """Return why a composed reward is missing."""
    names = compose.missing(rewards) if isinstance(compose, Composition) else ()
    return MISSING_PART.format(", ".join(names) or "what composes it gave no finite number")


def mean(values: Sequence[float]) -> float:
    """The mean of some numbers, at least one."""
    return math.fsum(values) / len(values)


def standardised(values: Sequence[float]) -> list[float]:
    """Each number less their mean, over their sample deviation; 0 where they are alike.

    Source: verl 0.9.1, ``compute_grpo_outcome_advantage`` (``torch.std``, epsilon 1e-6).
    """
    if len(values) < 2:
        return [0.0] * len(values)
    centre = mean(values)
    deviation = math.sqrt(math.fsum((value - centre) ** 2 for value in values) / (len(values) - 1))
    return [(value - centre) / (deviation + EPSILON) for value in values]
