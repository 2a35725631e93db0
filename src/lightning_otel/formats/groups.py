"""Rollouts to be compared with each other, brought together without holding all of them.

A temporary database on disk does it, SQLite's own kind, which nobody else can open and which is
gone with its connection.
"""

import hashlib
import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import fields
from typing import Any, Final

import orjson

from lightning_otel.formats.transition_rows import of_fields
from lightning_otel.types import Trajectory, Transition

_STEP: Final = tuple(each.name for each in fields(Transition))
_TRAJECTORY: Final = tuple(each.name for each in fields(Trajectory) if each.name != "transitions")


def group_of(trajectory: Trajectory) -> str:
    """The group a trajectory belongs to.

    It is the one advantages were computed in; where none were, trajectories of one agent that begin
    with the same prompt are a group.
    """
    first = trajectory.transitions[0]
    if first.group_id:
        return first.group_id
    return f"prompt-{prompt_key(first)}"


def prompt_key(step: Transition) -> str:
    """A hash of the prompt: its token ids, else its messages and tools; and of who was given it."""
    prompt: list[Any] = list(step.prompt_ids) or [step.observation, step.tools]
    try:
        text = orjson.dumps([step.agent, prompt], option=orjson.OPT_SORT_KEYS)
    except (TypeError, ValueError):  # an integer beyond 64 bits
        text = repr([step.agent, prompt]).encode("utf-8", "replace")
    return hashlib.sha256(text).hexdigest()[:16]


def by_group(trajectories: Iterable[Trajectory]) -> Iterator[Trajectory]:
    """The trajectories, those of a group one after the other, groups as their first one came."""
    with closing(sqlite3.connect("", isolation_level=None)) as held:
        held.execute("CREATE TABLE kept (grouped INTEGER, place INTEGER, trajectory BLOB)")
        held.execute("CREATE TABLE groups (name TEXT PRIMARY KEY, grouped INTEGER) WITHOUT ROWID")
        held.execute("BEGIN")
        for place, trajectory in enumerate(trajectories):
            if not trajectory.transitions:
                continue
            name = group_of(trajectory)
            held.execute("INSERT OR IGNORE INTO groups VALUES (?, ?)", (name, place))
            held.execute(
                "INSERT INTO kept SELECT grouped, ?, ? FROM groups WHERE name = ?",
                (place, packed(trajectory), name),
            )
        held.execute("CREATE INDEX order_of_kept ON kept (grouped, place)")
        held.execute("COMMIT")
        rows = held.execute("SELECT trajectory FROM kept ORDER BY grouped, place")
        for (found,) in rows:
            yield unpacked(found)


def packed(trajectory: Trajectory) -> bytes:
    """A trajectory as JSON."""
    steps = [[getattr(step, name) for name in _STEP] for step in trajectory.transitions]
    value = [*(getattr(trajectory, name) for name in _TRAJECTORY), steps]
    try:
        return orjson.dumps(value, default=_plain)
    except (TypeError, ValueError):  # an integer beyond 64 bits, or half a surrogate pair
        return json.dumps(value, default=_plain).encode()


def unpacked(text: bytes) -> Trajectory:
    """The trajectory that was packed."""
    try:
        *known, steps = orjson.loads(text)
    except ValueError:
        *known, steps = json.loads(text)
    return Trajectory(
        **dict(zip(_TRAJECTORY, known, strict=True)),
        transitions=tuple(of_fields(dict(zip(_STEP, values, strict=True))) for values in steps),
    )


def _plain(value: Any) -> Any:
    """What JSON knows of other kinds of sequences and mappings."""
    return dict(value) if isinstance(value, Mapping) else list(value)
