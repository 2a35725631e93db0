"""Prompts as the search sees them: named texts to change, and examples of what went well.

A prompt is one text, its template; where examples are searched for too they are a second one, a
JSON list of chat messages.
"""

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from lightning_otel.adapter.conversation_rows import conversations
from lightning_otel.types import Conversation, Prompt, Resource, Trajectory

EXAMPLES: Final = "#examples"
"""What comes after a prompt's name in the name of its examples."""

Candidate = dict[str, str]
"""Texts by name: what is tried together."""
Pair = tuple[dict[str, Any], dict[str, Any]]
"""A question of a user, and the last answer."""
_TRIES: Final = 8


def is_examples(name: str) -> bool:
    """Return whether a text is a prompt's examples, rather than its template."""
    return name.endswith(EXAMPLES)


class Texts:
    """The prompts that a run changes: what they were, and what becomes of them."""

    def __init__(self, seeds: Sequence[Resource], *, with_examples: bool) -> None:
        """Take the prompts as they are."""
        self._seeds = {seed.name: seed for seed in seeds}
        self._with_examples = with_examples

    @property
    def names(self) -> list[str]:
        """The resources' names."""
        return list(self._seeds)

    def seed(self) -> Candidate:
        """The texts to begin with."""
        found = {}
        for name, seed in self._seeds.items():
            found[name] = str(seed.body["template"])
            if self._with_examples:
                found[name + EXAMPLES] = written(seed.body.get("examples") or ())
        return found

    def bodies(self, candidate: Candidate) -> dict[str, dict[str, Any]]:
        """The body of each resource, with a candidate's texts in place of its own."""
        found = {}
        for name, seed in self._seeds.items():
            body = {**seed.body, "template": candidate[name]}
            if self._with_examples:
                body["examples"] = json.loads(candidate[name + EXAMPLES])
            found[name] = body
        return found

    def changed(self, candidate: Candidate) -> dict[str, dict[str, Any]]:
        """Return the bodies that differ from before."""
        start = self.seed()
        return {
            name: body
            for name, body in self.bodies(candidate).items()
            if any(candidate[key] != start[key] for key in (name, name + EXAMPLES) if key in start)
        }

    def fault(self, name: str, template: str) -> str:
        """Return the reason to reject a template; empty if there is none.

        An agent fills in the placeholders it knows: of one that is new it knows no value, and
        without one of the old its task would never be told.
        """
        if not template.strip():
            return "the text is empty"
        if any("\ud800" <= letter <= "\udfff" for letter in template):
            return "the text has half a letter (a lone surrogate) in it"
        want = set(self.placeholders(name))
        have = set(Prompt(template).placeholders)
        if lost := sorted(want - have):
            return f"the placeholders {_brace_names(lost)} are gone"
        if new := sorted(have - want):
            return (
                f"nobody fills in {_brace_names(new)}; double the braces of what is meant as text"
            )
        return ""

    def placeholders(self, name: str) -> tuple[str, ...]:
        """The names that the agent fills into a prompt."""
        return Prompt(str(self._seeds[name].body["template"])).placeholders


def written(examples: Iterable[Mapping[str, Any]]) -> str:
    """Return chat messages as the text that the search sees."""
    return json.dumps(list(examples), ensure_ascii=False, sort_keys=True)


def _brace_names(names: Iterable[str]) -> str:
    return ", ".join(f"{{{name}}}" for name in names)


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
