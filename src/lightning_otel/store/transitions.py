"""Transitions as the rows of a table."""

from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from lightning_otel.types import Trajectory, Transition

TRANSITION_COLUMNS: Mapping[str, str] = {
    "rollout_id": "VARCHAR",
    "attempt_id": "VARCHAR",
    "agent": "VARCHAR",
    "branch": "INTEGER",
    "step": "INTEGER",
    "observation": "JSON",
    "action": "JSON",
    "reward": "DOUBLE",
    "next_observation": "JSON",
    "done": "BOOLEAN",
    "rewards": "JSON",
    "is_shared": "BOOLEAN",
    "tools": "JSON",
    "prompt_ids": "INTEGER[]",
    "response_ids": "INTEGER[]",
    "logprobs": "DOUBLE[]",
    "capture": "VARCHAR",
    "resource_version": "VARCHAR",
    "resources": "JSON",
    "model": "VARCHAR",
    "response_id": "VARCHAR",
    "finish_reason": "VARCHAR",
    "trace_id": "VARCHAR",
    "span_id": "VARCHAR",
    "start_ns": "BIGINT",
    "end_ns": "BIGINT",
    "input_tokens": "BIGINT",
    "output_tokens": "BIGINT",
    "sampling": "JSON",
    "group_id": "VARCHAR",
    "advantage": "DOUBLE",
    "weight": "DOUBLE",
    "inexact": "VARCHAR",
}


def distinct(
    trajectories: Iterable[Trajectory], agents: str | None = None
) -> Iterator[tuple[Transition, int]]:
    """Each transition once, with the first branch it lies on; of agents that match a glob."""
    shared: set[tuple[str, str]] = set()
    for trajectory in trajectories:
        if agents is not None and not fnmatchcase(trajectory.agent, agents):
            continue
        for step in trajectory.transitions:
            if step.is_shared:
                if (step.trace_id, step.span_id) in shared:
                    continue
                shared.add((step.trace_id, step.span_id))
            yield step, trajectory.branch


def transition_row(step: Transition, branch: int) -> dict[str, Any]:
    """A transition as a flat row of JSON values, in the order of ``TRANSITION_COLUMNS``."""
    row: dict[str, Any] = {
        name: branch if name == "branch" else getattr(step, name) for name in TRANSITION_COLUMNS
    }
    for name in ("prompt_ids", "response_ids", "logprobs"):
        row[name] = list(row[name])
    return row
