"""The options of a training run, and the settings that are made of them."""

import os
import textwrap
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, TypedDict, TypeVar

from lightning_otel.types.rollouts import WorkerKind

if TYPE_CHECKING:
    from lightning_otel.dataset import Store
    from lightning_otel.resources import Resources
    from lightning_otel.runner.agents import Agent
    from lightning_otel.runner.attempt import Hook
    from lightning_otel.state import State
    from lightning_otel.state.queue import Queue
    from lightning_otel.state.runs import Runs
    from lightning_otel.tracing import RewardEvaluator

F = TypeVar("F", bound=Callable[..., Any])
Backend: TypeAlias = Literal["auto", "builtin", "microsoft"]
"""Optimiser: ``builtin`` ours, ``microsoft`` Agent Lightning's; ``auto`` prefers theirs."""
Progress: TypeAlias = Callable[[int, int | None, Mapping[str, float]], None]


class TrainingOptions(TypedDict, total=False):
    """The options of a training run: type and help; :class:`RunConfig` has the defaults."""

    backend: Annotated[Backend, "Engine that runs the algorithm; by default builtin.", "builtin"]
    store: Annotated[
        "Store | str | os.PathLike[str] | None",
        "The store of the rollouts; by default the default store.",
    ]
    resources: Annotated[
        Mapping[str, Any] | None, "Bodies by name; those without a version are published as live."
    ]
    min_batch_size: Annotated[int | None, "Fewest rollouts in a step; by default all."]
    max_iterations: Annotated[int | None, "Number of steps; by default one pass."]
    samples: Annotated[int | None, "Rollouts of each task, which are compared."]
    workers: Annotated[int, "Rollouts that run at once; 0 leaves them to runners elsewhere."]
    kind: Annotated[WorkerKind, "Kind of worker."]
    hooks: Annotated["Sequence[Hook]", "Called around each attempt."]
    reward_evaluator: Annotated[
        "RewardEvaluator | None", "Returns the reward of a recording in the agent's place."
    ]
    apply: Annotated[bool | None, "Put tuned resources into the agent's requests."]
    max_attempts: Annotated[int, "Most attempts at a rollout."]
    timeout_s: Annotated[float | None, "Time limit of an attempt, seconds."]
    reward_timeout_s: Annotated[float, "Wait for late rewards, seconds."]
    select: Annotated[
        Mapping[str, Any] | None,
        "Options of transitions, such as {'agents': 'planner*'}: which rollouts, and how.",
    ]
    consumer: Annotated[str, "Runs of one consumer never train on the same rollout."]
    min_gain: Annotated[float, "Extra mean reward to go live."]
    reward_range: Annotated[
        tuple[float, float] | list[float] | None,
        "The lowest and the highest reward that there can be; by default the range seen so far.",
    ]
    seed: Annotated[int, "Seed of the order of tasks."]
    state: Annotated[
        "State | None", "The state of queue, resources and runs; by default beside the store."
    ]
    run_dir: Annotated[str | os.PathLike[str] | None, "Folder of the runs' files."]
    progress: Annotated[
        Progress | None,
        "Called after each step with its number, the number of all, and the metrics.",
    ]
    report_to: Annotated[
        str | Sequence[str] | None, "Trackers that get the metrics: tensorboard, wandb or mlflow."
    ]


def describe_options(function: F) -> F:
    """Add the help of the options to the arguments in a docstring."""
    mark = " " * 12 + "**options"
    words = (
        textwrap.fill(
            f"{name}: {annotation.__metadata__[0]}", 100,
            initial_indent=" " * 12, subsequent_indent=" " * 16,
        )
        for name, annotation in TrainingOptions.__annotations__.items()
    )  # fmt: skip
    if function.__doc__ is not None:  # as Python's option -OO leaves it
        function.__doc__ = function.__doc__.replace(mark, "\n".join([*words, mark]))
    return function


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """The settings of a training run: its :class:`TrainingOptions`, and what they lead to."""

    store: "Store"
    state: "State"
    resources: "Resources"
    runs: "Runs"
    run_dir: Path
    agent: "Agent | None" = None
    train: Sequence[Any] = ()
    val: Sequence[Any] = ()
    select: Mapping[str, Any] = field(default_factory=dict)
    samples: int
    min_batch_size: int | None = None
    max_iterations: int | None = None
    workers: int = 1
    kind: WorkerKind = "threads"
    hooks: "Sequence[Hook]" = ()
    reward_evaluator: "RewardEvaluator | None" = None
    apply: bool | None = None
    max_attempts: int = 2
    timeout_s: float | None = None
    reward_timeout_s: float = 30.0
    consumer: str = ""
    min_gain: float = 0.0
    reward_range: tuple[float, float] | None = None
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)  # the algorithm's own
    report_to: tuple[str, ...] = ()
    follows: bool = False  # wait for more experience once there is none
    stop: threading.Event = field(default_factory=threading.Event)
    progress: Progress | None = None

    def describe(self) -> dict[str, Any]:
        """Return what is written down with the run."""
        return {
            "store": self.store.name,
            "agent": None if self.agent is None else self.agent.name,
            "train": len(self.train),
            "val": len(self.val),
            "samples": self.samples,
            "min_batch_size": self.min_batch_size,
            "max_iterations": self.max_iterations,
            "seed": self.seed,
            "options": {name: repr(value)[:200] for name, value in self.options.items()},
        }

    @property
    def queue(self) -> "Queue":
        """The queue, for workers elsewhere."""
        from lightning_otel.state.queue import Queue

        return Queue(self.state)
