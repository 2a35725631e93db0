"""The base of algorithms, and the input and the result of a training step."""

import difflib
import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

from lightning_otel.adapter.advantages import SUCCESS
from lightning_otel.algorithms.options import TrainingOptions
from lightning_otel.errors import ConfigError
from lightning_otel.types import CaptureLevel, Span, Trajectory, Transition
from lightning_otel.types.transitions import distinct_steps
from lightning_otel.types.values import check_types

if TYPE_CHECKING:
    from lightning_otel.algorithms.run import Run
    from lightning_otel.dataset import Store

UPDATE: Final = "resource_update"
TARGET: Final = "system_prompt"
"""The resource that a text is a version of, where a step returns no name for it."""


def unknown_option(algorithm: type, name: str, others: Iterable[str], more: str) -> ConfigError:
    """Return the error for an unknown option; it names the nearest."""
    parameters = inspect.signature(algorithm).parameters.values()
    args = [item.name for item in parameters if item.kind is not item.VAR_KEYWORD]
    options = [*args, *others, *TrainingOptions.__annotations__]
    best = difflib.get_close_matches(name, options, n=1)
    hint = f"did you mean {best[0]!r}?" if best else f"there are {', '.join([*args, more])}"
    return ConfigError(f"{algorithm.__name__} has no option {name!r}; {hint}")


class Batch(list[Trajectory]):
    """The trajectories of whole groups of rollouts, each with its reward.

    Attributes:
        number: Its step, from 1.
        rewards: The reward of each rollout, by id.
        groups: Rollout ids by group.
    """

    def __init__(
        self,
        trajectories: Iterable[Trajectory],
        *,
        number: int,
        rewards: Mapping[str, float],
        groups: Mapping[str, Sequence[str]],
        store: "Store | None" = None,
    ) -> None:
        super().__init__(trajectories)
        self.number = number
        self.rewards = dict(rewards)
        self._store = store
        self.groups = {group_id: tuple(ids) for group_id, ids in groups.items()}

    def __getitem__(self, index: Any) -> Any:
        """Return a trajectory by its index, or ``spans`` or ``rewards`` by name.

        ``rewards`` align with ``spans``, 0.0 where none; over a rollout they add up to its reward.
        """
        if index == "spans":
            return self.spans()
        if index == "rewards":
            return self._list_rewards()
        if isinstance(index, str):
            raise ConfigError(f"a batch has no {index!r}; it has 'spans' and 'rewards'")
        return super().__getitem__(index)

    def spans(self) -> list[Span]:
        """Return every span of its rollouts, rollout by rollout, as they were at the first call."""
        return list(chain.from_iterable(self._spans_of.values()))

    @cached_property
    def _spans_of(self) -> dict[str, list[Span]]:
        store, ids = self._store, self.rollout_ids
        return {} if store is None else {key: store.spans(rollout_id=key).rows() for key in ids}

    def _list_rewards(self) -> list[float]:
        steps: dict[str, list[Transition]] = {}
        for step in distinct_steps(self):
            steps.setdefault(step.rollout_id, []).append(step)
        rewards: list[float] = []
        for rollout_id, spans in self._spans_of.items():
            places = {(span.trace_id, span.span_id): at for at, span in enumerate(spans)}
            values = [0.0] * len(spans)
            last = 0
            for step in sorted(steps.get(rollout_id, ()), key=lambda step: step.start_ns):
                if (place := places.get((step.trace_id, step.span_id))) is not None:
                    values[place] += step.reward or 0.0
                    last = place
            if values and rollout_id in self.rewards:  # what is no single step's is the last one's
                values[last] += self.rewards[rollout_id] - math.fsum(values)
            rewards += values
        return rewards

    @property
    def rollout_ids(self) -> list[str]:
        """The ids of its rollouts, group by group."""
        return [rollout_id for ids in self.groups.values() for rollout_id in ids]

    def metrics(self) -> dict[str, float]:
        """Return metrics of any algorithm: means over its rollouts."""
        rollouts = len(self.rollout_ids)
        steps = distinct_steps(self)
        metrics = {"rollouts": float(rollouts)}
        if rollouts:
            metrics["length"] = len(steps) / rollouts
            metrics["tokens"] = sum(step.output_tokens or 0 for step in steps) / rollouts
        if self.rewards:
            values = self.rewards.values()
            metrics["reward"] = sum(values) / len(values)
            metrics["success_rate"] = sum(value >= SUCCESS for value in values) / len(values)
        return metrics


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step.

    Attributes:
        metrics: Numbers by name, such as ``{"loss": 0.3}``.
        resources: Bodies of improved resources by name; published once the step is committed.
    """

    metrics: Mapping[str, float] = field(default_factory=dict)
    resources: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, given: object) -> "StepResult":
        """Convert the result of ``train_step``; a mapping has bodies under ``resource_update``.

        Raises:
            ConfigError: It is no result, None or mapping of metrics.
        """
        if given is None or isinstance(given, StepResult):
            return given or cls()
        if not isinstance(given, Mapping):
            raise ConfigError(
                f"train_step gave back a {type(given).__name__}; give StepResult(metrics, "
                "{'name of the resource': body}), a mapping, or None"
            )
        body = given.get(UPDATE)
        resources = body if isinstance(body, Mapping) else {} if body is None else {TARGET: body}
        metrics = {name: value for name, value in given.items() if name != UPDATE}
        for name, value in metrics.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ConfigError(
                    f"train_step gave back {name}={value!r:.80}; metrics are numbers, and what is "
                    f"to be published stands under {UPDATE!r}"
                )
        return cls(metrics, resources)


class BaseAlgorithm:
    """Turns rollouts into better resources; override ``train_step``, or ``run`` for your own loop.

    Attributes:
        name: The name in runs and checkpoints; by default that of the class.
        needs: ``exact`` if it trains on the server's own token ids; ``text`` takes both.
        extra: The extra of this package that installs its libraries; empty if none.
        group_size: The least number of rewarded rollouts in a group; 1 compares none.
        batch_size: Rollouts per step, by default.
        needs_reward: Exclude rollouts without a reward.
        needs_difference: Exclude groups whose rollouts all have the same reward.
        takes_newest: Take the newest rollouts first, not the oldest.
        needs_steps: Exclude rollouts without a recorded call.
        needs_logprobs: Exclude rollouts without the log-probabilities of sampled tokens.
        canary_share: The share of rollouts that a new canary needs, 0 to 1; None is the default of
            resources. A canary that stands keeps its own.
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
    canary_share: float | None = None

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Check the options that our own classes name; a method of one's own checks its own."""
        for kind in cls.__mro__:
            if kind.__module__.startswith("lightning_otel."):
                check_types(options, getattr(vars(kind).get("__init__"), "__annotations__", {}))
        return super().__new__(cls)

    _named_store: "Store | None" = None
    _named_adapter: Any = None

    def set_store(self, store: "Store") -> None:
        """Set the store to learn from, for a trainer without one."""
        self._named_store = store

    def get_store(self) -> "Store | None":
        """Return the store that :meth:`set_store` named."""
        return self._named_store

    def set_adapter(self, adapter: Any) -> None:
        """Set what turns spans into training data.

        Args:
            adapter: An object whose ``adapt(spans)`` returns the trajectories of batches; or a
                :class:`TraceAdapter`, which ``train_step`` calls by itself.
        """
        self._named_adapter = adapter

    def get_adapter(self) -> Any:
        """Return the adapter that :meth:`set_adapter` set, or None."""
        return self._named_adapter

    def configure(self, **settings: Any) -> None:
        """Change options of an instance; by default there are none.

        Raises:
            ConfigError: The option cannot be set.
        """
        hint = "those of the training; an algorithm that is made already takes its own itself"
        for name in settings:
            raise unknown_option(type(self), name, (), hint)

    def run(self, context: "Run") -> None:
        """Learn until nothing is left to learn from, or the run is stopped."""
        for batch in context.batches():
            context.report(self.train_step(batch))
            context.commit(self.state_dict())

    def train_step(self, batch: Batch) -> StepResult | Mapping[str, Any] | None:
        """Learn once from the trajectories of whole groups of rollouts.

        Returns:
            The result; or a mapping of metrics with, under ``resource_update``, bodies by name
            of resources, or a text, which becomes the ``system_prompt``.
        """
        raise NotImplementedError(f"{type(self).__name__} needs a train_step or a run of its own")

    def unfit(self, trajectories: Sequence[Trajectory]) -> str:
        """Return the reason to exclude a rollout before a batch is made; empty by default."""
        return ""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state as JSON; :meth:`save` writes large files."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""

    def save(self, folder: Path) -> None:
        """Write files such as weights into an empty folder; by default none."""

    def load(self, folder: Path) -> None:
        """Read what :meth:`save` wrote; the folder may have moved."""


def name_of(algorithm: BaseAlgorithm) -> str:
    """Return an algorithm's name in runs and checkpoints."""
    return algorithm.name or type(algorithm).__name__
