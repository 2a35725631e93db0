"""Whether a version is better than another: rewards of the same tasks, and how sure that is."""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from lightning_otel.errors import ConfigError
from lightning_otel.types import Transition

if TYPE_CHECKING:
    from lightning_otel.store import Store

FEWEST: Final = 8
"""Pairs, or rollouts a side, below which nothing is said: eight that all go one way by chance are
one in 128."""
CONFIDENCE: Final = 0.95
NO_REWARD: Final = "without a reward"
BOTH: Final = "made with both versions"
ONE_SIDED: Final = "of tasks that were done with one version only"
NO_TASK: Final = "without a task"


@dataclass(frozen=True, slots=True)
class Comparison:
    """What rewards say of two versions of a resource.

    Attributes:
        name: The resource.
        a: One version.
        b: The other.
        tasks: How many tasks were done with both, each of which counts once; 0 where rollouts were
            compared whatever their task.
        rollouts_a: How many rollouts of ``a`` were counted.
        rollouts_b: How many of ``b``.
        mean_a: Their mean reward; of paired ones the mean over tasks.
        mean_b: Likewise.
        difference: ``mean_b - mean_a``.
        low: The lower end of its 95 % confidence interval.
        high: The upper end.
        left_out: Rollouts that were not counted, by reason.
    """

    name: str
    a: int
    b: int
    tasks: int
    rollouts_a: int
    rollouts_b: int
    mean_a: float
    mean_b: float
    difference: float
    low: float
    high: float
    left_out: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_better(self) -> bool:
        """Whether ``b`` is better than ``a``: the whole interval lies above 0."""
        return self.low > 0

    @property
    def is_worse(self) -> bool:
        """Whether ``b`` is worse than ``a``: the whole interval lies below 0."""
        return self.high < 0

    def __str__(self) -> str:
        how = f"{self.tasks} tasks" if self.tasks else "whatever the task"
        return (
            f"{self.name}@{self.b} − {self.name}@{self.a} = {self.difference:+.3f} "
            f"[{self.low:+.3f}, {self.high:+.3f}] ({how}; {self.rollouts_b} and "
            f"{self.rollouts_a} rollouts, mean reward {self.mean_b:.3f} and {self.mean_a:.3f})"
        )


class Scored(NamedTuple):
    """What a rollout came to.

    Attributes:
        group_id: Its task; empty if nothing says so.
        version: The version it was made with.
        reward: The sum of its steps' rewards.
    """

    group_id: str
    version: int
    reward: float


def compared(name: str, a: int, b: int, store: "Store", *, is_paired: bool = True) -> Comparison:
    """What the rewards of a store say of two versions.

    Args:
        name: The resource.
        a: One version.
        b: The other.
        store: Where rollouts of both were recorded.
        is_paired: Whether tasks that were done with both count, each once; else all rollouts.

    Raises:
        ConfigError: Too few rollouts tell of both.
    """
    if a == b:
        raise ConfigError(f"{name}@{a} is compared with itself; name two versions")
    steps = store.transitions(bodies=False, advantage="dr_grpo")
    left_out: Counter[str] = Counter()
    scored = _scored(name, (a, b), steps, left_out)
    if is_paired:
        pairs = _pairs(scored, a, b, left_out)
        _check_enough(name, a, b, len(pairs), "tasks that were done with both", left_out)
        of_a = [statistics.fmean(pair[0]) for pair in pairs]
        of_b = [statistics.fmean(pair[1]) for pair in pairs]
        differences = [after - before for before, after in zip(of_a, of_b, strict=True)]
        spread = statistics.stdev(differences) / math.sqrt(len(pairs))
        low, high = _interval(statistics.fmean(differences), spread, len(pairs) - 1)
    else:
        of_a, of_b = ([each.reward for each in scored if each.version == side] for side in (a, b))
        fewer = min(len(of_a), len(of_b))
        _check_enough(name, a, b, fewer, "rollouts of each", left_out)
        pairs = []
        low, high = _welch(of_a, of_b)
    mean_a, mean_b = statistics.fmean(of_a), statistics.fmean(of_b)
    return Comparison(
        name=name,
        a=a,
        b=b,
        tasks=len(pairs),
        rollouts_a=sum(len(pair[0]) for pair in pairs) or len(of_a),
        rollouts_b=sum(len(pair[1]) for pair in pairs) or len(of_b),
        mean_a=mean_a,
        mean_b=mean_b,
        difference=mean_b - mean_a,
        low=low,
        high=high,
        left_out=dict(left_out),
    )


def _scored(
    name: str, versions: tuple[int, int], steps: Iterable[Transition], left_out: Counter[str]
) -> list[Scored]:
    """Each rollout that was made with one of the versions, by its latest attempt with a reward."""
    attempts: dict[tuple[str, str], list[Transition]] = {}
    for step in steps:
        attempts.setdefault((step.rollout_id, step.attempt_id), []).append(step)
    found: dict[str, tuple[int, Scored]] = {}
    unrewarded: set[str] = set()
    for (rollout_id, _), own in attempts.items():
        used = {version for step in own if (version := version_in(name, step)) is not None}
        if not used & set(versions):
            continue
        rewards = [step.reward for step in own if step.reward is not None]
        if len(used) > 1:
            left_out[BOTH] += 1
        elif not rewards:
            unrewarded.add(rollout_id)
        else:
            start_ns = min(step.start_ns for step in own)
            scored = Scored(own[0].group_id, used.pop(), sum(rewards))
            if rollout_id not in found or found[rollout_id][0] < start_ns:
                found[rollout_id] = start_ns, scored
    if missing := len(unrewarded - found.keys()):
        left_out[NO_REWARD] = missing
    return [scored for _, scored in found.values()]


def version_in(name: str, step: Transition) -> int | None:
    """The version of a resource that a step was made with; None if none is stamped.

    A resource of one agent is found by its plain name too, as people stamp it by hand.
    """
    agent, _, plain = name.rpartition("/")
    text = step.resources.get(name)
    if f"{step.agent}/{name}" in step.resources:
        return None  # the agent's own, which may be stamped by its plain name, too
    if text is None and agent and step.agent == agent:
        text = step.resources.get(plain)
    return int(text) if text is not None and text.isdecimal() else None


def _pairs(
    scored: Iterable[Scored], a: int, b: int, left_out: Counter[str]
) -> list[tuple[list[float], list[float]]]:
    """Of each task that was done with both versions the rewards of either."""
    groups: dict[str, tuple[list[float], list[float]]] = {}
    for each in scored:
        if not each.group_id:
            left_out[NO_TASK] += 1
            continue
        groups.setdefault(each.group_id, ([], []))[each.version == b].append(each.reward)
    if lonely := sum(
        len(of_a) + len(of_b) for of_a, of_b in groups.values() if not of_a or not of_b
    ):
        left_out[ONE_SIDED] = lonely
    return [pair for pair in groups.values() if all(pair)]


def _check_enough(
    name: str, a: int, b: int, count: int, what: str, left_out: Mapping[str, int]
) -> None:
    if count >= FEWEST:
        return
    reasons = ", ".join(f"{number} {reason}" for reason, number in left_out.items())
    raise ConfigError(
        f"{name}@{a} and {name}@{b} cannot be compared: there are {count} {what}, and "
        f"{FEWEST} are the fewest that say anything"
        + (f" (left out: {reasons})" if reasons else "")
        + "; let more rollouts run with a reward and the same tasks"
    )


def _welch(of_a: Sequence[float], of_b: Sequence[float]) -> tuple[float, float]:
    """The interval of a difference of means of unequal spreads.

    Source: Welch, The generalization of Student's problem, Biometrika 34 (1947).
    """
    parts = [statistics.variance(side) / len(side) for side in (of_a, of_b)]
    difference = statistics.fmean(of_b) - statistics.fmean(of_a)
    if not any(parts):
        return difference, difference
    freedom = sum(parts) ** 2 / (parts[0] ** 2 / (len(of_a) - 1) + parts[1] ** 2 / (len(of_b) - 1))
    return _interval(difference, math.sqrt(sum(parts)), freedom)


def _interval(difference: float, spread: float, freedom: float) -> tuple[float, float]:
    half = t_quantile((1 + CONFIDENCE) / 2, freedom) * spread
    return difference - half, difference + half


def t_quantile(p: float, freedom: float) -> float:
    """A quantile of Student's t distribution, to three digits from 5 degrees of freedom on.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.5.
    """
    z = statistics.NormalDist().inv_cdf(p)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / freedom**power for power, term in enumerate(terms))
