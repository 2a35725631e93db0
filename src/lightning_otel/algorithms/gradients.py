"""The base of algorithms that train weights: a model, TRL's trainer, published weights.

Each batch of rollouts is one training of TRL's, on the model and with the optimizer of the batch
before it; a member says what its rows are and which trainer takes them. No loss is here.
"""

import copy
import difflib
import inspect
import logging
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple

from lightning_otel.algorithms import models
from lightning_otel.algorithms.base import BaseAlgorithm, Batch, StepResult
from lightning_otel.algorithms.run import Run
from lightning_otel.errors import ConfigError, TrainingError

log = logging.getLogger(__name__)

_DEFAULTS: Final[Mapping[str, Any]] = {
    # A schedule that ends would end with the first batch.
    "lr_scheduler_type": "constant",
    "num_train_epochs": 1,
    "logging_steps": 1,
    "disable_tqdm": True,
    "report_to": (),
}
_OURS: Final[Mapping[str, str]] = {
    "output_dir": "it is the run's folder",
    "save_strategy": "the run keeps its own checkpoints, one a batch",
    "resume_from_checkpoint": "resume the run: Trainer.resume_from_checkpoint",
}
"""Settings of a trainer that are not the user's, and why."""


class Rows(NamedTuple):
    """The training rows of a batch.

    Attributes:
        rows: As the trainer takes them.
        left: How many steps of agents are in none, by reason.
        metrics: Further numbers about them.
    """

    rows: Sequence[Mapping[str, Any]]
    left: Mapping[str, int]
    metrics: Mapping[str, float] = {}


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights that were just written.

    Attributes:
        folder: Where they lie, whole.
        name: A name that no other weights have.
        is_adapter: Whether they are an adapter to the base model alone.
        base_model: What they were trained from.
    """

    folder: Path
    name: str
    is_adapter: bool
    base_model: str


Announce = Callable[[Weights], "Mapping[str, Any] | None"]
"""Tells an engine of weights; gives bodies by name of resources that are to be published with them,
such as the endpoint where they answer."""


class GradientAlgorithm(BaseAlgorithm):
    """Trains the weights of a causal language model with a trainer of TRL's."""

    extra = models.EXTRA
    config: ClassVar[str]
    """The name of TRL's configuration."""

    def __init__(
        self,
        model: Any = None,
        *,
        tokenizer: Any = None,
        peft_config: Any = None,
        resource: str = "weights",
        announce: Announce | None = None,
        **settings: Any,
    ) -> None:
        """Say what is trained.

        Args:
            model: A folder or name that transformers loads, or a loaded model.
            tokenizer: Its tokenizer, folder or name; by default that of the model.
            peft_config: Train an adapter: what ``peft.LoraConfig`` takes, or one of peft's.
            resource: The name of the weights among the resources.
            announce: Told of weights as soon as they lie there, before they are published.
            **settings: Of TRL's configuration by their own names, such as ``learning_rate``,
                ``per_device_train_batch_size``, ``gradient_accumulation_steps`` and
                ``num_train_epochs``, which counts how often each batch is passed over.
        """
        self._given = (model, tokenizer, peft_config)
        self._settings: dict[str, Any] = {}
        self.configure(**settings)
        self._resource = resource
        self._announce = announce
        self._context: Run | None = None
        self._model: Any = None
        self._tokenizer: Any = None
        self._first: Any = None
        self._optimizer: Any = None
        self._remembered: Any = None
        self._steps = 0

    def configure(self, **settings: Any) -> None:
        """Set further settings of TRL's configuration, by their own names."""
        for name in _OURS.keys() & settings.keys():
            raise ConfigError(f"{name} cannot be set: {_OURS[name]}; leave it out")
        self._settings |= settings

    @abstractmethod
    def rows(self, batch: Batch) -> Rows:
        """Return the training rows of a batch."""

    @abstractmethod
    def trainer(self, args: Any, rows: Rows, **shared: Any) -> Any:
        """The trainer of the rows.

        Args:
            args: Its configuration.
            rows: What is trained.
            **shared: ``model``, ``processing_class`` and ``optimizers``, as it takes them.
        """

    def run(self, context: Run) -> None:
        """Train on each batch, and publish the weights.

        Args:
            context: What there is to learn from, and where results go.

        Raises:
            ConfigError: A setting is unknown, a library is missing, or the model cannot be loaded.
            TrainingError: Nothing of the first batch can be trained.
        """
        self._context = context
        self._open()
        super().run(context)

    def train_step(self, batch: Batch) -> StepResult:
        """Train on the rows of a batch once, or as often as ``num_train_epochs`` says.

        Raises:
            TrainingError: Nothing of the first batch can be trained; later that is counted.
        """
        self._open()
        made = self.rows(batch)
        counted = {f"left_out/{reason.partition(';')[0]}": n for reason, n in made.left.items()}
        metrics = {**counted, **made.metrics, "rows": float(len(made.rows))}
        if not made.rows:
            if not self._steps:
                raise TrainingError(_explain_nothing(batch, made.left))
            log.info("nothing of a batch can be trained: %s", dict(made.left))
            return StepResult(metrics)
        with models.chance_of_its_own():
            logged = self._train(made)
        self._steps += 1
        return StepResult({**logged, **metrics}, self._published())

    def _train(self, made: Rows) -> dict[str, float]:
        args = self._arguments()
        # So that a resumed run goes on as one that was never stopped.
        models.library("transformers").set_seed(args.seed + self._steps)
        args.seed = args.seed + self._steps
        trainer = self._made(args, made)
        # It would print what is logged here.
        trainer.remove_callback(models.library("transformers").PrinterCallback)
        if self._remembered is not None:
            trainer.create_optimizer().load_state_dict(self._remembered)
            self._remembered = None
        for group in trainer.optimizer.param_groups if trainer.optimizer else ():
            group["lr"] = args.learning_rate  # where a schedule of the batch before left it
        trainer.train()
        self._optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        return _mean_metrics(trainer.state.log_history)

    def _made(self, args: Any, made: Rows) -> Any:
        shared = {
            "model": models.plain(self._model),
            "processing_class": self._tokenizer,
            "optimizers": (self._optimizer, None),
        }
        try:
            with models.quiet():
                return self.trainer(args, made, **shared)
        except (TypeError, ValueError, ImportError, NotImplementedError) as exc:
            raise ConfigError(
                f"TRL does not take this model with these settings: {exc}; change what it names"
            ) from exc

    def _published(self) -> dict[str, Any]:
        """Write the weights down, tell of them, and give the bodies that are to be published."""
        if self._context is None:
            return {}
        step = f"{self._steps:06d}"
        folder = Path(self._context.run_dir) / "weights" / step
        digest = models.publish(self._model, self._tokenizer, folder)
        base = str(self._model.config._name_or_path)
        weights = Weights(folder, f"{self._resource}-{step}-{digest[:8]}", self._is_adapter(), base)
        body = {"uri": str(folder), "base_model": base}
        others = self._announce(weights) if self._announce is not None else None
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
        args = self._arguments()
        found = models.loaded(model, self._settings.get("model_init_kwargs") or {})
        self._tokenizer = models.tokenizer_of(found, tokenizer)
        with models.chance_of_its_own():
            models.library("transformers").set_seed(args.seed)  # an adapter begins with chance
            self._model = models.adapted(found, peft_config)

    def reference(self) -> Any:
        """The model as it was at first, frozen; for trainers that compare with it."""
        if self._first is None:
            model, _, _ = self._given
            settings = self._settings.get("model_init_kwargs") or {}
            found = models.loaded(model, settings)
            if found is model:
                raise ConfigError(
                    f"{type(self).__name__} compares with the model as it was, which a loaded one "
                    "does not stay; give its folder: model='path/to/model'"
                )
            self._first = found.train(False).requires_grad_(False)
        return self._first

    def _arguments(self) -> Any:
        """TRL's configuration of these settings.

        Raises:
            ConfigError: There is no such setting, or TRL does not take its value.
        """
        kind = getattr(models.library("trl"), self.config)
        known = inspect.signature(kind).parameters
        for name in self._settings:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                guess = f"did you mean {near[0]!r}?" if near else f"see trl.{self.config}"
                raise ConfigError(f"{type(self).__name__} has no option {name!r}; {guess}")
        place = Path(self._context.run_dir) / "trainer" if self._context is not None else "trainer"
        given = {**_DEFAULTS, **models.precision(), **self.defaults()}
        given |= copy.deepcopy(self._settings)
        given["report_to"] = list(given["report_to"])
        # The model is loaded here.
        given.pop("model_init_kwargs", None)
        try:
            return kind(output_dir=str(place), save_strategy="no", **given)
        except (TypeError, ValueError, ImportError) as exc:
            raise ConfigError(
                f"trl.{self.config} does not take these settings: {exc}; see its options"
            ) from exc

    def defaults(self) -> Mapping[str, Any]:
        """Settings that are not TRL's own by default."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the number of trained batches, and the model."""
        return {"steps": self._steps, "model": str(self._given[0])[:500]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after so many batches.

        Args:
            state: As :meth:`state_dict` gave it.
        """
        self._steps = int(state["steps"])

    def save(self, folder: Path) -> None:
        """Write the trained parameters and what the optimizer remembers.

        Args:
            folder: Where to.
        """
        if self._model is not None:
            models.save(self._model, self._optimizer, folder)

    def load(self, folder: Path) -> None:
        """Read them into the model.

        Args:
            folder: Where from.

        Raises:
            ConfigError: They are not of this model.
        """
        self._open()
        self._remembered = models.load(self._model, folder)


def _explain_nothing(batch: Batch, left: Mapping[str, int]) -> str:
    reasons = ", ".join(f"{n} × {reason}" for reason, n in Counter(left).most_common(3))
    return (
        f"nothing of {len(batch)} trajectories can be trained"
        f"{f': {reasons}' if reasons else ''}; see docs/training.md for what each needs"
    )


def _mean_metrics(history: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The mean of each number that was logged in steps; TRL's summary of a training is left out."""
    steps = [each for each in history if "train_runtime" not in each]
    found: dict[str, list[float]] = {}
    for each in steps:
        for name, value in each.items():
            if name not in ("epoch", "step") and isinstance(value, int | float):
                found.setdefault(name, []).append(float(value))
    return {name: sum(values) / len(values) for name, values in found.items()}
