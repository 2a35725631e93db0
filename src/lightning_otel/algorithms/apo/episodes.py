"""GEPA's adapter: run the agent with a candidate's texts and report the episodes.

Rewards and what the agent saw and did are read back from the store, never from the agent itself:
what the search learns from is what a user can look at.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from lightning_otel import conventions as c
from lightning_otel.adapter.conversation_rows import conversations
from lightning_otel.adapter.rewards import read_reward
from lightning_otel.algorithms.apo.memory import Memory
from lightning_otel.algorithms.apo.texts import Candidate, Texts, is_examples
from lightning_otel.algorithms.working import STOPPED
from lightning_otel.errors import ConfigError, TrainingError
from lightning_otel.store.schema import span_of
from lightning_otel.store.source import Selection
from lightning_otel.types import Mode, Reward, Rollout, Span, Trajectory

if TYPE_CHECKING:
    from gepa.core.adapter import EvaluationBatch

    from lightning_otel.algorithms.base import Context
    from lightning_otel.dataset import Store

_LIMIT: Final = 4000
"""Characters of one text in what the reflection model reads: a few such texts fit its context."""
_NOTES: Final = (c.SPAN_MESSAGE, c.SPAN_OBJECT, c.SPAN_EXCEPTION)


class StoppedError(Exception):
    """The run is to stop, and rollouts were left as they were: there is nothing to judge by."""


@dataclass(frozen=True, slots=True)
class Example:
    """A task, and whether one learns from it or chooses by it."""

    task: Any
    mode: Mode


@dataclass(frozen=True, slots=True)
class Episode:
    """The outcome of one task.

    Attributes:
        reward: What the agent earned; None if nothing says.
        rewards: Every named reward.
        notes: What was emitted besides, as text, in its order.
        score: What GEPA is told.
    """

    example: Example
    rollout: Rollout
    trajectories: tuple[Trajectory, ...]
    reward: float | None
    rewards: Mapping[str, float]
    notes: tuple[str, ...]
    score: float


class Episodes:
    """The ``GEPAAdapter`` of one search.

    Source: ``gepa.core.adapter.GEPAAdapter`` of gepa 0.1.4.
    """

    propose_new_texts: None = None  # GEPA reads it: how texts are proposed is told it elsewhere

    def __init__(
        self,
        context: "Context",
        texts: Texts,
        memory: Memory,
        *,
        metric: str | None = None,
        failure_score: float = 0.0,
        perfect_score: float | None = 1.0,
    ) -> None:
        """Prepare.

        Args:
            context: Of the training run.
            texts: The prompts that are changed.
            memory: Takes the conversations that examples are drawn from.
            metric: The named reward to raise; None is the primary one.
            failure_score: What an agent that raised, or was given no reward, is worth.
            perfect_score: The most a reward can be; None if there is no such number.
        """
        self._context = context
        self._texts = texts
        self._memory = memory
        self._metric = metric
        self._failure_score = failure_score
        self._perfect_score = perfect_score
        self._has_reward = False
        self.counts: Counter[str] = Counter()

    def evaluate(
        self,
        batch: list[Example],
        candidate: Candidate,
        capture_traces: bool = False,  # noqa: FBT001  # GEPA's signature
    ) -> "EvaluationBatch[Episode, str]":
        """Run the agent on each example.

        Raises:
            StoppedError: The run is to stop.
            TrainingError: The first time, no run of the agent earned a reward.
        """
        from gepa.core.adapter import EvaluationBatch

        episodes = self._run_batch(batch, candidate) if batch else []
        if episodes and not self._has_reward:
            self._check_episodes(episodes)
        for episode in episodes:
            self._note_episode(episode)
        named = [dict(episode.rewards) for episode in episodes]
        return EvaluationBatch(
            outputs=[episode.rollout.rollout_id for episode in episodes],
            scores=[episode.score for episode in episodes],
            trajectories=episodes if capture_traces else None,
            objective_scores=named if all(named) else None,
        )

    def make_reflective_dataset(
        self,
        candidate: Candidate,
        eval_batch: "EvaluationBatch[Episode, str]",
        components_to_update: list[str],
    ) -> dict[str, list[dict[str, Any]]]:
        """For each text what the agent was given, answered and was told about it."""
        episodes = eval_batch.trajectories or []
        return {
            name: [
                record_of(episode, name.rpartition("/")[0], self._perfect_score)
                for episode in episodes
            ]
            for name in components_to_update
            if not is_examples(name)
        }

    def get_adapter_state(self) -> dict[str, Any]:
        """Return our state, which GEPA keeps beside its own."""
        return self._memory.state()

    def set_adapter_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what it kept."""
        self._memory.load(state)

    def _run_batch(self, batch: Sequence[Example], candidate: Candidate) -> list[Episode]:
        ran = self._context.run_agent(
            [example.task for example in batch],
            resources=self._find_resources(candidate),
            mode=batch[0].mode,
        )
        if any(rollout.reason == STOPPED for rollout, _ in ran):
            raise StoppedError
        attempts = {rollout.rollout_id: str(rollout.attempts) for rollout, _ in ran}
        spans = spans_of(self._context.store, attempts)
        return [
            judge(
                example,
                rollout,
                tuple(trajectories),
                spans[rollout.rollout_id],
                self._metric,
                self._failure_score,
            )
            for example, (rollout, trajectories) in zip(batch, ran, strict=True)
        ]

    def _find_resources(self, candidate: Candidate) -> dict[str, Any]:
        """Return the agent's resources: published versions with the same text, else bodies."""
        resources = self._context.resources
        return {
            name: next(
                (each for each in reversed(resources.versions(name)) if each.body == body), body
            )
            for name, body in self._texts.bodies(candidate).items()
        }

    def _check_episodes(self, episodes: Sequence[Episode]) -> None:
        if any(episode.reward is not None for episode in episodes):
            self._has_reward = True
            return
        count = len(episodes)
        failed = [episode.rollout for episode in episodes if episode.rollout.status != "succeeded"]
        if len(failed) == count:
            raise TrainingError(
                f"the agent failed on each of {count} tasks, the first time with: "
                f"{failed[0].reason or failed[0].status}; make it work before its prompt is changed"
            )
        if self._metric is not None:
            known = sorted({name for episode in episodes for name in episode.rewards})
            raise TrainingError(
                f"none of {count} rollouts has a reward named {self._metric!r}; "
                f"they have {', '.join(known) or 'none'}: name one of them as evaluation_metric"
            )
        raise TrainingError(
            f"none of {count} rollouts has a reward; return a number from the agent, or call "
            "emit_reward() in it"
        )

    def _note_episode(self, episode: Episode) -> None:
        if episode.rollout.status != "succeeded":
            self.counts["failed"] += 1
        elif episode.reward is None:
            self.counts["unrewarded"] += 1
        top = self._perfect_score
        if top is not None and episode.score > top:
            raise ConfigError(
                f"a reward is {episode.score}, above the perfect_score {top}, at which nothing is "
                "left to learn; give perfect_score=… the most a reward can be, or None"
            )
        shots = self._memory.shots
        if shots is not None and episode.example.mode == "train":
            shots.take(episode.trajectories, episode.reward)


def spans_of(store: "Store", attempts: Mapping[str, str]) -> dict[str, list[Span]]:
    """Read the recorded spans of rollouts, each in one attempt, in order.

    Args:
        store: Where.
        attempts: The attempt that counts, by rollout.
    """
    found: dict[str, list[Span]] = {rollout_id: [] for rollout_id in attempts}
    selection = Selection(rollout_ids=tuple(attempts), is_ordered=True)
    for span in map(span_of, store.source.fetch(selection).dicts()):
        own = span.rollout_id
        # What was given from elsewhere names no attempt.
        if own in found and span.attributes.get(c.ATTEMPT_ID) in (None, attempts[own]):
            found[own].append(span)
    return found


def judge(
    example: Example,
    rollout: Rollout,
    trajectories: tuple[Trajectory, ...],
    spans: Sequence[Span],
    metric: str | None,
    failure_score: float,
) -> Episode:
    """Read what a rollout earned and was told.

    Args:
        example: Its task.
        rollout: The rollout.
        trajectories: What it did.
        spans: What was recorded of it.
        metric: The named reward that counts; None is the primary one.
        failure_score: What counts where there is none.
    """
    given = [each for each in map(read_reward, spans) if isinstance(each, Reward)]
    rewards = {name: value for each in given for name, value in each.values.items()}
    reward = rollout.reward if metric is None else rewards.get(metric)
    if rollout.status != "succeeded":
        reward = None
    return Episode(
        example,
        rollout,
        trajectories,
        reward,
        rewards,
        tuple(filter(None, map(_word_span, spans))),
        failure_score if reward is None else reward,
    )


def record_of(episode: Episode, agent: str, top: float | None) -> dict[str, Any]:
    """An episode as GEPA's template shows it: inputs, outputs, feedback.

    Args:
        episode: The episode.
        agent: Whose conversations; empty for all.
        top: The most a reward can be; None if there is no such number.
    """
    own = [each for each in episode.trajectories if not agent or each.agent == agent]
    given, answered = [], []
    for found in conversations(own):
        first = found.answers[0]
        given += [_one_line_of(said) for said in found.messages[:first] if said["role"] != "system"]
        answered += [_one_line_of(said) for said in found.messages[first:]]
    feedback = [_word_reward(episode, top), *episode.notes]
    if episode.rollout.reason:
        feedback.append(f"The agent failed: {episode.rollout.reason}")
    return {
        "Inputs": {
            "Task": _cut_text(_word_value(episode.example.task)),
            "Messages": _join_lines(given),
        },
        "Generated Outputs": _join_lines(answered) or "(no answer of a model)",
        "Feedback": _join_lines(feedback),
    }


def _word_reward(episode: Episode, top: float | None) -> str:
    if episode.reward is None:
        return "" if episode.rollout.reason else "No reward was given."
    best = "" if top is None else f" (the best is {top:g})"
    named = [f"{name} {value:g}" for name, value in episode.rewards.items()]
    parts = f"; {', '.join(named)}" if len(named) > 1 else ""
    return f"Reward: {episode.reward:g}{best}{parts}"


def _word_span(span: Span) -> str:
    attributes = span.attributes
    if span.name not in _NOTES:
        return str(attributes.get(c.FEEDBACK_TEXT) or "")
    keys = (c.MESSAGE_BODY, c.OBJECT_LITERAL, c.OBJECT_JSON, c.EXCEPTION_MESSAGE)
    return next((str(attributes[key]) for key in keys if key in attributes), "")


def _one_line_of(said: Mapping[str, Any]) -> str:
    calls = [
        f"{call['function']['name']}({call['function']['arguments']})"
        for call in said.get("tool_calls") or ()
        if call.get("function")
    ]
    content = said.get("content")
    words = content if isinstance(content, str) else _word_value(content) if content else ""
    return f"{said['role']}: {' '.join(filter(None, (words, *calls)))}"


def _word_value(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _join_lines(lines: Iterable[str]) -> str:
    return "\n".join(_cut_text(line) for line in lines if line)


def _cut_text(text: str) -> str:
    if len(text) <= _LIMIT:
        return text
    half = _LIMIT // 2
    return f"{text[:half]} … {text[-half:]}"
