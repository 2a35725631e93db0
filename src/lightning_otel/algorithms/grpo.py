"""GRPO: reinforcement learning on the token ids and log-probabilities that were recorded.

The clipped ratio is to the weights that sampled, so rows may be some versions old. Nothing here
trains a model of values: what is called PPO elsewhere is this loss with such a model beside it.

Source: TRL 1.16's ``GRPOTrainer``; see ``recorded`` for what is replaced of it.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

from lightning_otel.adapter import Advantage
from lightning_otel.adapter.rows import is_trainable, rows_of, token_advantages
from lightning_otel.algorithms import models
from lightning_otel.algorithms.base import Batch
from lightning_otel.algorithms.comparison import compared, distinct
from lightning_otel.algorithms.gradients import GradientAlgorithm, Rows
from lightning_otel.algorithms.sampling import fault_of
from lightning_otel.errors import ConfigError, TrainingError
from lightning_otel.substitution.assigning import Standing
from lightning_otel.types import CaptureLevel, Estimator, TrainingRow, Trajectory, Transition

STALE: Final = "stale: sampled by weights more than max_staleness versions old"
NO_DIFFERENCE: Final = "no difference: all rollouts of its group earned the same"
NO_TOKENS: Final = (
    "no token ids; ask the server for them: extra_body={'return_token_ids': True} with vLLM"
)


class GRPO(GradientAlgorithm):
    """Trains on rollouts compared with others of their group."""

    name: ClassVar[str] = "grpo"
    needs: CaptureLevel = "exact"
    needs_logprobs: bool = True
    config = "GRPOConfig"
    group_size: int = 2

    def __init__(
        self,
        model: Any = None,
        *,
        advantage: Advantage | Estimator = "grpo",
        max_staleness: int | None = None,
        follow: str | None = None,
        **others: Any,
    ) -> None:
        """Say what is trained, and how rollouts are compared.

        Args:
            model: As :class:`GradientAlgorithm` takes it, and what else it takes.
            advantage: ``grpo``, ``rloo``, ``dr_grpo``, or how else a group's rewards become
                advantages; TRL's ``scale_rewards`` has no say.
            max_staleness: Rows sampled by weights more versions older than the newest are left out;
                None takes all, and the clip sees to them. Rollouts that are too old as a whole are
                in no batch, so that no step is spent on them.
            follow: The resource whose versions, as spans are stamped with them, tell the age of a
                row; by default the weights. Name the endpoint where agents are given that.
            **others: As :class:`GradientAlgorithm` takes them; ``epsilon`` is the clip, ``beta``
                the pull to the first model, ``num_train_epochs`` PPO's epochs.
        """
        super().__init__(model, **others)
        self._how = advantage if isinstance(advantage, Advantage) else Advantage(advantage)
        if max_staleness is not None and max_staleness < 0:
            raise ConfigError(f"max_staleness is {max_staleness!r}; it is 0 or more, or None")
        self._max_staleness = max_staleness
        self._follow = follow or self._resource

    def defaults(self) -> Mapping[str, Any]:
        """A rollout counts as much as another, however many tokens it has."""
        # Nothing is generated; TRL wants numbers that could be all the same.
        steps = 2 * int(self._settings.get("gradient_accumulation_steps", 1))
        return {"loss_type": "grpo", "num_generations": 2, "steps_per_generation": steps}

    def unfit(self, trajectories: Sequence[Trajectory]) -> str:
        """Whether all of a rollout was sampled by weights that are too old."""
        if self._max_staleness is None:
            return ""
        newest, most = self._newest(), self._max_staleness
        steps = [step for path in trajectories for step in path.transitions]
        is_stale = bool(steps) and all(_age((each,), self._follow, newest) > most for each in steps)
        return STALE if is_stale else ""

    def rows(self, batch: Batch) -> Rows:
        """Sequences of exact tokens with a reward that differs from others of their group.

        Raises:
            TrainingError: Before the first step: some steps have token ids and some have none, or
                log-probabilities are not those that the trainer compares its own with.
        """
        found = compared(batch, self._how)
        left = found.reasons
        steps = distinct(found.trajectories)
        left.update(NO_TOKENS for step in steps if not is_trainable(step))
        temperature = float(self._settings.get("temperature", 1.0))
        faults = Counter(
            fault for step in steps if is_trainable(step) and (fault := fault_of(step, temperature))
        )
        if not self._steps:
            _refuse(steps, faults)
        left.update(faults)
        newest = self._newest()
        made, ages = [], []
        for row in rows_of(found.trajectories):
            age = _age(row.transitions, self._follow, newest)
            reason = self._unfit(row, age, temperature)
            if reason:
                left[reason] += len(row.transitions)
            elif reason is not None:
                made.append(_trained(row))
                ages.append(age)
        staleness = {"staleness": sum(ages) / len(ages)} if ages else {}
        return Rows(made, left, staleness)

    def _unfit(self, row: TrainingRow, age: int, temperature: float) -> str | None:
        """Why a row is left out: empty if it is not, None where its steps were counted already."""
        if any(step.advantage is None for step in row.transitions):
            return None
        if any(fault_of(step, temperature) for step in row.transitions):
            return None
        if not any(step.advantage for step in row.transitions):
            return NO_DIFFERENCE
        is_stale = self._max_staleness is not None and age > self._max_staleness
        return STALE if is_stale else ""

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
        from lightning_otel.algorithms.recorded import RecordedGRPOTrainer

        if "gradient_accumulation_steps" not in self._settings:
            count = math.ceil(len(rows.rows) / args.per_device_train_batch_size)
            args.gradient_accumulation_steps, args.steps_per_generation = count, 2 * count
        if args.beta and not self._is_adapter():
            shared["reference"] = models.plain(self.reference())
        return RecordedGRPOTrainer(args=args, rows=list(rows.rows), **shared)


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


def _age(steps: tuple[Transition, ...], resource: str, newest: int) -> int:
    """How many versions behind the newest the oldest step of a row is; 0 if that is not known."""
    stamped = [step.resources.get(resource, step.resource_version) for step in steps]
    known = [int(each) for each in stamped if each is not None and str(each).isdigit()]
    return max(0, newest - min(known)) if known and newest else 0


def _trained(row: TrainingRow) -> dict[str, Any]:
    """A row as the trainer takes it: its steps' share of the rollout weighs its advantage."""
    weight = sum(step.weight for step in row.transitions)
    return {
        "prompt_ids": row.prompt_ids,
        "completion_ids": row.completion_ids,
        "loss_mask": row.loss_mask,
        "logprobs": row.logprobs,
        "advantages": [weight * each for each in token_advantages(row) or ()],
    }
