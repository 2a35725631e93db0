"""Recorded rollouts and small algorithms for the tests of training."""

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_otel import Store
from lightning_otel import conventions as c
from lightning_otel.adapter.tokens import encode_ids, encode_logprobs
from lightning_otel.adapter.tracking import resources_text
from lightning_otel.algorithms import BaseAlgorithm, Batch, StepResult
from lightning_otel.emitters import reward_span
from lightning_otel.types import Span

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
    is_over: bool = True,
    resources: Mapping[str, int] | None = None,
) -> list[Span]:
    """The spans of one rollout with one call, as a runner or a traced program leaves them."""
    trace_id = _ids(rollout_id)[:32]
    start_ns = 1_700_000_000 * _SECOND_NS + next(_numbers) * _SECOND_NS
    stamps: dict[str, Any] = {c.ROLLOUT_ID: rollout_id, c.ATTEMPT_ID: "1", c.AGENT_NAME: "solver"}
    if mode is not None:
        stamps[c.MODE] = mode
    asked = [{"role": "user", "parts": [{"type": "text", "content": str(task)}]}]
    said = [{"role": "assistant", "parts": [{"type": "text", "content": f"{reward}"}]}]
    call = {
        **stamps,
        c.OPERATION: "chat",
        c.INPUT_MESSAGES: json.dumps(asked),
        c.OUTPUT_MESSAGES: json.dumps(said),
    }
    if tokens:
        call[c.PROMPT_TOKEN_IDS] = encode_ids([[1, 2, 3]])
        said_ids = [4, 5] if isinstance(tokens, bool) else list(tokens)
        call[c.RESPONSE_TOKEN_IDS] = encode_ids([said_ids])
        call[c.RESPONSE_LOGPROBS] = encode_logprobs([[-0.5, -0.25][: len(said_ids)]])
    if temperature is not None:
        call[c.REQUEST_TEMPERATURE] = temperature
    if resources is not None:
        call[c.RESOURCES] = resources_text({"*": dict(resources)}, None)
    if logprobs_mode is not None:
        call[c.LOGPROBS_MODE] = logprobs_mode
    root_id = _ids(rollout_id, "root")[:16]
    root = Span(
        trace_id, root_id, None, c.SPAN_ROLLOUT, start_ns,
        start_ns + 9 * 10**8 if is_over else None,
        attributes={**stamps, c.TASK: json.dumps(task)},
    )  # fmt: skip
    step = Span(
        trace_id, _ids(rollout_id, "call")[:16], root_id, "chat toy", start_ns + 10**8,
        start_ns + 2 * 10**8, kind="CLIENT", attributes=call,
    )  # fmt: skip
    if reward is None:
        return [root, step]
    given = {**stamps, c.REWARD_NAME: "primary", c.REWARD_VALUE: reward}
    at_ns = start_ns + 3 * 10**8
    reward_id = _ids(rollout_id, "reward")[:16]
    judged = Span(trace_id, reward_id, root_id, c.SPAN_ANNOTATION, at_ns, at_ns, attributes=given)
    return [root, step, judged]


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
        """The rows."""
        return {"rows": self.rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The rows."""
        self.rows = list(state["rows"])

    def save(self, folder: Path) -> None:
        """The rows once more, as weights would be."""
        (folder / "rows.txt").write_text("\n".join(self.rows))

    def load(self, folder: Path) -> None:
        """What the file says is what the state says."""
        assert (folder / "rows.txt").read_text() == "\n".join(self.rows)
