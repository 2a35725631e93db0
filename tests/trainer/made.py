"""Recorded rollouts and small algorithms for the tests of training."""

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.adapter.forest import call_attributes, token_attributes

from lightning_otel import Store, emit_action
from lightning_otel.adapter.agent_patterns import resources_text
from lightning_otel.algorithms import BaseAlgorithm, Batch, StepResult
from lightning_otel.tracing.emitters import reward_span
from lightning_otel.types import Resource, Span
from lightning_otel.types import conventions as c

_SECOND_NS = 1_000_000_000
_numbers = itertools.count(1)


def _ids(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def spans_of(
    rollout_id: str,
    task: object = "2+2?",
    reward: float | None = 1.0,
    *,
    mode: str | None = None,
    tokens: bool | Sequence[int] = False,
    temperature: float | None = None,
    logprobs_mode: str | None = None,
    resources: Mapping[str, int] | None = None,
) -> list[Span]:
    """The spans of one rollout with one call, as a runner or a traced program leaves them."""
    trace_id = _ids(rollout_id)[:32]
    start_ns = 1_700_000_000 * _SECOND_NS + next(_numbers) * _SECOND_NS
    own = {c.ROLLOUT_ID: rollout_id, c.ATTEMPT_ID: "1", c.AGENT_NAME: "solver", c.MODE: mode}
    stamps = {key: value for key, value in own.items() if value is not None}
    call = {
        **stamps,
        **call_attributes(str(task), f"{reward}"),
        c.REQUEST_TEMPERATURE: temperature,
        c.LOGPROBS_MODE: logprobs_mode,
        c.RESOURCES: resources_text({"*": dict(resources)}, None) if resources else None,
    }
    if tokens:
        ids = [4, 5] if isinstance(tokens, bool) else list(tokens)
        call |= token_attributes([1, 2, 3], ids, [-0.5, -0.25][: len(ids)])
    root_id = _ids(rollout_id, "root")[:16]

    def span(name: str, at_ds: int, for_ds: int, parent_id: str | None, **more: Any) -> Span:
        at_ns = start_ns + at_ds * 10**8
        span_id = root_id if parent_id is None else _ids(rollout_id, name)[:16]
        return Span(trace_id, span_id, parent_id, name, at_ns, at_ns + for_ds * 10**8, **more)

    spans = [
        span(c.SPAN_ROLLOUT, 0, 9, None, attributes={**stamps, c.TASK: json.dumps(task)}),
        span(
            "chat toy", 1, 1, root_id, kind="CLIENT",
            attributes={key: value for key, value in call.items() if value is not None},
        ),
    ]  # fmt: skip
    if reward is not None:
        given = {**stamps, c.REWARD_NAME: "primary", c.REWARD_VALUE: reward}
        spans.append(span(c.SPAN_ANNOTATION, 3, 0, root_id, attributes=given))
    return spans


def record(store: Store, rewards: Mapping[str, Sequence[float | None]], **more: Any) -> list[str]:
    """Record a rollout for each reward of each task; gives their ids."""
    made: list[str] = []
    for task, values in rewards.items():
        for value in values:
            rollout_id = f"r{len(made)}-{task}"
            store.add(spans_of(rollout_id, task, value, **more))
            made.append(rollout_id)
    return made


def reward_later(store: Store, rollout_id: str, value: float, span_id: str | None = None) -> None:
    """Give a reward to a rollout that is over, or to one of its spans, from elsewhere."""
    store.add([reward_span({"primary": value}, rollout_id=rollout_id, span_id=span_id)])


class Ledger(BaseAlgorithm):
    """Learns nothing, and remembers the rows it was trained on: in its state, and in a file."""

    def __init__(self, group_size: int = 1) -> None:
        self.rows: list[str] = []
        self.group_size = group_size

    def train_step(self, batch: Batch) -> StepResult:
        """Take the rows, and publish how many there are."""
        self.rows += batch.rollout_ids
        return StepResult({"loss": 1 / len(self.rows)}, {"prompt": f"after {len(self.rows)} rows"})

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.rows = list(state["rows"])

    def save(self, folder: Path) -> None:
        """The rows once more, as weights would be."""
        (folder / "rows.txt").write_text("\n".join(self.rows))

    def load(self, folder: Path) -> None:
        """What the file says is what the state says."""
        assert (folder / "rows.txt").read_text() == "\n".join(self.rows)


class Better(Ledger):
    """Makes the prompt one word longer at each step."""

    def train_step(self, batch: Batch) -> StepResult:
        """Take the rows, and publish a longer prompt."""
        super().train_step(batch)
        return StepResult({"loss": 1 / batch.number}, {"prompt": "good " * (batch.number + 1)})


def polite(task: Any, resources: Mapping[str, Resource]) -> float:
    """Earn a tenth for each good word."""
    prompt = resources["prompt"].format()
    emit_action("say", prompt)
    return prompt.count("good") / 10


class Seeing(Ledger):
    """Learns nothing, and keeps the latest batch that it was given."""

    def train_step(self, batch: Batch) -> StepResult:
        self.batch = batch
        return StepResult()
