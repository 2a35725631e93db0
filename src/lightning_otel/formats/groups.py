"""Rollouts to be compared with each other, brought together without holding all of them.

A temporary database on disk does it, SQLite's own kind, which nobody else can open and which is
gone with its connection.
"""

import hashlib
import pickle
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing
from typing import Any

import orjson

from lightning_otel.types import Trajectory, Transition


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
                (place, pickle.dumps(trajectory, pickle.HIGHEST_PROTOCOL), name),
            )
        held.execute("CREATE INDEX order_of_kept ON kept (grouped, place)")
        held.execute("COMMIT")
        rows = held.execute("SELECT trajectory FROM kept ORDER BY grouped, place")
        for (found,) in rows:
            # Nobody but this function can have written it.
            yield pickle.loads(found)
