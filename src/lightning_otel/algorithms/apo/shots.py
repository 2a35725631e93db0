"""Few-shot examples: which of the conversations that earned a reward show best how it is meant."""

import json
import random
from collections.abc import Iterable, Mapping
from typing import Any

from lightning_otel.adapter.conversation_rows import conversations
from lightning_otel.algorithms.apo.texts import written
from lightning_otel.types import Conversation, Trajectory

Pair = tuple[dict[str, Any], dict[str, Any]]
"""What a user asked, and what was answered in the end."""


class Shots:
    """Conversations of training tasks with their rewards, and sets drawn of the good ones.

    Source: random search over bootstrapped demonstrations, Khattab et al. 2023 (arXiv 2310.03714,
    section 4).
    """

    def __init__(self, count: int, *, perfect_score: float | None, seed: int) -> None:
        """Draw at most so many examples at a time."""
        self._count = count
        self._perfect_score = perfect_score
        self._seed = seed
        self._drawn = 0
        self._known: dict[str, tuple[float, Pair]] = {}
        self._sum = 0.0
        self._taken = 0

    def take(self, trajectories: Iterable[Trajectory], reward: float | None) -> None:
        """Note what an agent did and earned; of one question the best answer is kept."""
        if reward is None:
            return
        self._sum += reward
        self._taken += 1
        for found in conversations(trajectories):
            pair = _find_pair(found)
            if pair is None:
                continue
            key = json.dumps(pair[0], sort_keys=True)
            if key not in self._known or self._known[key][0] < reward:
                self._known[key] = (reward, pair)

    def draw(self, current: str) -> str | None:
        """Other examples than the current ones, as text; None if there are no other good ones.

        Good is what earned the most possible, or more than the mean.
        """
        if not self._taken:
            return None
        mean, top = self._sum / self._taken, self._perfect_score
        good = [
            pair
            for reward, pair in self._known.values()
            if reward > mean or (top is not None and reward >= top)
        ]
        for _ in range(_TRIES):
            chance = random.Random(f"{self._seed}/{self._drawn}")
            self._drawn += 1
            drawn = chance.sample(good, min(self._count, len(good)))
            text = written(message for pair in drawn for message in pair)
            if drawn and text != current:
                return text
        return None

    def state(self) -> dict[str, Any]:
        """Return the state to resume from."""
        return {
            "known": dict(self._known),
            "drawn": self._drawn,
            "sum": self._sum,
            "taken": self._taken,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on with what was known."""
        self._known = dict(state["known"])
        self._drawn, self._sum, self._taken = state["drawn"], state["sum"], state["taken"]


_TRIES = 8


def _find_pair(found: Conversation) -> Pair | None:
    """The first question and the last answer; None where that is not what it consists of."""
    asked = next((said for said in found.messages if said["role"] == "user"), None)
    answered = found.messages[-1]
    if asked is None or answered["role"] != "assistant":
        return None
    if not isinstance(answered.get("content"), str) or not answered["content"].strip():
        return None
    return (
        {"role": "user", "content": asked["content"]},
        {"role": "assistant", "content": answered["content"]},
    )
