"""A training run in one process: started or resumed, run under a lock, and finished."""

import contextlib
import logging
import math
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lightning_otel.algorithms import checkpoint as checkpoints
from lightning_otel.algorithms.base import BaseAlgorithm, Batch, StepResult, name_of
from lightning_otel.algorithms.batches import Collector
from lightning_otel.algorithms.checkpoint import Checkpoint, RunOrigin
from lightning_otel.algorithms.groups import read_members
from lightning_otel.algorithms.options import RunConfig
from lightning_otel.algorithms.promotion import Fit, promote
from lightning_otel.algorithms.reporters import open_reports
from lightning_otel.algorithms.tasks import RolloutResult, run_tasks
from lightning_otel.dataset.query import TransitionQuery
from lightning_otel.errors import (
    ConfigError,
    LightningOtelError,
    NotFoundError,
    NotInstalledError,
    install_command,
)
from lightning_otel.resources import bodies
from lightning_otel.state.runs import RunStatus
from lightning_otel.types import Mode, Resource

if TYPE_CHECKING:
    from lightning_otel.state.queue import Queue

log = logging.getLogger(__name__)

KEPT_CHECKPOINTS: Final = 2
_BEAT_S: Final = 20.0
_LONGEST_REASON: Final = 500


class Run:
    """A training run as its algorithm sees it: batches in, results out, and the signal to stop.

    Attributes:
        train: The tasks to learn from; empty if it learns from what is recorded.
        val: Held-out tasks; they may choose among candidates, and decide on promotion.
        options: Further options of the trainer.
        run: The run as it is written down.
        run_dir: A folder of its own.
        resume: Another process was at work on the run before: its files may be there.
        step: The number of committed steps.
        versions: The version of each resource that the next rollouts are given.
    """

    def __init__(
        self,
        config: RunConfig,
        algorithm: BaseAlgorithm,
        origin: RunOrigin | None = None,
        *,
        remembers: bool = False,
    ) -> None:
        """Start or continue a run; save at once what an algorithm ``remembers``."""
        self.config = config
        self.store, self.resources = config.store, config.resources
        self.train, self.val, self.options = config.train, config.val, config.options
        self._algorithm = algorithm
        self._origin = origin = origin or RunOrigin()
        self._remembers = remembers
        checkpoint = origin.kept
        self.run = origin.run or config.runs.start(
            name_of(algorithm),
            config.describe(),
            consumer=config.consumer or (checkpoint.consumer if checkpoint is not None else ""),
        )
        self.run_dir = config.run_dir / self.run.run_id
        self.resume = origin.run is not None
        self.step = self.run.step
        self.versions: dict[str, int] = dict(checkpoint.resources) if checkpoint is not None else {}
        self._claims = config.runs.claims(self.run)
        self._unpublished: dict[str, Any] = {}
        self._measured: dict[str, float] = {}
        self._yielded: list[Batch] = []
        self._is_used_up = False
        self._report_elsewhere: Callable[[int, Mapping[str, float]], None] = lambda *_: None
        self.left_out: Counter[str] = Counter()
        self._collector = Collector(
            config, algorithm, self._claims, self.versions, self.left_out, is_resumed=self.resume
        )

    def fit(self) -> Fit:
        """Run the algorithm until it ends or is stopped; write a failure down, and raise it."""
        runs, run_id = self.config.runs, self.run.run_id
        with checkpoints.lock_folder(self.run_dir):
            # Whoever was at work on it before is not any more: what it held is there again.
            self._claims.rewind(self.step)
            runs.rewind(run_id, self.step)
            dirs = {self._origin.folder, *(Path(item.place) for item in runs.checkpoints(run_id))}
            for folder in (self.run_dir / "checkpoints").glob("*"):
                if folder not in dirs:  # a killed process left it, whole or not
                    shutil.rmtree(folder, ignore_errors=True)
            try:
                with open_reports(self) as self._report_elsewhere:
                    return self._learn()
            except BaseException as exc:
                is_told = isinstance(exc, KeyboardInterrupt)
                status: RunStatus = "stopped" if is_told else "failed"
                reason = f"{type(exc).__name__}: {exc}"[:_LONGEST_REASON]
                with contextlib.suppress(LightningOtelError):  # what went wrong is told, and first
                    self._claims.rewind(self.step)
                    runs.set_status(run_id, status, "interrupted" if is_told else reason)
                raise

    def _learn(self) -> Fit:
        config, run_id = self.config, self.run.run_id
        self._restore_checkpoint()
        with self._hold_claims():
            if not self.should_stop():
                self._run_algorithm()
            if self._yielded:  # what it was given and did not commit by itself
                self.commit()
            is_stopped = config.stop.is_set()
            verdict = promote(self)
        self._claims.rewind(self.step)
        late = self._count_late()
        if late:
            self.log(self.step, {"late_rewards": float(late)})
        reason = "" if is_stopped else self._explain_few_steps()
        config.runs.set_status(run_id, "stopped" if is_stopped else "succeeded", reason)
        metrics = {metric.name: metric.value for metric in config.runs.metrics(run_id)}
        latest = {name: self.resources.get(name, item) for name, item in self.versions.items()}
        output = {name: item for name, item in latest.items() if item.run_id == run_id}
        return Fit(
            config.runs.get(run_id), metrics, output, verdict, dict(self.left_out.most_common())
        )

    def _explain_few_steps(self) -> str:
        most = self.config.max_iterations
        if most is None or self.step >= most:
            return ""
        why = f"{name_of(self._algorithm)} ended by itself"
        if self._is_used_up:
            why = "each recorded rollout trains once; record more, or lower min_batch_size"
        elif self.versions and not self.train:
            why += "; once its canary is promoted or withdrawn, train() goes on"
        return f"{self.step} of {most} steps: {why}"

    def _run_algorithm(self) -> None:
        try:
            self._algorithm.run(self)
        except ModuleNotFoundError as exc:
            if not self._algorithm.extra:
                raise
            raise NotInstalledError(
                f"{name_of(self._algorithm)} needs {exc.name}, which is not installed; "
                f"{install_command(self._algorithm.extra)}"
            ) from exc

    def _restore_checkpoint(self) -> None:
        origin = self._origin
        if origin.kept is None or origin.folder is None:
            if self._remembers:
                self.commit(step=0)  # a kill before the first step must not forget it
            return
        self._algorithm.load_state_dict(origin.kept.state)
        self._algorithm.load(origin.folder / checkpoints.FILES)
        if origin.run is None:
            self.versions.clear()  # versions of elsewhere mean something else here
            self.commit(step=0)
            return
        for checkpoint in self.config.runs.checkpoints(self.run.run_id):
            if checkpoint.step == self.step:
                self.versions.update(checkpoint.versions)
                self._publish_kept(checkpoint.step, checkpoint.unpublished)

    def _count_late(self) -> int:
        trained = {} if self.train else self._claims.read_trained()
        if not trained:
            return 0
        members = read_members(self.store, TransitionQuery.of({"rollout_id": list(trained)}).wanted)
        return sum(
            members[key].reward not in (None, reward)
            for key, reward in trained.items()
            if key in members and reward is not None
        )

    @contextlib.contextmanager
    def _hold_claims(self) -> Iterator[None]:
        over = threading.Event()

        def beat() -> None:
            while not over.wait(_BEAT_S):
                try:
                    self._claims.extend()
                    self.config.runs.heartbeat(self.run.run_id)
                except LightningOtelError:
                    log.debug("the run %s cannot be extended", self.run.run_id, exc_info=True)

        thread = threading.Thread(target=beat, name="lightning-otel-run", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    @property
    def queue(self) -> "Queue":
        """The queue of rollouts for workers elsewhere."""
        return self.config.queue

    def should_stop(self) -> bool:
        """Return True if the run is stopped, or all its steps are done."""
        most = self.config.max_iterations
        return self.config.stop.is_set() or (most is not None and self.step >= most)

    def batches(self) -> Iterator[Batch]:
        """Yield batches of whole groups that were never trained on, one for each step.

        It ends with the run or the data. An uncommitted batch comes again after a kill.

        Raises:
            TrainingError: There is nothing that the algorithm can learn from, and why.
        """
        most = self.config.max_iterations
        if most is None and self.train and not self.config.follows:
            most = 1  # tasks are never used up: once is what was asked for
        while not self.config.stop.is_set():
            number = self.step + len(self._yielded) + 1
            if most is not None and number > most:
                return
            batch = self._collector.next(number)
            if batch is None:
                self._is_used_up = True
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
    ) -> list[RolloutResult]:
        """Run the agent on tasks now; the rollouts are recorded, and never trained on elsewhere.

        Args:
            tasks: Any JSON values.
            resources: Overrides by name: a version, or a body, which becomes a private version.
            mode: The purpose of the rollouts.
            samples: Rollouts of each task.

        Returns:
            In the order of the tasks; a failed rollout has a reason, and no reward.

        Raises:
            ConfigError: There is no agent, and no runner elsewhere is announced.
        """
        pinned = dict(self.versions)
        for name, value in (resources or {}).items():
            if not isinstance(value, Resource):
                parent = self._parent_version(name)
                value = self.resources.publish(name, value, parent=parent, run_id=self.run.run_id)
            pinned[name] = value.version
        return run_tasks(self.config, tasks, pinned, mode=mode, samples=samples)

    def report(self, result: StepResult | Mapping[str, Any] | None) -> None:
        """Write down the result of a step; its resources are published once it is committed.

        Raises:
            ConfigError: It is no result, or a resource in it cannot be published.
        """
        step = StepResult.of(result)
        for name, body in step.resources.items():
            kind, _ = bodies.check_body(bodies.check_name(name), body, None)
            with contextlib.suppress(NotFoundError):
                resource = self.resources.get(name, 1)
                if resource.kind != kind:
                    raise ConfigError(
                        f"{name} is {resource.kind}, and what the step made is {kind}; publish it "
                        "under another name"
                    )
        self._unpublished.update(step.resources)
        latest = self._yielded[-1] if self._yielded else None
        measured = {**(latest.metrics() if latest is not None else {}), **step.metrics}
        # A loss that diverged is no reason for what is kept not to be published, again and again.
        self._measured = {name: item for name, item in measured.items() if math.isfinite(item)}
        if self._algorithm.canary_share is not None:
            for name in self.versions:
                self._measured[f"share/{name}"] = self.resources.canary_weight(name)
        exclusions = {f"left_out/{reason}": float(count) for reason, count in self.left_out.items()}
        number = latest.number if latest is not None else self.step + 1
        self.log(number, {**self._measured, **exclusions})

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write down numbers that were measured at a step, from 1."""
        self.config.runs.log(self.run.run_id, step, metrics)
        versions = {f"version/{name}": float(version) for name, version in self.versions.items()}
        self._report_elsewhere(step, {**metrics, **versions})

    def publish(
        self, name: str, body: Any, *, metrics: Mapping[str, float] | None = None
    ) -> Resource:
        """Publish a body as ``canary``; one that the newest version has stays that version.

        A canary that stands already keeps its share.
        """
        stands = "canary" in self.resources.aliases(name)
        resource = self.resources.publish(
            name,
            body,
            parent=self._parent_version(name),
            run_id=self.run.run_id,
            metrics=dict(metrics or {}),
            alias="canary",
            weight=None if stands else self._algorithm.canary_share,
        )
        self.versions[name] = resource.version
        return resource

    def commit(
        self,
        state: Mapping[str, Any] | None = None,
        *,
        batch: Batch | None = None,
        step: int | None = None,
    ) -> Path:
        """Write a checkpoint, acknowledge its rollouts, and publish.

        After a kill each row is either in the checkpoint that counts, or comes again.

        Args:
            state: The state to remember; by default the algorithm's ``state_dict``.
            batch: The last batch that was trained on; by default the last that was given.
            step: The number of steps; by default the number of that batch.

        Returns:
            The checkpoint's folder.

        Raises:
            ConfigError: The state is no JSON.
            StateError: Another process has taken the rollouts.
            TrainingError: It cannot be written.
        """
        runs, run = self.config.runs, self.run
        steps = [item for item in self._yielded if batch is None or item.number <= batch.number]
        number = max([item.number for item in steps], default=self.step) if step is None else step
        state = self._algorithm.state_dict() if state is None else state
        folder = self.run_dir / "checkpoints" / f"{number:08d}"
        checkpoint = Checkpoint(
            run.algorithm, run.run_id, run.consumer, number, dict(state), dict(self.versions)
        )
        checkpoints.write(folder, checkpoint, self._algorithm.save)
        unpublished = [
            {"name": name, "body": body, "metrics": self._measured}
            for name, body in self._unpublished.items()
        ]
        runs.keep_checkpoint(
            run.run_id,
            number,
            str(folder),
            claims=self._claims,
            rollout_ids=[rollout_id for item in steps for rollout_id in item.rollout_ids],
            unpublished=unpublished,
            versions=self.versions,
        )
        self.step = number
        self._yielded = self._yielded[len(steps) :]
        self._unpublished = {}
        self._publish_kept(number, unpublished)
        for old in runs.checkpoints(run.run_id)[KEPT_CHECKPOINTS:]:
            runs.delete_checkpoint(run.run_id, old.step)
            if Path(old.place).parent == folder.parent:  # a state names folders, and none else goes
                shutil.rmtree(old.place, ignore_errors=True)
        if self.config.progress is not None and steps:
            self.config.progress(number, self.config.max_iterations, self._measured)
        return folder

    def _publish_kept(self, step: int, unpublished: Sequence[Mapping[str, Any]]) -> None:
        for entry in unpublished:
            self.publish(entry["name"], entry["body"], metrics=entry["metrics"])
        if unpublished:
            self.config.runs.mark_published(self.run.run_id, step, self.versions)

    def _parent_version(self, name: str) -> int | None:
        version = self.versions.get(name)
        return version if version is not None else self.resources.aliases(name).get("live")
