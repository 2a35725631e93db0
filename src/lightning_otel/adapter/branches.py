"""Which call follows which: the calls of one agent in one attempt as a forest of paths.

A call follows the latest earlier one whose conversation it continues. One that continues none
follows the latest one that had ended before it began, as long as the parts of the tree that hold
the two had not run side by side. So concurrent calls, operations and agents are branches.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from lightning_otel.adapter.tree import NO_PARENT, Tree
from lightning_otel.types import Call

NONE: Final = -1
_MAX_DEPTH: Final = 20


def paths(before: Sequence[int]) -> list[list[int]]:
    """Every root-to-leaf path, in order of their last step.

    Args:
        before: For each step the earlier one it follows, or -1.
    """
    has_successor = bytearray(len(before))
    for previous in before:
        if previous != NONE:
            has_successor[previous] = 1
    found = []
    for leaf in range(len(before)):
        if has_successor[leaf]:
            continue
        path = []
        node = leaf
        while node != NONE:
            path.append(node)
            node = before[node]
        found.append(path[::-1])
    return found


def predecessors(tree: Tree, positions: Sequence[int], calls: Sequence[Call]) -> list[int]:
    """For each of one agent's calls the index of the one it follows, or -1.

    Args:
        tree: The attempt's spans.
        positions: The calls' positions in the tree, in order.
        calls: The calls.
    """
    by_time = _by_time(tree, positions)
    history = _History(calls)
    before = [NONE] * len(calls)
    by_end = sorted(range(len(calls)), key=lambda call: (tree.ends[positions[call]], call))
    finished = 0
    for call, position in enumerate(positions):
        while by_end[finished] < call and (
            tree.ends[positions[by_end[finished]]] <= tree.starts[position]
        ):
            history.add(by_end[finished])
            finished += 1
        before[call] = history.continued_by(call, by_time[call])
    return before


class _History:
    """Conversations so far, by a running hash of their messages: one step a message."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = calls
        self._given = [0] * len(calls)
        self._left: dict[int, int] = {}
        self._known: set[int] = set()

    def continued_by(self, call: int, by_time: int) -> int:
        """The call whose whole conversation this one's messages begin with, else the one by time.

        Where several left the same conversation behind, it is the one by time if that is among
        them, else the latest.
        """
        running = 0
        found, conversation = NONE, 0
        for message in self._calls[call].observation:
            running = hash((running, _key(message)))
            if running in self._left:
                found, conversation = self._left[running], running
        self._given[call] = running
        if found == NONE or hash((by_time, conversation)) in self._known:
            return by_time
        return found

    def add(self, call: int) -> None:
        """Know the conversation a call leaves behind: what it was given and each of its answers."""
        if not self._calls[call].observation:
            return
        for answer in self._calls[call].action:
            conversation = hash((self._given[call], _key(answer)))
            self._left[conversation] = call
            self._known.add(hash((call, conversation)))


def _key(message: Mapping[str, Any]) -> int:
    """A message without what an answer has and its repetition in the next request has not."""
    kept: list[Any] = []
    try:
        for part in message["parts"]:  # flat parts, as most are, are hashed in C
            kind = part.get("type")
            if kind != "text":
                if kind != "reasoning":
                    kept.append(frozenset(part.items()))
            elif part["content"]:
                kept.append(part["content"])
        return hash((message.get("role"), *kept))
    except (AttributeError, KeyError, TypeError):
        parts = message.get("parts")
        if isinstance(parts, list):
            parts = [part for part in parts if not _is_passing(part)]
        return _hashed([message.get("role"), parts], 0)


def _is_passing(part: object) -> bool:
    if not isinstance(part, dict):
        return False
    kind = part.get("type")
    return kind == "reasoning" or (kind == "text" and not part.get("content"))


def _hashed(value: object, depth: int) -> int:
    """A hash of a JSON value; dumping it to text would cost several times as much."""
    if type(value) is str:
        return hash(value)
    if depth >= _MAX_DEPTH:
        return 0
    if isinstance(value, dict):
        return hash(frozenset([(key, _hashed(item, depth + 1)) for key, item in value.items()]))
    if isinstance(value, list):
        return hash(tuple([_hashed(item, depth + 1) for item in value]))
    return hash((type(value).__name__, value))


@dataclass(slots=True)
class _Branch:
    """A part of the tree that holds calls, up to where it meets its siblings.

    Attributes:
        node: Its lowest span that holds all its calls.
        top: Its highest span, whose parent it shares with its siblings.
        end: When all of it had ended.
        newest: Position of the call in it that ended last.
        before: Position of the call that its calls follow, or -1.
    """

    node: int
    top: int
    end: int
    newest: int = NONE
    before: int = NONE


def _by_time(tree: Tree, positions: Sequence[int]) -> list[int]:
    """For each call the latest one that had ended before it, on branches that had ended too."""
    index = {position: call for call, position in enumerate(positions)}
    above = _meetings(tree, positions)
    branches: dict[int, _Branch] = {NO_PARENT: _Branch(NO_PARENT, NO_PARENT, 0)}
    for node, parent in above.items():
        top = node if tree.parents[node] == parent else tree.below(parent, node)
        branches[node] = _Branch(node, top, max(tree.ends[top], tree.ends[node]))
        if node in index:
            branches[node].newest = node
    siblings: dict[int, list[_Branch]] = {}
    for node in reversed(above):  # children before parents
        branch, upper = branches[node], branches[above[node]]
        siblings.setdefault(upper.node, []).append(branch)
        upper.end = max(upper.end, branch.end)
        upper.newest = _later(tree, upper.newest, branch.newest)
    for node in (NO_PARENT, *above):  # parents before children
        if node in siblings:
            _follow(tree, siblings[node], branches[node].before)
    return [index.get(branches[position].before, NONE) for position in positions]


def _follow(tree: Tree, siblings: list[_Branch], latest: int) -> None:
    """Let each branch follow the latest call of those that had ended before it began."""
    by_end = sorted(siblings, key=lambda branch: (branch.end, branch.top))
    finished = 0
    newest = NONE
    for branch in sorted(siblings, key=lambda branch: branch.top):
        while by_end[finished].top < branch.top and (
            by_end[finished].end <= tree.starts[branch.top]
        ):
            newest = _later(tree, newest, by_end[finished].newest)
            finished += 1
        branch.before = latest if newest == NONE else newest


def _later(tree: Tree, one: int, other: int) -> int:
    """The call that ended later; of two at one instant the later started."""
    if NONE in (one, other):
        return max(one, other)
    return max(one, other, key=lambda call: (tree.ends[call], call))


def _meetings(tree: Tree, positions: Sequence[int]) -> dict[int, int]:
    """The calls and the spans where they meet, each with the next one above it, parents first."""
    nodes = set(positions)
    for left, right in pairwise(sorted(positions, key=tree.first.__getitem__)):
        is_beside = tree.parents[left] == tree.parents[right]
        nodes.add(tree.parents[left] if is_beside else tree.meet(left, right))
    nodes.discard(NO_PARENT)
    found: dict[int, int] = {}
    above: list[int] = []
    for node in sorted(nodes, key=tree.first.__getitem__):
        while above and not tree.contains(above[-1], node):
            above.pop()
        found[node] = above[-1] if above else NO_PARENT
        above.append(node)
    return found
