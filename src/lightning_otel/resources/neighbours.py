"""Differences between rollouts of two versions that lie next to each other in time.

Nothing is assumed of tasks, users or days. All that counts is that versions were drawn: of two
neighbours with different ones, the other way round was as likely. This is exact while the canary's
share stays, and nearly so while it is ramped, for neighbours lie in the same part of the ramp.

Source: von Neumann, Various techniques used in connection with random digits (1951); for neighbours
of one version, Peres, Iterating von Neumann's procedure, Annals of Statistics 20 (1992).
"""

import statistics
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

STICKY: Final = 0.25
"""Share of changes back of a key's version, of independent draws', up to which it sticks."""


class Unit(NamedTuple):
    """A rollout, or several that were given their version together."""

    key: str  # its id, or that of the user, session or group
    is_b: bool
    reward: float  # its reward, or their mean


class PairDifference(NamedTuple):
    """A reward with ``b`` less one with ``a``, and its weight in pairs of rollouts."""

    value: float
    weight: float = 1.0


class Neighbours:
    """Pairs units in order of time, for good; two of one version form a next-level unit."""

    def __init__(self) -> None:
        self._waiting: dict[int, Unit] = {}

    def add(self, unit: Unit) -> PairDifference | None:
        """Return the difference that the unit completes, if it does."""
        level = 0
        while (before := self._waiting.pop(level, None)) is not None:
            if before.is_b != unit.is_b:
                gain = unit.reward - before.reward
                return PairDifference(gain if unit.is_b else -gain, 2.0**level)
            unit = unit._replace(reward=(before.reward + unit.reward) / 2)
            level += 1
        self._waiting[level] = unit
        return None


def compare_neighbours(units: Sequence[Unit]) -> list[PairDifference]:
    """Return differences of units by time; if there is none, that of the means."""
    neighbours = Neighbours()
    differences = [gain for unit in units if (gain := neighbours.add(unit)) is not None]
    if differences:
        return differences
    of_a, of_b = ([unit.reward for unit in units if unit.is_b == side] for side in (False, True))
    return [PairDifference(statistics.fmean(of_b) - statistics.fmean(of_a))]


def compare_task(units: Sequence[Unit]) -> list[PairDifference]:
    """Return a task's differences: of neighbours, or one by one if one version came first."""
    if sum(before.is_b != unit.is_b for before, unit in pairwise(units)) > 1:
        return compare_neighbours(units)
    of_a, of_b = ([unit.reward for unit in units if unit.is_b == side] for side in (False, True))
    few, many, sign = (of_a, of_b, -1) if len(of_a) < len(of_b) else (of_b, of_a, 1)
    ends = [position * len(many) // len(few) for position in range(len(few) + 1)]
    return [
        PairDifference(sign * (reward - statistics.fmean(many[start:end])))
        for reward, (start, end) in zip(few, pairwise(ends), strict=True)
    ]


def join_units(units: Iterable[Unit]) -> list[Unit]:
    """Return one unit for each key, with the mean reward.

    Where a key has both versions the share moved, and the rest of its rollouts have no match: then
    the first rollout of each key counts.
    """
    members: dict[str, list[Unit]] = {}
    for unit in units:
        members.setdefault(unit.key, []).append(unit)
    if any(len({unit.is_b for unit in rows}) > 1 for rows in members.values()):
        return [rows[0] for rows in members.values()]
    return [
        rows[0]._replace(reward=statistics.fmean(unit.reward for unit in rows))
        for rows in members.values()
    ]


def is_sticky(units: Sequence[Unit]) -> bool:
    """Return whether versions were drawn by key: it stays the same, where a key comes again."""
    repeats, changes = 0, [0, 0]
    members: dict[str, list[bool]] = {}
    for unit in units:
        versions = members.setdefault(unit.key, [])
        if versions:
            repeats += 1
            changes[unit.is_b] += versions[-1] != unit.is_b
        versions.append(unit.is_b)
    share = sum(unit.is_b for unit in units) / max(1, len(units))
    kinds = {frozenset(versions) for versions in members.values()}
    limit = STICKY * share * (1 - share) * repeats
    # A session that a program uses for all it does has both, and says nothing.
    return repeats > 0 and len(kinds - {frozenset({False, True})}) == 2 and min(changes) <= limit
