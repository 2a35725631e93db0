"""Rollouts to be compared with each other, brought together without holding all of them.

A temporary database on disk does it, SQLite's own kind, which nobody else can open and which is
gone with its connection.
"""

import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import fields, is_dataclass
from itertools import groupby
from typing import Any, Final, NamedTuple

import orjson

from lightning_otel.adapter.histories import state_key
from lightning_otel.dataset.formats.chat import has_messages
from lightning_otel.dataset.formats.format import (
    NO_MESSAGES,
    NO_REWARD,
    LeftOut,
    Made,
    Row,
    make_row,
)
from lightning_otel.dataset.formats.transition_rows import transition
from lightning_otel.types import Trajectory, Transition
from lightning_otel.types.transitions import distinct
from lightning_otel.types.values import dump

SAME: Final = "the same answer earned more and less; look at how rewards are given"
ALONE: Final = "no other answer to the same prompt; run the task several times"
NO_GAP: Final = "no answer to the same prompt whose reward differs by enough; lower the gap"


def group_of(trajectory: Trajectory) -> str:
    """Return the group a trajectory belongs to.

    It is the one advantages were computed in; where none were, trajectories of one agent that begin
    with the same prompt are a group.
    """
    first = trajectory.transitions[0]
    return first.group_id or f"prompt-{state_key(first)}"


def by_group(trajectories: Iterable[Trajectory]) -> Iterator[Trajectory]:
    """Yield trajectories group by group, groups as their first came."""
    groups: dict[str, int] = {}
    # A page's download is closed on another thread than it was read on.
    anywhere = sqlite3.connect("", isolation_level=None, check_same_thread=False)
    with closing(anywhere) as con:
        con.execute("CREATE TABLE kept (grouped INTEGER, place INTEGER, trajectory TEXT)")
        con.execute("BEGIN")
        for place, trajectory in enumerate(trajectories):
            if trajectory.transitions:
                grouped = groups.setdefault(group_of(trajectory), place)
                row = (grouped, place, dump(trajectory, _plain_value))
                con.execute("INSERT INTO kept VALUES (?, ?, ?)", row)
        con.execute("CREATE INDEX order_of_kept ON kept (grouped, place)")
        con.execute("COMMIT")
        rows = con.execute("SELECT trajectory FROM kept ORDER BY grouped, place")
        for (packed,) in rows:
            yield _unpack_trajectory(packed)


def _unpack_trajectory(text: str) -> Trajectory:
    try:
        values = orjson.loads(text)
    except ValueError:  # an integer beyond 64 bits, or half a surrogate pair
        values = json.loads(text)
    return Trajectory(**{**values, "transitions": tuple(map(transition, values["transitions"]))})


def _plain_value(value: Any) -> Any:
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return dict(value) if isinstance(value, Mapping) else list(value)


class PreferencePair(NamedTuple):
    """Two answers to one prompt, the first one worth more."""

    chosen: Transition
    rejected: Transition


def pair_rows(
    trajectories: Iterable[Trajectory],
    gap: float,
    row_of: Callable[[PreferencePair], Row],
    notes: Callable[[Transition], Iterator[LeftOut]],
) -> Made:
    """Yield a row for each pair of answers to a prompt: the best with the worst, and so inwards.

    An answer is in one pair at most, so that none outvotes the others. Prompts are the same if
    their messages and tools are, since these are what is trained: calls by number, not by id. The
    trajectories come group by group; the better answer must have earned more by the gap, and more
    in any case.

    Source: equal states as groups, Feng et al., GiGPO, arXiv 2505.10978, section 4.
    """
    for _, group in groupby(trajectories, group_of):
        by_prompt: dict[str, list[Transition]] = {}
        for step, _ in distinct(group):
            if step.reward is None:
                yield LeftOut(step, NO_REWARD)
            elif not has_messages(step):
                yield LeftOut(step, NO_MESSAGES)
            else:
                by_prompt.setdefault(state_key(step), []).append(step)
        for steps in by_prompt.values():
            for pair in _pair_steps(steps, gap):
                if isinstance(pair, LeftOut):
                    yield pair
                    continue
                yield from make_row(row_of, pair, pair, notes)


def _pair_steps(steps: list[Transition], gap: float) -> Iterator[PreferencePair | LeftOut]:
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
            yield PreferencePair(better, worse)
        low, high = low + 1, high - 1
    for step in ranked[low : high + 1]:
        yield LeftOut(step, NO_GAP)
