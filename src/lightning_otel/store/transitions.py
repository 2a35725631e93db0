"""Transitions as the rows of a table."""

from collections.abc import Iterable, Iterator
from typing import Any, Final

from lightning_otel.formats.triplets import COLUMNS
from lightning_otel.types import Trajectory, Transition

TRANSITION_COLUMNS: Final = COLUMNS
BODY_COLUMNS: Final = frozenset(
    {
        "observation",
        "action",
        "next_observation",
        "tools",
        "prompt_ids",
        "response_ids",
        "logprobs",
    }
)
"""Columns that hold what was said: all but these are there without reading it."""
NARROW_COLUMNS: Final = {
    name: kind for name, kind in TRANSITION_COLUMNS.items() if name not in BODY_COLUMNS
}


_NUMBERS: Final = frozenset({"prompt_ids", "response_ids", "logprobs"})


def distinct(trajectories: Iterable[Trajectory]) -> Iterator[tuple[Transition, int]]:
    """Each transition once, with the first branch it lies on."""
    shared: set[tuple[str, str]] = set()
    for trajectory in trajectories:
        for step in trajectory.transitions:
            if step.is_shared:
                if (step.trace_id, step.span_id) in shared:
                    continue
                shared.add((step.trace_id, step.span_id))
            yield step, trajectory.branch


def transition_row(
    step: Transition, branch: int, columns: Iterable[str] = TRANSITION_COLUMNS
) -> dict[str, Any]:
    """A transition as a flat row of JSON values, in the order of the columns."""
    row: dict[str, Any] = {
        name: branch if name == "branch" else getattr(step, name) for name in columns
    }
    for name in _NUMBERS & row.keys():
        row[name] = list(row[name])
    return row
