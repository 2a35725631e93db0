"""Better and worse answers to one prompt, which both formats of preferences begin with."""

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import Final, NamedTuple

from lightning_otel.formats.chat import has_messages
from lightning_otel.formats.format import (
    NO_MESSAGES,
    NO_REWARD,
    LeftOut,
    Made,
    Row,
    UnheldError,
    distinct,
)
from lightning_otel.formats.groups import group_of, prompt_key
from lightning_otel.types import Trajectory, Transition

SAME: Final = "the same answer earned more and less; look at how rewards are given"
ALONE: Final = "no other answer to the same prompt; run the task several times"
NO_GAP: Final = "no answer to the same prompt whose reward differs by enough; lower the gap"


class Pair(NamedTuple):
    """Two answers to one prompt, the first one worth more."""

    chosen: Transition
    rejected: Transition


def pair_rows(
    trajectories: Iterable[Trajectory],
    gap: float,
    row_of: Callable[[Pair], Row],
    notes: Callable[[Transition], Iterator[LeftOut]],
) -> Made:
    """Yield a row for each pair; arguments as those of :func:`pairs` and ``step_rows``."""
    for pair in pairs(trajectories, gap):
        if isinstance(pair, LeftOut):
            yield pair
            continue
        try:
            row = row_of(pair)
        except UnheldError as exc:
            yield from (LeftOut(step, str(exc)) for step in pair)
            continue
        for step in pair:
            yield from notes(step)
        yield row


def pairs(trajectories: Iterable[Trajectory], gap: float) -> Iterator[Pair | LeftOut]:
    """Yield pairs of answers to a prompt in a group: the best with the worst, and so inwards.

    An answer is in one pair at most, so that none outvotes the others. Prompts are the same if
    their token ids are, or where there are none their messages and tools.

    Args:
        trajectories: What answers are taken of, group by group.
        gap: How much more the better one must have earned; it must have earned more in any case.
    """
    for _, group in groupby(trajectories, group_of):
        by_prompt: dict[str, list[Transition]] = {}
        for step, _ in distinct(group):
            if step.reward is None:
                yield LeftOut(step, NO_REWARD)
            elif not has_messages(step):
                yield LeftOut(step, NO_MESSAGES)
            else:
                by_prompt.setdefault(prompt_key(step), []).append(step)
        for steps in by_prompt.values():
            yield from _pair_steps(steps, gap)


def _pair_steps(steps: list[Transition], gap: float) -> Iterator[Pair | LeftOut]:
    if len(steps) == 1:
        yield LeftOut(steps[0], ALONE)
        return
    ranked = sorted(steps, key=lambda step: step.reward or 0.0, reverse=True)
    low, high = 0, len(ranked) - 1
    while low < high:
        better, worse = ranked[low], ranked[high]
        difference = (better.reward or 0.0) - (worse.reward or 0.0)
        if difference <= 0.0 or difference < gap:
            break
        if better.action[:1] == worse.action[:1]:
            yield from (LeftOut(better, SAME), LeftOut(worse, SAME))
        else:
            yield Pair(better, worse)
        low, high = low + 1, high - 1
    for step in ranked[low : high + 1]:
        yield LeftOut(step, NO_GAP)
