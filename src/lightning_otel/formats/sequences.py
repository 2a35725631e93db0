"""Training rows and what they were worth, which every format of token ids begins with."""

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import NamedTuple

from lightning_otel.adapter.rows import is_trainable, rows_of
from lightning_otel.formats.format import (
    NO_LOGPROBS,
    NO_REWARD,
    NO_TOKENS,
    LeftOut,
    distinct,
)
from lightning_otel.formats.groups import group_of
from lightning_otel.types import TrainingRow, Trajectory, Transition


class Sequence(NamedTuple):
    """A training row with the reward of its rollout."""

    row: TrainingRow
    reward: float | None

    @property
    def last(self) -> Transition:
        """Its last step."""
        return self.row.transitions[-1]


def sequences(trajectories: Iterable[Trajectory]) -> Iterator[Sequence | LeftOut]:
    """Every training row, and the steps that are in none for want of token ids.

    Args:
        trajectories: Those of an attempt one after the other: only so much is held at once.
    """
    for _, found in groupby(trajectories, lambda each: (each.rollout_id, each.attempt_id)):
        attempt = list(found)
        worth: dict[tuple[str, str], float | None] = {}
        for trajectory in attempt:
            for step in trajectory.transitions:
                worth.setdefault((step.trace_id, step.span_id), trajectory.reward)
        for step, _ in distinct(attempt):
            if not is_trainable(step):
                yield LeftOut(step, _why_no_ids(step))
        for row in rows_of(attempt):
            first = row.transitions[0]
            yield Sequence(row, worth[first.trace_id, first.span_id])


def compared(
    trajectories: Iterable[Trajectory], is_judged: Callable[[Sequence], bool]
) -> Iterator[tuple[str, Sequence] | LeftOut]:
    """Every sequence that was judged, with its group; those of a group are neighbours.

    Args:
        trajectories: Group by group.
        is_judged: Whether it is known what a sequence was worth.
    """
    for group_id, group in groupby(trajectories, group_of):
        for each in sequences(group):
            if isinstance(each, LeftOut):
                yield each
            elif not is_judged(each):
                yield from (LeftOut(step, NO_REWARD) for step in each.row.transitions)
            else:
                if not len(each.row.logprobs):
                    yield from (LeftOut(step, NO_LOGPROBS, True) for step in each.row.transitions)
                yield group_id, each


def _why_no_ids(step: Transition) -> str:
    """Return why there are no token ids, if known, and what to do."""
    what, _, remedy = NO_TOKENS.partition("; ")
    return f"{step.inexact or what}; {remedy}"
