"""Which call follows which: the calls of one agent in one attempt as a forest of paths.

A call follows the latest earlier one whose conversation it continues; a call that continues none
follows the latest one that had ended before it began. Calls that overlap in time are branches.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_otel.types import Call

NONE = -1


def paths(calls: Sequence[Call], starts: Sequence[int], ends: Sequence[int]) -> list[list[int]]:
    """Every root-to-leaf path through the calls, in order of their first own call.

    Args:
        calls: One agent's calls, ordered by start.
        starts: When each began, on the clock of ``ends``.
        ends: When each ended.
    """
    before = predecessors(calls, starts, ends)
    has_successor = bytearray(len(calls))
    for previous in before:
        if previous != NONE:
            has_successor[previous] = 1
    found = []
    for leaf in range(len(calls)):
        if has_successor[leaf]:
            continue
        path = []
        node = leaf
        while node != NONE:
            path.append(node)
            node = before[node]
        found.append(path[::-1])
    return found


def predecessors(calls: Sequence[Call], starts: Sequence[int], ends: Sequence[int]) -> list[int]:
    """For each call the position of the one it follows, or -1."""
    history = _History()
    before = [NONE] * len(calls)
    by_end = sorted(range(len(calls)), key=ends.__getitem__)
    finished = 0
    latest = NONE
    for call in range(len(calls)):
        while finished < len(by_end) and ends[by_end[finished]] <= starts[call]:
            latest = by_end[finished]
            history.add(latest, calls[latest])
            finished += 1
        continued = history.continued_by(calls[call])
        before[call] = latest if continued == NONE else continued
    return before


class _History:
    """Conversations so far, by a running hash of their messages: one step a message."""

    def __init__(self) -> None:
        self._ends: dict[int, int] = {}

    def add(self, position: int, call: Call) -> None:
        """Know the conversation a call leaves behind: what it was given and what it answered."""
        if not call.observation:
            return
        running = 0
        for message in call.observation:
            running = hash((running, _key(message)))
        for answer in call.action[:1]:
            running = hash((running, _key(answer)))
        self._ends[running] = position

    def continued_by(self, call: Call) -> int:
        """The latest call whose whole conversation this call's messages begin with."""
        running = 0
        found = NONE
        for message in call.observation:
            running = hash((running, _key(message)))
            found = self._ends.get(running, found)
        return found


def _key(message: Mapping[str, Any]) -> str:
    """A message without what an answer has and its repetition in the next request has not."""
    parts = [part for part in message.get("parts") or () if part.get("type") != "reasoning"]
    return f"{message.get('role')}:{json.dumps(parts, sort_keys=True)}"
