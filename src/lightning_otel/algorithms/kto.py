"""KTO: training on answers that were good and answers that were not; no pairs are needed.

The fit for thumbs up and down.

Source: TRL's ``KTOTrainer``; Ethayarajh et al., KTO, arXiv 2402.01306.
"""

from typing import Any, ClassVar

from lightning_otel.algorithms.base import Batch
from lightning_otel.algorithms.gradients import GradientAlgorithm, Rows, format_rows


class KTO(GradientAlgorithm):
    """Trains on each step that has a reward."""

    name: ClassVar[str] = "kto"
    config = "KTOConfig"
    format = "kto"
    columns = ("prompt", "completion", "label", "tools")
    compares_first = True

    def __init__(self, model: Any = None, *, threshold: float = 0.5, **others: Any) -> None:
        super().__init__(model, **others)
        self._threshold = threshold

    def rows(self, batch: Batch) -> Rows:
        """Return each rewarded step, and how many of them are good."""
        rows, exclusions = format_rows("kto", batch, threshold=self._threshold)
        good = sum(row["label"] for row in rows)
        return Rows(rows, exclusions, {"good": float(good), "bad": float(len(rows) - good)})
