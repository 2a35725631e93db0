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
from lightning_otel.algorithms.checkpoint import Checkpoint, Origin
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
        config: All settings.
        store: The store of the rollouts.
        resources: The versioned resources.
        train: The tasks to learn from; empty if it learns from what is recorded.
        val: Held-out tasks; they may choose among candidates, and decide on promotion.
        options: Further options of the trainer.
        run: The run as it is written down.
        run_dir: A folder of its own.
        resume: Another process was at work on the run before: its files may be there.
        step: The number of steps that are kept.
        versions: The version of each resource that the next rollouts are given.
    """

    def __init__(
        self,
        config: RunConfig,
        algorithm: BaseAlgorithm,
        origin: Origin | None = None,
        *,
        remembers: bool = False,
    ) -> None:
        """Start a run, or continue one.

        An algorithm that ``remembers`` has the state of an earlier run, which is saved at once.
        """
        self.config = config
        self.store, self.resources = config.store, config.resources
        self.train, self.val, self.options = config.train, config.val, config.options
        self._algorithm = algorithm
        self._origin = origin = origin or Origin()
        self._remembers = remembers
        kept = origin.kept
        self.run = origin.run or config.runs.start(
            name_of(algorithm),
            config.describe(),
            consumer=config.consumer or (kept.consumer if kept is not None else ""),
        )
        self.run_dir = config.run_dir / self.run.run_id
        self.resume = origin.run is not None
        self.step = self.run.step
        self.versions: dict[str, int] = dict(kept.resources) if kept is not None else {}
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
            kept = {self._origin.folder, *(Path(each.place) for each in runs.checkpoints(run_id))}
            for folder in (self.run_dir / "checkpoints").glob("*"):
                if folder not in kept:  # a killed process left it, whole or not
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
        metrics = {each.name: each.value for each in config.runs.metrics(run_id)}
        latest = {name: self.resources.get(name, each) for name, each in self.versions.items()}
        made = {name: each for name, each in latest.items() if each.run_id == run_id}
        return Fit(
            config.runs.get(run_id), metrics, made, verdict, dict(self.left_out.most_common())
        )

    def _explain_few_steps(self) -> str:
        """Return why there were fewer steps than were asked for; empty if there were not."""
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
                f"pip install 'lightning-otel[{self._algorithm.extra}]'"
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
        for each in self.config.runs.checkpoints(self.run.run_id):
            if each.step == self.step:
                self.versions.update(each.versions)
                self._publish_kept(each.step, each.unpublished)

    def _count_late(self) -> int:
        trained = {} if self.train else self._claims.read_trained()
        if not trained:
            return 0
        here = read_members(self.store, TransitionQuery.of({"rollout_id": list(trained)}).wanted)
        return sum(
            here[key].reward not in (None, reward)
            for key, reward in trained.items()
            if key in here and reward is not None
        )

    @contextlib.contextmanager
    def _hold_claims(self) -> Iterator[None]:
        """Extend the claims and the run's heartbeat within the block."""
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

        It ends when the run is stopped, or nothing is left to learn from. A batch that was not
        committed comes again after a kill.

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
        """Run the agent on tasks now; whatever it did is recorded, and never trained on but here.

        Args:
            tasks: Any JSON values.
            resources: Given to the agent besides what it has, by name: a version, or a body, which
                is kept as a version that nobody else is given.
            mode: The purpose of the rollouts.
            samples: Rollouts of each task.

        Returns:
            In the order of the tasks; a rollout that failed says why, and has no reward.

        Raises:
            ConfigError: There is no agent, and no runner elsewhere is announced.
        """
        pinned = dict(self.versions)
        for name, given in (resources or {}).items():
            if not isinstance(given, Resource):
                parent = self._parent_version(name)
                given = self.resources.publish(name, given, parent=parent, run_id=self.run.run_id)
            pinned[name] = given.version
        return run_tasks(self.config, tasks, pinned, mode=mode, samples=samples)

    def report(self, result: StepResult | Mapping[str, Any] | None) -> None:
        """Write down the result of a step; its resources are published once it is committed.

        Raises:
            ConfigError: It is no result of a step, or a resource in it cannot be published: said
                before the step is kept, as what is kept is published however often that fails.
        """
        step = StepResult.of(result)
        for name, body in step.resources.items():
            kind, _ = bodies.check_body(bodies.check_name(name), body, None)
            with contextlib.suppress(NotFoundError):
                held = self.resources.get(name, 1)
                if held.kind != kind:
                    raise ConfigError(
                        f"{name} is {held.kind}, and what the step made is {kind}; publish it "
                        "under another name"
                    )
        self._unpublished.update(step.resources)
        latest = self._yielded[-1] if self._yielded else None
        measured = {**(latest.metrics() if latest is not None else {}), **step.metrics}
        # A loss that diverged is no reason for what is kept not to be published, again and again.
        self._measured = {name: each for name, each in measured.items() if math.isfinite(each)}
        if self._algorithm.canary_share is not None:
            for name in self.versions:
                self._measured[f"share/{name}"] = self.resources.canary_weight(name)
        left = {f"left_out/{reason}": float(count) for reason, count in self.left_out.items()}
        number = latest.number if latest is not None else self.step + 1
        self.log(number, {**self._measured, **left})

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write down numbers that were measured at a step, from 1."""
        self.config.runs.log(self.run.run_id, step, metrics)
        versions = {f"version/{name}": float(each) for name, each in self.versions.items()}
        self._report_elsewhere(step, {**metrics, **versions})

    def publish(
        self, name: str, body: Any, *, metrics: Mapping[str, float] | None = None
    ) -> Resource:
        """Give the running agent a better version, as ``canary``; the run goes on with it.

        A canary that stands already keeps its share.

        A body that the newest version has already stays that version.
        """
        stands = "canary" in self.resources.aliases(name)  # with a share of its own
        made = self.resources.publish(
            name,
            body,
            parent=self._parent_version(name),
            run_id=self.run.run_id,
            metrics=dict(metrics or {}),
            alias="canary",
            weight=None if stands else self._algorithm.canary_share,
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
        """Write a checkpoint, acknowledge the rollouts that it was learnt from, and publish.

        After a kill each row is either in the checkpoint that counts, or comes again.

        Args:
            state: The state to remember; by default the algorithm's ``state_dict``.
            batch: The last batch that was trained on; by default the last that was given.
            step: The number of steps that makes, for a loop that counts them by itself; by default
                the number of that batch.

        Returns:
            The checkpoint's folder.

        Raises:
            ConfigError: The state is no JSON.
            StateError: Another process has taken the rollouts.
            TrainingError: It cannot be written.
        """
        runs, run = self.config.runs, self.run
        done = [each for each in self._yielded if batch is None or each.number <= batch.number]
        number = max([each.number for each in done], default=self.step) if step is None else step
        state = self._algorithm.state_dict() if state is None else state
        folder = self.run_dir / "checkpoints" / f"{number:08d}"
        kept = Checkpoint(
            run.algorithm, run.run_id, run.consumer, number, dict(state), dict(self.versions)
        )
        checkpoints.write(folder, kept, self._algorithm.save)
        unpublished = [
            {"name": name, "body": body, "metrics": self._measured}
            for name, body in self._unpublished.items()
        ]
        runs.keep_checkpoint(
            run.run_id,
            number,
            str(folder),
            claims=self._claims,
            rollout_ids=[rollout_id for each in done for rollout_id in each.rollout_ids],
            unpublished=unpublished,
            versions=self.versions,
        )
        self.step = number
        self._yielded = self._yielded[len(done) :]
        self._unpublished = {}
        self._publish_kept(number, unpublished)
        for old in runs.checkpoints(run.run_id)[KEPT_CHECKPOINTS:]:
            runs.delete_checkpoint(run.run_id, old.step)
            if Path(old.place).parent == folder.parent:  # a state names folders, and none else goes
                shutil.rmtree(old.place, ignore_errors=True)
        if self.config.progress is not None and done:
            self.config.progress(number, self.config.max_iterations, self._measured)
        return folder

    def _publish_kept(self, step: int, unpublished: Sequence[Mapping[str, Any]]) -> None:
        """Publish what a kept step made; harmless if it was published already."""
        for each in unpublished:
            self.publish(each["name"], each["body"], metrics=each["metrics"])
        if unpublished:
            self.config.runs.mark_published(self.run.run_id, step, self.versions)

    def _parent_version(self, name: str) -> int | None:
        version = self.versions.get(name)
        return version if version is not None else self.resources.aliases(name).get("live")
