"""Whether a version is better than another: rewards of the same tasks, and how sure that is."""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from lightning_otel import markup
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
class Pair:
    """One task that was done with both versions.

    Attributes:
        group_id: The task.
        rollouts_a: Ids of the rollouts made with ``a``.
        rollouts_b: Likewise with ``b``.
        mean_a: Their mean reward.
        mean_b: Likewise.
    """

    group_id: str
    rollouts_a: tuple[str, ...]
    rollouts_b: tuple[str, ...]
    mean_a: float
    mean_b: float

    @property
    def difference(self) -> float:
        """``mean_b - mean_a``."""
        return self.mean_b - self.mean_a


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
        pairs: The tasks that were done with both; none where tasks were not looked at.
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
    pairs: tuple[Pair, ...] = ()

    @property
    def is_better(self) -> bool:
        """Whether ``b`` is better than ``a``: the whole interval lies above 0."""
        return self.low > 0

    @property
    def is_worse(self) -> bool:
        """Whether ``b`` is worse than ``a``: the whole interval lies below 0."""
        return self.high < 0

    def _repr_html_(self) -> str:
        """Both versions beside each other, and what that says, for notebooks."""
        unsure = "neither better nor worse for sure"
        verdict = "better" if self.is_better else "worse" if self.is_worse else unsure
        how = (
            f"{self.tasks:,} tasks done with both" if self.tasks else "rollouts, whatever the task"
        )
        rows = [
            (f"{self.name}@{self.a}", f"{self.mean_a:.3f}", f"{self.rollouts_a:,}"),
            (f"{self.name}@{self.b}", f"{self.mean_b:.3f}", f"{self.rollouts_b:,}"),
            ("difference", f"{self.difference:+.3f}", f"[{self.low:+.3f}, {self.high:+.3f}]"),
        ]
        rows += [("left out", f"{count:,}", reason) for reason, count in self.left_out.items()]
        note = f"{how}: {self.name}@{self.b} is {verdict} (95 %)"
        return markup.table(("", "mean reward", "rollouts"), rows, note)

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
    rollout_id: str


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
        of_a = [pair.mean_a for pair in pairs]
        of_b = [pair.mean_b for pair in pairs]
        low, high = interval_of([pair.difference for pair in pairs])
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
        rollouts_a=sum(len(pair.rollouts_a) for pair in pairs) or len(of_a),
        rollouts_b=sum(len(pair.rollouts_b) for pair in pairs) or len(of_b),
        mean_a=mean_a,
        mean_b=mean_b,
        difference=mean_b - mean_a,
        low=low,
        high=high,
        left_out=dict(left_out),
        pairs=tuple(pairs),
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
            scored = Scored(own[0].group_id, used.pop(), sum(rewards), rollout_id)
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


def _pairs(scored: Iterable[Scored], a: int, b: int, left_out: Counter[str]) -> list[Pair]:
    """The tasks that were done with both versions."""
    groups: dict[str, tuple[list[Scored], list[Scored]]] = {}
    for each in scored:
        if not each.group_id:
            left_out[NO_TASK] += 1
            continue
        groups.setdefault(each.group_id, ([], []))[each.version == b].append(each)
    if lonely := sum(
        len(of_a) + len(of_b) for of_a, of_b in groups.values() if not of_a or not of_b
    ):
        left_out[ONE_SIDED] = lonely
    return [_pair(group, *sides) for group, sides in groups.items() if all(sides)]


def _pair(group_id: str, of_a: Sequence[Scored], of_b: Sequence[Scored]) -> Pair:
    return Pair(
        group_id,
        tuple(each.rollout_id for each in of_a),
        tuple(each.rollout_id for each in of_b),
        statistics.fmean(each.reward for each in of_a),
        statistics.fmean(each.reward for each in of_b),
    )


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


def interval_of(differences: Sequence[float]) -> tuple[float, float]:
    """The 95 % confidence interval of the mean of paired differences, of which there are two.

    Source: Student, The probable error of a mean, Biometrika 6 (1908).
    """
    spread = statistics.stdev(differences) / math.sqrt(len(differences))
    return _interval(statistics.fmean(differences), spread, len(differences) - 1)


def is_chance(one_way: int, other_way: int) -> bool:
    """Whether so many more changes one way than the other may well be chance.

    Args:
        one_way: How many of what was tried twice changed one way.
        other_way: How many changed the other.

    Source: McNemar, Note on the sampling error of the difference between correlated proportions,
        Psychometrika 12 (1947), by its exact distribution, two-sided at 5 %.
    """
    count = one_way + other_way
    tail = sum(math.comb(count, each) for each in range(one_way, count + 1))
    return 2 * tail > (1 - CONFIDENCE) * 2.0**count


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
