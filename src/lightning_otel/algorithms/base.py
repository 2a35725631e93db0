"""The base of algorithms: a class with one method, or with a loop of its own."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from lightning_otel.algorithms.batch import Batch, StepResult
from lightning_otel.algorithms.context import Context
from lightning_otel.errors import ConfigError
from lightning_otel.types import CaptureLevel, Trajectory

if TYPE_CHECKING:
    from lightning_otel.dataset import Store

__all__ = ["BaseAlgorithm", "Batch", "Context", "StepResult"]


class BaseAlgorithm:
    """Turns experience into better resources; write ``train_step``, or ``run`` for another loop.

    Attributes:
        name: What it is called in runs and checkpoints; by default its class.
        needs: ``exact`` if it trains on the server's own token ids; ``text`` takes both.
        extra: The extra of this package that installs what it imports; empty if none.
        group_size: How many rewarded rollouts of a group it needs to compare them; 1 compares none.
        batch_size: How many rollouts a step learns from where the trainer is not told.
        needs_reward: Whether only rollouts with a reward are of use.
        needs_difference: Whether groups that all earned the same are of no use.
        takes_newest: Whether the newest rollouts are taken first, not the oldest.
        needs_steps: Whether only rollouts of which calls were recorded are of use.
        needs_logprobs: Whether the probabilities that tokens were sampled with must be known.
    """

    name: ClassVar[str] = ""
    needs: CaptureLevel = "text"
    extra: str = ""
    group_size: int = 1
    batch_size: int | None = None
    needs_reward: bool = True
    needs_difference: bool = False
    takes_newest: bool = False
    needs_steps: bool = True
    needs_logprobs: bool = False

    _named_store: "Store | None" = None
    _named_adapter: Any = None

    def set_store(self, store: "Store") -> None:
        """Name the store to learn from, for a trainer that is given none."""
        self._named_store = store

    def get_store(self) -> "Store | None":
        """The store that :meth:`set_store` named."""
        return self._named_store

    def set_adapter(self, adapter: Any) -> None:
        """Say how spans become what is learnt from.

        Args:
            adapter: An object with ``adapt(spans)`` that gives trajectories, of which batches are
                made; or a :class:`TraceAdapter`, which gives anything, and which ``train_step``
                asks by itself: ``self.get_adapter().adapt(batch["spans"])``.
        """
        self._named_adapter = adapter

    def get_adapter(self) -> Any:
        """The adapter that :meth:`set_adapter` named; None if none was."""
        return self._named_adapter

    def configure(self, **settings: Any) -> None:
        """Take settings of the algorithm's own after it was made; by default there are none.

        Raises:
            ConfigError: It has none that may be set then.
        """
        raise ConfigError(
            f"unknown options {', '.join(settings)}; give those of an algorithm that is made "
            f"already to {type(self).__name__}(…) itself"
        )

    def run(self, context: Context) -> None:
        """Learn until there is nothing more to learn from, or it is to stop.

        Args:
            context: What there is to learn from, and where results go.
        """
        for batch in context.batches():
            context.report(self.train_step(batch))
            context.commit(self.state_dict())

    def train_step(self, batch: Batch) -> StepResult | Mapping[str, Any] | None:
        """Learn from trajectories once.

        Args:
            batch: Trajectories of whole groups of rollouts; a list, which also has their rewards.

        Returns:
            What it came to; or a mapping of metrics with, under ``resource_update``, bodies by name
            of resources, or a text, which becomes the ``system_prompt``.
        """
        raise NotImplementedError(f"{type(self).__name__} needs a train_step or a run of its own")

    def unfit(self, trajectories: Sequence[Trajectory]) -> str:
        """Return the reason to leave a rollout out of the next step; empty by default.

        It is asked before a batch is made: what is of no use is left out, counted with the reason,
        and others take its place, so that no step is spent on it.

        Args:
            trajectories: Those of the rollout.
        """
        return ""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state as JSON; :meth:`save` puts large things into files."""
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
    """Return an algorithm's name in runs and checkpoints."""
    return algorithm.name or type(algorithm).__name__
