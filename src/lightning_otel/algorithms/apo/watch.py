"""Progress and end of a search."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from lightning_otel.algorithms.apo.episodes import Episodes
from lightning_otel.algorithms.apo.fault import Fault
from lightning_otel.algorithms.apo.memory import kept
from lightning_otel.algorithms.apo.reflection import Reflection
from lightning_otel.algorithms.apo.texts import Candidate, Texts
from lightning_otel.algorithms.batch import StepResult

if TYPE_CHECKING:
    from gepa.core.callbacks import (
        EvaluationEndEvent,
        StateSavedEvent,
        ValsetEvaluatedEvent,
    )
    from gepa.core.state import GEPAState

    from lightning_otel.algorithms.apo.search import Part
    from lightning_otel.algorithms.base import Context

    State = GEPAState[Any, Any]


class Quiet:
    """GEPA's logger: says nothing, for what GEPA has to say are prompts and answers."""

    def log(self, message: str) -> None:
        """Drop a line.

        Args:
            message: The line.
        """


class Watch:
    """A callback and stopper of GEPA's.

    GEPA catches what its callbacks raise and goes on: it is noted, ends the search, and is raised
    then.
    """

    def __init__(
        self,
        context: "Context",
        texts: Texts,
        episodes: Episodes,
        reflection: Reflection,
        fault: Fault,
        *,
        part: "Part",
        before: int,
        keep: Callable[[Mapping[str, Any]], None],
    ) -> None:
        """Prepare.

        Args:
            context: Of the training run.
            texts: The prompts that are changed.
            episodes: What was run.
            reflection: What proposed.
            fault: What went wrong.
            part: The tasks.
            before: Steps of the run before this search.
            keep: Told after each iteration where the search stands.
        """
        self._context = context
        self._texts = texts
        self._episodes = episodes
        self._reflection = reflection
        self._fault = fault
        self._part = part
        self._before = before
        self._keep = keep
        self._judged_by = "val_reward" if part.val else "train_reward"
        self._state: State | None = None
        self._published: Candidate | None = None
        self._measured: dict[str, float] = {}
        self._told = context.step

    def __call__(self, gepa_state: "State") -> bool:
        """Return whether the search ends; GEPA asks before each iteration."""
        self._state = gepa_state
        if self._fault.first is not None or self._reflection.is_given_up:
            return True
        return self._context.should_stop()

    def on_state_saved(self, event: "StateSavedEvent") -> None:
        """Keep where the search stands, and only then give away what is best in it."""
        with self._fault.noted():
            self._commit_best()

    def on_valset_evaluated(self, event: "ValsetEvaluatedEvent") -> None:
        """Measure a candidate that was tried on every task that one chooses by."""
        self._measured[f"candidate_{self._judged_by}"] = event["average_score"]

    def on_evaluation_end(self, event: "EvaluationEndEvent") -> None:
        """Measure a candidate on a few training tasks, before it is changed."""
        scores = event["scores"]
        if event["candidate_idx"] is not None and scores:
            self._measured["reward"] = sum(scores) / len(scores)

    def end(self) -> None:
        """Keep and publish what was best in the end, and say what went wrong, if anything did.

        Raises:
            TrainingError: The model gave nothing usable several times in a row.
        """
        self._fault.check()
        self._commit_best()
        self._reflection.check()

    def _commit_best(self) -> None:
        state = self._state
        if state is None:
            return
        scores = state.program_full_scores_val_set
        best = max(range(len(scores)), key=scores.__getitem__)
        step = self._before + state.i + 1
        found = {**self._measured, self._judged_by: scores[best]}
        found["rollouts"] = float(state.total_num_evals)
        found |= {key: float(count) for key, count in self._episodes.counts.items() if count}
        if step > self._context.step:
            self._context.report(StepResult(self._part.measured(found)))
            self._context.step = step
        elif state.i < 0:  # what there was to begin with
            self._context.log(step, self._part.measured(found))
        self._measured.clear()
        self._keep(kept(state))
        progress = self._context.setting.progress
        if progress is not None and step > self._told:
            self._told = step
            progress(step, self._context.setting.max_iterations, self._part.measured(found))
        if state.program_candidates[best] == self._published:
            return
        self._published = dict(state.program_candidates[best])
        for name, body in self._texts.changed(self._published).items():
            if not self._is_given(name, body):
                metrics = {self._judged_by: scores[best]}
                self._context.publish(name, body, metrics=metrics)

    def _is_given(self, name: str, body: Mapping[str, Any]) -> bool:
        """Return whether the run published it before a restart."""
        version = self._context.versions.get(name)
        return version is not None and self._context.resources.get(name, version).body == body


def policy(*, resumes: bool) -> Any:
    """GEPA's policy of validation, which does not try the seed once more after a restart.

    Args:
        resumes: Whether there is a state to go on from.
    """
    from gepa.strategies.eval_policy import FullEvaluationPolicy

    class Policy(FullEvaluationPolicy[Any, Any]):
        def get_seed_eval_batch(self, loader: Any) -> list[Any]:
            return [] if resumes else list(loader.all_ids())

    return Policy()
