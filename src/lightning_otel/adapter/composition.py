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
    """Return the primary reward, which stands first; None where there is none."""
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
        """Compose rewards, given by name; None where a part is missing."""
        if self._is_shut(rewards):
            return self.floor
        if self.missing(rewards):
            return None
        return sum(weight * rewards[name] for name, weight in self.weights.items())

    def missing(self, rewards: Mapping[str, float]) -> list[str]:
        """Return the names of the rewards that it needs and that are not there."""
        return [name for name in dict.fromkeys([*self.gates, *self.weights]) if name not in rewards]

    def of_group(self, group: Sequence[Mapping[str, float]]) -> list[float | None]:
        """Compose the rewards of each rollout of a group.

        Where it is normalised, a rollout whose gate fails has the floor as each of its parts, and a
        reward is compared among those that have it.
        """
        whole = [self(rewards) for rewards in group]
        if not self.is_normalised:
            return whole
        shut = dict.fromkeys(self.weights, self.floor)
        parts = [shut if self._is_shut(rewards) else rewards for rewards in group]
        found = [0.0] * len(group)
        for name, weight in self.weights.items():
            having = [index for index, rewards in enumerate(parts) if name in rewards]
            scaled = standardise([parts[index][name] for index in having])
            for index, number in zip(having, scaled, strict=True):
                found[index] += weight * number
        return [None if one is None else sum_ for one, sum_ in zip(whole, found, strict=True)]

    def _is_shut(self, rewards: Mapping[str, float]) -> bool:
        """Return whether a gate fails."""
        return any(name in rewards and rewards[name] < least for name, least in self.gates.items())


def compose_rewards(compose: Compose, rewards: Mapping[str, float]) -> tuple[float | None, str]:
    """Return one finite number of named rewards, or None and why it is missing."""
    value = compose(rewards)
    if value is not None and math.isfinite(value):
        return value, ""
    names = compose.missing(rewards) if isinstance(compose, Composition) else ()
    return None, MISSING_PART.format(", ".join(names) or "what composes it gave no finite number")


def standardise(values: Sequence[float]) -> list[float]:
    """Return each number less their mean, over their sample deviation; 0 where they are alike.

    Source: verl 0.9.1, ``compute_grpo_outcome_advantage`` (``torch.std``, epsilon 1e-6).
    """
    if len(values) < 2:
        return [0.0] * len(values)
    centre = math.fsum(values) / len(values)
    deviation = math.sqrt(math.fsum((value - centre) ** 2 for value in values) / (len(values) - 1))
    return [(value - centre) / (deviation + EPSILON) for value in values]
