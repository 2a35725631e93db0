"""DPO: training on a better and a worse answer to the same prompt.

Source: TRL's ``DPOTrainer``; Rafailov et al., DPO, arXiv 2305.18290.
"""

from typing import Any, ClassVar

from lightning_otel.adapter import Advantage
from lightning_otel.algorithms import models, tables
from lightning_otel.algorithms.base import Batch
from lightning_otel.algorithms.comparison import compared
from lightning_otel.algorithms.gradients import GradientAlgorithm, Rows


class DPO(GradientAlgorithm):
    """Trains on pairs: the best answer of a group with its worst, the next with the next."""

    name: ClassVar[str] = "dpo"
    config = "DPOConfig"
    group_size: int = 2

    def __init__(self, model: Any = None, *, gap: float = 0.0, **others: Any) -> None:
        """Say what is trained.

        Args:
            model: As :class:`GradientAlgorithm` takes it, and what else it takes.
            gap: How much more the better answer must have earned at least.
            **others: As :class:`GradientAlgorithm` takes them.
        """
        super().__init__(model, **others)
        self._gap = gap

    def rows(self, batch: Batch) -> Rows:
        """Pairs of answers that earned more and less."""
        found = compared(batch, Advantage())
        rows, left = tables.made("dpo", found.trajectories, gap=self._gap)
        return Rows(rows, left)

    def trainer(self, args: Any, rows: Rows, **shared: Any) -> Any:
        """TRL's, compared with the model as it was at first."""
        table = tables.dataset("dpo", rows.rows, ("prompt", "chosen", "rejected", "tools"))
        return models.library("trl").DPOTrainer(
            args=args, train_dataset=table, ref_model=models.plain(self.reference()), **shared
        )
