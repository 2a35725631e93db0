"""Rewards composed to one number, and advantages: one a rollout, against others at the same task.

A composed reward is missing (None, never 0) where a reward that it names is missing; only a gate
that fails decides alone. A rollout's steps share its advantage, and each agent's steps in it share
a weight of 1. Where nothing can be compared there is no advantage, and the report says why.
"""

import contextlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias, get_args

from lightning_otel.adapter.attempts import AttemptKey
from lightning_otel.adapter.attributes import matched_text, to_number
from lightning_otel.adapter.rewards import add_decimals
from lightning_otel.errors import ConfigError
from lightning_otel.types import Compose, Dropped, Estimator, Span, Trajectory, Transition
from lightning_otel.types import conventions as c
from lightning_otel.types.values import check_types

GroupBy: TypeAlias = str | Callable[[Sequence[Span]], str | None]
"""What rollouts of one group have in common: an attribute, or a function of an attempt's spans."""

NO_TASK: Final = "no advantage: nothing says which task its rollout is about"
NO_REWARD: Final = "no advantage: its rollout has no reward"
OTHER_ATTEMPT: Final = "no advantage: another attempt at its rollout counts"
STATE: Final = "state"
"""The ``group_by`` that compares steps, and not rollouts."""
PROMPT: Final = "prompt"
"""The ``group_by`` that takes a rollout's first prompt where nothing tells its task."""
NO_STEP_REWARD: Final = "no advantage: its step has no reward; credit 'discounted' gives each one"
ALONE: Final = "no advantage: no other rollout of its group has a reward"
CAME_LATER: Final = "no advantage: its rollout came while the others were compared"
TOO_LARGE: Final = "no advantage: the rewards of its group are too large to compare"
NOT_WHOLE: Final = "no advantage: its group has a reward in {} of {} rollouts"
_LONGEST_TASK: Final = 64
MISSING_PART: Final = "its composed reward is missing, as one of its parts is: {}"
SUCCESS: Final = 0.5
"""The reward from which on a rollout has succeeded, where nothing else is said."""
EPSILON: Final = 1e-6
"""Added to a standard deviation before it divides, as verl does."""


def primary(rewards: Mapping[str, float]) -> float | None:
    """Return the primary reward, which stands first; None where there is none."""
    return next(iter(rewards.values()), None)


StepIds: TypeAlias = tuple[str, str]
"""Ids of a step's trace and span."""
NOTHING: Final[Mapping[StepIds, Any]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Composition:
    """A weighted sum of named rewards, behind hard gates.

    Attributes:
        weights: How much each reward counts; all of them must be there.
        gates: The least value of each reward that gates the whole.
        floor: The whole where a gate fails, or the reward of one is missing.
        is_normalised: Whether advantages bring each reward to mean 0 and deviation 1 within its
            group before it is weighted. A single step has no group: its reward is the plain sum.
    """

    weights: Mapping[str, float]
    gates: Mapping[str, float] = field(default_factory=dict)
    floor: float = 0.0
    is_normalised: bool = False

    def __post_init__(self) -> None:
        check_types({"weights": self.weights, "gates": self.gates}, Composition.__annotations__)
        if not self.weights:
            raise ConfigError("a composition needs weights, such as {'correct': 1.0}")
        for table in (self.weights, self.gates, {"floor": self.floor}):
            for name, number in table.items():
                if to_number(number) is None:
                    raise ConfigError(f"{name!r} is {number!r}; give a finite number")

    def __call__(self, rewards: Mapping[str, float]) -> float | None:
        """Compose rewards, given by name; None where a part is missing."""
        if self._is_shut(rewards):
            return self.floor
        if self.missing(rewards):
            return None
        return add_decimals([weight * rewards[name] for name, weight in self.weights.items()])

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
        totals = [0.0] * len(group)
        for name, weight in self.weights.items():
            having = [index for index, rewards in enumerate(parts) if name in rewards]
            scaled = standardise([parts[index][name] for index in having])
            for index, number in zip(having, scaled, strict=True):
                totals[index] += weight * number
        return [None if one is None else sum_ for one, sum_ in zip(whole, totals, strict=True)]

    def _is_shut(self, rewards: Mapping[str, float]) -> bool:
        return any(name in rewards and rewards[name] < least for name, least in self.gates.items())


def compose_rewards(compose: Compose, rewards: Mapping[str, float]) -> tuple[float | None, str]:
    """Return one finite number of named rewards, or None and why it is missing."""
    value = compose(rewards)
    if value is not None and math.isfinite(value):
        return value, ""
    names = compose.missing(rewards) if isinstance(compose, Composition) else ()
    return None, MISSING_PART.format(", ".join(names) or "what composes it gave no finite number")


@dataclass(frozen=True, slots=True)
class Advantage:
    """The settings of advantages.

    Attributes:
        estimator: ``grpo``: the reward less the group's mean, over its standard deviation;
            ``rloo``: less the mean of the others; ``dr_grpo``: less the mean alone. Or a function
            from the rewards of a group to their advantages.
        group_by: An attribute, or a function of the spans of an attempt, that gives a rollout's
            group; by default its task. ``prompt``: its task, else its first prompt. ``state``
            compares steps: those of such a group in which the agent saw the same, by their rewards
            (Feng et al., GiGPO, arXiv 2505.10978, section 4).
        size: How many rollouts with a reward make a group whole; by default two are enough.
    """

    estimator: Estimator | Callable[[Sequence[float]], Sequence[float]] = "grpo"
    group_by: GroupBy | None = None
    size: int | None = None

    def __post_init__(self) -> None:
        if not callable(self.estimator) and self.estimator not in get_args(Estimator):
            raise ConfigError(
                f"advantage is {self.estimator!r}; it must be one of "
                f"{', '.join(get_args(Estimator))}, or a function"
            )
        check_types({"size": self.size}, Advantage.__annotations__)
        if self.size is not None and self.size < 2:
            raise ConfigError(f"size is {self.size!r}; a group holds 2 rollouts or more")


class AttemptOutcome(NamedTuple):
    """An attempt's reward; a rollout's is that of its last attempt.

    Attributes:
        group_id: Its group; empty if nothing says so.
        rewards: Its rewards by name, each counted once.
        value: Its reward; None, for a ``reason``, where it has none, or a part of it is missing.
        has_steps: Whether it made a step; without one it is judged, and never compared.
        steps: Its steps, where these are compared: their group is the state of the agent.
    """

    key: AttemptKey
    group_id: str
    start_ns: int
    rewards: Mapping[str, float]
    value: float | None
    reason: str = NO_REWARD
    has_steps: bool = True
    steps: "Mapping[StepIds, AttemptOutcome]" = NOTHING


class Estimate(NamedTuple):
    """An attempt's group and advantage, or why it has none; where steps are compared, of each."""

    group_id: str
    advantage: float | None
    reason: str = ""
    steps: "Mapping[StepIds, Estimate]" = NOTHING


def last_rewards(outcomes: Iterable[AttemptOutcome]) -> dict[str, float]:
    """Return the reward of each rollout that has one: its last attempt's."""
    last = {outcome.key.rollout_id: outcome for outcome in sorted(outcomes, key=_attempt_order)}
    return {name: outcome.value for name, outcome in last.items() if outcome.value is not None}


def _attempt_order(outcome: AttemptOutcome) -> tuple[int, AttemptKey]:
    return outcome.start_ns, outcome.key


def group_of(spans: Sequence[Span], group_by: GroupBy | None) -> str:
    """Return the group of an attempt, given its spans in order; empty where nothing says so."""
    if group_by in (STATE, PROMPT):
        group_by = None
    if callable(group_by):
        group = group_by(spans)
        return "" if group is None else str(group)
    if group_by is not None:
        return _read_task(spans, group_by)
    rollout = [span for span in spans if span.name == c.SPAN_ROLLOUT]
    places = [(where, key) for where in (rollout, spans) for key in (c.TASK_ID, c.TASK)]
    return next(filter(None, (_read_task(*place) for place in places)), "")


def _read_task(spans: Iterable[Span], key: str) -> str:
    texts = (matched_text(span.attributes[key]) for span in spans if key in span.attributes)
    text = next(filter(None, texts), "")
    if text.startswith("{"):  # one order for the keys of a JSON object
        with contextlib.suppress(ValueError, RecursionError):
            text = json.dumps(json.loads(text), sort_keys=True, ensure_ascii=False)
    if len(text) <= _LONGEST_TASK:
        return text
    return f"sha256:{sha256(text.encode('utf-8', 'replace')).hexdigest()[:32]}"


def estimate_advantages(
    outcomes: Iterable[AttemptOutcome], how: Advantage, compose: Compose
) -> dict[AttemptKey, Estimate]:
    """Return the advantage of each attempt; of several at a rollout the last one counts.

    ``compose`` made one number of an attempt's rewards; ``outcomes`` are of every rollout there is.

    Raises:
        ConfigError: The estimator does not give one finite number for each reward.
    """
    attempts = sorted(outcomes, key=_attempt_order)
    latest = {outcome.key.rollout_id: outcome for outcome in attempts}
    estimates: dict[AttemptKey, Estimate] = {}
    groups: dict[str, list[AttemptOutcome]] = {}
    for outcome in attempts:
        if outcome is not latest[outcome.key.rollout_id]:
            estimates[outcome.key] = Estimate(outcome.group_id, None, OTHER_ATTEMPT)
        elif outcome.value is None:
            estimates[outcome.key] = Estimate(outcome.group_id, None, outcome.reason)
        elif outcome.has_steps:
            groups.setdefault(outcome.group_id, []).append(outcome)
    for group_id, members in groups.items():
        values, reason = _compare_members(group_id, members, how, compose)
        for outcome, value in zip(members, values, strict=True):
            estimates[outcome.key] = Estimate(group_id, value, reason)
    return _estimate_steps(groups, estimates, how, compose) if how.group_by == STATE else estimates


def _estimate_steps(
    groups: Mapping[str, Sequence[AttemptOutcome]],
    estimates: Mapping[AttemptKey, Estimate],
    how: Advantage,
    compose: Compose,
) -> dict[AttemptKey, Estimate]:
    """Return the estimates with those of steps, each compared with the others of its state."""
    states: dict[str, list[tuple[StepIds, AttemptOutcome]]] = {}
    by_step: dict[AttemptKey, dict[StepIds, Estimate]] = {}
    for group_id, members in groups.items():
        for ids, step in (item for member in members for item in member.steps.items()):
            text = f"{group_id} {step.group_id}".encode("utf-8", "replace")
            state = group_id and f"state-{sha256(text).hexdigest()[:16]}"
            if step.value is None:
                estimate = Estimate(state, None, NO_STEP_REWARD)
                by_step.setdefault(step.key, {})[ids] = estimate
            else:
                states.setdefault(state, []).append((ids, step))
    for state, steps in states.items():
        values, reason = _compare_members(state, [step for _, step in steps], how, compose)
        for (ids, step), value in zip(steps, values, strict=True):
            by_step.setdefault(step.key, {})[ids] = Estimate(state, value, reason)
    return {key: entry._replace(steps=by_step.get(key, {})) for key, entry in estimates.items()}


def _compare_members(
    group_id: str, members: Sequence[AttemptOutcome], how: Advantage, compose: Compose
) -> tuple[Sequence[float | None], str]:
    reason = ""
    if not group_id:
        reason = NO_TASK
    elif how.size is not None and len(members) < how.size:
        reason = NOT_WHOLE.format(len(members), how.size)
    elif len(members) < 2:
        reason = ALONE
    else:
        rewards: Iterable[float | None] = [outcome.value for outcome in members]
        if isinstance(compose, Composition):
            rewards = compose.of_group([outcome.rewards for outcome in members])
        values = [value for value in rewards if value is not None]
        with contextlib.suppress(OverflowError):
            results = _compute_advantages(values, how)
            if all(map(math.isfinite, results)):
                return results, ""
        reason = TOO_LARGE
    return [None] * len(members), reason


def _compute_advantages(values: Sequence[float], how: Advantage) -> Sequence[float]:
    if not callable(how.estimator):
        return NAMED[how.estimator](values)
    results = [to_number(value) for value in how.estimator(values)]
    numbers = [value for value in results if value is not None]
    if len(numbers) != len(values) or len(results) != len(values):
        raise ConfigError(
            f"the advantage function gave {results!r:.200} for {len(values)} rewards; "
            "return one finite number for each"
        )
    return numbers


def standardise(values: Sequence[float]) -> list[float]:
    """Return each number less their mean, over their sample deviation; 0 where they are alike.

    Source: verl 0.9.1, ``compute_grpo_outcome_advantage`` (``torch.std``, epsilon 1e-6).
    """
    if len(values) < 2:
        return [0.0] * len(values)
    differences = centre(values)
    deviation = math.sqrt(math.fsum(value**2 for value in differences) / (len(values) - 1))
    return [value / (deviation + EPSILON) for value in differences]


def centre(values: Sequence[float]) -> list[float]:
    """Return each number less their mean. Source: Dr. GRPO, arXiv 2503.20783, section 3."""
    mean = math.fsum(values) / len(values)
    return [value - mean for value in values]


def leave_one_out(values: Sequence[float]) -> list[float]:
    """Return each number less the others' mean. Source: RLOO, arXiv 2402.14740, section 3."""
    count = len(values)
    return [value * count / (count - 1) for value in centre(values)]


NAMED: Final[Mapping[Estimator, Callable[[Sequence[float]], Sequence[float]]]] = {
    "grpo": standardise,
    "rloo": leave_one_out,
    "dr_grpo": centre,
}


def stamp_steps(
    trajectories: Sequence[Trajectory], estimates: Mapping[AttemptKey, Estimate]
) -> tuple[list[Trajectory], list[Dropped]]:
    """Return trajectories, each step with group, advantage and weight, and why some have none.

    The weights of an agent's steps in one attempt add up to 1; all its trajectories are given.
    """
    keyed = [(AttemptKey(path.rollout_id, path.attempt_id), path) for path in trajectories]
    steps: dict[tuple[AttemptKey, str], set[int]] = {}
    for key, path in keyed:
        steps.setdefault((key, path.agent), set()).update(map(id, path.transitions))
    copies: dict[int, Transition] = {}
    results: list[Trajectory] = []
    dropped: dict[object, Dropped] = {}
    for key, path in keyed:
        whole = estimates.get(key, Estimate("", None, CAME_LATER))
        weight = 1 / len(steps[key, path.agent])
        for step in path.transitions:
            ids = step.trace_id, step.span_id
            estimate = whole.steps.get(ids, whole)
            if estimate.reason:
                lost = Dropped(step.span_id, step.trace_id, "advantage", estimate.reason)
                dropped.setdefault(ids if whole.steps else key, lost)
            if id(step) not in copies:  # one that several paths share stays one
                copies[id(step)] = replace(
                    step, group_id=estimate.group_id, advantage=estimate.advantage, weight=weight
                )
        results.append(replace(path, transitions=tuple([copies[id(s)] for s in path.transitions])))
    return results, list(dropped.values())
