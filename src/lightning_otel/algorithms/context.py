"""The training run as its algorithm sees it: experience in, results out, and when to stop."""

import contextlib
import logging
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lightning_otel.algorithms import checkpoint
from lightning_otel.algorithms.batch import Batch, StepResult
from lightning_otel.algorithms.checkpoint import Checkpoint
from lightning_otel.algorithms.collecting import Collector
from lightning_otel.algorithms.setting import Setting
from lightning_otel.algorithms.working import Ran, run_tasks
from lightning_otel.errors import ConfigError, LightningOtelError, NotFoundError
from lightning_otel.resources import bodies
from lightning_otel.state.runs import Claims, TrainingRun
from lightning_otel.types import Mode, Resource

if TYPE_CHECKING:
    from lightning_otel.algorithms.base import BaseAlgorithm
    from lightning_otel.dataset import Store
    from lightning_otel.resources import Resources
    from lightning_otel.state.queue import Queue

log = logging.getLogger(__name__)

KEPT_CHECKPOINTS: Final = 2


class Context:
    """A training run, as its algorithm sees it."""

    def __init__(
        self,
        setting: Setting,
        algorithm: "BaseAlgorithm",
        run: TrainingRun,
        claims: Claims,
        *,
        run_dir: Path,
        stop: threading.Event,
        options: Mapping[str, Any] | None = None,
        resume: bool = False,
        kept: Checkpoint | None = None,
    ) -> None:
        """Begin, or go on from a checkpoint.

        Args:
            setting: What the run is set up with.
            algorithm: The algorithm.
            run: The run.
            claims: The claims of its consumer, which this process holds.
            run_dir: A folder of its own.
            stop: Set when it is to stop.
            options: What else the trainer was given.
            resume: Whether another process was at work on the run before.
            kept: The checkpoint it goes on from.
        """
        self._setting = setting
        self._algorithm = algorithm
        self._claims = claims
        self._stop = stop
        self._progress = setting.progress
        self.run = run
        self.run_dir = run_dir
        self.options: Mapping[str, Any] = dict(options or {})
        self.resume = resume
        """Whether another process was at work on the run before: its files may be there."""
        self.step = run.step
        """How many steps are kept."""
        self.versions: dict[str, int] = dict(kept.resources) if kept is not None else {}
        """The version of each resource that the next rollouts are given."""
        self._unpublished: dict[str, Any] = {}
        self._measured: dict[str, float] = {}
        self._yielded: list[Batch] = []
        self._collector = Collector(setting, algorithm, claims, stop, lambda: self.versions)

    # What there is.

    @property
    def store(self) -> "Store":
        """The store of the rollouts."""
        return self._setting.store

    @property
    def queue(self) -> "Queue":
        """The queue of the rollouts."""
        return self._setting.queue

    @property
    def resources(self) -> "Resources":
        """The versioned resources."""
        return self._setting.resources

    @property
    def train(self) -> Sequence[Any]:
        """The tasks to learn from; empty if it learns from what is recorded."""
        return self._setting.train

    @property
    def val(self) -> Sequence[Any]:
        """Held-out tasks; they may choose among candidates, and decide on promotion."""
        return self._setting.val

    @property
    def setting(self) -> Setting:
        """All that the run is set up with."""
        return self._setting

    @property
    def left_out(self) -> dict[str, int]:
        """The number of rollouts left out, by reason."""
        return dict(self._collector.counts.most_common())

    def should_stop(self) -> bool:
        """Return whether to end: somebody asked for it, or all steps are done."""
        most = self._setting.max_iterations
        return self._stop.is_set() or (most is not None and self.step >= most)

    def batches(self) -> Iterator[Batch]:
        """Batch after batch of whole groups that were never trained on; each is for one step.

        It ends when it is time to stop, or there is nothing more to learn from. Whatever was given
        and is not committed comes again after a kill.

        Raises:
            TrainingError: There is nothing that the algorithm can learn from, and why.
        """
        setting = self._setting
        most = setting.max_iterations
        if most is None and setting.train and not setting.follows:
            most = 1  # tasks are never used up: once is what was asked for
        while not self._stop.is_set():
            number = self.step + len(self._yielded) + 1
            if most is not None and number > most:
                return
            batch = self._collector.next(number)
            if batch is None:
                return
            self._yielded.append(batch)
            yield batch

    def run_agent(
        self,
        tasks: Sequence[Any],
        resources: Mapping[str, Any] | None = None,
        mode: Mode = "val",
        *,
        samples: int = 1,
    ) -> list[Ran]:
        """Run the agent on tasks now; whatever it did is recorded, and never trained on but here.

        Args:
            tasks: Any JSON values.
            resources: By name what the agent is given besides what it has: a version, or a body,
                which is kept as a version that nobody else is given.
            mode: What the rollouts are for.
            samples: How many rollouts of each task.

        Returns:
            In the order of the tasks; a rollout that failed says why, and has no reward.

        Raises:
            ConfigError: There is no agent, and nobody was said to run one elsewhere.
        """
        versions = {
            name: self._find_version(name, given) for name, given in (resources or {}).items()
        }
        pinned = {**self.versions, **versions}
        return run_tasks(self._setting, tasks, pinned, self._stop, mode=mode, samples=samples)

    # What comes of it.

    def report(self, result: StepResult | Mapping[str, Any] | None) -> None:
        """Write down what a step came to; its resources are published once it is committed.

        Raises:
            ConfigError: It is no result of a step, or a resource in it cannot be published: said
                before the step is kept, as what is kept is published however often that fails.
        """
        found = StepResult.of(result)
        for name, body in found.resources.items():
            self._check_body(name, body)
        self._unpublished.update(found.resources)
        number = self._yielded[-1].number if self._yielded else self.step + 1
        told = self._yielded[-1].metrics() if self._yielded else {}
        left = {f"left_out/{reason}": float(count) for reason, count in self.left_out.items()}
        self._measured = {**told, **found.metrics}
        self.log(number, {**self._measured, **left})

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write down numbers that were measured at a step.

        Args:
            step: The step, from 1.
            metrics: Numbers by name, such as ``loss``.
        """
        self._setting.runs.log(self.run.run_id, step, metrics)

    def publish(
        self, name: str, body: Any, *, metrics: Mapping[str, float] | None = None
    ) -> Resource:
        """Give the running agent a better version, as ``canary``; the run goes on with it.

        Args:
            name: The resource.
            body: Its content; what the newest version says already stays that version.
            metrics: What it was measured by.
        """
        made = self.resources.publish(
            name,
            body,
            parent=self._parent_version(name),
            run_id=self.run.run_id,
            metrics=dict(metrics or {}),
            alias="canary",
        )
        self.versions[name] = made.version
        return made

    def commit(
        self,
        state: Mapping[str, Any] | None = None,
        *,
        batch: Batch | None = None,
        step: int | None = None,
    ) -> Path:
        """Keep what was learnt, and with it acknowledge what it was learnt from; then publish.

        Whatever kills the process, a row is either in the checkpoint that counts or comes again.

        Args:
            state: What to remember; by default what ``state_dict`` gives.
            batch: The last batch that was trained on; by default the last that was given.
            step: How many steps that makes; by default the number of that batch. For a loop that
                counts its steps by itself.

        Returns:
            The checkpoint's folder.

        Raises:
            ConfigError: The state is no JSON.
            StateError: Another process has taken the rollouts.
            TrainingError: It cannot be written.
        """
        done = [each for each in self._yielded if batch is None or each.number <= batch.number]
        number = max([each.number for each in done], default=self.step) if step is None else step
        folder = self._write_checkpoint(
            number, self._algorithm.state_dict() if state is None else state
        )
        unpublished = [
            {"name": name, "body": body, "metrics": self._measured}
            for name, body in self._unpublished.items()
        ]
        self._setting.runs.keep(
            self.run.run_id,
            number,
            str(folder),
            claims=self._claims,
            rollout_ids=[rollout_id for each in done for rollout_id in each.rollout_ids],
            unpublished=unpublished,
            versions=self.versions,
        )
        self.step = number
        self._yielded = [each for each in self._yielded if not any(each is one for one in done)]
        self._unpublished = {}
        self.publish_kept(number, unpublished)
        self._drop_old()
        if self._progress is not None and done:
            self._progress(number, self._setting.max_iterations, self._measured)
        return folder

    def _write_checkpoint(self, step: int, state: Mapping[str, Any]) -> Path:
        """The folder of a checkpoint, whole; it does not count yet."""
        folder = self.run_dir / "checkpoints" / f"{step:08d}"
        held = Checkpoint(
            algorithm=self.run.algorithm,
            run_id=self.run.run_id,
            consumer=self.run.consumer,
            step=step,
            state=dict(state),
            resources=dict(self.versions),
        )
        checkpoint.write(folder, held, self._algorithm.save)
        return folder

    def publish_kept(self, step: int, unpublished: Sequence[Mapping[str, Any]]) -> None:
        """Publish what a kept step made; harmless if it was published already.

        Args:
            step: The step.
            unpublished: Names, bodies and metrics.
        """
        for each in unpublished:
            self.publish(each["name"], each["body"], metrics=each["metrics"])
        if unpublished:
            self._setting.runs.published(self.run.run_id, step, self.versions)

    def finish(self) -> None:
        """Keep what the algorithm was given and did not commit by itself."""
        if self._yielded:
            self.commit()

    @contextlib.contextmanager
    def alive(self, every_s: float = 20.0) -> Iterator[None]:
        """Hold the claims and be seen for as long as this lasts.

        Args:
            every_s: How often, seconds.
        """
        over = threading.Event()

        def beat() -> None:
            while not over.wait(every_s):
                try:
                    self._claims.extend()
                    self._setting.runs.see(self.run.run_id)
                except LightningOtelError:
                    log.debug("the run %s cannot be extended", self.run.run_id, exc_info=True)

        thread = threading.Thread(target=beat, name="lightning-otel-run", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _check_body(self, name: str, body: Any) -> None:
        kind, _ = bodies.checked_body(bodies.checked_name(name), body, None)
        with contextlib.suppress(NotFoundError):
            held = self.resources.get(name, 1)
            if held.kind != kind:
                raise ConfigError(
                    f"{name} is {held.kind}, and what the step made is {kind}; publish it under "
                    "another name"
                )

    def _parent_version(self, name: str) -> int | None:
        found = self.versions.get(name)
        return found if found is not None else self.resources.aliases(name).get("live")

    def _find_version(self, name: str, given: Any) -> int:
        if isinstance(given, Resource):
            return given.version
        return self.resources.publish(
            name, given, parent=self._parent_version(name), run_id=self.run.run_id
        ).version

    def _drop_old(self) -> None:
        for old in self._setting.runs.checkpoints(self.run.run_id)[KEPT_CHECKPOINTS:]:
            self._setting.runs.forget(self.run.run_id, old.step)
            shutil.rmtree(old.place, ignore_errors=True)
