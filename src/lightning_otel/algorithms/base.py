"""What an algorithm is: a class with one method, or with a loop of its own."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from lightning_otel.algorithms.batch import Batch, StepResult
from lightning_otel.algorithms.context import Context
from lightning_otel.types import CaptureLevel, Trajectory

__all__ = ["BaseAlgorithm", "Batch", "Context", "StepResult"]


_ELSEWHERE: Final = {
    "set_store": "give the store to the trainer: Trainer(store=…)",
    "set_adapter": "say to the trainer how spans become transitions: Trainer(select={…})",
    "set_trainer": "give the algorithm to the trainer: Trainer(algorithm=…)",
}


class BaseAlgorithm:
    """Turns experience into better resources; write ``train_step``, or ``run`` for another loop.

    Attributes:
        name: What it is called in runs and checkpoints; by default its class.
        needs: ``exact`` if it trains on the server's own token ids; ``text`` takes both.
        extra: The extra of this package that installs what it imports; empty if none.
        group_size: How many rewarded rollouts of a group it needs to compare them; 1 compares none.
        needs_reward: Whether only rollouts with a reward are of use.
        needs_steps: Whether only rollouts of which calls were recorded are of use.
        needs_logprobs: Whether the probabilities that tokens were sampled with must be known.
    """

    name: ClassVar[str] = ""
    needs: CaptureLevel = "text"
    extra: str = ""
    group_size: int = 1
    needs_reward: bool = True
    needs_steps: bool = True
    needs_logprobs: bool = False

    if not TYPE_CHECKING:  # whoever reads types is told that there is no such method

        def __getattr__(self, name: str) -> Any:
            """Say what stands for a method of Agent Lightning's algorithms that is not here."""
            said = f"; {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{said}")

    def run(self, context: Context) -> None:
        """Learn until there is nothing more to learn from, or it is to stop.

        Args:
            context: What there is to learn from, and where results go.
        """
        for batch in context.batches():
            context.report(self.train_step(batch))
            context.commit(self.state_dict())

    def train_step(self, batch: Batch) -> StepResult | None:
        """Learn from trajectories once.

        Args:
            batch: Trajectories of whole groups of rollouts; a list, which also has their rewards.
        """
        raise NotImplementedError(f"{type(self).__name__} needs a train_step or a run of its own")

    def unfit(self, trajectories: Sequence[Trajectory]) -> str:
        """Why a rollout is of no use to the next step; empty if it is of use, as by default.

        It is asked before a batch is made: what is of no use is left out, counted with the reason,
        and others take its place, so that no step is spent on it.

        Args:
            trajectories: Those of the rollout.
        """
        return ""

    def state_dict(self) -> Mapping[str, Any]:
        """What it must remember, as JSON; large things go into files by :meth:`save`."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Remember what :meth:`state_dict` gave.

        Args:
            state: That, read back.
        """

    def save(self, folder: Path) -> None:
        """Write files of its own, such as weights, into a checkpoint; none by default.

        Args:
            folder: Empty, and the algorithm's alone.
        """

    def load(self, folder: Path) -> None:
        """Read what :meth:`save` wrote.

        Args:
            folder: The same, at another place perhaps.
        """


def name_of(algorithm: BaseAlgorithm) -> str:
    """What an algorithm is called in runs and checkpoints."""
    return algorithm.name or type(algorithm).__name__
