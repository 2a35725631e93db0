"""The common part of GRPO and PPO: exact tokens, logprobs they were sampled with, their age.

The clipped ratio is to the weights that sampled, so rows may be some versions old. Recorded
log-probabilities are comparable if the model's own distribution was sampled, at the trainer's
temperature. Anything else gives wrong ratios from the first step, in silence: 1.47 instead of 1.

Source: TRL 1.16's ``GRPOTrainer``; see ``recorded`` for what is replaced of it. vLLM's
``--logprobs-mode``; measured with a tiny model at temperature 0.7 and top_p 0.9.
"""

import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from lightning_otel.adapter.rows import is_trainable, rows_of
from lightning_otel.algorithms import models
from lightning_otel.algorithms.base import Batch
from lightning_otel.algorithms.gradients import Compared, GradientAlgorithm, Rows
from lightning_otel.algorithms.groups import NO_DIFFERENCE, find_token_fault
from lightning_otel.errors import ConfigError, TrainingError
from lightning_otel.instrumentors.substitution import Standing
from lightning_otel.types import CaptureLevel, TrainingRow, Trajectory, Transition
from lightning_otel.types.transitions import distinct_steps

STALE: Final = "stale: sampled by weights more than max_staleness versions old"
NO_TOKENS: Final = (
    "no token ids; ask the server for them: extra_body={'return_token_ids': True} with vLLM"
)
TEMPERATURE: Final = "sampled at another temperature than the trainer's; set temperature={:g}"
FILLED: Final = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Settings that vLLM and SGLang default from a model's ``generation_config.json``.

Source: vLLM's ``ModelConfig.get_diff_sampling_param``.
"""


class PolicyGradient(GradientAlgorithm):
    """Trains on tokens that were sampled, weighed by how well they did."""

    needs: CaptureLevel = "exact"
    needs_logprobs: bool = True
    config = "GRPOConfig"
    unfit_if: Callable[[Iterable[bool]], bool] = staticmethod(all)
    """Whether a rollout is unfit if all of its steps are stale, or any."""

    def __init__(
        self,
        model: Any = None,
        *,
        max_staleness: int | None = None,
        follow: str | None = None,
        **others: Any,
    ) -> None:
        """Args:
        model: The model, as :class:`GradientAlgorithm` takes it.
        max_staleness: The age in versions up to which rows are trained on, the newest first; None
            takes all, the oldest first.
        follow: The resource whose versions tell the age of a row; by default the weights. Name the
            endpoint where agents get that.
        **others: ``epsilon`` is the clip, ``beta`` the pull to the first model,
            ``num_train_epochs`` PPO's epochs.
        """
        super().__init__(model, **others)
        if max_staleness is not None and max_staleness < 0:
            raise ConfigError(f"max_staleness is {max_staleness!r}; it is 0 or more, or None")
        self._max_staleness = max_staleness
        self.takes_newest = max_staleness is not None
        self._follow = follow or self._resource
        self._filled: dict[str, Any] = {}

    def defaults(self) -> Mapping[str, Any]:
        """Return settings by which a rollout counts as much as another, however long."""
        # Nothing is generated; TRL wants numbers that could be all the same.
        steps = 2 * int(self._settings.get("gradient_accumulation_steps", 1))
        return {"loss_type": "grpo", "num_generations": 2, "steps_per_generation": steps}

    @abstractmethod
    def compare(self, batch: Batch) -> Compared:
        """Return the trajectories of a batch that can be judged, and why others cannot."""

    @abstractmethod
    def row(self, row: TrainingRow) -> dict[str, Any]:
        """Convert a row for the trainer."""

    @abstractmethod
    def make_trainer(self, **shared: Any) -> Any:
        """Return the trainer of recorded rows."""

    def explain_useless(self, row: TrainingRow) -> str | None:
        """Return why a row teaches nothing; empty if it does, None if that was counted."""
        return ""

    def unfit(self, trajectories: Sequence[Trajectory]) -> str:
        """Return the reason if a rollout was sampled by weights that are too old."""
        newest = self._newest_version()
        steps = [step for path in trajectories for step in path.transitions]
        is_unfit = self.unfit_if(self._is_stale((step,), newest) for step in steps)
        return STALE if steps and is_unfit else ""

    def rows(self, batch: Batch) -> Rows:
        """Return sequences of exact tokens that can be judged."""
        paths, exclusions = self.compare(batch)
        steps = distinct_steps(paths)
        exact = [step for step in steps if is_trainable(step)]
        exclusions[NO_TOKENS] += len(steps) - len(exact)
        faults = Counter(filter(None, map(self._fault, exact)))
        if not self._steps and 0 < len(exact) < len(steps):
            raise TrainingError(
                f"mixed capture levels: {len(exact)} of {len(steps)} steps have token ids, the "
                "others are text; record all with ids, or select those that are: agents=, "
                "capture='exact'"
            )
        if not self._steps and faults:
            fault, count = faults.most_common(1)[0]
            raise TrainingError(f"{count} of {len(exact)} steps have {fault}")
        exclusions.update(faults)
        newest = self._newest_version()
        tokens: Counter[str] = Counter()
        judged: set[str] = set()
        rows: list[TrainingRow] = []
        for row in rows_of(paths):
            rollout_id = row.transitions[0].rollout_id
            tokens[rollout_id] += sum(row.loss_mask)
            reason = self._find_reason(row, newest)
            if reason in ("", NO_DIFFERENCE):
                judged.add(rollout_id)
            if reason:
                exclusions[reason] += len(row.transitions)
            elif reason == "":
                rows.append(row)
        # A row is a share of its rollout; those that taught nothing count in the mean as well.
        parts = [sum(row.loss_mask) / tokens[row.transitions[0].rollout_id] for row in rows]
        records = [
            {
                "prompt_ids": row.prompt_ids,
                "completion_ids": row.completion_ids,
                "loss_mask": row.loss_mask,
                "logprobs": row.logprobs,
                "rollout_tokens": tokens[row.transitions[0].rollout_id],
                "rollouts": len(judged) * part / sum(parts),
                **self.row(row),
            }
            for row, part in zip(rows, parts, strict=True)
        ]
        ages = [_version_lag(row.transitions, self._follow, newest) for row in rows]
        return Rows(records, +exclusions, {"staleness": sum(ages) / len(ages)} if ages else {})

    def _find_reason(self, row: TrainingRow, newest: int) -> str | None:
        """Return why a row is left out; empty if it is not, None if that was counted."""
        if any(map(self._fault, row.transitions)):
            return None
        reason = self.explain_useless(row)
        is_stale = reason == "" and self._is_stale(row.transitions, newest)
        return STALE if is_stale else reason

    def _fault(self, step: Transition) -> str:
        if fault := find_token_fault(step, filled=self._filled):
            return fault
        temperature = {**self._filled, **step.sampling}.get("temperature", 1.0)
        is_same = temperature == float(self._settings.get("temperature", 1.0))
        return "" if is_same else TEMPERATURE.format(temperature)

    def _open(self) -> None:
        super()._open()
        config = getattr(self._model, "generation_config", None)
        settings = config.to_diff_dict() if config is not None else {}
        self._filled = {name: settings[name] for name in FILLED if settings.get(name) is not None}

    def _is_stale(self, steps: tuple[Transition, ...], newest: int) -> bool:
        most = self._max_staleness
        return most is not None and _version_lag(steps, self._follow, newest) > most

    def _newest_version(self) -> int:
        if self._context is None:
            return 0
        standing = self._context.resources.standings().get(self._follow, Standing())
        versions = (standing.live, standing.canary)
        return max((version.version for version in versions if version is not None), default=0)

    def trainer(self, args: Any, rows: Rows, **shared: Any) -> Any:
        """Return TRL's, on recorded rows; by default a batch is one step of the optimizer."""
        models.library("trl")
        if "gradient_accumulation_steps" not in self._settings:
            count = math.ceil(len(rows.rows) / args.per_device_train_batch_size)
            args.gradient_accumulation_steps, args.steps_per_generation = count, 2 * count
        if args.beta and not self._is_adapter():
            shared["reference"] = self.reference()
        return self.make_trainer(args=args, rows=list(rows.rows), **shared)


def _version_lag(steps: tuple[Transition, ...], resource: str, newest: int) -> int:
    stamped = [step.resources.get(resource, step.resource_version) for step in steps]
    versions = [int(item) for item in stamped if item is not None and str(item).isdigit()]
    return max(0, newest - min(versions)) if versions and newest else 0
