"""The base of algorithms that train weights: a model, TRL's trainer, published weights.

Each batch is one training of TRL's, on the model and optimizer of the batch before it.
"""

import copy
import inspect
import logging
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple

from lightning_otel.adapter import Advantage
from lightning_otel.adapter.advantages import (
    AttemptOutcome,
    estimate_advantages,
    primary,
    stamp_steps,
)
from lightning_otel.adapter.attempts import AttemptKey
from lightning_otel.algorithms import models
from lightning_otel.algorithms.base import BaseAlgorithm, Batch, StepResult, unknown_option
from lightning_otel.algorithms.groups import count_reasons
from lightning_otel.algorithms.run import Run
from lightning_otel.dataset import formats
from lightning_otel.errors import ConfigError, TrainingError
from lightning_otel.types import Trajectory
from lightning_otel.types.transitions import distinct_steps
from lightning_otel.types.values import check_whole

log = logging.getLogger(__name__)

_DEFAULTS: Final[Mapping[str, Any]] = {
    # A schedule that ends would end with the first batch.
    "lr_scheduler_type": "constant",
    "num_train_epochs": 1,
    "logging_steps": 1,
    "disable_tqdm": True,
    # The run reports by itself; each batch would be a run of its own there.
    "report_to": "none",
}
OURS: Final[Mapping[str, str]] = {
    "output_dir": "it is the run's folder",
    "save_strategy": "the run keeps its own checkpoints, one a batch",
    "resume_from_checkpoint": "resume the run: Trainer.resume_from_checkpoint",
    **dict.fromkeys(
        ("sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps"),
        "the reference stays the initial model",
    ),
    **dict.fromkeys(
        ("save_steps", "save_total_limit", "load_best_model_at_end", "push_to_hub"),
        "the run publishes each batch's weights",
    ),
}
"""Settings of a trainer that are not the user's, and why."""
_KINDS: Final[Mapping[str, str]] = {"VARCHAR": "string", "BOOLEAN": "bool", "DOUBLE": "float64"}


class Rows(NamedTuple):
    """The training rows of a batch."""

    rows: Sequence[Mapping[str, Any]]
    left: Mapping[str, int]  # how many agents' steps are in none, by reason
    metrics: Mapping[str, float] = {}


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights that were just written."""

    folder: Path
    name: str  # that no other weights have
    is_adapter: bool  # to the base model, rather than whole weights
    base_model: str


Announce = Callable[[Weights], "Mapping[str, Any] | None"]
"""Load weights into an engine; return bodies to publish with them, such as their endpoint."""


class GradientAlgorithm(BaseAlgorithm):
    """Trains the weights of a causal language model with a trainer of TRL's."""

    extra = models.EXTRA
    config: ClassVar[str]
    format: str = ""
    columns: Sequence[str] = ()
    unused: ClassVar[Mapping[str, str]] = OURS
    """Settings of the configuration that would have no effect, and why."""
    compares_first: bool = False
    """Whether it compares with the model as it was at first."""

    def __init__(
        self,
        model: Any = None,
        *,
        tokenizer: Any = None,
        peft_config: Any = None,
        resource: str = "weights",
        announce: Announce | None = None,
        keep_weights: int | None = None,
        **settings: Any,
    ) -> None:
        """Args:
        model: A folder or name that transformers loads, or a loaded model.
        tokenizer: Its tokenizer, folder or name; by default that of the model.
        peft_config: Train an adapter: what ``peft.LoraConfig`` takes, or one of peft's.
        resource: The name of the weights among the resources.
        announce: Called with weights before they are published; a new canary then has all
            rollouts.
        keep_weights: Number of the run's newest weights to keep; older ones are deleted unless
            an alias, a checkpoint or a running rollout names them. None deletes nothing.
        **settings: Of TRL's configuration, such as ``learning_rate``,
            ``per_device_train_batch_size`` and ``num_train_epochs``, the passes over each batch.
        """
        self._given = (model, tokenizer, peft_config)
        self._settings: dict[str, Any] = {}
        self.configure(**settings)
        self._resource = resource
        self._announce = announce
        self.canary_share = None if announce is None else 1.0
        if keep_weights is not None:
            check_whole("keep_weights", keep_weights, 1)
        self._keep_weights = keep_weights
        self._context: Run | None = None
        self._model: Any = None
        self._tokenizer: Any = None
        self._first: Any = None
        self._optimizer: Any = None
        self._remembered: Any = None
        self._steps = 0

    def configure(self, **settings: Any) -> None:
        """Set further settings of TRL's configuration, by their own names."""
        for name in self.unused.keys() & settings.keys():
            raise ConfigError(f"{name} cannot be set: {self.unused[name]}; leave it out")
        self._settings |= settings

    @abstractmethod
    def rows(self, batch: Batch) -> Rows:
        """Return the training rows of a batch."""

    def trainer(self, args: Any, rows: Rows, **shared: Any) -> Any:
        """Return the trainer of the rows: by default TRL's that goes with the configuration."""
        kind = getattr(models.library("trl"), self.config.replace("Config", "Trainer"))
        if self.compares_first:
            shared["ref_model"] = self.reference()
            kind = models.weigh_rows(kind)
        table = make_dataset(self.format, rows.rows, self.columns)
        return kind(args=args, train_dataset=table, **shared)

    def run(self, context: Run) -> None:
        """Train on each batch, and publish the weights.

        Raises:
            ConfigError: A setting is unknown, a library is missing, or the model cannot be loaded.
            TrainingError: Nothing of the first batch can be trained.
        """
        self._context = context
        self._open()
        super().run(context)

    def train_step(self, batch: Batch) -> StepResult:
        """Train on the rows of a batch once, or as often as ``num_train_epochs`` says."""
        self._open()
        rows = self.rows(batch)
        counted = {f"left_out/{reason.partition(';')[0]}": n for reason, n in rows.left.items()}
        metrics = {**counted, **rows.metrics, "rows": float(len(rows.rows))}
        if not rows.rows:
            reasons = count_reasons(rows.left)
            if not self._steps:
                raise TrainingError(
                    f"nothing of {len(batch)} trajectories can be trained"
                    f"{f': {reasons}' if reasons else ''}; see docs/training.md for what each needs"
                )
            log.info("nothing of a batch can be trained: %s", reasons)
            return StepResult(metrics)
        with models.keep_random_state():
            logged = self._train(rows)
        self._steps += 1
        return StepResult({**logged, **metrics}, self._publish_weights())

    def _train(self, rows: Rows) -> dict[str, float]:
        args = self._read_arguments()
        # So that a resumed run goes on as one that was never stopped.
        args.seed += self._steps
        models.library("transformers").set_seed(args.seed)
        try:
            with models.hide_bars():
                trainer = self.trainer(
                    args,
                    rows,
                    model=models.unwrap(self._model),
                    processing_class=self._tokenizer,
                    optimizers=(self._optimizer, None),
                )
        except (TypeError, ValueError, ImportError, NotImplementedError) as exc:
            raise ConfigError(
                f"TRL does not take this model with these settings: {exc}; change what it names"
            ) from exc
        # It would print what is logged here.
        trainer.remove_callback(models.library("transformers").PrinterCallback)
        if self._remembered is not None:
            trainer.create_optimizer().load_state_dict(self._remembered)
            self._remembered = None
        for group in trainer.optimizer.param_groups if trainer.optimizer else ():
            group["lr"] = args.learning_rate  # where a schedule of the batch before left it
        trainer.train()
        self._optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        logged: dict[str, list[float]] = {}
        for entry in trainer.state.log_history:
            for name, value in entry.items() if "train_runtime" not in entry else ():  # a summary
                if name not in ("epoch", "step") and isinstance(value, int | float):
                    logged.setdefault(name, []).append(float(value))
        return {name: sum(values) / len(values) for name, values in logged.items()}

    def _publish_weights(self) -> dict[str, Any]:
        if self._context is None:
            return {}
        step = f"{self._steps:06d}"
        folder = Path(self._context.run_dir) / "weights" / step
        digest = models.publish(self._model, self._tokenizer, folder)
        base = str(self._model.config._name_or_path)
        weights = Weights(folder, f"{self._resource}-{step}-{digest[:8]}", self._is_adapter(), base)
        body = {"uri": str(folder), "base_model": base}
        others = self._announce(weights) if self._announce is not None else None
        if self._keep_weights is not None:
            models.remove_old(self._context, self._resource, self._keep_weights)
        return {self._resource: body, **(others or {})}

    def _is_adapter(self) -> bool:
        return hasattr(self._model, "peft_config")

    def _open(self) -> None:
        if self._model is not None:
            return
        model, tokenizer, peft_config = self._given
        if model is None:
            raise ConfigError(
                f"{type(self).__name__} has no model to train; give model='path/to/model' "
                "(in a shell, -o model=path/to/model)"
            )
        args = self._read_arguments()
        loaded = models.load_model(model, self._settings.get("model_init_kwargs") or {})
        self._tokenizer = models.load_tokenizer(loaded, tokenizer)
        with models.keep_random_state():
            models.library("transformers").set_seed(args.seed)  # an adapter begins at random
            self._model = models.add_adapter(loaded, peft_config)

    def reference(self) -> Any:
        """Return the model as it was at first, frozen; for trainers that compare with it."""
        if self._first is None:
            model = self._given[0]
            loaded = models.load_model(model, self._settings.get("model_init_kwargs") or {})
            if loaded is model:
                raise ConfigError(
                    f"{type(self).__name__} compares with the model as it was, which a loaded one "
                    "does not stay; give its folder: model='path/to/model'"
                )
            self._first = loaded.train(False).requires_grad_(False)
        return models.unwrap(self._first)

    def _read_arguments(self) -> Any:
        kind = getattr(models.library("trl"), self.config)
        parameters = inspect.signature(kind).parameters
        for name in self._settings:
            if name not in parameters:
                raise unknown_option(type(self), name, parameters, f"those of trl.{self.config}")
        place = Path(self._context.run_dir) / "trainer" if self._context is not None else "trainer"
        settings = {**_DEFAULTS, **models.precision_settings(), **self.defaults()}
        settings |= copy.deepcopy(self._settings)
        if not isinstance(settings["report_to"], str):
            settings["report_to"] = list(settings["report_to"] or ())
        # The model is loaded here.
        settings.pop("model_init_kwargs", None)
        try:
            return kind(output_dir=str(place), save_strategy="no", **settings)
        except (TypeError, ValueError, ImportError) as exc:
            raise ConfigError(
                f"trl.{self.config} does not take these settings: {exc}; see its options"
            ) from exc

    def defaults(self) -> Mapping[str, Any]:
        """Return settings that are not TRL's own by default."""
        return {"max_length": None}  # TRL would cut rows, and the answers at their end, unsaid

    def state_dict(self) -> dict[str, Any]:
        """Return the number of trained batches, and the model."""
        return {"steps": self._steps, "model": str(self._given[0])[:500]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after so many batches."""
        self._steps = int(state["steps"])

    def save(self, folder: Path) -> None:
        """Write the trained parameters and the state of the optimizer."""
        if self._model is not None:
            models.save(self._model, self._optimizer, folder)

    def load(self, folder: Path) -> None:
        """Read them into the model."""
        self._open()
        self._remembered = models.load(self._model, folder)


class Compared(NamedTuple):
    """Trajectories whose steps know how well their rollout did; the steps without, by reason."""

    trajectories: list[Trajectory]
    reasons: Counter[str]


def compare_rollouts(batch: Batch, how: Advantage) -> Compared:
    """Return a batch's trajectories, rollouts compared within their group."""
    groups = {rollout_id: group_id for group_id, ids in batch.groups.items() for rollout_id in ids}
    outcomes: dict[AttemptKey, AttemptOutcome] = {}
    for path in batch:
        key = AttemptKey(path.rollout_id, path.attempt_id)
        start_ns = path.transitions[0].start_ns if path.transitions else 0
        group_id, reward = groups.get(path.rollout_id, ""), batch.rewards.get(path.rollout_id)
        outcomes.setdefault(key, AttemptOutcome(key, group_id, start_ns, {}, reward))
    estimates = estimate_advantages(outcomes.values(), how, primary)
    paths, _ = stamp_steps([path for path in batch if path.transitions], estimates)
    reasons = Counter(
        estimates[AttemptKey(step.rollout_id, step.attempt_id)].reason
        for step in distinct_steps(paths)
        if step.advantage is None
    )
    return Compared(paths, reasons)


def format_rows(
    name: str, trajectories: Iterable[Trajectory], **options: Any
) -> tuple[list[dict[str, Any]], Counter[str]]:
    """Return rows of a format, and how many steps are in none, by reason."""
    exclusions: Counter[str] = Counter()

    def note(omission: formats.LeftOut) -> None:
        if not omission.is_row_written:
            exclusions[omission.reason] += 1

    return list(formats.rows(name, trajectories, left_out=note, **options)), exclusions


def make_dataset(name: str, rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> Any:
    """Return columns of a format's rows as a Hugging Face dataset; drop columns without values.

    Nested values become JSON: tables would fill up missing keys with nulls, shown to the model.
    """
    datasets = models.library("datasets")
    kinds = formats.get(name).columns
    nonempty = [column for column in columns if any(row.get(column) is not None for row in rows)]
    features = {column: _make_feature(datasets, kinds[column]) for column in nonempty}
    values = {column: [row.get(column) for row in rows] for column in nonempty}
    return datasets.Dataset.from_dict(values, features=datasets.Features(features))


def _make_feature(datasets: Any, kind: str) -> Any:
    if kind == "JSON":
        return datasets.Json()
    if kind.endswith("[]"):
        return datasets.List(datasets.Value("int64"))
    return datasets.Value(_KINDS[kind])
