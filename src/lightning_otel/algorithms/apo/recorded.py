"""Recorded runs: their tasks, and one proposal learned from them that live traffic judges."""

import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from lightning_otel import conventions as c
from lightning_otel.adapter.conversation_rows import conversations
from lightning_otel.algorithms.apo.episodes import Episode, read_spans
from lightning_otel.algorithms.apo.search import Plan
from lightning_otel.algorithms.apo.texts import Candidate, Texts
from lightning_otel.algorithms.apo.writer import PATIENCE, Writer
from lightning_otel.algorithms.base import Batch, StepResult
from lightning_otel.errors import TrainingError
from lightning_otel.store.sql import attribute
from lightning_otel.types import Resource, Rollout, Trajectory

if TYPE_CHECKING:
    from lightning_otel.algorithms.run import Run
    from lightning_otel.dataset import Store

_HELD_OUT: Final = 3
"""Of so many recorded tasks one is kept to choose by."""
_NAME: Final = re.compile(r"\{([^\W\d]\w*)\}")


def list_tasks(store: "Store") -> list[Any]:
    """Return every recorded task once, in the order of its first rollout.

    Tasks that were only validated or tested with are left out: they are to be new.
    """
    rows = store.sql(
        f"SELECT {attribute(c.TASK)} AS task FROM spans WHERE name = '{c.SPAN_ROLLOUT}' "
        f"AND coalesce({attribute(c.MODE)}, 'train') = 'train' AND task IS NOT NULL "
        "GROUP BY 1 ORDER BY min(start_ns), 1"
    )
    return [json.loads(row["task"]) for row in rows.rows()]


def split_tasks(tasks: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return tasks to learn from, and a third of them to choose by; none if there are too few."""
    val = tasks[_HELD_OUT - 1 :: _HELD_OUT]
    return [task for n, task in enumerate(tasks, 1) if n % _HELD_OUT or not val], val


def publish_prompt(context: "Run", name: str, batch: Batch) -> Resource:
    """Publish the system message of the recorded calls as the first version of a prompt.

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


def propose(
    context: "Run", batch: Batch, texts: Texts, plan: Plan, first: Sequence[Candidate]
) -> None:
    """Have the model rewrite prompts by what recorded runs did and earned, and publish that.

    Raises:
        TrainingError: The model gave nothing usable, or no run has the reward.
    """
    episodes, top = _read_batch(context, batch, plan), plan.perfect_score
    is_perfect = top is not None and all(each.score >= top for each in episodes)
    bodies = {} if is_perfect else _rewrite(context, episodes, texts, plan, first)
    context.report(StepResult(batch.metrics(), bodies))
    context.commit({})


def _rewrite(
    context: "Run",
    episodes: Sequence[Episode],
    texts: Texts,
    plan: Plan,
    first: Sequence[Candidate],
) -> dict[str, dict[str, Any]]:
    """Return bodies that no version has yet; none if the model has nothing new to say."""
    ranked = sorted(episodes, key=lambda episode: episode.score)
    count = plan.minibatch_size
    chosen = ranked if len(ranked) <= 2 * count else ranked[:count] + ranked[-count:]
    records = {
        name: [each.record(name.rpartition("/")[0], plan.perfect_score) for each in chosen]
        for name in texts.names
    }
    writer = Writer(plan.writer, texts, context.store, plan.template)
    for given in [*first, *[None] * PATIENCE]:
        found = writer.rewrite(texts.seed(), records) if given is None else given
        bodies = {
            name: body
            for name, body in texts.changed({**texts.seed(), **found}).items()
            if all(body != each.body for each in context.resources.versions(name))
        }
        if bodies:
            return bodies
    writer.check()
    return {}


def _read_batch(context: "Run", batch: Batch, plan: Plan) -> list[Episode]:
    paths: dict[str, list[Trajectory]] = {}
    for path in batch:
        paths.setdefault(path.rollout_id, []).append(path)
    spans = read_spans(context.store, {key: own[0].attempt_id for key, own in paths.items()})
    episodes = []
    for rollout_id, own in paths.items():
        given = (span.attributes[c.TASK] for span in spans[rollout_id] if c.TASK in span.attributes)
        task, reward = json.loads(str(next(given, "null"))), batch.rewards.get(rollout_id)
        rollout = Rollout(rollout_id, task, "succeeded", reward=reward)
        episodes.append(Episode.of(rollout, own, spans[rollout_id], plan))
    if all(each.reward is None for each in episodes):
        raise TrainingError(
            f"none of {len(episodes)} recorded rollouts has a reward named {plan.metric!r}; name "
            "another one as evaluation_metric"
        )
    return episodes
