"""Generated rollouts as Agent Lightning's own tracer records them: facts that spans are made of.

Programs run one thing after the other: agents in agents, chains, tools, calls with and without
token ids, calls recorded by two instrumentors one inside the other, rewards right after what they
judge, a final reward, and sometimes a root that never came. What else there is, is a difference.
"""

import json
import random
from typing import Any

CALL = "openai.chat.completion"
REWARD = "agentlightning.reward"
Fact = dict[str, Any]


class Program:
    """One generated rollout."""

    def __init__(self, seed: int) -> None:
        self.facts: list[Fact] = []
        self._rng = random.Random(seed)
        self._now = 0
        self._is_rewarded = True
        self.calls = 0
        root = self._open("run.session", None) if self._rng.random() < 0.9 else None
        for _ in range(self._rng.randint(1, 4)):
            self._work(root, 0)
        if not self._is_rewarded and self._rng.random() < 0.5:
            self._give(root)
        if root is not None:
            self._close(root)
            if self._rng.random() < 0.2:
                del self.facts[0]  # what was around everything never came

    def _tick(self) -> int:
        self._now += self._rng.randint(1, 3)
        return self._now

    def _open(self, name: str, parent: str | None, **attributes: Any) -> str:
        number = len(self.facts) + 1
        fact = {"number": number, "span_id": f"{number:016x}", "parent_id": parent, "name": name}
        fact |= {"start": 1_000_000 + self._tick(), "end": None, "attributes": attributes}
        self.facts.append(fact)
        return f"{number:016x}"

    def _close(self, span_id: str) -> None:
        self.facts[int(span_id, 16) - 1]["end"] = 1_000_000 + self._tick()

    def _work(self, parent: str | None, depth: int) -> None:
        kind = self._rng.random()
        if depth > 3 or kind < 0.55:
            self._ask(parent)
            while self._rng.random() < 0.2:
                self._close(self._open("tool", parent))
            if self._rng.random() < 0.35:
                self._give(parent)
            return
        if kind < 0.8:
            name = f"agent {self._rng.randint(0, 3)}"
            attributes = {"agentops.span.kind": "agent", "operation.name": name}
        else:
            name, attributes = "chain", {}
        inner = self._open(name, parent, **attributes)
        for _ in range(self._rng.randint(0, 3)):
            self._work(inner, depth + 1)
        self._close(inner)

    def _give(self, parent: str | None) -> None:
        self._is_rewarded = True
        value = self._rng.choice([0.0, 1.0, round(self._rng.random(), 3), -1.5])
        found = {f"{REWARD}.0.name": "primary", f"{REWARD}.0.value": value}
        if self._rng.random() < 0.3:
            found |= {f"{REWARD}.1.name": "style", f"{REWARD}.1.value": 0.5}
        self._open("agentlightning.annotation", parent, **found)
        self.facts[-1]["end"] = self.facts[-1]["start"]

    def _ask(self, parent: str | None) -> None:
        self.calls += 1
        attributes = self._exchange()
        outer = self._open(CALL, parent, **attributes)
        if self._rng.random() < 0.15:  # another instrumentor's record of the same request
            self._close(self._open(CALL, outer, **attributes))
        self._close(outer)
        self._is_rewarded = False

    def _exchange(self) -> dict[str, Any]:
        rng, number = self._rng, self.calls
        found: dict[str, Any] = {"gen_ai.response.id": f"chatcmpl-{number}"}
        roles = (
            ["system"] * rng.randint(0, 1) + ["user", "assistant"] * rng.randint(0, 2) + ["user"]
        )
        for index, role in enumerate(roles):
            found[f"gen_ai.prompt.{index}.role"] = role
            found[f"gen_ai.prompt.{index}.content"] = self._words()
        for index in range(rng.choice([1, 1, 1, 2])):
            row = f"gen_ai.completion.{index}"
            found[f"{row}.role"] = "assistant"
            found[f"{row}.content"] = f"answer {number}.{index} {self._words()}"
            found[f"{row}.finish_reason"] = "stop"
            for tool in range(rng.choice([0, 0, 0, 1, 2])):
                call = f"{row}.tool_calls.{tool}"
                found[f"{call}.id"] = f"call_{number}_{tool}"
                found[f"{call}.type"] = "function"
                found[f"{call}.name"] = f"tool_{tool}"
                found[f"{call}.arguments"] = json.dumps({"q": self._words(), "n": tool})
        if rng.random() < 0.7:
            found["prompt_token_ids"] = [rng.randrange(150_000) for _ in range(rng.randint(1, 9))]
            sampled = [rng.randrange(150_000) for _ in range(rng.randint(1, 9))]
            found["response_token_ids"] = sampled
            if rng.random() < 0.5:
                content = [{"token": "x", "logprob": -rng.random()} for _ in sampled]
                found["logprobs.content"] = json.dumps(content)
        return found

    def _words(self) -> str:
        return " ".join(self._rng.choice(["alpha", "β", "gamma", "{", "\n"]) for _ in range(4))
