"""What an export read: the account of its steps, what its card tells of them, and their two sides.

The law of an export: distinct steps = steps in its rows + steps left out, by reason.
"""

from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from statistics import fmean, quantiles
from typing import Any, Final

from lightning_otel.adapter import Adaptation
from lightning_otel.adapter.advantages import group_of
from lightning_otel.adapter.histories import state_key
from lightning_otel.dataset.formats.format import LeftOut
from lightning_otel.errors import ConfigError
from lightning_otel.types import Report, Transition
from lightning_otel.types import conventions as c
from lightning_otel.types.values import parse_json

TRAIN: Final = "train"
VALIDATION: Final = "validation"
_KINDS: Final = ("agents", "models", "modes", "versions")
_JUDGES: Final = {
    c.REWARD_FUNCTION: "a reward function", c.REWARD_AUTHOR_KIND: "",
    c.FEEDBACK_ID: "feedback", c.EVALUATION_NAME: "an evaluation",
}  # fmt: skip
"""Attributes of rewards that tell who gave them; a kind of authors by its own word."""


def mark_step(span_id: str) -> int:
    """Return a number for a span id; the sum tells a bag of them, in any order, from others."""
    return int.from_bytes(sha256(span_id.encode("utf-8", "replace")).digest()[:16], "big")


class Census:
    """Counts the steps that came, what became of each, and what is told of them."""

    def __init__(self, *, is_full: bool) -> None:
        """Begin; one that is not full only keeps the law."""
        self._is_full, self._balance = is_full, 0
        self.steps = 0
        self.in_rows: int | None = 0  # None if the format does not tell
        self.has_span_ids = True
        self.reasons: Counter[tuple[str, bool]] = Counter()
        self.span_ids: dict[str, str] = {}  # the first step's, by reason
        self.marks = [0, 0]  # sums of the steps that came, and of those in no row
        self.times_ns = [1 << 62, 0]  # when the first and the last one began
        self._kinds: Counter[tuple[str | None, ...]] = Counter()
        self._origins: Counter[tuple[str, str]] = Counter()
        self.reports: list[Report] = []
        self._rewards = array("d")

    def add_step(self, step: Transition) -> None:
        """Count a distinct step that came."""
        self.steps += 1
        self._balance += hash(step.span_id)
        if not self._is_full:
            return
        self.marks[0] += mark_step(step.span_id)
        self._kinds[step.agent, step.model, step.mode, step.resource_version] += 1
        first, last = self.times_ns
        self.times_ns = [min(first, step.start_ns), max(last, step.start_ns)]
        if step.reward is not None:
            self._rewards.append(step.reward)

    def add_row(self, steps: Sequence[str] | int | None) -> None:
        """Count the steps of a row, as the format tells them: by span ids, or their number."""
        if isinstance(steps, Sequence):
            self._balance -= sum(map(hash, steps))
            steps = len(steps)
        else:
            self.has_span_ids = False
        self.in_rows = None if steps is None or self.in_rows is None else self.in_rows + steps

    def leave_out(self, part: LeftOut) -> None:
        """Count what a row does not hold."""
        self.reasons[part.reason, part.is_row_written] += 1
        self.span_ids.setdefault(part.reason, part.step.span_id)
        if not part.is_row_written:
            self._balance -= hash(part.step.span_id)
            self.marks[1] += mark_step(part.step.span_id)

    def add_part(self, part: Adaptation) -> None:
        """Count origins of calls, masks, and who gave rewards."""
        self.reports.append(part.report)
        for _, spans, _ in part.parts if self._is_full else ():
            for attributes in (span.attributes for span in spans):
                if attributes.get(c.OPERATION) in c.GENERATIVE_OPERATIONS:
                    origin = str(attributes.get(c.RECEIVED, "recorded here")).partition(":")[0]
                    self._origins["origins", origin] += 1
                if c.REWARD_VALUE in attributes:
                    self._origins["judges", _name_judge(attributes)] += 1
                masks = parse_json(attributes.get(c.REDACTED))
                for kind, number in masks.items() if isinstance(masks, dict) else ():
                    self._origins["masks", kind] += number if isinstance(number, int) else 0

    def count_names(self, noun: str) -> dict[str, int]:
        """Return how many steps, calls, rewards or masks there are of each name of a noun."""
        counts = Counter({name: n for (kind, name), n in self._origins.items() if kind == noun})
        for names, number in self._kinds.items() if noun in _KINDS else ():
            counts[names[_KINDS.index(noun)] or "(none)"] += number
        return counts

    def list_reasons(self, *, is_row_written: bool = False) -> dict[str, int]:
        """Return reasons for what is left out, the most frequent first."""
        ranked = self.reasons.most_common()
        return {reason: number for (reason, is_row), number in ranked if is_row is is_row_written}

    @property
    def is_lawful(self) -> bool:
        """False if a step is in no row without a reason, or in several places."""
        is_balanced = not self.has_span_ids or self._balance == 0
        steps = (self.in_rows or 0) + sum(self.list_reasons().values())
        return self.in_rows is None or (is_balanced and self.steps == steps)

    def describe_rewards(self) -> dict[str, Any]:
        """Return count, mean, extremes and quartiles of the steps' rewards."""
        values = sorted(self._rewards)
        if not values:
            return {"count": 0}
        middle = quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
        numbers = (len(values), fmean(values), values[0], *middle, values[-1])
        names = ("count", "mean", "min", "q1", "median", "q3", "max")
        return dict(zip(names, numbers, strict=True))


def _name_judge(attributes: Mapping[str, Any]) -> str:
    # Not by name: who annotates is a person.
    judges = (word or str(attributes[key]) for key, word in _JUDGES.items() if key in attributes)
    return next(judges, "the program")


class Split:
    """Divides rollouts into training and validation by task, by a hash: alike on every machine."""

    def __init__(self, share: float | None, seed: int) -> None:
        """Take the share of tasks for validation, between 0 and 1; None has one side alone."""
        if share is not None and not 0.0 < share < 1.0:
            raise ConfigError(f"split is {share!r}; give the share of validation, such as 0.1")
        self.share, self.seed = share, seed
        self.tasks: dict[str, set[str]] = {TRAIN: set()}
        if share is not None:
            self.tasks[VALIDATION] = set()

    def list_rollouts(self, part: Adaptation, side: str) -> Iterator[str]:
        """Yield the rollouts of a side; one whose task is not known goes by its first prompt."""
        tasks: dict[str, str] = {}
        for key, spans, _ in part.parts:
            if task := group_of(sorted(spans, key=lambda span: span.start_ns), None):
                tasks.setdefault(key.rollout_id, task)
        for path in part.trajectories:
            if path.transitions and path.rollout_id not in tasks:
                tasks[path.rollout_id] = f"prompt-{state_key(path.transitions[0])}"
        for rollout_id in {path.rollout_id: None for path in part.trajectories}:
            text = f"{self.seed}\n{tasks.get(rollout_id, '')}"
            number = int.from_bytes(sha256(text.encode("utf-8", "replace")).digest()[:8], "big")
            if (VALIDATION if number < (self.share or 0.0) * 2**64 else TRAIN) == side:
                self.tasks[side].add(tasks.get(rollout_id, ""))
                yield rollout_id
