"""DPO: training on a better and a worse answer to the same prompt.

Source: TRL's ``DPOTrainer``; Rafailov et al., DPO, arXiv 2305.18290.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from lightning_otel.adapter import Advantage
from lightning_otel.algorithms.base import Batch
from lightning_otel.algorithms.gradients import (
    OURS,
    GradientAlgorithm,
    Rows,
    compare_rollouts,
    format_rows,
)


class DPO(GradientAlgorithm):
    """Trains on pairs: the best answer of a group with its worst, the next with the next."""

    name: ClassVar[str] = "dpo"
    config = "DPOConfig"
    format = "dpo"
    columns = ("prompt", "chosen", "rejected", "tools")
    unused: ClassVar[Mapping[str, str]] = {
        **OURS, "padding_free": "pairs are weighed by their rows, which it joins into one"
    }  # fmt: skip
    compares_first = True
    group_size: int = 2

    def __init__(self, model: Any = None, *, gap: float = 0.0, **others: Any) -> None:
        super().__init__(model, **others)
        self._gap = gap

    def rows(self, batch: Batch) -> Rows:
        """Return pairs of answers that earned more and less."""
        paths = compare_rollouts(batch, Advantage()).trajectories
        return Rows(*format_rows("dpo", paths, gap=self._gap))
