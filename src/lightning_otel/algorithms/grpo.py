"""GRPO: reinforcement learning by comparing rollouts with others of their group.

Source: Shao et al., DeepSeekMath, arXiv 2402.03300, equation 3.
"""

from typing import Any, ClassVar

from lightning_otel.adapter import Advantage
from lightning_otel.adapter.rows import token_advantages
from lightning_otel.algorithms.base import Batch
from lightning_otel.algorithms.gradients import Compared, compare_rollouts
from lightning_otel.algorithms.groups import NO_DIFFERENCE
from lightning_otel.algorithms.policy import PolicyGradient
from lightning_otel.types import Estimator, TrainingRow


class GRPO(PolicyGradient):
    """Trains on rollouts compared with others of their group."""

    name: ClassVar[str] = "grpo"
    group_size: int = 2

    def __init__(
        self, model: Any = None, *, advantage: Advantage | Estimator = "grpo", **others: Any
    ) -> None:
        """Take the options of :class:`PolicyGradient`.

        ``advantage`` is ``grpo``, ``rloo``, ``dr_grpo`` or an estimator; TRL's ``scale_rewards``
        has no effect.
        """
        super().__init__(model, **others)
        self._how = advantage if isinstance(advantage, Advantage) else Advantage(advantage)
        self.needs_difference = not callable(self._how.estimator)

    def compare(self, batch: Batch) -> Compared:
        """Return each step with the advantage of its rollout."""
        return compare_rollouts(batch, self._how)

    def explain_useless(self, row: TrainingRow) -> str | None:
        """Return the reason if a row's rollout earned as much as its group."""
        if any(step.advantage is None for step in row.transitions):
            return None
        return "" if any(step.advantage for step in row.transitions) else NO_DIFFERENCE

    def row(self, row: TrainingRow) -> dict[str, Any]:
        """Return the advantage of each token."""
        return {"advantages": token_advantages(row)}

    def make_trainer(self, **shared: Any) -> Any:
        """Return the trainer of GRPO."""
        from lightning_otel.algorithms.recorded_trainers import RecordedGRPOTrainer

        return RecordedGRPOTrainer(**shared)
