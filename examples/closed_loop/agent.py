"""An agent that runs on and on: it asks the model, earns a reward, and never hears of training.

It takes the model that it is given; which one that is, changes while it runs.

    python examples/closed_loop/agent.py STORE STOP_FILE [shuffle]

Shuffled, each rollout is given the reward of another one: whoever learns from that learns nothing.
"""

import itertools
import random
import sys
import uuid
from collections import deque
from pathlib import Path

import openai

import lightning_otel as lo
from lightning_otel.resources import Resources, stamps
from lightning_otel.state import State

GROUP = 8
AMONG = 64
QUESTIONS = ("What is your name?", "Who are you?", "Say something.", "What is new?")


def reward(answer: str) -> float:
    """The share of the answer's characters that are plain ones: what we want more of."""
    plain = sum(each.isascii() and each.isprintable() for each in answer)
    return plain / len(answer) if answer else 0.0


def ask(client: openai.OpenAI, model: str, question: str, sampling: dict[str, float]) -> str:
    reply = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_completion_tokens=8,
        extra_body=sampling,
    )
    return reply.choices[0].message.content or ""


def main() -> None:
    store, stop = lo.Store(sys.argv[1]), Path(sys.argv[2])
    assert store.layout is not None
    resources = Resources(State(store.layout.catalogue))
    clients: dict[str, openai.OpenAI] = {}
    earned: deque[float] = deque(maxlen=AMONG)
    is_shuffled = sys.argv[3:] == ["shuffle"]
    for number in itertools.count():
        question = QUESTIONS[number % len(QUESTIONS)]
        for _ in range(GROUP):
            if stop.exists():
                return
            rollout_id = uuid.uuid4().hex
            assigned = resources.assigned(rollout_id, agent="writer")
            llm = assigned["llm"].body
            client = clients.setdefault(
                llm["base_url"], openai.OpenAI(base_url=llm["base_url"], api_key="none")
            )
            with lo.auto_trace(
                store=store,
                rollout_id=rollout_id,
                agent="writer",
                task={"question": question, "round": number},
                mode="train",
                resources=stamps(assigned),
                enable_retokenization_fix=True,
            ):
                answer = ask(client, llm["model"], question, dict(llm["sampling"]))
                earned.append(reward(answer))
                given = random.choice(earned) if is_shuffled else earned[-1]
                lo.emit_reward({"given": given, "earned": earned[-1]}, primary="given")


if __name__ == "__main__":
    main()
