"""The common part of GRPO and PPO: exact tokens, logprobs they were sampled with, their age.

The clipped ratio is to the weights that sampled, so rows may be some versions old. Recorded
log-probabilities are comparable if the model's own distribution was sampled, at the trainer's
temperature. Anything else gives wrong ratios from the first step, in silence: 1.47 instead of 1.

Source: TRL 1.16's ``GRPOTrainer``; see ``recorded`` for what is replaced of it. vLLM's
``--logprobs-mode``; measured with a tiny model at temperature 0.7 and top_p 0.9.
"""

import logging
import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final

from lightning_otel.adapter.rows import is_trainable, rows_of
from lightning_otel.algorithms import models
from lightning_otel.algorithms.base import Batch
from lightning_otel.algorithms.gradients import OURS, Compared, GradientAlgorithm, Rows
from lightning_otel.algorithms.groups import NO_DIFFERENCE, find_token_fault
from lightning_otel.dataset.formats.format import NO_TOKENS
from lightning_otel.errors import ConfigError, TrainingError
from lightning_otel.instrumentors.substitution import Standing
from lightning_otel.types import CaptureLevel, TrainingRow, Trajectory, Transition
from lightning_otel.types.transitions import distinct_steps

log = logging.getLogger(__name__)

STALE: Final = "stale: sampled by weights more than max_staleness versions old"
UNKNOWN_AGE: Final = (
    "unknown version: their spans do not tell which weights sampled them; run the agent with "
    "--apply and the trainer's state (LIGHTNING_OTEL_STATE), or leave max_staleness out"
)
TINY: Final = 1e-8
TEMPERATURE: Final = "sampled at another temperature than the trainer's; set temperature={:g}"
MISMATCH_NATS: Final = 0.02
"""KL divergence from which engine and trainer differ by more than their arithmetic: bfloat16 makes
1e-3 or less of it, another temperature 0.1 and more, measured with a tiny model."""
FILLED: Final = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Settings that vLLM and SGLang default from a model's ``generation_config.json``.

Source: vLLM's ``ModelConfig.get_diff_sampling_param``.
"""
_UNUSED: Final[Mapping[str, str]] = {
    "rollouts are recorded, and nothing is generated": (
        "num_generations num_generations_eval generation_batch_size steps_per_generation "
        "ds3_gather_for_generation top_p top_k min_p generation_kwargs chat_template_kwargs "
        "repetition_penalty cache_implementation use_vllm vllm_mode vllm_model_impl "
        "vllm_enable_sleep_mode vllm_structured_outputs_regex vllm_server_base_url "
        "vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port "
        "vllm_gpu_memory_utilization vllm_max_model_length vllm_tensor_parallel_size "
        "max_tool_calling_iterations use_transformers_continuous_batching "
        "transformers_continuous_batching_config use_transformers_paged log_completions "
        "log_multimodal num_completions_to_print log_unique_prompts log_completions_hub_repo"
    ),
    "advantage= says how rewards are compared": "scale_rewards multi_objective_aggregation",
    "select={'compose': …} weighs named rewards": "reward_weights",
    "num_train_epochs counts the passes over a batch": "num_iterations",
    "answers train as recorded; leave rollouts out by their reward": "mask_truncated_completions",
    "rows are drawn in a random order": "shuffle_dataset",
    "its coefficient would depend on the micro-batches; set entropy_coef": (
        "use_adaptive_entropy entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target"
    ),
    "it is called vllm_importance_sampling_clip_max": "vllm_importance_sampling_cap",
}
"""Settings of ``GRPOConfig`` that have no effect on recorded rows, by the reason.

Source: TRL 1.16, ``trl/trainer/grpo_config.py``.
"""


class PolicyGradient(GradientAlgorithm):
    """Trains on tokens that were sampled, weighed by how well they did."""

    needs: CaptureLevel = "exact"
    needs_logprobs: bool = True
    config = "GRPOConfig"
    unused: ClassVar[Mapping[str, str]] = {
        **OURS,
        **{name: reason for reason, names in _UNUSED.items() for name in names.split()},
    }
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
            takes all, the oldest first. With a limit, rows of an unknown version are left out.
        follow: The resource whose versions tell the age of a row; by default the weights. Name the
            endpoint where agents get that.
        **others: ``epsilon`` is the clip, ``beta`` the pull to the first model,
            ``num_train_epochs`` PPO's epochs. TRL's names of truncated importance sampling
            (``vllm_importance_sampling_mode``, ``…_clip_max``) correct rows for the difference
            between the weights that sampled them and those of the trainer.
        """
        super().__init__(model, **others)
        if max_staleness is not None and max_staleness < 0:
            raise ConfigError(f"max_staleness is {max_staleness!r}; it is 0 or more, or None")
        size = getattr(self._announce, "keep", math.inf)
        if size <= (max_staleness or 0):
            raise ConfigError(
                f"the engine keeps {size} adapters, and with max_staleness={max_staleness} "
                f"agents ask for more; set keep={(max_staleness or 0) + 1} or more"
            )
        self._max_staleness = max_staleness
        self.takes_newest = max_staleness is not None
        self._is_following = follow is not None
        self._follow = follow or self._resource
        self._filled: dict[str, Any] = {}
        self._has_warned = False

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
        """Return the reason if a rollout's weights are too old, or unknown."""
        newest = self._newest_version()
        steps = [step for path in trajectories for step in path.transitions]
        reasons = [self._find_age_fault((step,), newest) for step in steps]
        return max(reasons) if steps and self.unfit_if(map(bool, reasons)) else ""

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
        ages = [_find_version_lag(row.transitions, self._follow, newest) for row in rows]
        records = [
            {
                "prompt_ids": row.prompt_ids,
                "completion_ids": row.completion_ids,
                "loss_mask": row.loss_mask,
                "logprobs": row.logprobs,
                "rollout_tokens": tokens[row.transitions[0].rollout_id],
                "rollouts": len(judged) * part / sum(parts),
                "age": age,
                **self.row(row),
            }
            for row, part, age in zip(rows, parts, ages, strict=True)
        ]
        lags = [age for age in ages if age is not None]
        if ages and not lags and self._is_following:
            self._is_following = False  # said once
            log.warning("no step says which version of %s acted: %s", self._follow, UNKNOWN_AGE)
        metrics = {"unknown_staleness": float(ages.count(None))} if ages else {}
        if lags:
            metrics["staleness"] = sum(lags) / len(lags)
        return Rows(records, +exclusions, metrics)

    def _train(self, made: Rows) -> dict[str, float]:
        logged = super()._train(made)
        if not self._has_warned and (kl := logged.get("mismatch/kl", 0.0)) > MISMATCH_NATS:
            self._has_warned = True
            log.warning(
                "the engine's log-probabilities differ from the trainer's by %.3f nats a token "
                "with the same weights; check that the model, its dtype, the temperature and "
                "--logprobs-mode processed_logprobs are the same on both sides", kl,
            )  # fmt: skip
        return logged

    def _find_reason(self, row: TrainingRow, newest: int) -> str | None:
        """Return why a row is left out; empty if it is not, None if that was counted."""
        if any(map(self._fault, row.transitions)):
            return None
        reason = self.explain_useless(row)
        return self._find_age_fault(row.transitions, newest) if reason == "" else reason

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

    def _find_age_fault(self, steps: tuple[Transition, ...], newest: int) -> str:
        """Return why steps are too old to be trained on; empty if they are not."""
        if self._max_staleness is None:
            return ""
        lag = _find_version_lag(steps, self._follow, newest)
        if lag is None:
            return UNKNOWN_AGE
        return STALE if lag > self._max_staleness else ""

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
        names = {"vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max",
                 "vllm_importance_sampling_clip_min"} & self._settings.keys()  # fmt: skip
        shared["corrects_sampling"] = self._settings.get(
            "vllm_importance_sampling_correction", bool(names)
        )
        return self.make_trainer(args=args, rows=list(rows.rows), **shared)


def _find_version_lag(steps: tuple[Transition, ...], resource: str, newest: int) -> int | None:
    """Return how old a row's oldest step is, in versions; None if unknown."""
    if not newest:
        return 0  # nothing was published yet
    stamps = [
        str(step.resources.get(resource) if step.resources else step.resource_version)
        for step in steps
    ]
    if not all(map(str.isdigit, stamps)):
        return None
    return max(0, newest - min(map(int, stamps)))


def credit_steps(
    rows: Sequence[dict[str, Any]], gamma: float, gae_lambda: float, *, is_whitened: bool
) -> None:
    """Write into rows the return of each step, [S], and the advantage of each token, [C]."""
    episodes: dict[str, dict[int, tuple[dict[str, Any], int]]] = {}
    for row in rows:
        row["returns"] = [0.0] * len(row["order"])
        row["advantages"] = [0.0] * len(row["completion_ids"])
        for index, place in enumerate(row["order"]):
            episodes.setdefault(row["episode"], {})[place] = (row, index)
    found: list[tuple[dict[str, Any], int, float]] = []
    for episode in episodes.values():
        following = advantage = 0.0
        for _, (row, index) in sorted(episode.items(), reverse=True):
            value = row["values"][index]
            difference = row["rewards"][index] + gamma * following - value
            advantage = difference + gamma * gae_lambda * advantage
            following = value
            row["returns"][index] = advantage + value
            found.append((row, index, advantage))
    mean, deviation = 0.0, 1.0
    if is_whitened and len(found) > 1:
        mean = sum(each for *_, each in found) / len(found)
        squares = sum((each - mean) ** 2 for *_, each in found)
        deviation = (squares / (len(found) - 1)) ** 0.5 + TINY
    for row, index, advantage in found:
        start, end = row["starts"][index], row["ends"][index]
        row["advantages"][start:end] = [(advantage - mean) / deviation] * (end - start)
