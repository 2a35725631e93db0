"""One search of GEPA's: over the texts of some prompts, on the tasks of one category."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from lightning_otel.algorithms.apo.episodes import Episodes, Example, StoppedError
from lightning_otel.algorithms.apo.fault import Fault
from lightning_otel.algorithms.apo.memory import Memory, put
from lightning_otel.algorithms.apo.reflection import Model, Reflection
from lightning_otel.algorithms.apo.shots import Shots
from lightning_otel.algorithms.apo.texts import Candidate, Texts
from lightning_otel.algorithms.apo.watch import Quiet, Watch, policy
from lightning_otel.types import Resource

if TYPE_CHECKING:
    from gepa.core.adapter import GEPAAdapter
    from gepa.core.callbacks import GEPACallback

    from lightning_otel.algorithms.base import Context

SEARCHED: Final = "gepa"
"""GEPA's folder within that of the run."""


@dataclass(frozen=True, slots=True)
class Part:
    """The tasks of one category; of all where there are none.

    Attributes:
        category: Its name; empty if there are none.
        train: Tasks to learn from.
        val: Tasks to choose by; empty to choose by those one learns from.
    """

    category: str
    train: Sequence[Any]
    val: Sequence[Any]

    @property
    def place(self) -> str:
        """The name in messages."""
        return f" of {self.category}" if self.category else ""

    def named(self, name: str) -> str:
        """Return the name of the resource that its tasks have in place of another."""
        return f"{name}[{self.category}]" if self.category else name

    def measured(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Metrics by names that no other category has."""
        prefix = f"{self.category}/" if self.category else ""
        return {f"{prefix}{name}": value for name, value in metrics.items()}

    def fingerprint(self, *further: object) -> str:
        """Return a digest of its tasks and of the settings that decide the search."""
        held = [self.category, list(self.train), list(self.val), *further]
        return hashlib.sha256(json.dumps(held, default=repr).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The settings of a search; see :class:`lightning_otel.algorithms.apo.APO`."""

    model: Model
    first: Sequence[Candidate]
    few_shot: int
    metric: str | None
    num_candidates: int
    max_metric_calls: int | None
    perfect_score: float | None
    failure_score: float
    minibatch_size: int
    template: str | Mapping[str, str] | None
    seed: int
    gepa: Mapping[str, Any]


def texts_of(seeds: Sequence[Resource], plan: Plan) -> Texts:
    """The texts that a search changes."""
    return Texts(seeds, with_examples=plan.few_shot > 0)


def search(
    context: "Context",
    seeds: Sequence[Resource],
    part: Part,
    plan: Plan,
    *,
    state: Mapping[str, Any] | None,
    keep: Callable[[Mapping[str, Any]], None],
) -> None:
    """Search until the budget is spent, nothing is left to learn, or it is to stop.

    Args:
        context: Of the training run.
        seeds: The prompts to begin with.
        part: The tasks.
        plan: How.
        state: Where to go on; None begins.
        keep: Told after each iteration where it stands.

    Raises:
        TrainingError: No rewards, a model without a usable text, or a state of another search.
        ConfigError: A reward lies above the perfect score.
    """
    texts = texts_of(seeds, plan)
    memory = Memory(part.fingerprint(texts.names, plan.few_shot, plan.metric), _make_shots(plan))
    fault = Fault()
    episodes = Episodes(
        context,
        texts,
        memory,
        metric=plan.metric,
        failure_score=plan.failure_score,
        perfect_score=plan.perfect_score,
    )
    reflection = Reflection(
        plan.model, texts, memory, context.store, fault, first=plan.first, template=plan.template
    )
    before = context.step - (state.get("i", -1) + 1 if state is not None else 0)
    watch = Watch(context, texts, episodes, reflection, fault, part=part, before=before, keep=keep)
    folder = context.run_dir / SEARCHED
    put(state, folder)
    try:
        _run_gepa(
            part,
            plan,
            episodes,
            reflection,
            watch,
            seed=texts.seed(),
            folder=folder,
            resumes=state is not None,
        )
    except StoppedError:
        return  # in the midst of an iteration, which is begun anew
    watch.end()


def _make_shots(plan: Plan) -> Shots | None:
    """Examples for the prompts, if the plan has any."""
    if not plan.few_shot:
        return None
    return Shots(plan.few_shot, perfect_score=plan.perfect_score, seed=plan.seed)


def _run_gepa(
    part: Part,
    plan: Plan,
    episodes: Episodes,
    reflection: Reflection,
    watch: Watch,
    *,
    seed: Candidate,
    folder: Path,
    resumes: bool,
) -> None:
    """Hand it all to GEPA, in GEPA's words."""
    from gepa.api import optimize

    train = [Example(task, "train") for task in part.train]
    optimize(
        seed_candidate=seed,
        trainset=train,
        valset=[Example(task, "val") for task in part.val] or train,
        adapter=cast("GEPAAdapter[Any, Any, Any]", episodes),
        custom_candidate_proposer=reflection,
        reflection_minibatch_size=min(plan.minibatch_size, len(train)),
        skip_perfect_score=plan.perfect_score is not None,
        perfect_score=plan.perfect_score if plan.perfect_score is not None else float("inf"),
        max_metric_calls=plan.max_metric_calls,
        stop_callbacks=[watch, *_make_stoppers(plan)],
        logger=Quiet(),
        callbacks=[cast("GEPACallback", watch)],
        run_dir=str(folder),
        track_best_outputs=False,
        seed=plan.seed,
        val_evaluation_policy=policy(resumes=resumes),
        **plan.gepa,
    )


def _make_stoppers(plan: Plan) -> list[Any]:
    from gepa.utils.stop_condition import MaxCandidateProposalsStopper, ScoreThresholdStopper

    found: list[Any] = [MaxCandidateProposalsStopper(plan.num_candidates)]
    if plan.perfect_score is not None:
        found.append(ScoreThresholdStopper(plan.perfect_score))
    return found
