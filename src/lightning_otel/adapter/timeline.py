"""What followed what in time, as far as the tree tells what ran side by side."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

from lightning_otel.adapter.identities import NONE
from lightning_otel.adapter.ordering import NO_PARENT
from lightning_otel.adapter.tree import Tree
from lightning_otel.types import Call
from lightning_otel.types import conventions as c


def follow_time(
    tree: Tree, positions: Sequence[int], tool_of: Sequence[int]
) -> tuple[list[int], bytearray]:
    """Return the latest ended call before each one, and if its branch ran beside others.

    Calls inside a tool of their own agent follow one another, and none outside of it.
    """
    groups: dict[int, list[int]] = {}
    for call, tool in enumerate(tool_of):
        groups.setdefault(tool, []).append(call)
    before, is_beside = [NONE] * len(positions), bytearray(len(positions))
    for tool, group in groups.items():
        is_inside = tool != NONE and NONE in groups
        index = {positions[call]: call for call in group}
        for position, (latest, parallel) in _follow_branches(tree, index).items():
            call = index[position]
            before[call] = index.get(latest, NONE)
            is_beside[call] = parallel or (is_inside and before[call] == NONE)
    return before, is_beside


def _follow_branches(tree: Tree, calls: Mapping[int, int]) -> dict[int, tuple[int, bool]]:
    """Return the call that each one follows, by position, and whether it ran beside others.

    A branch is a part of the tree that holds calls, up to where it meets its siblings. It follows
    the latest call of those that had ended before it began; the first one that of what holds it.
    """
    starts, ends = tree.starts, tree.ends

    def later_of(one: int, other: int) -> int:
        return max(one, other, key=lambda call: (call != NONE, ends[call], call))

    above = _find_meetings(tree, calls)
    top = {
        node: node if tree.parents[node] == upper else tree.below(upper, node)
        for node, upper in above.items()
    }
    end = {NO_PARENT: 0} | {node: max(ends[top[node]], ends[node]) for node in above}
    newest = {NO_PARENT: NONE} | {node: node if node in calls else NONE for node in above}
    children: dict[int, list[int]] = {}
    for node in reversed(above):  # children before parents
        upper = above[node]
        children.setdefault(upper, []).append(node)
        end[upper] = max(end[upper], end[node])
        newest[upper] = later_of(newest[upper], newest[node])
    result = {NO_PARENT: (NONE, False)}
    for upper in [node for node in (NO_PARENT, *above) if node in children]:  # parents first
        siblings = sorted(children[upper], key=top.__getitem__)
        by_end = sorted(siblings, key=lambda node: (end[node], top[node]))
        finished, latest, last_end = 0, NONE, -1
        for node, following in zip(siblings, [*siblings[1:], None], strict=True):
            start = starts[top[node]]
            while top[by_end[finished]] < top[node] and end[by_end[finished]] <= start:
                latest = later_of(latest, newest[by_end[finished]])
                finished += 1
            is_overtaken = following is not None and starts[top[following]] < end[node]
            is_beside = last_end > start or is_overtaken
            last_end = max(last_end, end[node])
            # The first in what holds it may run beside others as that does.
            before, inherited = result[upper] if latest == NONE else (latest, False)
            result[node] = before, is_beside or inherited
    return {position: result[position] for position in calls}


def _find_meetings(tree: Tree, calls: Mapping[int, int]) -> dict[int, int]:
    """Return calls and the spans where they meet, each with the next one above, parents first."""
    nodes = set(calls)
    for left, right in pairwise(sorted(calls, key=tree.first.__getitem__)):
        is_beside = tree.parents[left] == tree.parents[right]
        nodes.add(tree.parents[left] if is_beside else tree.meet(left, right))
    nodes.discard(NO_PARENT)
    result: dict[int, int] = {}
    above: list[int] = []
    for node in sorted(nodes, key=tree.first.__getitem__):
        while above and not tree.contains(above[-1], node):
            above.pop()
        result[node] = above[-1] if above else NO_PARENT
        above.append(node)
    return result


def find_tools(tree: Tree, calls: Mapping[int, Call]) -> dict[int, int]:
    """Return for each call the innermost tool of its own agent that holds it, or -1."""
    tool_of = dict.fromkeys(calls, NONE)
    tools = [
        at
        for at, span in enumerate(tree.spans)
        if span.attributes.get(c.OPERATION) == c.EXECUTE_TOOL
    ]
    above: dict[str, list[int]] = {}
    for node in sorted({*tools, *calls}, key=tree.first.__getitem__) if tools else ():
        call = calls.get(node)
        stack = above.setdefault(tree.agents[node] if call is None else call.agent, [])
        while stack and not tree.contains(stack[-1], node):
            stack.pop()
        if call is None:
            stack.append(node)
        elif stack:
            tool_of[node] = stack[-1]
    return tool_of


def is_after(tree: Tree, first: int, second: int) -> bool:
    """Return whether the part of the tree around one call ended before another's began."""
    meeting = tree.meet(first, second)
    if meeting in (first, second):
        return False
    return tree.ends[tree.below(meeting, first)] <= tree.starts[tree.below(meeting, second)]
