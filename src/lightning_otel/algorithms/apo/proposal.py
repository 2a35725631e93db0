"""One proposal from recorded runs alone: no agent is run, and live traffic judges it later."""

import json
import re
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from lightning_otel import conventions as c
from lightning_otel.adapter.conversation_rows import conversations
from lightning_otel.algorithms.apo.episodes import Episode, Example, judge, record_of, spans_of
from lightning_otel.algorithms.apo.fault import Fault
from lightning_otel.algorithms.apo.memory import Memory
from lightning_otel.algorithms.apo.reflection import PATIENCE, Reflection
from lightning_otel.algorithms.apo.search import Plan
from lightning_otel.algorithms.apo.texts import Texts
from lightning_otel.algorithms.batch import Batch, StepResult
from lightning_otel.errors import TrainingError
from lightning_otel.types import Resource, Rollout, Trajectory

if TYPE_CHECKING:
    from lightning_otel.algorithms.base import Context

_NAME: Final = re.compile(r"\{([^\W\d]\w*)\}")


def publish_recorded(context: "Context", name: str, batch: Batch) -> Resource:
    """Publish the system message of the recorded calls as the first version of a prompt.

    Args:
        context: Of the training run.
        name: The resource; of ``agent/name`` the calls of that agent count.
        batch: What was recorded.

    Raises:
        TrainingError: The calls have none, or not most of them the same.
    """
    agent = name.rpartition("/")[0]
    said = Counter(
        str(found.messages[0]["content"])
        for path in batch
        if not agent or path.agent == agent
        for found in conversations([path])
        if found.messages[0]["role"] == "system"
    )
    if not said:
        raise TrainingError(
            f"there is no resource {name!r}, and no recorded call has a system message to begin "
            f"with; lightning-otel resources publish {name} TEXT"
        )
    ((text, count),) = said.most_common(1)
    if 2 * count < said.total():
        raise TrainingError(
            f"there is no resource {name!r}, and the recorded calls have {len(said)} different "
            f"system messages; lightning-otel resources publish {name} TEXT"
        )
    return context.resources.publish(name, {"template": _NAME.sub(r"{{\1}}", text)})


def propose(context: "Context", batch: Batch, texts: Texts, plan: Plan) -> None:
    """Have the model rewrite prompts by what recorded runs did and earned, and publish that.

    Args:
        context: Of the training run.
        batch: The runs.
        texts: The prompts.
        plan: How.

    Raises:
        TrainingError: The model gave nothing usable, or no run has the reward.
    """
    episodes = _episodes_of(context, batch, plan)
    reached = [plan.perfect_score is not None and e.score >= plan.perfect_score for e in episodes]
    bodies = {} if all(reached) else _rewrite_texts(context, episodes, texts, plan)
    context.report(StepResult(batch.metrics(), bodies))
    context.commit({})


def _rewrite_texts(
    context: "Context", episodes: list[Episode], texts: Texts, plan: Plan
) -> dict[str, dict[str, Any]]:
    """Bodies that no version has yet; none if the model has nothing new to say."""
    reflection = Reflection(
        plan.model,
        texts,
        Memory(""),
        context.store,
        Fault(),
        first=plan.first,
        template=plan.template,
    )
    ranked = sorted(episodes, key=lambda episode: episode.score)
    count = plan.minibatch_size
    chosen = ranked if len(ranked) <= 2 * count else ranked[:count] + ranked[-count:]
    records = {
        name: [record_of(each, name.rpartition("/")[0], plan.perfect_score) for each in chosen]
        for name in texts.names
    }
    for _ in range(PATIENCE + len(plan.first)):
        found = reflection(texts.seed(), records, texts.names)
        bodies = {
            name: body
            for name, body in texts.changed({**texts.seed(), **found}).items()
            if all(body != each.body for each in context.resources.versions(name))
        }
        if bodies:
            return bodies
    reflection.check()
    return {}


def _episodes_of(context: "Context", batch: Batch, plan: Plan) -> list[Episode]:
    paths: dict[str, list[Trajectory]] = {}
    for path in batch:
        paths.setdefault(path.rollout_id, []).append(path)
    spans = spans_of(context.store, {key: own[0].attempt_id for key, own in paths.items()})
    episodes = []
    for rollout_id, own in paths.items():
        given = (span.attributes[c.TASK] for span in spans[rollout_id] if c.TASK in span.attributes)
        task = json.loads(str(next(given, "null")))
        reward = batch.rewards.get(rollout_id)
        rollout = Rollout(rollout_id, task, "succeeded", reward=reward)
        example = Example(task, "train")
        episodes.append(
            judge(example, rollout, tuple(own), spans[rollout_id], plan.metric, plan.failure_score)
        )
    if all(each.reward is None for each in episodes):
        raise TrainingError(
            f"none of {len(episodes)} recorded rollouts has a reward named {plan.metric!r}; name "
            "another one as evaluation_metric"
        )
    return episodes
