"""GRPO and PPO, as far as they agree: exact tokens, logprobs they were sampled with, their age.

The clipped ratio is to the weights that sampled, so rows may be some versions old.

Source: TRL 1.16's ``GRPOTrainer``; see ``recorded`` for what is replaced of it.
"""

import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from lightning_otel.adapter.rows import is_trainable, rows_of
from lightning_otel.algorithms import models
from lightning_otel.algorithms.base import Batch
from lightning_otel.algorithms.comparison import Compared, distinct
from lightning_otel.algorithms.gradients import GradientAlgorithm, Rows
from lightning_otel.algorithms.groups import NO_DIFFERENCE
from lightning_otel.algorithms.sampling import FILLED, fault_of
from lightning_otel.errors import ConfigError, TrainingError
from lightning_otel.substitution import Standing
from lightning_otel.types import CaptureLevel, TrainingRow, Trajectory, Transition

STALE: Final = "stale: sampled by weights more than max_staleness versions old"
NO_TOKENS: Final = (
    "no token ids; ask the server for them: extra_body={'return_token_ids': True} with vLLM"
)


class PolicyGradient(GradientAlgorithm):
    """Trains on tokens that were sampled, weighed by how well they did."""

    needs: CaptureLevel = "exact"
    needs_logprobs: bool = True
    config = "GRPOConfig"

    def __init__(
        self,
        model: Any = None,
        *,
        max_staleness: int | None = None,
        follow: str | None = None,
        **others: Any,
    ) -> None:
        """Say what is trained.

        Args:
            model: As :class:`GradientAlgorithm` takes it, and what else it takes.
            max_staleness: Rows sampled by weights more versions older than the newest are left out,
                and the newest rollouts are taken first; None takes all, the oldest first, and the
                clip sees to them. Rollouts that are too old as a whole are in no batch, so that no
                step is spent on them.
            follow: The resource whose versions, as spans are stamped with them, tell the age of a
                row; by default the weights. Name the endpoint where agents are given that.
            **others: As :class:`GradientAlgorithm` takes them; ``epsilon`` is the clip, ``beta``
                the pull to the first model, ``num_train_epochs`` PPO's epochs.
        """
        super().__init__(model, **others)
        if max_staleness is not None and max_staleness < 0:
            raise ConfigError(f"max_staleness is {max_staleness!r}; it is 0 or more, or None")
        self._max_staleness = max_staleness
        self.takes_newest = max_staleness is not None
        self._follow = follow or self._resource
        self._filled: dict[str, Any] = {}

    def defaults(self) -> Mapping[str, Any]:
        """A rollout counts as much as another, however many tokens it has."""
        # Nothing is generated; TRL wants numbers that could be all the same.
        steps = 2 * int(self._settings.get("gradient_accumulation_steps", 1))
        return {"loss_type": "grpo", "num_generations": 2, "steps_per_generation": steps}

    @abstractmethod
    def judged(self, batch: Batch) -> Compared:
        """The trajectories of a batch that can be judged, and why steps of others cannot."""

    @abstractmethod
    def row(self, row: TrainingRow) -> dict[str, Any]:
        """Convert a row for the trainer."""

    def useless(self, row: TrainingRow) -> str | None:
        """Reason for which a row teaches nothing; empty if it does, None if that was counted."""
        return ""

    def unfit(self, trajectories: Sequence[Trajectory]) -> str:
        """Return the reason if all of a rollout was sampled by weights that are too old."""
        newest = self._newest()
        steps = [step for path in trajectories for step in path.transitions]
        return STALE if steps and all(self._is_stale((each,), newest) for each in steps) else ""

    def rows(self, batch: Batch) -> Rows:
        """Sequences of exact tokens that can be judged.

        Raises:
            TrainingError: Before the first step: some steps have token ids and some have none, or
                log-probabilities are not those that the trainer compares its own with.
        """
        found = self.judged(batch)
        left = found.reasons
        steps = distinct(found.trajectories)
        left.update(NO_TOKENS for step in steps if not is_trainable(step))
        faults = Counter(
            fault for step in steps if is_trainable(step) and (fault := self._fault(step))
        )
        if not self._steps:
            _refuse(steps, faults)
        left.update(faults)
        newest = self._newest()
        rows = list(rows_of(found.trajectories))
        reasons = [self._reason(row, newest) for row in rows]
        left.update(
            reason
            for row, reason in zip(rows, reasons, strict=True)
            if reason
            for _ in row.transitions
        )
        judged = [
            row for row, each in zip(rows, reasons, strict=True) if each in ("", NO_DIFFERENCE)
        ]
        held = [row for row, each in zip(rows, reasons, strict=True) if each == ""]
        shares = _token_shares(rows, held, len({row.transitions[0].rollout_id for row in judged}))
        made = [{**shape, **self.row(row)} for row, shape in zip(held, shares, strict=True)]
        ages = [_version_lag(row.transitions, self._follow, newest) for row in held]
        return Rows(made, left, {"staleness": sum(ages) / len(ages)} if ages else {})

    def _reason(self, row: TrainingRow, newest: int) -> str | None:
        if any(map(self._fault, row.transitions)):
            return None
        if (reason := self.useless(row)) != "":
            return reason
        return STALE if self._is_stale(row.transitions, newest) else ""

    def _fault(self, step: Transition) -> str:
        return fault_of(step, float(self._settings.get("temperature", 1.0)), self._filled)

    def _open(self) -> None:
        super()._open()
        told = getattr(self._model, "generation_config", None)
        given = told.to_diff_dict() if told is not None else {}
        self._filled = {name: given[name] for name in FILLED if given.get(name) is not None}

    def _is_stale(self, steps: tuple[Transition, ...], newest: int) -> bool:
        most = self._max_staleness
        return most is not None and _version_lag(steps, self._follow, newest) > most

    def _newest(self) -> int:
        """The newest version that agents are given of what they follow; 0 if there is none."""
        if self._context is None:
            return 0
        standing = self._context.resources.standings().get(self._follow, Standing())
        given = (standing.live, standing.canary)
        return max((each.version for each in given if each is not None), default=0)

    def trainer(self, args: Any, rows: Rows, **shared: Any) -> Any:
        """TRL's, on recorded rows; by default all rows of a batch are one step of the optimizer."""
        models.library("trl")
        if "gradient_accumulation_steps" not in self._settings:
            count = math.ceil(len(rows.rows) / args.per_device_train_batch_size)
            args.gradient_accumulation_steps, args.steps_per_generation = count, 2 * count
        if args.beta and not self._is_adapter():
            shared["reference"] = models.plain(self.reference())
        return self.recorded(args=args, rows=list(rows.rows), **shared)

    @abstractmethod
    def recorded(self, **shared: Any) -> Any:
        """The trainer of recorded rows, made of what it takes."""


def _refuse(steps: list[Transition], faults: Counter[str]) -> None:
    exact = sum(map(is_trainable, steps))
    if 0 < exact < len(steps):
        raise TrainingError(
            f"mixed capture levels: {exact} of {len(steps)} steps have token ids, the others are "
            "text; record all with ids, or select those that are: agents=, capture='exact'"
        )
    if faults:
        reason, count = faults.most_common(1)[0]
        raise TrainingError(f"{count} of {exact} steps have {reason}")


def _version_lag(steps: tuple[Transition, ...], resource: str, newest: int) -> int:
    """Return the versions between a row's oldest step and the newest; 0 if unknown."""
    stamped = [step.resources.get(resource, step.resource_version) for step in steps]
    known = [int(each) for each in stamped if each is not None and str(each).isdigit()]
    return max(0, newest - min(known)) if known and newest else 0


def _token_shares(
    rows: Sequence[TrainingRow], held: Sequence[TrainingRow], rollouts: int
) -> list[dict[str, Any]]:
    """Tokens of each row that is trained, and how much of a mean over rollouts it is.

    Args:
        rows: All of the batch.
        held: Those that are trained.
        rollouts: How many rollouts the mean is of, with those that taught nothing.
    """
    tokens: Counter[str] = Counter()
    for row in rows:
        tokens[row.transitions[0].rollout_id] += sum(row.loss_mask)
    sizes = [tokens[row.transitions[0].rollout_id] for row in held]
    parts = [sum(row.loss_mask) / size for row, size in zip(held, sizes, strict=True)]
    return [
        {
            "prompt_ids": row.prompt_ids,
            "completion_ids": row.completion_ids,
            "loss_mask": row.loss_mask,
            "logprobs": row.logprobs,
            "rollout_tokens": size,
            "rollouts": rollouts * part / sum(parts),
        }
        for row, size, part in zip(held, sizes, parts, strict=True)
    ]
