"""Totals of a store and of each category: spans, rollouts, steps, rewards.

A rollout's category is what its task says under ``category``; else that of the resource it was
made with, as in ``system_prompt[image]``.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Final, NamedTuple

from lightning_otel.dataset import Store
from lightning_otel.messages import object_of
from lightning_otel.store.reader import Reader
from lightning_otel.store.source import read_overview
from lightning_otel.store.views import LAST_REWARD
from lightning_otel.types.values import parse_json

KEY: Final = "category"
"""Where a task says what kind it is of."""
_NAMED: Final = re.compile(r"[^\[\]]+\[([^\[\]]+)\]")
_ROLLOUTS: Final = f"""
SELECT sum(spans)::BIGINT AS spans, any_value(task) AS task, sum(rewards)::BIGINT AS rewards,
  {LAST_REWARD} AS reward,
  coalesce(sum(steps) FILTER (status <> 'incomplete'), 0)::BIGINT AS steps,
  coalesce(sum(rewarded) FILTER (status <> 'incomplete'), 0)::BIGINT AS rewarded_steps,
  arg_max(resources::VARCHAR, start_ns)
    FILTER (status <> 'incomplete' AND contains(resources::VARCHAR, '[')) AS resources
FROM rollouts GROUP BY rollout_id"""


def read_rollout_rewards(con: Reader) -> dict[str, float]:
    """Return the reward of each rollout that has one: its last attempt's."""
    query = f"SELECT rollout_id, {LAST_REWARD} FROM rollouts GROUP BY 1"
    rows = con.execute(query).fetchall()
    return {rollout_id: reward for rollout_id, reward in rows if reward is not None}


@dataclass(slots=True)
class Totals:
    """Counts that can be added up."""

    spans: int = 0
    rollouts: int = 0
    rewarded_rollouts: int = 0
    steps: int = 0
    rewarded_steps: int = 0
    rewards: int = 0
    reward_sum: float = 0.0  # over rollouts of what each earned

    @property
    def average_reward(self) -> float | None:
        """The mean over rollouts that have a reward; None without one, or where none has a step."""
        if not self.steps or not self.rewarded_rollouts:
            return None
        return self.reward_sum / self.rewarded_rollouts

    @property
    def rewarded_share(self) -> float | None:
        """The share of steps that have a reward; None without a step."""
        return self.rewarded_steps / self.steps if self.steps else None

    @property
    def rewarded_rollouts_share(self) -> float | None:
        """The share of rollouts that have a reward; None without a rollout."""
        return self.rewarded_rollouts / self.rollouts if self.rollouts else None

    def add(self, other: "Totals") -> None:
        """Add what others counted."""
        for field in fields(Totals):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


class StoreTotals(NamedTuple):
    """The totals of a store."""

    total: Totals
    categories: Mapping[str, Totals]


def count_totals(store: Store) -> StoreTotals:
    """Count a store's totals; read no message."""
    total, categories = Totals(), dict[str, Totals]()
    for row in read_overview(store.source, _ROLLOUTS):
        rollout = Totals(
            spans=row["spans"],
            rollouts=1,
            rewarded_rollouts=int(row["reward"] is not None),
            steps=row["steps"],
            rewarded_steps=row["rewarded_steps"],
            rewards=row["rewards"],
            reward_sum=row["reward"] or 0.0,
        )
        total.add(rollout)
        resources = json.loads(row["resources"] or "{}")
        if category := category_of_task(row["task"]) or category_of_resources(resources):
            categories.setdefault(category, Totals()).add(rollout)
    return StoreTotals(total, dict(sorted(categories.items())))


def category_of_task(text: str | None) -> str:
    """The category that a task says, as JSON text; empty if none."""
    # To parse the tasks of a large store takes long; others write no JSON there.
    task = parse_json(text) if text and KEY in text else None
    category = object_of(task).get(KEY)
    return category if isinstance(category, str) else ""


def category_of_resources(resources: Mapping[str, str]) -> str:
    """The category of what a step was made with; none where several are named."""
    matches = (_NAMED.fullmatch(name) for name in resources)
    categories = {match[1] for match in matches if match is not None}
    return categories.pop() if len(categories) == 1 else ""
