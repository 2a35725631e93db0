"""Sequence of calls by time alone, and parts of the tree that ran side by side.

The calls inside a tool that their own agent runs follow one another, and none outside of it.

Belongs here: time and the tree. What calls said is not known here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from lightning_otel import conventions as c
from lightning_otel.adapter.tree import NO_PARENT, Tree

NONE: Final = -1


def is_after(tree: Tree, earlier: int, later: int) -> bool:
    """Return whether the part of the tree around one call ended before another's began."""
    meeting = tree.meet(earlier, later)
    if meeting in (earlier, later):
        return False
    return tree.ends[tree.below(meeting, earlier)] <= tree.starts[tree.below(meeting, later)]


@dataclass(slots=True)
class _Branch:
    """A part of the tree that holds calls, up to where it meets its siblings.

    Attributes:
        node: Its lowest span that holds all its calls.
        top: Its highest span, whose parent it shares with its siblings.
        end: When all of it had ended.
        newest: Position of the call in it that ended last.
        before: Position of the call that its calls follow, or -1.
        is_beside: Whether it, or what it is the first of, ran beside a sibling.
    """

    node: int
    top: int
    end: int
    newest: int = NONE
    before: int = NONE
    is_beside: bool = False


def tools_with_work(tree: Tree) -> list[int]:
    """Positions of the tools that ran with spans inside them, in the order of the walk."""
    found = [
        position
        for position, span in enumerate(tree.spans)
        if span.attributes.get(c.OPERATION) == c.EXECUTE_TOOL
        and tree.first[position] != tree.last[position]
    ]
    return sorted(found, key=tree.first.__getitem__)


def tool_of_each(tree: Tree, positions: Sequence[int], tools: Sequence[int]) -> list[int]:
    """The innermost tool that holds each call, or -1.

    Args:
        tree: The spans.
        positions: Positions of the calls.
        tools: Positions of tools, in the order of the walk.
    """
    found = [NO_PARENT] * len(positions)
    above: list[int] = []
    waiting = list(reversed(tools))
    for call in sorted(range(len(found)), key=lambda call: tree.first[positions[call]]):
        while waiting and tree.first[waiting[-1]] < tree.first[positions[call]]:
            above.append(waiting.pop())
        while above and not tree.contains(above[-1], positions[call]):
            above.pop()
        found[call] = above[-1] if above else NO_PARENT
    return found


def by_time(
    tree: Tree, positions: Sequence[int], tool_of: Sequence[int]
) -> tuple[list[int], bytearray]:
    """For each call the latest one that had ended before it, on branches that had ended too.

    And whether the branch that it begins ran beside others.

    Args:
        tree: The spans.
        positions: Positions of the calls, in order.
        tool_of: For each call the tool that parts it from those outside, or -1.
    """
    groups: dict[int, list[int]] = {}
    for call, tool in enumerate(tool_of):
        groups.setdefault(tool, []).append(call)
    if len(groups) < 2:
        return _in_turn(tree, positions)
    before, is_beside = [NONE] * len(positions), bytearray(len(positions))
    for tool, group in groups.items():
        is_inside = tool != NO_PARENT and NO_PARENT in groups
        own, beside = _in_turn(tree, [positions[call] for call in group])
        for index, call in enumerate(group):
            before[call] = group[own[index]] if own[index] != NONE else NONE
            is_beside[call] = beside[index] or (is_inside and before[call] == NONE)
    return before, is_beside


def _in_turn(tree: Tree, positions: Sequence[int]) -> tuple[list[int], bytearray]:
    index = {position: call for call, position in enumerate(positions)}
    above = _find_meetings(tree, positions)
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
        upper.newest = _later_of(tree, upper.newest, branch.newest)
    for node in (NO_PARENT, *above):  # parents before children
        if node in siblings:
            _follow_branches(tree, siblings[node], branches[node])
    before = [index.get(branches[position].before, NONE) for position in positions]
    return before, bytearray(branches[position].is_beside for position in positions)


def _follow_branches(tree: Tree, siblings: list[_Branch], upper: _Branch) -> None:
    """Let each branch follow the latest call of those that had ended before it began."""
    by_end = sorted(siblings, key=lambda branch: (branch.end, branch.top))
    finished = 0
    newest = NONE
    by_start = sorted(siblings, key=lambda branch: branch.top)
    _mark_beside(tree, by_start)
    for branch in by_start:
        while by_end[finished].top < branch.top and (
            by_end[finished].end <= tree.starts[branch.top]
        ):
            newest = _later_of(tree, newest, by_end[finished].newest)
            finished += 1
        if newest == NONE:  # the first in what holds it, which may run beside others itself
            branch.before = upper.before
            branch.is_beside |= upper.is_beside
        else:
            branch.before = newest


def _mark_beside(tree: Tree, by_start: Sequence[_Branch]) -> None:
    """Say of branches with one parent, in order of their start, which of them overlap others."""
    latest = -1
    for branch, following in zip(by_start, [*by_start[1:], None], strict=True):
        is_overtaken = following is not None and tree.starts[following.top] < branch.end
        branch.is_beside = latest > tree.starts[branch.top] or is_overtaken
        latest = max(latest, branch.end)


def _later_of(tree: Tree, one: int, other: int) -> int:
    """The call that ended later; of two at one instant the later started."""
    if NONE in (one, other):
        return max(one, other)
    return max(one, other, key=lambda call: (tree.ends[call], call))


def _find_meetings(tree: Tree, positions: Sequence[int]) -> dict[int, int]:
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
