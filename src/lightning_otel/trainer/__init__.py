"""The trainer: runs an algorithm over an agent or a store, and publishes better resources.

A run publishes its result as ``canary``; held-out reward, live traffic or a person makes it
``live``.
"""

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Unpack, get_type_hints, overload

from lightning_otel.adapter import TraceAdapter
from lightning_otel.algorithms import (
    BaseAlgorithm,
    Run,
    checkpoint,
    make_backend_algorithm,
    name_of,
)
from lightning_otel.algorithms.options import (
    Progress,
    RunConfig,
    TrainingOptions,
    describe_options,
)
from lightning_otel.algorithms.promotion import Evaluation, Fit, Verdict
from lightning_otel.algorithms.reporters import reporter_names
from lightning_otel.algorithms.tasks import require_agent, run_tasks
from lightning_otel.config import warn_of_former
from lightning_otel.dataset import Store
from lightning_otel.dataset.query import TransitionQuery
from lightning_otel.errors import ConfigError, TrainingError
from lightning_otel.resources import Resources
from lightning_otel.resources.evidence import check_range
from lightning_otel.rewards.pending import settle_pending
from lightning_otel.runner.agents import agent_of
from lightning_otel.runner.attempt import Hook
from lightning_otel.state import State
from lightning_otel.state.runs import Metric, Runs, TrainingRun
from lightning_otel.tracing import RewardEvaluator
from lightning_otel.types import Mode
from lightning_otel.types.values import check_finite, check_seconds, check_types, check_whole

if TYPE_CHECKING:
    from lightning_otel.state.queue import Queue

log = logging.getLogger(__name__)

__all__ = ["Evaluation", "Fit", "Fitting", "Trainer", "Verdict"]

_TYPES: Final[Mapping[str, Any]] = get_type_hints(
    TrainingOptions,
    None,
    {"Store": Store, "State": State, "Hook": Hook, "RewardEvaluator": RewardEvaluator},
)
_LEAST: Final = {
    "min_batch_size": 1, "max_iterations": 1, "samples": 1, "workers": 0, "max_attempts": 1
}  # fmt: skip
"""The least values of options that are whole numbers."""


class Fitting:
    """A training run in a thread: stop it, wait for it, or await it."""

    def __init__(self, fit: Callable[[], Fit], stop: threading.Event) -> None:
        self._stop = stop
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="lightning-otel-trainer")
        self._fit = self._pool.submit(fit)
        self._pool.shutdown(wait=False)

    @property
    def is_running(self) -> bool:
        """True while it trains or waits for experience."""
        return not self._fit.done()

    def stop(self) -> None:
        """End the run after its present step, which is kept."""
        self._stop.set()

    def wait(self, timeout_s: float | None = None) -> Fit | None:
        """Wait for the result; return None if the time is up first. Ctrl-C ends the run.

        Raises:
            LightningOtelError: What it failed with.
        """
        try:
            completed, _ = wait([self._fit], timeout_s)
        except KeyboardInterrupt:
            self.stop()
            log.warning("the run stops after its present step; Ctrl-C again ends at once")
            wait([self._fit])
            raise
        if not completed:
            return None
        self._pool.shutdown()
        return self._fit.result()

    def __await__(self) -> Generator[Any, None, Fit | None]:
        return asyncio.to_thread(self.wait).__await__()


class Trainer:
    """Trains an agent, run or recorded, and publishes better resources."""

    @overload
    def __init__(
        self,
        agent: object = None,
        algorithm: BaseAlgorithm = ...,
        **options: Unpack[TrainingOptions],
    ) -> None: ...
    @overload  # an algorithm that is not made yet has options of its own
    def __init__(
        self, agent: object = None, algorithm: str | type[BaseAlgorithm] = ..., **options: Any
    ) -> None: ...
    @describe_options
    def __init__(self, agent: object = None, algorithm: Any = "baseline", **options: Any) -> None:
        """Configure the training; nothing starts yet.

        Args:
            agent: Runs tasks: a function ``(task)`` or ``(task, resources)`` that returns a reward,
                a :class:`LitAgent`, or anything else that ``agent_of`` takes. None learns from
                recorded rollouts.
            algorithm: The algorithm, by its name, its class or an instance.
            **options: Options of the training, and of the algorithm.

        Raises:
            ConfigError: An argument cannot be used.
        """
        check_types(options, _TYPES)
        settings = dict(options)
        extras = {name: settings.pop(name) for name in options if name not in _TYPES}
        self.algorithm = make_backend_algorithm(
            algorithm, settings.pop("backend", "builtin"), **extras
        )
        store, state = settings.pop("store", None), settings.pop("state", None)
        store = store if store is not None else self.algorithm.get_store()
        self.store = store if isinstance(store, Store) else Store(store)
        self.state = state if state is not None else State.beside(self.store)
        self.runs = Runs(self.state)
        self.resources = Resources(self.state)
        bodies = settings.pop("resources", None) or {}
        self.progress: Progress | None = settings.pop("progress", None)
        """Called after each step; see the option."""
        agent = None if agent is None else agent_of(agent)
        self._config = self._make_config(settings, agent=agent, options=extras)
        self._origin: checkpoint.RunOrigin | None = None
        self.started: Callable[[TrainingRun], None] | None = None
        """Called with each run as soon as it is written down."""
        self.latest: TrainingRun | None = None
        """The latest run of this trainer."""
        names = set(self.resources.names()) if bodies else set()
        for name, body in bodies.items():
            if name not in names:
                self.resources.publish(name, body, alias="live")

    @property
    def queue(self) -> "Queue":
        """The queue of rollouts for workers elsewhere."""
        return self._config.queue

    def add_agent(self, agent: object) -> None:
        """Set the agent of a trainer that has none."""
        self._config = replace(self._config, agent=agent_of(agent))

    def fit(self, train: Sequence[Any] = (), val: Sequence[Any] = ()) -> Fit:
        """Train until the steps are done, or there is nothing more to learn from.

        Args:
            train: Tasks that the agent is run on; without, it learns from what is recorded.
            val: Held-out tasks: what was learnt becomes live only if it earns more on them.

        Raises:
            ConfigError: Training is switched off, or tasks are given and no agent.
            TrainingError: There is nothing that the algorithm can learn from, and why.
        """
        return self._run_fit(self._configure(train, val))

    train = fit

    def fit_async(
        self, train: Sequence[Any] = (), val: Sequence[Any] = (), *, follow: bool = True
    ) -> Fitting:
        """Train in a thread, and wait for new rollouts of any process until stopped.

        The run ends after ``max_iterations``, or when :meth:`Fitting.stop` is called; without
        ``follow``, where :meth:`fit` would.
        """
        config = replace(self._configure(train, val), follows=follow)
        return Fitting(lambda: self._run_fit(config), config.stop)

    train_async = fit_async

    async def run(self, train: Sequence[Any] = (), val: Sequence[Any] = ()) -> Fit:
        """Run :meth:`fit` without blocking the event loop."""
        return await asyncio.to_thread(self.fit, train, val)

    def evaluate(
        self,
        tasks: Sequence[Any],
        resources: Mapping[str, int] | None = None,
        *,
        mode: Mode = "test",
        samples: int = 1,
    ) -> Evaluation:
        """Run the agent on tasks and return its rewards; nothing is learnt.

        Args:
            tasks: Any JSON values.
            resources: Versions by name; by default what is live.
            mode: The purpose of the rollouts; they are never trained on.
            samples: Rollouts of each task: n of ``pass_at(k)`` and ``mean()``.

        Raises:
            ConfigError: There is no agent.
        """
        standings = self.resources.standings().items()
        live = {name: item.live.version for name, item in standings if item.live is not None}
        pinned = {**live, **(resources or {})}
        return Evaluation.of(
            run_tasks(self._config, tasks, pinned, mode=mode, samples=samples), samples
        )

    def metrics(self, names: Sequence[str] | None = None) -> list[Metric]:
        """Return the metrics of this trainer's latest run, by step and name."""
        return [] if self.latest is None else self.runs.metrics(self.latest.run_id, names=names)

    def save_checkpoint(self, path: str | os.PathLike[str]) -> Path:
        """Copy the latest checkpoint to a folder, or replace one there; whole, or not at all.

        Raises:
            TrainingError: There is none yet, or something else stands there.
        """
        checkpoints = self.runs.checkpoints(self.latest.run_id) if self.latest is not None else []
        if not checkpoints:
            raise TrainingError("no step is kept yet; save_checkpoint() after fit()")
        checkpoint.copy(Path(checkpoints[0].place), Path(path))
        return Path(path)

    def resume_from_checkpoint(self, place: str | os.PathLike[str] = "@last") -> "Trainer":
        """Continue a run with the next ``fit``; rollouts that it trained on do not come again.

        Args:
            place: A folder that :meth:`save_checkpoint` made, a run's id, or the latest run.

        Raises:
            NotFoundError: There is no such run.
            TrainingError: It is one of another algorithm, or damaged.
        """
        self._origin = checkpoint.find_origin(self.runs, place, name_of(self.algorithm))
        return self

    def _make_config(self, settings: dict[str, Any], **more: Any) -> RunConfig:
        select, adapter = dict(settings.pop("select", None) or {}), self.algorithm.get_adapter()
        if adapter is not None and not isinstance(adapter, TraceAdapter):
            select.setdefault("adapter", adapter)
        TransitionQuery.of({**select})  # type: ignore[typeddict-item]  # refused here, not later
        if settings.get("min_batch_size") is None:
            settings["min_batch_size"] = self.algorithm.batch_size
        _check_numbers(settings, self.algorithm)
        layout, run_dir = self.store.local.layout, settings.pop("run_dir", None)
        default_dir = Path(".lightning", "runs") if layout is None else layout.root / "runs"
        return RunConfig(
            store=self.store,
            state=self.state,
            resources=self.resources,
            runs=self.runs,
            run_dir=default_dir if run_dir is None else Path(run_dir),
            select=select,
            samples=settings.pop("samples", None) or max(self.algorithm.group_size, 1),
            hooks=tuple(settings.pop("hooks", ())),
            reward_range=check_range(settings.pop("reward_range", None)),
            report_to=reporter_names(settings.pop("report_to", None)),
            **settings,
            **more,
        )

    def _configure(self, train: Sequence[Any], val: Sequence[Any]) -> RunConfig:
        return replace(
            self._config, train=list(train), val=list(val), progress=self.progress,
            stop=threading.Event(),
        )  # fmt: skip

    def _run_fit(self, config: RunConfig) -> Fit:
        warn_of_former("LIGHTNING_OTEL_TRAIN")
        if config.train:
            require_agent(config)
        settle_pending(self.store)  # feedback that came before what it judges
        origin, self._origin = self._origin, None
        remembers = self.latest is not None and origin is None
        run = Run(config, self.algorithm, origin, remembers=remembers)
        self.latest = run.run
        # The algorithm remembers, so that what it was trained on is not to come again.
        self._config = replace(self._config, consumer=run.run.consumer)
        if self.started is not None:
            self.started(run.run)
        return run.fit()


def _check_numbers(settings: Mapping[str, Any], algorithm: BaseAlgorithm) -> None:
    for name, least in _LEAST.items():
        if settings.get(name) is not None:
            check_whole(name, settings[name], least)
    check_finite("reward_timeout_s", settings.get("reward_timeout_s", 0.0))
    if settings.get("timeout_s") is not None:
        check_seconds("timeout_s", settings["timeout_s"])
    samples = settings.get("samples")
    if samples is not None and samples < max(algorithm.group_size, 1):
        raise ConfigError(
            f"samples is {samples}; {name_of(algorithm)} compares {algorithm.group_size} rollouts "
            "of a task or more"
        )
