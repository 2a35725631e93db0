"""The offline demo: a toy policy behind an OpenAI-compatible server, and a real agent before it.

The server is also what the tests and examples talk to.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning_otel import config
from lightning_otel.demo.agent import solve
from lightning_otel.demo.server import DemoServer
from lightning_otel.emitters import emit_reward
from lightning_otel.errors import ConfigError
from lightning_otel.store import Store
from lightning_otel.tracing import auto_trace


@dataclass(frozen=True, slots=True)
class Outcome:
    """One task of the demo: what was asked, answered and earned."""

    question: str
    answer: str
    reward: float
    rollout_id: str


def tasks(count: int, seed: int) -> list[tuple[str, int]]:
    """Arithmetic questions and their right answers, the same for the same seed."""
    chance = random.Random(seed)
    pairs = [(chance.randint(11, 99), chance.randint(11, 99)) for _ in range(count)]
    return [(f"What is {a}*{b}?", a * b) for a, b in pairs]


def run_agent(
    store: Store,
    *,
    rollouts: int = 24,
    seed: int = 0,
    progress: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Let the agent work on each task under ``auto_trace``, and reward the right answers.

    Args:
        store: Where the spans go.
        rollouts: How many tasks.
        seed: Decides tasks and the policy's luck.
        progress: Told each outcome as it comes.

    Raises:
        ConfigError: The ``openai`` package is not installed, or recording is switched off.
        StoreError: The store cannot be made.
    """
    client_class = _openai()
    if not config.is_enabled():
        raise ConfigError(
            "LIGHTNING_OTEL or OTEL_SDK_DISABLED switches off the recording that the demo shows; "
            f"unset {config.ENABLED_ENV} OTEL_SDK_DISABLED"
        )
    store.writer()
    outcomes = []
    with (
        DemoServer(seed=seed) as server,
        client_class(base_url=server.base_url, api_key="none-needed") as client,
    ):
        for question, want in tasks(rollouts, seed):
            task = {"question": question}
            with auto_trace(store=store, name="demo", task=task, agent="calc") as recording:
                answer = solve(client, question)
                reward = float(answer.rstrip(".").endswith(f" {want}"))
                emit_reward(reward)
            outcomes.append(Outcome(question, answer, reward, recording.rollout_id))
            progress(outcomes[-1])
    return outcomes


def _openai() -> Any:
    try:
        import openai
    except ImportError as exc:
        raise ConfigError(
            "the demo talks through the openai client, which is not installed; "
            "pip install 'lightning-otel[demo]'"
        ) from exc
    return openai.OpenAI
