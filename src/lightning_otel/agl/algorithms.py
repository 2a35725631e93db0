"""Algorithms by the options that are written of Agent Lightning's; ours do the work."""

from collections.abc import Mapping
from typing import Any, Final

from lightning_otel.algorithms import BaseAlgorithm
from lightning_otel.algorithms.apo import APO
from lightning_otel.algorithms.baseline import Baseline
from lightning_otel.algorithms.microsoft import Microsoft
from lightning_otel.algorithms.ppo import PPO
from lightning_otel.algorithms.sft import SFT

__all__ = ["APO", "PPO", "SFT", "VERL", "BaseAlgorithm", "Baseline", "SupervisedFineTuning"]

NAMES: Final = {
    "base_model": "model",
    "distributed_backend": "ddp_backend",
    "epochs": "num_train_epochs",
}
"""Options that are called otherwise here."""


class SupervisedFineTuning(SFT):
    """``sft``, with ``base_model`` and ``epochs``."""

    def __init__(self, base_model: Any = None, **options: Any) -> None:
        super().__init__(
            base_model, **{NAMES.get(name, name): value for name, value in options.items()}
        )


class VERL(Microsoft):
    """Agent Lightning's own ``verl``, which needs that package to run."""

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        super().__init__("verl", **({} if config is None else {"config": config}))
