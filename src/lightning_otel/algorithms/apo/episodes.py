"""Episodes: what the agent did on a task and earned, read back from the store alone."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from lightning_otel.adapter.conversations import make_conversations
from lightning_otel.adapter.rewards import read_reward
from lightning_otel.algorithms.apo.texts import PATIENCE, Candidate, Records, Texts, Writer
from lightning_otel.algorithms.base import Batch, StepResult
from lightning_otel.errors import TrainingError
from lightning_otel.store.schema import build_span
from lightning_otel.store.selection import Selection
from lightning_otel.types import Resource, Reward, Rollout, Span, Trajectory
from lightning_otel.types import conventions as c

if TYPE_CHECKING:
    from lightning_otel.algorithms.apo import APO
    from lightning_otel.algorithms.run import Run
    from lightning_otel.dataset import Store

_HELD_OUT: Final = 3
"""Of so many recorded tasks one is kept to choose by."""
_NAME: Final = re.compile(r"\{([^\W\d]\w*)\}")
_LIMIT: Final = 4000
"""Characters of one text in what the reflection model reads: a few such texts fit its context."""
_NOTES: Final = (c.SPAN_MESSAGE, c.SPAN_OBJECT, c.SPAN_EXCEPTION)


@dataclass(frozen=True, slots=True)
class Episode:
    """The outcome of one task; ``score`` is what GEPA is told of it."""

    rollout: Rollout
    trajectories: Sequence[Trajectory]
    reward: float | None
    rewards: Mapping[str, float]
    notes: tuple[str, ...]  # what was emitted besides, as text, in its order
    score: float

    @classmethod
    def of(
        cls,
        rollout: Rollout,
        trajectories: Sequence[Trajectory],
        spans: Iterable[Span],
        apo: "APO",
    ) -> "Episode":
        """Return the episode of a rollout."""
        notes, rewards = [], dict[str, float]()
        for span in spans:
            given = read_reward(span)
            if isinstance(given, Reward):
                rewards |= given.values
            notes.append(_word_span(span))
        reward = rollout.reward if apo.metric is None else rewards.get(apo.metric)
        if rollout.status != "succeeded":
            reward = None
        score = apo.failure_score if reward is None else reward
        return cls(rollout, trajectories, reward, rewards, tuple(filter(None, notes)), score)

    def record(self, agent: str, top: float | None) -> dict[str, Any]:
        """Return it as GEPA's template shows it: inputs, outputs, feedback."""
        paths = [path for path in self.trajectories if not agent or path.agent == agent]
        lines, answered = [], []
        for chat in make_conversations(paths):
            first, messages = chat.answers[0], chat.messages
            lines += [_word_message(item) for item in messages[:first] if item["role"] != "system"]
            answered += [_word_message(item) for item in messages[first:]]
        reason = self.rollout.reason
        failed = f"The agent failed: {reason}" if reason else ""
        return {
            "Inputs": {
                "Task": _cut_text(_word_value(self.rollout.task)),
                "Messages": _join_lines(lines),
            },
            "Generated Outputs": _join_lines(answered) or "(no answer of a model)",
            "Feedback": _join_lines([self._word_reward(top), *self.notes, failed]),
        }

    def _word_reward(self, top: float | None) -> str:
        if self.reward is None:
            return "" if self.rollout.reason else "No reward was given."
        best = "" if top is None else f" (the best is {top:g})"
        rewards = [f"{name} {value:g}" for name, value in self.rewards.items()]
        parts = f"; {', '.join(rewards)}" if len(rewards) > 1 else ""
        return f"Reward: {self.reward:g}{best}{parts}"


def read_spans(store: "Store", attempts: Mapping[str, str]) -> dict[str, list[Span]]:
    """Read the recorded spans of rollouts, each in one attempt, in order."""
    lists: dict[str, list[Span]] = {rollout_id: [] for rollout_id in attempts}
    selection = Selection(rollout_ids=tuple(attempts), is_ordered=True)
    for span in map(build_span, store.source.fetch(selection).dicts()):
        key = span.rollout_id
        # What was given from elsewhere names no attempt.
        if key in lists and span.attributes.get(c.ATTEMPT_ID) in (None, attempts[key]):
            lists[key].append(span)
    return lists


def check_rewards(episodes: Sequence[Episode], metric: str | None) -> None:
    """Check that one of the first episodes has a reward."""
    if any(episode.reward is not None for episode in episodes):
        return
    count = len(episodes)
    failed = [episode.rollout for episode in episodes if episode.rollout.status != "succeeded"]
    if len(failed) == count:
        raise TrainingError(
            f"the agent failed on each of {count} tasks, the first time with: "
            f"{failed[0].reason or failed[0].status}; make it work before its prompt is changed"
        )
    if metric is not None:
        names = sorted({name for episode in episodes for name in episode.rewards})
        raise TrainingError(
            f"none of {count} rollouts has a reward named {metric!r}; "
            f"they have {', '.join(names) or 'none'}: name one of them as evaluation_metric"
        )
    raise TrainingError(
        f"none of {count} rollouts has a reward; return a number from the agent, or call "
        "emit_reward() in it"
    )


def _word_span(span: Span) -> str:
    attributes = span.attributes
    if span.name not in _NOTES:
        return str(attributes.get(c.FEEDBACK_TEXT) or "")
    keys = (c.MESSAGE_BODY, c.OBJECT_LITERAL, c.OBJECT_JSON, c.EXCEPTION_MESSAGE)
    return next((str(attributes[key]) for key in keys if key in attributes), "")


def _word_message(message: Mapping[str, Any]) -> str:
    calls = [
        f"{call['function']['name']}({call['function']['arguments']})"
        for call in message.get("tool_calls") or ()
        if call.get("function")
    ]
    content = message.get("content")
    words = content if isinstance(content, str) else _word_value(content) if content else ""
    return f"{message['role']}: {' '.join(filter(None, (words, *calls)))}"


def _word_value(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _join_lines(lines: Iterable[str]) -> str:
    return "\n".join(_cut_text(line) for line in lines if line)


def _cut_text(text: str) -> str:
    if len(text) <= _LIMIT:
        return text
    half = _LIMIT // 2
    return f"{text[:half]} … {text[-half:]}"


def list_tasks(store: "Store") -> list[Any]:
    """Return each recorded training task once, in the order of its first rollout."""
    rows = store.sql(
        "SELECT task FROM rollouts WHERE coalesce(mode, 'train') = 'train' AND task IS NOT NULL "
        "GROUP BY 1 ORDER BY min(start_ns), 1"
    )
    return [json.loads(row["task"]) for row in rows.rows()]


def split_tasks(tasks: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return tasks to learn from, and a third to choose by, if there are enough."""
    val = tasks[_HELD_OUT - 1 :: _HELD_OUT]
    return [task for n, task in enumerate(tasks, 1) if n % _HELD_OUT or not val], val


def publish_prompt(context: "Run", name: str, batch: Batch) -> Resource:
    """Publish the recorded system message as a prompt's first version."""
    agent = name.rpartition("/")[0]
    prompts = Counter(
        str(chat.messages[0]["content"])
        for path in batch
        if not agent or path.agent == agent
        for chat in make_conversations([path])
        if chat.messages[0]["role"] == "system"
    )
    if not prompts:
        raise TrainingError(
            f"there is no resource {name!r}, and no recorded call has a system message to begin "
            f"with; lightning-otel resources publish {name} TEXT"
        )
    ((text, count),) = prompts.most_common(1)
    if 2 * count < prompts.total():
        raise TrainingError(
            f"there is no resource {name!r}, and the recorded calls have {len(prompts)} different "
            f"system messages; lightning-otel resources publish {name} TEXT"
        )
    return context.resources.publish(name, {"template": _NAME.sub(r"{{\1}}", text)})


def propose(
    context: "Run", batch: Batch, texts: Texts, apo: "APO", first: Sequence[Candidate]
) -> None:
    """Have the model rewrite prompts by recorded runs, and publish that."""
    ranked = sorted(_read_batch(context, batch, apo), key=lambda episode: episode.score)
    top, count = apo.perfect_score, apo.minibatch_size
    bodies: dict[str, dict[str, Any]] = {}
    if top is None or ranked[0].score < top:
        chosen = ranked if len(ranked) <= 2 * count else ranked[:count] + ranked[-count:]
        records = {
            name: [episode.record(name.rpartition("/")[0], top) for episode in chosen]
            for name in texts.names
        }
        bodies = _rewrite(context, records, texts, apo, first)
    context.report(StepResult(batch.metrics(), bodies))
    context.commit({})


def _rewrite(
    context: "Run", records: Records, texts: Texts, apo: "APO", first: Sequence[Candidate]
) -> dict[str, dict[str, Any]]:
    writer = Writer(apo.writer, texts, context.store, apo.template)
    for candidate in [*first, *[None] * PATIENCE]:
        changes = writer.rewrite(texts.seed, records) if candidate is None else candidate
        bodies = {
            name: body
            for name, body in texts.changed_bodies({**texts.seed, **changes}).items()
            if all(body != item.body for item in context.resources.versions(name))
        }
        if bodies:
            return bodies
    writer.check()
    return {}


def _read_batch(context: "Run", batch: Batch, apo: "APO") -> list[Episode]:
    paths: dict[str, list[Trajectory]] = {}
    for path in batch:
        paths.setdefault(path.rollout_id, []).append(path)
    spans = read_spans(context.store, {key: group[0].attempt_id for key, group in paths.items()})
    episodes = []
    for rollout_id, group in paths.items():
        tasks = (span.attributes[c.TASK] for span in spans[rollout_id] if c.TASK in span.attributes)
        task, reward = json.loads(str(next(tasks, "null"))), batch.rewards.get(rollout_id)
        rollout = Rollout(rollout_id, task, "succeeded", reward=reward)
        episodes.append(Episode.of(rollout, group, spans[rollout_id], apo))
    if all(item.reward is None for item in episodes):
        raise TrainingError(
            f"none of {len(episodes)} recorded rollouts has a reward named {apo.metric!r}; name "
            "another one as evaluation_metric"
        )
    return episodes
