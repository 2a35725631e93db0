"""One search of GEPA's: over the texts of some prompts, on the tasks of one category."""

import contextlib
import hashlib
import json
import pickle
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

from lightning_otel.algorithms.apo.episodes import Episode, check_rewards, read_spans
from lightning_otel.algorithms.apo.texts import (
    Candidate,
    Records,
    Shots,
    TaskSet,
    Texts,
    Writer,
    is_examples,
)
from lightning_otel.algorithms.base import StepResult
from lightning_otel.algorithms.tasks import STOPPED
from lightning_otel.errors import ConfigError, TrainingError
from lightning_otel.store.files import write_private
from lightning_otel.types import Mode, Resource

if TYPE_CHECKING:
    from gepa.core.adapter import EvaluationBatch, GEPAAdapter, ProposalFn
    from gepa.core.callbacks import (
        EvaluationEndEvent,
        GEPACallback,
        StateSavedEvent,
        ValsetEvaluatedEvent,
    )
    from gepa.core.state import GEPAState

    from lightning_otel.algorithms.apo import APO
    from lightning_otel.algorithms.run import Run

Example: TypeAlias = tuple[Any, Mode]
"""A task, and whether one learns from it or chooses by it."""
FOLDER: Final = "gepa"
_FILE: Final = "gepa_state.bin"
_NOT_KEPT: Final = ("_budget_hooks", "evaluation_cache")


class StoppedError(Exception):
    """The run is to stop, and there is nothing to judge by."""


class Search:
    """GEPA's adapter, proposer, stopper and callback.

    GEPA catches what its callbacks raise and goes on; here that ends the search and is raised.

    Source: ``gepa.core.adapter.GEPAAdapter`` and ``gepa.core.callbacks`` of gepa 0.1.4.
    """

    propose_new_texts: None = None  # GEPA reads it: how texts are proposed is told it elsewhere

    def __init__(
        self,
        context: "Run",
        seeds: Sequence[Resource],
        part: TaskSet,
        apo: "APO",
        first: Sequence[Candidate],
        keep: Callable[[Mapping[str, Any]], None],
    ) -> None:
        self._context, self._part, self._apo = context, part, apo
        self._first, self._keep = first, keep
        self._texts = texts = Texts(seeds, with_examples=apo.few_shot > 0)
        self._writer = Writer(apo.writer, texts, context.store, apo.template)
        self._shots = Shots(apo.few_shot, perfect_score=apo.perfect_score, seed=apo.seed)
        tasks = [part.category, list(part.train), list(part.val)]
        settings = [*tasks, texts.names, apo.few_shot, apo.metric]
        self._fingerprint = hashlib.sha256(json.dumps(settings, default=repr).encode()).hexdigest()
        self._judged_by = "val_reward" if part.val else "train_reward"
        self._tried = 0  # of those that somebody wrote
        self._fault: BaseException | None = None
        self._state: GEPAState[Any, Any] | None = None
        self._published: Candidate | None = None
        self._has_reward = self._has_proposed = False
        self._measured: dict[str, float] = {}
        self._counts: Counter[str] = Counter()
        self._before = self._told = context.step  # steps of the run before this search

    def run(self, state: Mapping[str, Any] | None) -> None:
        """Search until the budget is spent, nothing is left to learn, or it is to stop."""
        if state is not None:
            self._before -= state.get("i", -1) + 1
        write_state(state, self._context.run_dir / FOLDER)
        try:
            self._optimize(is_resumed=state is not None)
        except StoppedError:
            return  # in the midst of an iteration, which is begun anew
        if self._fault is not None:
            raise self._fault
        self._commit_best()
        is_fruitless = state is None and not self._has_proposed and not self._context.should_stop()
        self._writer.check(is_needed=is_fruitless)

    def _optimize(self, *, is_resumed: bool) -> None:
        from gepa.api import optimize
        from gepa.strategies.eval_policy import FullEvaluationPolicy
        from gepa.utils.stop_condition import MaxCandidateProposalsStopper, ScoreThresholdStopper

        class EvaluationPolicy(FullEvaluationPolicy[Any, Any]):
            def get_seed_eval_batch(self, loader: Any) -> list[Any]:
                return [] if is_resumed else list(loader.all_ids())

        apo = self._apo
        train = [(task, "train") for task in self._part.train]
        stoppers: list[Any] = [self._is_over, MaxCandidateProposalsStopper(apo.num_candidates)]
        if apo.perfect_score is not None:
            stoppers.append(ScoreThresholdStopper(apo.perfect_score))
        optimize(
            seed_candidate=dict(self._texts.seed),
            trainset=train,
            valset=[(task, "val") for task in self._part.val] or train,
            adapter=cast("GEPAAdapter[Any, Any, Any]", self),
            custom_candidate_proposer=cast("ProposalFn", self._propose),
            reflection_minibatch_size=min(apo.minibatch_size, len(train)),
            skip_perfect_score=apo.perfect_score is not None,
            perfect_score=float("inf") if apo.perfect_score is None else apo.perfect_score,
            max_metric_calls=apo.max_metric_calls,
            stop_callbacks=stoppers,
            # What GEPA has to say are prompts and answers.
            logger=SimpleNamespace(log=lambda message: None),
            callbacks=[cast("GEPACallback", self)],
            run_dir=str(self._context.run_dir / FOLDER),
            track_best_outputs=False,
            seed=apo.seed,
            val_evaluation_policy=EvaluationPolicy(),
            **apo.gepa,
        )

    # GEPA's adapter.

    def evaluate(
        self,
        batch: list[Example],
        candidate: Candidate,
        capture_traces: bool = False,  # noqa: FBT001  # GEPA's signature
    ) -> "EvaluationBatch[Episode, str]":
        """Run the agent on each example."""
        from gepa.core.adapter import EvaluationBatch

        episodes = self._run_agent(batch, candidate) if batch else []
        if episodes and not self._has_reward:
            check_rewards(episodes, self._apo.metric)
            self._has_reward = True
        for episode in episodes:
            self._note_episode(episode)
        rewards = [dict(episode.rewards) for episode in episodes]
        return EvaluationBatch(
            outputs=[episode.rollout.rollout_id for episode in episodes],
            scores=[episode.score for episode in episodes],
            trajectories=episodes if capture_traces else None,
            objective_scores=rewards if all(rewards) else None,
        )

    def make_reflective_dataset(
        self,
        candidate: Candidate,
        eval_batch: "EvaluationBatch[Episode, str]",
        components_to_update: list[str],
    ) -> dict[str, list[dict[str, Any]]]:
        """Return for each text what the agent was given, answered and was told about it."""
        top, episodes = self._apo.perfect_score, eval_batch.trajectories or []
        return {
            name: [episode.record(name.rpartition("/")[0], top) for episode in episodes]
            for name in components_to_update
            if not is_examples(name)
        }

    def get_adapter_state(self) -> dict[str, Any]:
        """Return our state, which GEPA keeps beside its own."""
        shots = self._shots.state()
        return {"fingerprint": self._fingerprint, "tried": self._tried, "shots": shots}

    def set_adapter_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what it kept."""
        if not state:  # of a search that begins
            return
        if state["fingerprint"] != self._fingerprint:
            raise TrainingError(
                "the run to go on with searched for other resources or on other tasks; give the "
                "same ones in the same order, or begin a new run"
            )
        self._tried = state["tried"]
        if state["shots"] is not None:
            self._shots.load(state["shots"])

    def _run_agent(self, batch: Sequence[Example], candidate: Candidate) -> list[Episode]:
        context, resources = self._context, self._context.resources
        # Published versions with the same text, else bodies.
        overrides = {
            name: next(
                (item for item in reversed(resources.versions(name)) if item.body == body), body
            )
            for name, body in self._texts.bodies(candidate).items()
        }
        ran = context.run_agent([task for task, _ in batch], resources=overrides, mode=batch[0][1])
        if any(rollout.reason == STOPPED for rollout, _ in ran):
            raise StoppedError
        attempts = {rollout.rollout_id: str(rollout.attempts) for rollout, _ in ran}
        spans = read_spans(context.store, attempts)
        return [
            Episode.of(rollout, trajectories, spans[rollout.rollout_id], self._apo)
            for rollout, trajectories in ran
        ]

    def _note_episode(self, episode: Episode) -> None:
        if episode.rollout.status != "succeeded":
            self._counts["failed"] += 1
        elif episode.reward is None:
            self._counts["unrewarded"] += 1
        top = self._apo.perfect_score
        if top is not None and episode.score > top:
            raise ConfigError(
                f"a reward is {episode.score}, above the perfect_score {top}, at which nothing is "
                "left to learn; give perfect_score=… the most a reward can be, or None"
            )
        if self._apo.few_shot and episode.rollout.mode == "train":
            self._shots.add_answers(episode.trajectories, episode.reward)

    # GEPA's proposer, stopper and callback.

    def _propose(
        self, candidate: Candidate, records: Records, components: Sequence[str]
    ) -> Candidate:
        with self._keep_fault():
            if self._tried < len(self._first):
                self._tried += 1
                self._has_proposed = True
                return self._first[self._tried - 1]
            proposal = self._writer.rewrite(
                candidate, {name: records[name] for name in components if not is_examples(name)}
            )
            for name in filter(is_examples, components):
                if drawn := self._shots.draw_examples(candidate[name]):
                    proposal[name] = drawn
            self._has_proposed = self._has_proposed or bool(proposal)
            return proposal

    def _is_over(self, gepa_state: "GEPAState[Any, Any]") -> bool:
        self._state = gepa_state
        if self._fault is not None or self._writer.is_given_up:
            return True
        return self._context.should_stop()

    def on_state_saved(self, event: "StateSavedEvent") -> None:
        """Keep where the search stands, and only then give away what is best in it."""
        with self._keep_fault():
            self._commit_best()

    def on_valset_evaluated(self, event: "ValsetEvaluatedEvent") -> None:
        """Measure a candidate that was tried on every task that one chooses by."""
        self._measured[f"candidate_{self._judged_by}"] = event["average_score"]

    def on_evaluation_end(self, event: "EvaluationEndEvent") -> None:
        """Measure a candidate on a few training tasks, before it is changed."""
        scores = event["scores"]
        if event["candidate_idx"] is not None and scores:
            self._measured["reward"] = sum(scores) / len(scores)

    @contextlib.contextmanager
    def _keep_fault(self) -> Iterator[None]:
        try:
            yield
        except BaseException as exc:
            self._fault = self._fault or exc
            raise

    def _commit_best(self) -> None:
        state, context, part = self._state, self._context, self._part
        if state is None:
            return
        scores = state.program_full_scores_val_set
        best = max(range(len(scores)), key=scores.__getitem__)
        step = self._before + state.i + 1
        metrics = {**self._measured, self._judged_by: scores[best]}
        metrics["rollouts"] = float(state.total_num_evals)
        metrics |= {key: float(count) for key, count in self._counts.items() if count}
        if step > context.step:
            context.report(StepResult(part.prefix_metrics(metrics)))
            context.step = step
        elif state.i < 0:  # what there was to begin with
            context.log(step, part.prefix_metrics(metrics))
        self._measured.clear()
        self._keep(encode_state(state))
        progress = context.config.progress
        if progress is not None and step > self._told:
            self._told = step
            progress(step, context.config.max_iterations, part.prefix_metrics(metrics))
        if state.program_candidates[best] == self._published:
            return
        self._published = dict(state.program_candidates[best])
        for name, body in self._texts.changed_bodies(self._published).items():
            version = context.versions.get(name)
            # The run may have published it before a restart.
            if version is None or context.resources.get(name, version).body != body:
                context.publish(name, body, metrics={self._judged_by: scores[best]})


# GEPA keeps its state as a pickle, and to read one runs whatever it says. It is never read but from
# a folder into which it was written a moment before; what checkpoints hold is JSON.


def encode_state(state: "GEPAState[Any, Any]") -> dict[str, Any]:
    """GEPA's state as JSON."""
    return {key: _to_json(value) for key, value in vars(state).items() if key not in _NOT_KEPT}


def write_state(kept_state: Mapping[str, Any] | None, folder: Path) -> None:
    """Make a folder for GEPA: with the state to go on from, or with none."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700, parents=True)
    if kept_state is not None:
        write_private(folder / _FILE, pickle.dumps(decode_state(kept_state)))


def decode_state(kept_state: Mapping[str, Any]) -> dict[str, Any]:
    """GEPA's state as it was, by attribute."""
    try:
        state = {key: _from_json(value) for key, value in kept_state.items()}
    except (TypeError, ValueError, AttributeError) as exc:
        raise TrainingError(
            f"the search to go on with is damaged ({exc}); resume from another checkpoint"
        ) from exc
    return {**state, "evaluation_cache": None}


def _to_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {"map": [[_to_json(key), _to_json(item)] for key, item in value.items()]}
    if isinstance(value, (set, frozenset)):
        return {"set": sorted(map(_to_json, value))}
    if isinstance(value, tuple):
        return {"tuple": [_to_json(item) for item in value]}
    if isinstance(value, list):
        return [_to_json(item) for item in value]
    return value


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "map":
        return {_from_json(key): _from_json(item) for key, item in content}
    if kind not in ("set", "tuple"):
        raise ValueError(f"there is no {kind!r} in it")
    return (set if kind == "set" else tuple)(map(_from_json, content))
