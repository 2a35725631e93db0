"""Rollouts to be compared with each other, brought together without holding all of them.

A temporary database on disk does it, SQLite's own kind, which nobody else can open and which is
gone with its connection.
"""

import hashlib
import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import fields, is_dataclass
from typing import Any

import orjson

from lightning_otel.formats.transition_rows import transition
from lightning_otel.types import Trajectory, Transition


def group_of(trajectory: Trajectory) -> str:
    """Return the group a trajectory belongs to.

    It is the one advantages were computed in; where none were, trajectories of one agent that begin
    with the same prompt are a group.
    """
    first = trajectory.transitions[0]
    if first.group_id:
        return first.group_id
    return f"prompt-{prompt_key(first)}"


def prompt_key(step: Transition) -> str:
    """Return a hash of the agent and its prompt: token ids, else messages and tools."""
    prompt: list[Any] = list(step.prompt_ids) or [step.observation, step.tools]
    try:
        text = orjson.dumps([step.agent, prompt], option=orjson.OPT_SORT_KEYS)
    except (TypeError, ValueError):  # an integer beyond 64 bits
        text = repr([step.agent, prompt]).encode("utf-8", "replace")
    return hashlib.sha256(text).hexdigest()[:16]


def by_group(trajectories: Iterable[Trajectory]) -> Iterator[Trajectory]:
    """Yield the trajectories, those of a group one after the other, groups as their first came."""
    groups: dict[str, int] = {}
    with closing(sqlite3.connect("", isolation_level=None)) as held:
        held.execute("CREATE TABLE kept (grouped INTEGER, place INTEGER, trajectory BLOB)")
        held.execute("BEGIN")
        for place, trajectory in enumerate(trajectories):
            if trajectory.transitions:
                grouped = groups.setdefault(group_of(trajectory), place)
                row = (grouped, place, _pack_trajectory(trajectory))
                held.execute("INSERT INTO kept VALUES (?, ?, ?)", row)
        held.execute("CREATE INDEX order_of_kept ON kept (grouped, place)")
        held.execute("COMMIT")
        rows = held.execute("SELECT trajectory FROM kept ORDER BY grouped, place")
        for (packed,) in rows:
            yield _unpack_trajectory(packed)


def _pack_trajectory(trajectory: Trajectory) -> bytes:
    try:
        return orjson.dumps(trajectory, default=_plain_value)
    except (TypeError, ValueError):  # an integer beyond 64 bits, or half a surrogate pair
        return json.dumps(trajectory, default=_plain_value).encode()


def _unpack_trajectory(text: bytes) -> Trajectory:
    try:
        found = orjson.loads(text)
    except ValueError:
        found = json.loads(text)
    return Trajectory(**{**found, "transitions": tuple(map(transition, found["transitions"]))})


def _plain_value(value: Any) -> Any:
    if is_dataclass(value):
        return {each.name: getattr(value, each.name) for each in fields(value)}
    return dict(value) if isinstance(value, Mapping) else list(value)
