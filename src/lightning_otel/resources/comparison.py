"""Comparison of two versions: rewards of the same tasks, and how sure the difference is."""

import json
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from lightning_otel.adapter.agent_patterns import resources_of
from lightning_otel.errors import ConfigError
from lightning_otel.resources.evidence import (
    check_range,
    find_range,
    format_verdict,
    weigh_differences,
)
from lightning_otel.resources.neighbours import (
    Unit,
    compare_neighbours,
    compare_task,
    is_sticky,
    join_units,
)
from lightning_otel.store.reader import Reader
from lightning_otel.store.sql import ROLLOUT, attribute_sql
from lightning_otel.store.table import Query
from lightning_otel.store.views import LAST_REWARD
from lightning_otel.types import conventions as c
from lightning_otel.types import html

if TYPE_CHECKING:
    from lightning_otel.dataset import Store

_ROLLOUTS: Final = f"""
SELECT * FROM (
  SELECT rollout_id, {LAST_REWARD} AS reward, max(start_ns) AS start_ns,
    arg_max(status, start_ns) IN ('failed', 'incomplete') AS is_lost,
    arg_max(coalesce(agents, ''), start_ns) AS agent, coalesce(any_value(task), '') AS task
  FROM rollouts GROUP BY rollout_id
) LEFT JOIN (
  SELECT {ROLLOUT} AS rollout_id, any_value({attribute_sql(c.CONVERSATION_ID)}) AS session,
    any_value(coalesce({attribute_sql("user.id")}, {attribute_sql("enduser.id")})) AS user,
    arg_max({attribute_sql(c.RESOURCES)}, start_ns) AS resources
  FROM spans GROUP BY 1
) USING (rollout_id)"""
"""Rollouts, as their last attempt left them, and what their versions may have been drawn by."""
_LAST_STEPS: Final = """
SELECT rollout_id, rollouts.group_id, min(steps.start_ns) AS start_ns, list(DISTINCT {
  'agent': steps.agent, 'model': steps.model, 'resources': steps.resources::VARCHAR}) AS stamps
FROM steps JOIN rollouts USING (rollout_id, attempt_id) WHERE rollouts.status <> 'incomplete'
GROUP BY rollout_id, attempt_id, rollouts.group_id
QUALIFY row_number() OVER (PARTITION BY rollout_id ORDER BY min(steps.start_ns) DESC) = 1
ORDER BY 3, 1"""
"""Who acted with which resources in each rollout's last attempt."""


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
        tasks: Number of tasks done with both; 0 where neighbours in time were compared.
        rollouts_a: Number of counted rollouts of ``a``.
        mean_a: Their mean reward; of paired ones the mean over tasks.
        difference: The mean of ``b``'s rewards less ``a``'s next to them.
        low: The lower end of its 95 % confidence interval, however often one looks.
        high: The upper end.
        missing: Estimated tasks, or rollouts of each, until one is told from the other; 0 if they
            are told apart, None if no end is in sight.
        left_out: Rollouts that were not counted, by reason.
        pairs: The tasks that were done with both; none where tasks were not looked at.
        reward_range: The range of rewards that the verdict relies on.
        stated_range: The range that was stated; None if none was.
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
    reward_range: tuple[float, float] = (0.0, 1.0)
    stated_range: tuple[float, float] | None = None

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
    def assumption(self) -> str:
        """The range of rewards that the verdict assumes; empty if it is the stated one."""
        if self.reward_range == self.stated_range:
            return ""
        low, high = self.reward_range
        why = "seen so far" if self.stated_range is None else "as some left the stated one"
        return f"; assumes rewards from {low:g} to {high:g}, {why}"

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
        note = f"{how}: {self.name}@{self.b} is {self.verdict} (95 %){self.assumption}"
        return html.render_table(("", "mean reward", "rollouts"), rows, note)

    def __str__(self) -> str:
        how = f"{self.tasks} tasks" if self.tasks else "whatever the task"
        return (
            f"{self.name}@{self.b} − {self.name}@{self.a} = {self.difference:+.3f} "
            f"[{self.low:+.3f}, {self.high:+.3f}] ({how}; {self.rollouts_b} and "
            f"{self.rollouts_a} rollouts, mean reward {self.mean_b:.3f} and {self.mean_a:.3f}"
            f"{self.assumption})"
        )


def compare_versions(
    name: str,
    a: int,
    b: int,
    store: "Store",
    *,
    is_paired: bool | None = None,
    reward_range: tuple[float, float] | None = None,
) -> Comparison:
    """Compare two versions by the rewards of a store."""
    if a == b:
        raise ConfigError(f"{name}@{a} is compared with itself; name two versions")
    reward_range = check_range(reward_range)
    left_out: Counter[str] = Counter()
    lonely: Counter[str] = Counter()
    con = store.source.connect_overview()
    rows = {row["rollout_id"]: row for row in Query(con, _ROLLOUTS).dicts()}
    scored = _choose_attempts(name, (a, b), read_last_attempts(name, con), rows, left_out)
    rewards = _score_attempts(scored, rows, reward_range)
    units = _make_units(scored, rows, rewards, b)
    pairs = [] if is_paired is False else _pair_tasks(scored, rewards, b, lonely)
    sizes = sum(len(p.rollouts_a) for p in pairs), sum(len(p.rollouts_b) for p in pairs)
    if is_paired is None:  # where most rollouts of the rarer version have paired tasks
        counts = Counter(attempt.version for attempt in scored)
        is_most = 2 * sizes[counts[a] >= counts[b]] >= min(counts[a], counts[b])
        is_paired = is_most and not is_sticky(units)
    if is_paired:
        left_out += lonely
        of_a, of_b = [pair.mean_a for pair in pairs], [pair.mean_b for pair in pairs]
        tasks: dict[str, list[Unit]] = {pair.group_id: [] for pair in pairs}
        for row in scored:
            if row.group_id in tasks:
                unit = Unit(row.rollout_id, row.version == b, rewards[row.rollout_id])
                tasks[row.group_id].append(unit)
        differences = [gain for units in tasks.values() for gain in compare_task(units)]
        counted = [unit.reward for units in tasks.values() for unit in units]
    else:
        pairs = []
        of_a, of_b = (
            [unit.reward for unit in units if unit.is_b == side] for side in (False, True)
        )
        sizes = len(of_a), len(of_b)
        differences = compare_neighbours(join_units(units)) if units else []
        counted = of_a + of_b
    if not differences:
        what = (
            "no task was done with both"
            if is_paired
            else "they were never in use at the same time"
            if {row.version for row in scored} == {a, b}
            else "no rollout of one of them has a reward"
        )
        reasons = ", ".join(f"{number} {reason}" for reason, number in left_out.items())
        raise ConfigError(
            f"{name}@{a} and {name}@{b} cannot be compared: {what}"
            + (f" (left out: {reasons})" if reasons else "")
            + "; let more rollouts run with a reward"
            + (" and the same tasks" if is_paired else "")
        )
    bounds = find_range(counted, reward_range)
    evidence = weigh_differences(differences, bounds)
    missing = evidence.missing
    if missing and len(pairs) != len(differences):  # of rollouts, some of which make a difference
        missing = math.ceil(missing * min(sizes) / len(differences))
    return Comparison(
        name=name,
        a=a,
        b=b,
        tasks=len(pairs),
        rollouts_a=sizes[0],
        rollouts_b=sizes[1],
        mean_a=statistics.fmean(of_a),
        mean_b=statistics.fmean(of_b),
        difference=evidence.mean,
        low=evidence.low,
        high=evidence.high,
        missing=missing,
        left_out=dict(left_out),
        pairs=tuple(pairs),
        reward_range=bounds,
        stated_range=reward_range,
    )


def _choose_attempts(
    name: str,
    versions: tuple[int, int],
    attempts: list["LastAttempt"],
    rows: Mapping[str, Mapping[str, Any]],
    left_out: Counter[str],
) -> list["LastAttempt"]:
    versions_known = {attempt.rollout_id for attempt in attempts if attempt.versions}
    for rollout_id, row in rows.items():
        if row["is_lost"] and rollout_id not in versions_known:  # before its first step
            version = _version_of(name, row["agent"], resources_of(row["agent"], row["resources"]))
            version_set = frozenset(() if version is None else (version,))
            attempts.append(LastAttempt(rollout_id, row["task"], row["start_ns"], version_set))
    chosen: list[LastAttempt] = []
    for attempt in sorted(attempts, key=lambda attempt: attempt.start_ns):
        row = rows.get(attempt.rollout_id, {"reward": None, "is_lost": False})
        if not attempt.versions & set(versions):
            continue
        if attempt.version is None:
            left_out["made with both versions"] += 1
        elif row["reward"] is None and not row["is_lost"]:
            left_out["without a reward"] += 1
        else:
            chosen.append(attempt)
    return chosen


def _score_attempts(
    attempts: Iterable["LastAttempt"],
    rows: Mapping[str, Mapping[str, Any]],
    reward_range: tuple[float, float] | None,
) -> dict[str, float]:
    """Return rewards by rollout; a lost one has the lowest in any case."""
    ids = [attempt.rollout_id for attempt in attempts]
    rewards = {key: rows[key]["reward"] for key in ids if not rows[key]["is_lost"]}
    lowest = reward_range[0] if reward_range else min([0.0, *rewards.values()])
    return {key: rewards.get(key, lowest) for key in ids}


def _make_units(
    scored: Sequence["LastAttempt"],
    rows: Mapping[str, Mapping[str, Any]],
    rewards: Mapping[str, float],
    b: int,
) -> list[Unit]:
    """Return rollouts since both versions were used, by what they stick to."""
    first_ns = {attempt.version: attempt.start_ns for attempt in reversed(scored)}
    pool = [row for row in scored if row.start_ns >= max(first_ns.values(), default=0)]
    if len({attempt.version for attempt in pool}) < 2:
        return []
    by_rollout = [Unit(row.rollout_id, row.version == b, rewards[row.rollout_id]) for row in pool]
    users = [rows[attempt.rollout_id]["user"] for attempt in pool]
    sessions = [rows[attempt.rollout_id]["session"] for attempt in pool]
    for keys in filter(any, (users, sessions, [attempt.group_id for attempt in pool])):
        units = [
            Unit(key or unit.key, unit.is_b, unit.reward)
            for unit, key in zip(by_rollout, keys, strict=True)
        ]
        if is_sticky(units):
            return units
    return by_rollout


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


def read_last_attempts(name: str, con: Reader, model: str | None = None) -> list[LastAttempt]:
    """Return the last attempt at each rollout, which its reward is of, by start.

    The connection is one of ``SpanSource.connect_overview``. Versions count only by steps of the
    ``model``, a name or glob; None is any.
    """
    attempts: list[LastAttempt] = []
    for row in Query(con, _LAST_STEPS).dicts():
        stamps = (
            (stamp["agent"], stamp["resources"])
            for stamp in row["stamps"]
            if model is None or fnmatchcase(stamp["model"] or "", model)
        )
        numbers = (read_version(name, *stamp) for stamp in stamps)
        versions = frozenset(version for version in numbers if version is not None)
        attempts.append(
            LastAttempt(row["rollout_id"], row["group_id"] or "", row["start_ns"], versions)
        )
    return attempts


@lru_cache(maxsize=4096)
def read_version(name: str, agent: str, resources: str) -> int | None:
    """Return the version in an agent's JSON ``resources``, by full or plain name; None if none."""
    return _version_of(name, agent, json.loads(resources or "{}"))


def _version_of(name: str, agent: str, resources: Mapping[str, str]) -> int | None:
    owner, _, plain = name.rpartition("/")
    text = resources.get(name)
    if f"{agent}/{name}" in resources:
        return None  # the agent's own, which may be stamped by its plain name, too
    if text is None and owner and agent == owner:
        text = resources.get(plain)
    return int(text) if text is not None and text.isdecimal() else None


def _pair_tasks(
    scored: Iterable[LastAttempt], rewards: Mapping[str, float], b: int, left_out: Counter[str]
) -> list[Pair]:
    groups: dict[str, tuple[list[str], list[str]]] = {}
    for item in scored:
        if item.group_id:
            groups.setdefault(item.group_id, ([], []))[item.version == b].append(item.rollout_id)
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
