"""The offline demo: a toy policy behind a server, and a real agent."""

import contextlib
import math
import random
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from lightning_otel import config
from lightning_otel.dataset import Store
from lightning_otel.demo.agent import solve
from lightning_otel.demo.policy import STYLES, ToyPolicy, style_of
from lightning_otel.demo.server import DemoServer
from lightning_otel.errors import ConfigError, NotInstalledError, install_command
from lightning_otel.messages import plain_text
from lightning_otel.tracing import auto_trace
from lightning_otel.tracing.emitters import emit_reward
from lightning_otel.types import Transition

_RATE: Final = 2.0


@dataclass(frozen=True, slots=True)
class TaskOutcome:
    """One task of the demo: what was asked, answered and earned."""

    question: str
    answer: str
    reward: float
    rollout_id: str


class Lesson(NamedTuple):
    """The result of learning."""

    outcomes: list[TaskOutcome]
    versions: list[str]
    steps: int
    likely: dict[str, float]
    is_shuffled: bool = False


def tasks(count: int, seed: int) -> list[tuple[str, int]]:
    """Arithmetic questions and their right answers, the same for the same seed."""
    chance = random.Random(seed)
    pairs = [(chance.randint(11, 99), chance.randint(11, 99)) for _ in range(count)]
    return [(f"What is {a}*{b}?", a * b) for a, b in pairs]


def train(
    store: Store,
    *,
    rollouts: int = 240,
    batch: int = 24,
    seed: int = 0,
    is_shuffled: bool = False,
    progress: Callable[[TaskOutcome], None] = lambda outcome: None,
) -> Lesson:
    """Run rounds of tasks; after each the policy learns from the round's stored transitions.

    Shuffled, as a control, rewards are dealt to any answers of their round before.

    Raises:
        ConfigError: The ``openai`` package is not installed, or recording is switched off.
        StoreError: The store cannot be made, or does not hold what was recorded.
    """
    policy, work = ToyPolicy(), tasks(rollouts, seed)
    name = f"toy-{secrets.token_hex(3)}"
    lesson = Lesson([], [], 0, {}, is_shuffled)
    dealt_by = random.Random(seed) if is_shuffled else None
    with _open_client(store, policy, seed) as client:
        for start in range(0, rollouts, batch):
            version, since_ns = f"{name}@{start // batch + 1}", time.time_ns()
            lesson.versions.append(version)
            part = work[start : start + batch]
            lesson.outcomes.extend(_work_tasks(store, client, part, progress, version))
            back = store.transitions(since=since_ns, resource_version=version, rewarded=True)
            lesson = lesson._replace(steps=lesson.steps + _learn(policy, back, dealt_by=dealt_by))
    likely = {style: math.exp(logprob) for style, logprob in policy.logprobs().items()}
    return lesson._replace(likely=likely)


def _learn(
    policy: ToyPolicy, steps: Iterable[Transition], *, dealt_by: random.Random | None = None
) -> int:
    """Make what earned more than the others likelier, by one step of the policy's gradient.

    Source: Williams 1992, REINFORCE, with the mean reward as the baseline.
    """
    data = [
        (style_of(plain_text(step.observation[-1:]), plain_text(step.action[:1])), step.reward)
        for step in steps
    ]
    pairs = [(style, reward) for style, reward in data if style is not None and reward is not None]
    if not pairs:
        return 0
    rewards = [reward for _, reward in pairs]
    if dealt_by is not None:
        dealt_by.shuffle(rewards)
    mean = sum(rewards) / len(rewards)
    likely = {style: math.exp(logprob) for style, logprob in policy.logprobs().items()}
    change = dict.fromkeys(STYLES, 0.0)
    for (chosen, _), reward in zip(pairs, rewards, strict=True):
        for style in STYLES:
            change[style] += (reward - mean) * ((style == chosen) - likely[style]) / len(pairs)
    weights = policy.weights
    policy.set_weights({style: weights[style] + _RATE * change[style] for style in STYLES})
    return len(pairs)


def _work_tasks(
    store: Store,
    client: Any,
    work: Iterable[tuple[str, int]],
    progress: Callable[[TaskOutcome], None],
    version: str,
) -> Iterator[TaskOutcome]:
    stamp: Any = {"resource_version": version, "mode": "train"}
    for question, want in work:
        task = {"question": question}
        with auto_trace(store=store, name="demo", task=task, agent="calc", **stamp) as recording:
            answer = solve(client, question)
            reward = float(answer.rstrip(".").endswith(f" {want}"))
            emit_reward(reward)
        outcome = TaskOutcome(question, answer, reward, recording.rollout_id)
        progress(outcome)
        yield outcome


@contextlib.contextmanager
def _open_client(store: Store, policy: ToyPolicy, seed: int) -> Iterator[Any]:
    try:
        import openai
    except ImportError as exc:
        raise NotInstalledError(
            "the demo talks through the openai client, which is not installed; "
            f"{install_command('demo')}"
        ) from exc
    if not config.is_enabled():
        raise ConfigError(
            "LIGHTNING_OTEL or OTEL_SDK_DISABLED switches off the recording that the demo shows; "
            f"unset {config.ENABLED.name} OTEL_SDK_DISABLED"
        )
    store.writer()
    with (
        DemoServer(policy, seed=seed) as server,
        openai.OpenAI(base_url=server.base_url, api_key="none-needed") as client,
    ):
        yield client
