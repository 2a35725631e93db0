"""The best version by rewards of ``name[category]``, as APO publishes it."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from lightning_otel.dataset import Store
from lightning_otel.errors import ConfigError, NotFoundError
from lightning_otel.resources import LIVE, Resources
from lightning_otel.resources.comparison import read_last_attempts
from lightning_otel.rewards.totals import read_rollout_rewards
from lightning_otel.types import Resource

MIN_ROLLOUTS: Final = 3


class Earned(NamedTuple):
    """The rewards of a version's rollouts: number, mean, standard error if two or more."""

    version: int
    rollouts: int
    mean: float
    error: float | None


class Learned(NamedTuple):
    """The best version of a category's resource, and what it is known by.

    Attributes:
        resource: That version.
        earned: What it earned; None where too few rollouts were rewarded, and it is the live one.
        versions: What each version earned, the best first; none that was withdrawn or rolled back.
        is_general: Whether nothing is known of the category, and it is what all are given.
    """

    resource: Resource
    earned: Earned | None
    versions: Sequence[Earned]
    is_general: bool


def learned(
    category: str,
    name: str = "system_prompt",
    *,
    model: str | None = None,
    min_rollouts: int = MIN_ROLLOUTS,
    resources: Resources | None = None,
    store: Store | None = None,
    rewards_of: Callable[[Store, str, str | None], Mapping[int, Sequence[float]]] | None = None,
) -> Learned:
    """Return the version of a category's resource that earned the most reward so far.

    A version that was withdrawn or rolled back is left out. Where none has enough rollouts it is
    the live one, and where the category has no resource of its own, the one that all have.

    Args:
        category: The kind of task, such as ``image``.
        name: The resource.
        model: Only rollouts of this model; a name or glob.
        min_rollouts: The fewest rewarded rollouts by which a version may be judged.
        resources: Where versions stand; by default beside the default store.
        store: Where rollouts are recorded; by default the default store.
        rewards_of: Reads what rollouts earned, as :func:`rewards_by_version` does.

    Raises:
        ConfigError: ``min_rollouts`` is less than 1.
        NotFoundError: There is neither such a resource of the category nor one of all.
        StoreError: The store cannot be read.
    """
    if min_rollouts < 1:
        raise ConfigError(f"min_rollouts is {min_rollouts}; a version is judged by 1 or more")
    repository = resources if resources is not None else Resources()
    names = set(repository.names())
    possible = (f"{name}[{category}]", name)
    resource_name = next((candidate for candidate in possible if candidate in names), None)
    if resource_name is None:
        raise NotFoundError(
            f"there is neither {' nor '.join(possible)}; publish one, or train with category=…"
        )
    read = rewards_of if rewards_of is not None else rewards_by_version
    rewards = read(store if store is not None else Store(), resource_name, model)
    numbers = {
        version.version for version in repository.versions(resource_name)
    } - repository.withdrawn(resource_name).keys()
    versions = sorted(
        (_make_earned(version, rewards[version]) for version in numbers & rewards.keys()),
        key=lambda version: (-version.mean, -version.rollouts, version.version),
    )
    best = next((version for version in versions if version.rollouts >= min_rollouts), None)
    resource = repository.get(resource_name, LIVE if best is None else best.version)
    return Learned(resource, best, versions, resource_name == name)


def rewards_by_version(
    store: Store, name: str, model: str | None = None
) -> Mapping[int, Sequence[float]]:
    """Return rollouts' rewards by the version they were given; of two, they count for none."""
    con = store.source.connect_overview()
    attempts = read_last_attempts(name, con, model)
    rewards = read_rollout_rewards(con)
    by_version: dict[int, list[float]] = {}
    for attempt in attempts:
        if attempt.version is not None and attempt.rollout_id in rewards:
            by_version.setdefault(attempt.version, []).append(rewards[attempt.rollout_id])
    return by_version


def _make_earned(version: int, rewards: Sequence[float]) -> Earned:
    error = statistics.stdev(rewards) / math.sqrt(len(rewards)) if len(rewards) > 1 else None
    return Earned(version, len(rewards), statistics.fmean(rewards), error)
