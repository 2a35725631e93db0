"""One training run in one process: begun or resumed, alone in its folder, and brought to an end."""

import contextlib
import fcntl
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from lightning_otel import markup
from lightning_otel.algorithms import BaseAlgorithm, Context, name_of
from lightning_otel.algorithms import checkpoint as checkpoints
from lightning_otel.algorithms.checkpoint import Checkpoint
from lightning_otel.algorithms.groups import recorded
from lightning_otel.algorithms.setting import Setting
from lightning_otel.dataset.query import Asked
from lightning_otel.errors import (
    LightningOtelError,
    NotFoundError,
    NotInstalledError,
    TrainingError,
)
from lightning_otel.state.runs import Claims, RunStatus, TrainingRun
from lightning_otel.trainer.promotion import Verdict, promote
from lightning_otel.types import Resource

_LONGEST_REASON: Final = 500


@dataclass(frozen=True, slots=True)
class Fit:
    """The result of a training run.

    Attributes:
        run: The run, as it ended.
        metrics: What was measured last, by name.
        resources: What the run made, by name; the latest version of each.
        verdict: Whether that became live, and why.
        left_out: How many rollouts were of no use, by reason.
    """

    run: TrainingRun
    metrics: Mapping[str, float] = field(default_factory=dict)
    resources: Mapping[str, Resource] = field(default_factory=dict)
    verdict: Verdict = field(default_factory=Verdict)
    left_out: Mapping[str, int] = field(default_factory=dict)

    @property
    def promoted(self) -> tuple[str, ...]:
        """Names of the resources that became live."""
        return self.verdict.promoted

    @property
    def withdrawn(self) -> tuple[str, ...]:
        """Names of the resources whose candidate was worse, and is given to nobody any more."""
        return self.verdict.withdrawn

    def _repr_html_(self) -> str:
        """The run, what it measured last, made and left out, for notebooks."""
        rows: list[tuple[str, str, object]] = [
            ("made", str(made), self._word_place(name)) for name, made in self.resources.items()
        ]
        rows += [("measured", name, f"{value:g}") for name, value in self.metrics.items()]
        rows += [("left out", reason, f"{count:,}") for reason, count in self.left_out.items()]
        note = f"curves: lo.plot_training_metrics(runs={self.run.run_id!r})"
        told = f"{self.verdict.reason}; {note}" if self.verdict.reason else note
        return self.run._repr_html_() + markup.table(("", "", ""), rows, told)

    def _word_place(self, name: str) -> str:
        if name in self.withdrawn:
            return "withdrawn"
        return "live" if name in self.promoted else "canary"


@dataclass(frozen=True, slots=True)
class Origin:
    """The checkpoint that a run starts from.

    Attributes:
        run: The run, as it stands; None to begin one.
        folder: The checkpoint that is read; None if there is none yet.
        kept: What stands in it.
    """

    run: TrainingRun | None = None
    folder: Path | None = None
    kept: Checkpoint | None = None


def origin(setting: Setting, place: str | os.PathLike[str], algorithm: str) -> Origin:
    """Find the checkpoint that a person named.

    Args:
        setting: Where runs are written down.
        place: A run's id, or its beginning, ``@last``, or a checkpoint's folder.
        algorithm: The algorithm that is to go on.

    Raises:
        NotFoundError: There is no such run.
        TrainingError: It is one of another algorithm, or damaged.
    """
    path, runs = Path(place), setting.runs
    if not path.is_dir():
        if len(path.parts) > 1:
            raise TrainingError(
                f"no checkpoint at {path}; name a folder that save_checkpoint() made"
            )
        try:
            run = runs.get(os.fspath(place))
        except NotFoundError as exc:
            raise NotFoundError(f"no checkpoint at {path.absolute()}, and {exc}") from exc
        if run.algorithm != algorithm:
            raise TrainingError(
                f"{run.run_id} is a run of {run.algorithm}, not of {algorithm}; make the trainer "
                "with that algorithm, or start anew"
            )
        latest = next(iter(runs.checkpoints(run.run_id)), None)
        if latest is None:
            return Origin(replace(run, step=0))
        folder = Path(latest.place)
        return Origin(run, folder, _check_checkpoint(folder, algorithm))
    kept = _check_checkpoint(path, algorithm)
    try:
        return Origin(replace(runs.get(kept.run_id), step=kept.step), path, kept)
    except NotFoundError:
        return Origin(None, path, kept)  # it was made elsewhere: a run of its own begins here


def _check_checkpoint(folder: Path, algorithm: str) -> Checkpoint:
    kept = checkpoints.read(folder)
    checkpoints.check(kept, algorithm, folder)
    return kept


class Session:
    """A run while a process is at work on it."""

    def __init__(
        self,
        setting: Setting,
        algorithm: BaseAlgorithm,
        *,
        folder: Path,
        stop: threading.Event,
        options: Mapping[str, Any],
        config: Mapping[str, Any],
        consumer: str = "",
        goes_on: Origin | None = None,
        remembers: bool = False,
        min_gain: float = 0.0,
        started: Callable[[TrainingRun], None] | None = None,
    ) -> None:
        """Name what is to be done.

        Args:
            setting: What the run is set up with.
            algorithm: What learns.
            folder: Where runs have their folders.
            stop: Set when it is to stop.
            options: What the algorithm may ask the context for.
            config: What is written down of it.
            consumer: Whose claims it works with; by default its own.
            goes_on: Where it goes on from; by default it begins.
            remembers: Whether the algorithm knows of an earlier run what a checkpoint must hold.
            min_gain: How much more held-out reward makes a candidate live.
            started: Told of the run as soon as there is one.
        """
        self._setting = setting
        self._algorithm = algorithm
        self._folder = folder
        self._stop = stop
        self._options = options
        self._config = config
        self._consumer = consumer
        self._origin = goes_on or Origin()
        self._remembers = remembers
        self._min_gain = min_gain
        self._started = started
        self.run: TrainingRun | None = None

    def fit(self) -> Fit:
        """Run the algorithm to its end, or until it is told to stop.

        Raises:
            LightningOtelError: What it says; the run is written down as failed.
        """
        runs = self._setting.runs
        self.run = run = self._begin_run()
        if self._started is not None:
            self._started(run)
        with _lock_folder(self._folder / run.run_id) as run_dir:
            claims = runs.claims(run)
            # Whoever was at work on it before is not any more: what it held is there again.
            claims.rewind(run.step)
            runs.rewind(run.run_id, run.step)
            kept = {Path(each.place) for each in runs.checkpoints(run.run_id)}
            read = {self._origin.folder} if self._origin.folder is not None else set()
            checkpoints.clear(run_dir / "checkpoints", kept | read)
            context = Context(
                self._setting,
                self._algorithm,
                run,
                claims,
                run_dir=run_dir,
                stop=self._stop,
                options=self._options,
                resume=self._origin.run is not None,
                kept=self._origin.kept,
            )
            try:
                return self._make_fit(context, claims)
            except BaseException as exc:
                is_told = isinstance(exc, KeyboardInterrupt)
                status: RunStatus = "stopped" if is_told else "failed"
                reason = f"{type(exc).__name__}: {exc}"[:_LONGEST_REASON]
                with contextlib.suppress(LightningOtelError):  # what went wrong is told, and first
                    claims.rewind(context.step)
                    runs.set_status(run.run_id, status, "interrupted" if is_told else reason)
                raise

    def _begin_run(self) -> TrainingRun:
        if self._origin.run is not None:
            return self._origin.run
        kept = self._origin.kept
        consumer = self._consumer or (kept.consumer if kept is not None else "")
        return self._setting.runs.start(name_of(self._algorithm), self._config, consumer=consumer)

    def _make_fit(self, context: Context, claims: Claims) -> Fit:
        runs, run = self._setting.runs, context.run
        self._restore_checkpoint(context)
        with context.alive():
            if not context.should_stop():
                self._learn_steps(context)
            context.finish()
            is_stopped = self._stop.is_set()
            verdict = promote(context, self._setting, self._stop, min_gain=self._min_gain)
        claims.rewind(context.step)
        late = self._count_late(claims)
        if late:
            context.log(context.step, {"late_rewards": float(late)})
        runs.set_status(run.run_id, "stopped" if is_stopped else "succeeded")
        metrics = {each.name: each.value for each in runs.metrics(run.run_id)}
        made = {
            name: found
            for name, version in context.versions.items()
            if (found := self._setting.resources.get(name, version)).run_id == run.run_id
        }
        return Fit(runs.get(run.run_id), metrics, made, verdict, context.left_out)

    def _learn_steps(self, context: Context) -> None:
        try:
            self._algorithm.run(context)
        except ModuleNotFoundError as exc:
            if not self._algorithm.extra:
                raise
            raise NotInstalledError(
                f"{name_of(self._algorithm)} needs {exc.name}, which is not installed; "
                f"pip install 'lightning-otel[{self._algorithm.extra}]'"
            ) from exc

    def _restore_checkpoint(self, context: Context) -> None:
        found = self._origin
        if found.kept is None or found.folder is None:
            if self._remembers:
                context.commit(step=0)  # a kill before the first step must not forget it
            return
        self._algorithm.load_state_dict(found.kept.state)
        self._algorithm.load(checkpoints.files(found.folder))
        if found.run is None:
            context.versions.clear()  # versions of elsewhere mean something else here
            context.commit(step=0)
            return
        for each in self._setting.runs.checkpoints(context.run.run_id):
            if each.step == context.step:
                context.versions.update(each.versions)
                context.publish_kept(each.step, each.unpublished)

    def _count_late(self, claims: Claims) -> int:
        """Count recorded rollouts whose reward changed after training."""
        trained = {} if self._setting.train else claims.trained()
        if not trained:
            return 0
        wanted = Asked.of({"rollout_id": list(trained)}).wanted
        here = recorded(self._setting.store, wanted)
        return sum(
            here[key].member.reward not in (None, reward)
            for key, reward in trained.items()
            if key in here and reward is not None
        )


@contextlib.contextmanager
def _lock_folder(run_dir: Path) -> Iterator[Path]:
    """The folder of a run, which no other process of this machine is at work on."""
    run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(run_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise TrainingError(
                f"another process is at work on {run_dir.name}; stop it, or begin a run of its own"
            ) from exc
        yield run_dir
    finally:
        os.close(descriptor)
