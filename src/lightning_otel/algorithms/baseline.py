"""The baseline: nothing is learnt, and what an agent earns as it is, is measured."""

from typing import ClassVar

from lightning_otel.algorithms.base import BaseAlgorithm, Batch, StepResult


class Baseline(BaseAlgorithm):
    """Runs tasks or reads what was recorded; reports mean rewards."""

    name: ClassVar[str] = "baseline"
    needs_steps = False

    def __init__(self) -> None:
        self._rollouts = 0
        self._sum = 0.0

    def train_step(self, batch: Batch) -> StepResult:
        """Return the mean reward so far."""
        self._rollouts += len(batch.rewards)
        self._sum += sum(batch.rewards.values())
        return StepResult({"mean_reward": self._sum / max(self._rollouts, 1)})

    def state_dict(self) -> dict[str, float]:
        """The sum so far."""
        return {"rollouts": self._rollouts, "sum": self._sum}

    def load_state_dict(self, state: "dict[str, float]") -> None:  # type: ignore[override]  # what state_dict gave
        """Go on from the sum so far."""
        self._rollouts, self._sum = int(state["rollouts"]), state["sum"]
