"""Promotion and withdrawal of a run's candidates, by evidence of their rewards.

Without sufficient evidence a candidate stays the canary.
"""

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, NamedTuple

from lightning_otel.algorithms.options import RunConfig
from lightning_otel.algorithms.tasks import RolloutResult, run_tasks
from lightning_otel.errors import ConfigError, NotFoundError
from lightning_otel.resources.evidence import find_range, format_verdict, weigh_differences
from lightning_otel.resources.neighbours import PairDifference
from lightning_otel.resources.waiting import explain_waiting
from lightning_otel.state.runs import TrainingRun
from lightning_otel.types import Resource, html

if TYPE_CHECKING:
    from lightning_otel.algorithms.run import Run

_Z95: Final = statistics.NormalDist().inv_cdf(0.975)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on a run's candidates.

    Attributes:
        promoted: Names of the resources that became live.
        reason: The reason why they did, or did not.
        live: Mean held-out reward of what was live; None if it was not measured.
        candidate: That of what the run made.
        withdrawn: Names of the resources whose version of this run is the canary no more.
    """

    promoted: tuple[str, ...] = ()
    reason: str = ""
    live: float | None = None
    candidate: float | None = None
    withdrawn: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Fit:
    """The result of a training run.

    Attributes:
        run: The run, as it ended.
        metrics: The latest of each metric, by name.
        resources: The latest version that the run made of each resource, by name.
        verdict: The decision whether that became live, and why.
        left_out: The number of rollouts that were of no use, by reason.
    """

    run: TrainingRun
    metrics: Mapping[str, float] = field(default_factory=dict)
    resources: Mapping[str, Resource] = field(default_factory=dict)
    verdict: Verdict = field(default_factory=Verdict)
    left_out: Mapping[str, int] = field(default_factory=dict)

    @property
    def promoted(self) -> tuple[str, ...]:
        """Names of the resources that became live."""
        return self.verdict.promoted

    @property
    def withdrawn(self) -> tuple[str, ...]:
        """Names of the resources whose candidate was worse, and is withdrawn."""
        return self.verdict.withdrawn

    def _repr_html_(self) -> str:
        rows: list[tuple[str, str, object]] = [
            ("made", str(version), self.place_of(name)) for name, version in self.resources.items()
        ]
        rows += [("measured", name, f"{value:g}") for name, value in self.metrics.items()]
        rows += [("left out", reason, f"{count:,}") for reason, count in self.left_out.items()]
        note = f"curves: lo.plot_training_metrics(runs={self.run.run_id!r})"
        note = f"{self.verdict.reason}; {note}" if self.verdict.reason else note
        return self.run._repr_html_() + html.render_table(("", "", ""), rows, note)

    def place_of(self, name: str) -> str:
        """Return what became of a resource: ``live``, ``canary`` or ``withdrawn``."""
        if name in self.withdrawn:
            return "withdrawn"
        return "live" if name in self.promoted else "canary"


def promote(run: "Run") -> Verdict:
    """Compare a run's candidates with what is live; promote or withdraw them."""
    config, resources = run.config, run.resources
    live: dict[str, int] = {}
    withdrawn: list[str] = []
    for name, version in run.versions.items():
        if (why := resources.withdrawn(name).get(version)) is not None:
            withdrawn.append(f"{name}@{version} was withdrawn: {why}")
            continue
        aliases = resources.aliases(name)
        standing = aliases.get("live")
        made_here = resources.get(name, version).run_id == run.run.run_id
        if standing != version and (made_here or aliases.get("canary") == version):
            if standing is None:
                return Verdict(reason=f"nothing of {name} is live to compare with: by hand")
            live[name] = standing
    if not live:
        return Verdict(reason="; ".join(withdrawn) or "nothing better was made")
    unmeasured = _explain_unmeasured(config)
    if unmeasured:
        return _judge_traffic(run, live, unmeasured)
    before = run_tasks(config, config.val, {**run.versions, **live}, mode="val")
    after = run_tasks(config, config.val, run.versions, mode="val")
    verdict = _judge_candidates(before, after, tuple(live), config)
    means = {"val/live": verdict.live, "val/candidate": verdict.candidate}
    run.log(run.step, {name: value for name, value in means.items() if value is not None})
    if config.stop.is_set():
        return Verdict(reason="stopped before the held-out tasks were done: by hand")
    for name in verdict.promoted:
        _make_live(run, name)
    worse = (name for name in verdict.withdrawn if _withdraw(run, name, verdict.reason))
    return replace(verdict, withdrawn=tuple(worse))


def _explain_unmeasured(config: RunConfig) -> str:
    if config.stop.is_set():
        return "stopped"
    if not config.val:
        return "there are no held-out tasks (val)"
    if config.agent is None and config.workers:
        return "there is no agent to run held-out tasks with"
    return ""


def _judge_traffic(run: "Run", live: Mapping[str, int], unmeasured: str) -> Verdict:
    promoted, withdrawn, reasons = [], [], []
    for name, standing in live.items():
        version = run.versions[name]
        try:
            comparison = run.resources.compare(
                name, standing, version, run.store, reward_range=run.config.reward_range
            )
        except ConfigError:  # nothing is recorded of one of them
            share = run.resources.canary_weight(name)
            vain = explain_waiting(run.resources, name, run.store)
            reasons.append(
                f"{unmeasured}: {name}@{version} is the canary, which {share:.0%} of the runs with "
                f"apply are given; what they and those with {name}@{standing} earn decides at the "
                f"next look: train() again, or lightning-otel resources promote {name} --if-better"
                + (f"; so far {vain}" if vain else "")
            )
            continue
        if comparison.is_worse and _withdraw(run, name, f"worse: {comparison}"):
            withdrawn.append(name)
        elif comparison.is_better and comparison.difference >= run.config.min_gain:
            _make_live(run, name)
            promoted.append(name)
        reasons.append(f"{comparison.verdict} in live traffic: {comparison}")
    return Verdict(tuple(promoted), "; ".join(reasons), withdrawn=tuple(withdrawn))


def _make_live(run: "Run", name: str) -> None:
    if run.resources.aliases(name).get("canary") == run.versions[name]:
        run.resources.promote(name)
    else:
        run.resources.set_alias(name, "live", run.versions[name])


def _withdraw(run: "Run", name: str, reason: str) -> bool:
    by_whom = f"{reason} ({run.run.run_id})"
    try:
        run.resources.withdraw(name, by_whom, version=run.versions[name])
    except NotFoundError:  # another one is by now
        return False
    return True


def _judge_candidates(
    before: Sequence[RolloutResult],
    after: Sequence[RolloutResult],
    names: tuple[str, ...],
    config: RunConfig,
) -> Verdict:
    pairs = [
        (old.rollout.reward, new.rollout.reward) for old, new in zip(before, after, strict=True)
    ]
    both = [(old, new) for old, new in pairs if old is not None and new is not None]
    lost = sum(old is not None and new is None for old, new in pairs)
    presence = [
        PairDifference(float(new is not None) - float(old is not None)) for old, new in pairs
    ]
    is_broken = weigh_differences(presence, (0.0, 1.0)).is_below
    why = f"{lost} of {len(pairs)} held-out tasks have a reward no more"
    if not both:
        # Where the agent fails on all of them, there is no reward to compare.
        return Verdict(
            reason=why if is_broken else "no held-out task has a reward from both: by hand",
            withdrawn=names if is_broken else (),
        )
    live = statistics.fmean(old for old, _ in both)
    candidate = statistics.fmean(new for _, new in both)
    proof = weigh_differences(
        [PairDifference(new - old) for old, new in both],
        find_range((reward for pair in both for reward in pair), config.reward_range),
    )
    text = (
        f"held-out reward {live:.3f} → {candidate:.3f} over {len(both)} tasks, a difference of "
        f"{candidate - live:+.3f} [{proof.low:+.3f}, {proof.high:+.3f}]"
    )
    if proof.is_below:
        return Verdict((), text, live, candidate, names)
    if lost:
        return Verdict((), why, live, candidate, names if is_broken else ())
    if not proof.is_above:
        return Verdict((), f"{text}: {format_verdict(0, proof.missing, 'tasks')}", live, candidate)
    if candidate - live < config.min_gain:
        return Verdict((), f"{text}, and {config.min_gain:g} is needed", live, candidate)
    return Verdict(names, text, live, candidate)


class MeanEstimate(NamedTuple):
    """A mean over tasks, its 95 % interval, and the value of each task, in order.

    ``None`` is unknown: a task without a reward, or an interval of fewer than two tasks.
    """

    value: float | None
    low: float | None
    high: float | None
    tasks: tuple[float | None, ...]

    @classmethod
    def of(cls, values: Sequence[float | None], most: float = math.inf) -> "MeanEstimate":
        """Return the mean of tasks' values; a task counts once, however many samples it has.

        The interval is cut to 0 to ``most`` where that is finite.

        Source: Miller, "Adding Error Bars to Evals", arXiv 2411.00640, equation 4: the standard
        error is clustered by task.
        """
        numbers = [value for value in values if value is not None]
        if not numbers:
            return cls(None, None, None, tuple(values))
        mean = statistics.fmean(numbers)
        if len(numbers) < 2:
            return cls(mean, None, None, tuple(values))
        margin = _Z95 * statistics.stdev(numbers) / math.sqrt(len(numbers))
        low, high = mean - margin, min(mean + margin, most)
        return cls(mean, max(low, 0.0) if most < math.inf else low, high, tuple(values))


@dataclass(frozen=True, slots=True)
class Evaluation:
    """An agent's rewards on tasks.

    Attributes:
        reward: The mean over rollouts that have a reward; None if none has.
        rollouts: The outcome of each rollout, task by task.
        unrewarded: The number of rollouts without a reward, by reason.
        samples: The rollouts of each task, n.
    """

    reward: float | None
    rollouts: Sequence[RolloutResult]
    unrewarded: Mapping[str, int] = field(default_factory=dict)
    samples: int = 1

    @classmethod
    def of(cls, results: Sequence[RolloutResult], samples: int = 1) -> "Evaluation":
        """Sum up the outcomes of tasks."""
        rollouts = [result.rollout for result in results]
        rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
        reasons = Counter(item.reason or "no reward" for item in rollouts if item.reward is None)
        mean = statistics.fmean(rewards) if rewards else None
        return cls(mean, results, dict(reasons), samples)

    def mean(self) -> MeanEstimate:
        """Return mean@n: the mean reward of each task's samples, and of the tasks.

        Rollouts without a reward are left out; ``unrewarded`` counts them.
        """
        rewards = ([reward for reward in task if reward is not None] for task in self._tasks())
        return MeanEstimate.of([statistics.fmean(task) if task else None for task in rewards])

    def pass_at(self, k: int, *, threshold: float = 1.0) -> MeanEstimate:
        """Return pass@k: the chance that one of k samples of a task earns ``threshold`` or more.

        A rollout without a reward did not pass.

        Raises:
            ConfigError: There are fewer than k samples of a task.

        Source: Chen et al., arXiv 2107.03374, equation 1, unbiased.
        """
        if not 1 <= k <= self.samples:
            raise ConfigError(
                f"pass@{k} of {self.samples} samples a task is unknown; evaluate(samples={k}) or "
                "more"
            )
        failures = (
            sum(reward is None or reward < threshold for reward in task) for task in self._tasks()
        )
        total = math.comb(self.samples, k)
        return MeanEstimate.of([1 - math.comb(count, k) / total for count in failures], 1.0)

    def _tasks(self) -> Iterator[list[float | None]]:
        rewards = [result.rollout.reward for result in self.rollouts]
        for start in range(0, len(rewards), self.samples):
            yield rewards[start : start + self.samples]
