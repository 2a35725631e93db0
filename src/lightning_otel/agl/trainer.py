"""The trainer with the options that are written of Agent Lightning's, and what goes with it."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lightning_otel.agl.algorithms import NAMES
from lightning_otel.trainer import Fit
from lightning_otel.trainer import Trainer as OurTrainer

if TYPE_CHECKING:
    from lightning_otel.algorithms.exchange import Backend
    from lightning_otel.tracing import RewardEvaluator


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Limits of parallel work.

    Attributes:
        num_workers: Rollouts that run at once.
        distributed_backend: The algorithm's ``ddp_backend``, such as ``nccl``.
    """

    num_workers: int = 1
    distributed_backend: str | None = None
    gradient_accumulation_steps: int | None = None

    def settings(self) -> dict[str, Any]:
        """Return the algorithm's options under its own names."""
        settings = {
            NAMES["distributed_backend"]: self.distributed_backend,
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
        }
        return {name: value for name, value in settings.items() if value is not None}


class Trainer(OurTrainer):
    """A :class:`lightning_otel.Trainer`, also by the options that are written of it."""

    def __init__(
        self,
        *args: Any,
        parallelization: ParallelConfig | None = None,
        fixes: Iterable[object] = (),
        n_runners: int = 1,
        initial_resources: Mapping[str, Any] | None = None,
        adapter: Any = None,
        **options: Any,
    ) -> None:
        """Set up; see :class:`lightning_otel.Trainer` for other options.

        Args:
            *args: The agent and the algorithm.
            parallelization: Limits of parallel work.
            fixes: Of :mod:`lightning_otel.agl.fixes`; each is in force once it is called.
            n_runners: ``workers``.
            initial_resources: ``resources``.
            adapter: What makes trajectories of spans; ``select={"adapter": …}``.
            **options: All others.
        """
        config = parallelization or ParallelConfig(n_runners)
        settings: dict[str, Any] = {"workers": config.num_workers, "resources": initial_resources}
        if adapter is not None:
            settings["select"] = {"adapter": adapter, **(options.pop("select", None) or {})}
        super().__init__(*args, **{**settings, **config.settings(), **options})


@dataclass(frozen=True, slots=True)
class LightningRuntimeConfig:
    """Switches of the runtime; all off by default.

    Attributes:
        enable_collection: Whether runs are recorded; by default as ``enabled``.
        enable_training: Whether :func:`train_with_lightning_backend` trains.
        apply_optimized_profile: Whether requests are made with the resources that are live.
    """

    enabled: bool = False
    enable_training: bool = False
    backend: "Backend" = "auto"
    store: str | os.PathLike[str] | None = None
    reward_evaluator: "RewardEvaluator | None" = None
    apply_optimized_profile: bool = False
    enable_collection: bool | None = None

    @property
    def is_collecting(self) -> bool:
        """Whether runs are recorded."""
        return self.enabled if self.enable_collection is None else self.enable_collection


@dataclass(frozen=True, slots=True)
class LightningTrainingRequest:
    """A training request: algorithm, agent, tasks and options of the trainer."""

    algorithm: Any = "baseline"
    agent: object = None
    train: Sequence[Any] = ()
    val: Sequence[Any] = ()
    options: Mapping[str, Any] = field(default_factory=dict)


def train_with_lightning_backend(
    request: LightningTrainingRequest, config: LightningRuntimeConfig
) -> Fit | None:
    """Train by Agent Lightning 0.3 where it can, else by ours; None where training is off."""
    if not config.enable_training:
        return None
    trainer = OurTrainer(
        request.agent,
        request.algorithm,
        backend=config.backend,
        store=config.store,
        reward_evaluator=config.reward_evaluator,
        apply=config.apply_optimized_profile,
        **request.options,
    )
    return trainer.fit(request.train, request.val)
