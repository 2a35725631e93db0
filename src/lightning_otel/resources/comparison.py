"""Comparison of two versions: rewards of the same tasks, and how sure the difference is."""

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, NamedTuple

from lightning_otel.errors import ConfigError
from lightning_otel.resources.evidence import format_verdict, weigh_differences
from lightning_otel.store.source import read_rollout_rewards
from lightning_otel.types import Transition, html

if TYPE_CHECKING:
    from lightning_otel.dataset import Store


@dataclass(frozen=True, slots=True)
class Pair:
    """One task that was done with both versions."""

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
    """The comparison of two versions by rewards.

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
        low: The lower end of its 95 % confidence interval, however often one looks.
        high: The upper end.
        missing: About how many more tasks, or rollouts of each, it takes until one is told from the
            other, if they come out alike; 0 if they are told apart, None if no end is in sight.
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
    missing: int | None
    left_out: Mapping[str, int] = field(default_factory=dict)
    pairs: tuple[Pair, ...] = ()

    @property
    def is_better(self) -> bool:
        """True if ``b`` is better than ``a``: the whole interval lies above 0."""
        return self.low > 0

    @property
    def is_worse(self) -> bool:
        """True if ``b`` is worse than ``a``: the whole interval lies below 0."""
        return self.high < 0

    @property
    def verdict(self) -> str:
        """The result in words: better, worse, or about how many more tasks it takes."""
        return format_verdict(self.is_better - self.is_worse, self.missing, self.unit)

    @property
    def unit(self) -> str:
        """The name of what is counted once: tasks, or rollouts of each version."""
        return "tasks" if self.tasks else "rollouts of each"

    def _repr_html_(self) -> str:
        how = (
            f"{self.tasks:,} tasks done with both" if self.tasks else "rollouts, whatever the task"
        )
        rows = [
            (f"{self.name}@{self.a}", f"{self.mean_a:.3f}", f"{self.rollouts_a:,}"),
            (f"{self.name}@{self.b}", f"{self.mean_b:.3f}", f"{self.rollouts_b:,}"),
            ("difference", f"{self.difference:+.3f}", f"[{self.low:+.3f}, {self.high:+.3f}]"),
        ]
        rows += [("left out", f"{count:,}", reason) for reason, count in self.left_out.items()]
        note = f"{how}: {self.name}@{self.b} is {self.verdict} (95 %)"
        return html.render_table(("", "mean reward", "rollouts"), rows, note)

    def __str__(self) -> str:
        how = f"{self.tasks} tasks" if self.tasks else "whatever the task"
        return (
            f"{self.name}@{self.b} − {self.name}@{self.a} = {self.difference:+.3f} "
            f"[{self.low:+.3f}, {self.high:+.3f}] ({how}; {self.rollouts_b} and "
            f"{self.rollouts_a} rollouts, mean reward {self.mean_b:.3f} and {self.mean_a:.3f})"
        )


def compare_versions(
    name: str, a: int, b: int, store: "Store", *, is_paired: bool | None = None
) -> Comparison:
    """Compare two versions by the rewards of a store."""
    if a == b:
        raise ConfigError(f"{name}@{a} is compared with itself; name two versions")
    steps = store.transitions(bodies=False, advantage="dr_grpo")
    left_out: Counter[str] = Counter()
    lonely: Counter[str] = Counter()
    rewards = read_rollout_rewards(store.source)
    scored = _choose_attempts(name, (a, b), steps, rewards, left_out)
    pairs = [] if is_paired is False else _pair_tasks(scored, rewards, b, lonely)
    used = sum(len(p.rollouts_a) for p in pairs), sum(len(p.rollouts_b) for p in pairs)
    if is_paired is None:  # where most rollouts of the rarer version have paired tasks
        counts = Counter(each.version for each in scored)
        is_paired = 2 * used[counts[a] >= counts[b]] >= min(counts[a], counts[b])
    if is_paired:
        left_out += lonely
        sides = [p.mean_a for p in pairs], [p.mean_b for p in pairs]
        differences = [pair.difference for pair in pairs]
        tasks = {pair.group_id for pair in pairs}
        counted = [rewards[each.rollout_id] for each in scored if each.group_id in tasks]
    else:
        pairs = []
        sides = _concurrent_rewards(scored, rewards, a, b)
        differences = spread_rewards(*sides)
        used = len(sides[0]), len(sides[1])
        counted = [*sides[0], *sides[1]]
    if not differences:
        what = (
            "no task was done with both" if is_paired else "no rollout of one of them has a reward"
        )
        reasons = ", ".join(f"{number} {reason}" for reason, number in left_out.items())
        raise ConfigError(
            f"{name}@{a} and {name}@{b} cannot be compared: {what}"
            + (f" (left out: {reasons})" if reasons else "")
            + "; let more rollouts run with a reward"
            + (" and the same tasks" if is_paired else "")
        )
    mean_a, mean_b = map(statistics.fmean, sides)
    evidence = weigh_differences(differences, counted)
    return Comparison(
        name=name,
        a=a,
        b=b,
        tasks=len(pairs),
        rollouts_a=used[0],
        rollouts_b=used[1],
        mean_a=mean_a,
        mean_b=mean_b,
        difference=mean_b - mean_a,
        low=evidence.low,
        high=evidence.high,
        missing=evidence.missing,
        left_out=dict(left_out),
        pairs=tuple(pairs),
    )


def _choose_attempts(
    name: str,
    versions: tuple[int, int],
    steps: Iterable[Transition],
    rewards: Mapping[str, float],
    left_out: Counter[str],
) -> list["LastAttempt"]:
    """Return the rewarded attempts that were made with one of the versions, by start."""
    found: list[LastAttempt] = []
    for made in find_last_attempts(name, steps):
        if not made.versions & set(versions):
            continue
        if made.version is None:
            left_out["made with both versions"] += 1
        elif made.rollout_id not in rewards:
            left_out["without a reward"] += 1
        else:
            found.append(made)
    return found


class LastAttempt(NamedTuple):
    """The last attempt at a rollout: its task, its start, the versions that it was made with."""

    rollout_id: str
    group_id: str
    start_ns: int
    versions: frozenset[int] = frozenset()

    @property
    def version(self) -> int | None:
        """The version; None if it was made with none, or with several."""
        return next(iter(self.versions)) if len(self.versions) == 1 else None


def find_last_attempts(
    name: str, steps: Iterable[Transition], model: str | None = None
) -> list[LastAttempt]:
    """Return the last attempt at each rollout, which its reward is of, by start.

    A version counts only by steps of the model, a name or glob; None is any.
    """
    attempts: dict[tuple[str, str], LastAttempt] = {}
    for step in steps:
        key = (step.rollout_id, step.attempt_id)
        made = attempts.get(key) or LastAttempt(step.rollout_id, step.group_id, step.start_ns)
        version = version_in(name, step)
        if version is not None and (model is None or fnmatchcase(step.model or "", model)):
            made = made._replace(versions=made.versions | {version})
        attempts[key] = made._replace(start_ns=min(made.start_ns, step.start_ns))
    ordered = sorted(attempts.values(), key=lambda made: made.start_ns)
    last = {made.rollout_id: made for made in ordered}
    return sorted(last.values(), key=lambda made: made.start_ns)


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


def _pair_tasks(
    scored: Iterable[LastAttempt], rewards: Mapping[str, float], b: int, left_out: Counter[str]
) -> list[Pair]:
    groups: dict[str, tuple[list[str], list[str]]] = {}
    for each in scored:
        if each.group_id:
            groups.setdefault(each.group_id, ([], []))[each.version == b].append(each.rollout_id)
        else:
            left_out["without a task"] += 1
    pairs = []
    for group_id, sides in groups.items():
        if all(sides):
            mean_a, mean_b = (statistics.fmean(map(rewards.__getitem__, side)) for side in sides)
            pairs.append(Pair(group_id, tuple(sides[0]), tuple(sides[1]), mean_a, mean_b))
        else:
            left_out["of tasks that were done with one version only"] += sum(map(len, sides))
    return pairs


def _concurrent_rewards(
    scored: Sequence[LastAttempt], rewards: Mapping[str, float], a: int, b: int
) -> tuple[list[float], list[float]]:
    """Return rewards of each version while both were in use; all if they never were at once."""
    first_ns = {each.version: each.start_ns for each in reversed(scored)}
    beside = [each for each in scored if each.start_ns >= max(first_ns.values(), default=0)]
    if {each.version for each in beside} != {a, b}:
        beside = list(scored)
    of_a, of_b = (
        [rewards[each.rollout_id] for each in beside if each.version == v] for v in (a, b)
    )
    return of_a, of_b


def spread_rewards(of_a: Sequence[float], of_b: Sequence[float]) -> list[float]:
    """Differences between each reward of the rarer side and the mean of its share of the other."""
    few, many, sign = (of_a, of_b, -1) if len(of_a) < len(of_b) else (of_b, of_a, 1)
    ends = [position * len(many) // len(few) for position in range(len(few) + 1)] if few else []
    return [
        sign * (reward - statistics.fmean(many[start:end]))
        for reward, start, end in zip(few, ends, ends[1:], strict=False)
    ]
