"""What an export read: the account of its steps, what its card tells of them, and their two sides.

The law of an export: distinct steps = steps in its rows + steps left out, by reason.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from statistics import fmean, quantiles
from typing import Any, Final

from lightning_otel.adapter import Adaptation
from lightning_otel.adapter.advantages import group_of
from lightning_otel.dataset.formats.groups import prompt_key
from lightning_otel.errors import ConfigError
from lightning_otel.types import Report, Span, Transition
from lightning_otel.types import conventions as c
from lightning_otel.types.values import parse_json

TRAIN: Final = "train"
VALIDATION: Final = "validation"
MARKS: Final = 1 << 128
_JUDGES: Final = {
    c.REWARD_FUNCTION: "a reward function", c.REWARD_AUTHOR_KIND: "",
    c.FEEDBACK_ID: "feedback", c.EVALUATION_NAME: "an evaluation",
}  # fmt: skip
"""Attributes of rewards that tell who gave them, and their words; without any the value's own."""


def mark_steps(span_ids: Iterable[str]) -> int:
    """Return a number of 128 bits that tells a bag of span ids, in any order, from others."""
    return sum(map(_mark_step, span_ids)) % MARKS


def _mark_step(span_id: str) -> int:
    return int.from_bytes(sha256(span_id.encode("utf-8", "replace")).digest()[:16], "big")


def count_calls_left_out(report: Report) -> Counter[str]:
    """Return how many calls became no step, by reason."""
    return Counter(entry.reason for entry in report.dropped if entry.noun == "call")


class Account:
    """The steps that came, and what became of each of them.

    Attributes:
        steps: Distinct steps that came.
        in_rows: Steps in rows; None if the format does not tell.
        left_out: Steps in no row, by reason.
        has_span_ids: Whether rows name the spans of their steps.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.in_rows: int | None = 0
        self.left_out: Counter[str] = Counter()
        self.has_span_ids = True
        self._balance = 0  # of hashes: 0 where each step that came went somewhere once

    def add_step(self, step: Transition) -> None:
        """Count a step that came."""
        self.steps += 1
        self._balance += hash(step.span_id)

    def add_row(self, steps: Sequence[str] | int | None) -> None:
        """Count the steps of a row, as the format tells them."""
        if isinstance(steps, Sequence) and self.in_rows is not None:
            self.in_rows += len(steps)
            self._balance -= sum(map(hash, steps))
            return
        self.has_span_ids = False
        is_known = isinstance(steps, int) and self.in_rows is not None
        self.in_rows = self.in_rows + steps if is_known else None  # type: ignore[operator]

    def add_left_out(self, step: Transition, reason: str) -> None:
        """Count a step that is in no row."""
        self.left_out[reason] += 1
        self._balance -= hash(step.span_id)

    @property
    def is_lawful(self) -> bool | None:
        """True if each step is in one row, or left out with one reason; None if nobody can tell."""
        if self.in_rows is None:
            return None
        is_balanced = not self.has_span_ids or self._balance == 0
        return is_balanced and self.steps == self.in_rows + self.left_out.total()


class Census:
    """Counts what is told of steps beside the rows themselves.

    Attributes:
        counts: Calls, rewards and masks by what is told of where they come from.
        steps_mark: Sum of the marks of the steps that came, as :func:`mark_steps` has it.
        left_out_mark: That of the steps in no row.
        first_ns: When the first step began; None without one.
        last_ns: When the last one began.
    """

    def __init__(self) -> None:
        self.counts: dict[str, Counter[str]] = {}
        self.steps_mark = self.left_out_mark = 0
        self.first_ns: int | None = None
        self.last_ns = 0
        self._rollouts: set[int] = set()
        self._kinds: Counter[tuple[str, ...]] = Counter()
        self._rewards = array("d")

    def add_step(self, step: Transition) -> None:
        """Count a distinct step."""
        self.steps_mark += _mark_step(step.span_id)
        version = step.resource_version or ""
        if step.resources:
            version = ", ".join(f"{name}@{at}" for name, at in step.resources.items())
        self._kinds[step.agent, step.model or "", version, step.mode or ""] += 1
        self._rollouts.add(hash(step.rollout_id))
        if self.first_ns is None or step.start_ns < self.first_ns:
            self.first_ns = step.start_ns
        if step.start_ns > self.last_ns:
            self.last_ns = step.start_ns
        if step.reward is not None:
            self._rewards.append(step.reward)

    def add_left_out(self, step: Transition) -> None:
        """Count a step that is in no row."""
        self.left_out_mark += _mark_step(step.span_id)

    @property
    def rollouts(self) -> int:
        """Rollouts that have a step."""
        return len(self._rollouts)

    def count_kinds(self) -> dict[str, Counter[str]]:
        """Return how many steps each agent, model, version and mode has."""
        names = ("agents", "models", "versions", "modes")
        counts = {name: Counter[str]() for name in names}
        for kinds, number in self._kinds.items():
            for name, kind in zip(names, kinds, strict=True):
                counts[name][kind or "(not told)"] += number
        return counts

    def add_spans(self, part: Adaptation) -> None:
        """Count what the spans of rollouts tell: origins of calls, masks, who gave rewards."""
        for _, spans, _ in part.parts:
            for span in spans:
                attributes = span.attributes
                if attributes.get(c.OPERATION) in c.GENERATIVE_OPERATIONS:
                    origin = str(attributes.get(c.RECEIVED, "recorded here")).partition(":")[0]
                    self._count("origins", origin)
                if c.REWARD_VALUE in attributes:
                    self._count("judges", _name_judge(attributes))
                if c.REDACTED in attributes:
                    self._add_masks(parse_json(attributes[c.REDACTED]))

    def _count(self, noun: str, name: str, number: int = 1) -> None:
        self.counts.setdefault(noun, Counter())[name] += number

    def _add_masks(self, note: Any) -> None:
        for kind, number in note.items() if isinstance(note, dict) else ():
            if isinstance(number, int):
                self._count("masks", kind, number)

    def describe_rewards(self) -> dict[str, Any]:
        """Return count, mean, extremes and quartiles of the steps' rewards."""
        values = sorted(self._rewards)
        if not values:
            return {"count": 0}
        middle = quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
        numbers = [fmean(values), values[0], *middle, values[-1]]
        names = ("mean", "min", "q1", "median", "q3", "max")
        return {"count": len(values), **dict(zip(names, numbers, strict=True))}


def _name_judge(attributes: Mapping[str, Any]) -> str:
    # Not by name: who annotates is a person.
    judges = (word or str(attributes[key]) for key, word in _JUDGES.items() if key in attributes)
    return next(judges, "the program")


class Split:
    """Divides rollouts into training and validation by task, by a hash: alike on every machine."""

    def __init__(self, share: float | None, seed: int) -> None:
        """Take the share of tasks for validation, between 0 and 1; None has one side alone.

        Raises:
            ConfigError: The share is no such number.
        """
        if share is not None and not 0.0 < share < 1.0:
            raise ConfigError(f"split is {share!r}; give the share of validation, such as 0.1")
        self.share, self.seed = share, seed
        self.sides = (TRAIN,) if share is None else (TRAIN, VALIDATION)
        self.tasks: dict[str, set[str]] = {side: set() for side in self.sides}

    def list_rollouts(self, part: Adaptation, side: str) -> set[str]:
        """Return the rollouts of a side; one whose task is not known goes by its first prompt."""
        tasks: dict[str, str] = {}
        for key, spans, _ in part.parts:
            if task := group_of(sorted(spans, key=_start_of), None):
                tasks.setdefault(key.rollout_id, task)
        for path in part.trajectories:
            if path.transitions and path.rollout_id not in tasks:
                tasks[path.rollout_id] = f"prompt-{prompt_key(path.transitions[0])}"
        rollouts = {name for name, task in tasks.items() if self.choose_side(task) == side}
        self.tasks[side].update(tasks[path.rollout_id] for path in part.trajectories
                                if path.rollout_id in rollouts)  # fmt: skip
        return rollouts

    def describe(self) -> dict[str, Any] | None:
        """Return share, seed and the tasks of each side; None without a split."""
        if self.share is None:
            return None
        tasks = {side: len(names) for side, names in self.tasks.items()}
        return {"share": self.share, "seed": self.seed, "tasks": tasks}

    def choose_side(self, task: str) -> str:
        """Return the side of a task."""
        digest = sha256(f"{self.seed}\n{task}".encode("utf-8", "replace")).digest()
        is_validation = int.from_bytes(digest[:8], "big") < (self.share or 0.0) * 2**64
        return VALIDATION if is_validation else TRAIN


def _start_of(span: Span) -> int:
    return span.start_ns
