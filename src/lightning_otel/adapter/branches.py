"""The order of calls: those of one agent in one attempt as a forest of paths.

A call follows the latest earlier one whose conversation it continues. One that continues none
follows the latest one that had ended before it began, as long as the parts of the tree that hold
the two had not run side by side. So concurrent calls, operations and agents are branches. It is a
branch, too, where that one's conversation goes on elsewhere, and inside a tool of its own agent.

One that asks again what an earlier call was asked, whose answer was thrown away, follows what that
one followed. One that goes on with a shortened conversation follows by time, and begins a path.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final

from lightning_otel.adapter import histories, ordering
from lightning_otel.adapter.attributes import get_integer
from lightning_otel.adapter.histories import History
from lightning_otel.adapter.ordering import NO_PARENT
from lightning_otel.adapter.tree import Tree
from lightning_otel.types import Call
from lightning_otel.types import conventions as c

NONE: Final = -1
_MOST_ABOVE: Final = 64
"""How far up is looked for who waited for a call."""


class Links:
    """One agent's calls, in order, and how they hang together, by index; -1 stands for none.

    Attributes:
        positions: Their positions in the tree.
        calls: The calls.
        hashes: Their conversations.
        before: The earlier call that each one follows.
        is_continued: Whether it continues that one's conversation, and not only its time.
        is_beside: Whether it began beside another branch of its agent.
        repeats: The earlier call that each one asks again.
        is_compacted: Whether it goes on with a shortened conversation.
    """

    def __init__(
        self,
        tree: Tree,
        positions: Sequence[int],
        calls: Sequence[Call],
        hashes: Sequence[History],
        tool_of: Sequence[int],
    ) -> None:
        """Link the calls; ``tool_of`` has the innermost tool of its agent around each, or -1."""
        count = len(calls)
        self.positions, self.calls, self.hashes = positions, calls, hashes
        self.before, self.repeats = [NONE] * count, [NONE] * count
        self.is_continued, self.is_compacted = bytearray(count), bytearray(count)
        latest, self.is_beside = _follow_time(tree, positions, tool_of)
        self._root = list(range(count))  # where the conversation of each call began
        self._left: dict[int, int] = {}  # what calls left behind, and what they were given
        self._given: dict[int, int] = {}
        left = {each for hashed in hashes for each in hashed.left}
        self._may_continue = [not left.isdisjoint(hashed.prefixes) for hashed in hashes]
        continued = {
            hashed.prefixes[histories.longest_prefix(hashed.prefixes, left) - 1]
            for hashed, may_continue in zip(hashes, self._may_continue, strict=True)
            if may_continue
        }
        self._gone_on_with = {
            hashed.given for hashed in hashes if continued and not continued.isdisjoint(hashed.left)
        }
        by_end = sorted(range(count), key=lambda call: (tree.ends[positions[call]], call))
        finished = 0
        for call, position in enumerate(positions):
            while by_end[finished] < call and (
                tree.ends[positions[by_end[finished]]] <= tree.starts[position]
            ):
                ended = by_end[finished]
                self._left.update(dict.fromkeys(hashes[ended].left, ended))
                if hashes[ended].prefixes:
                    self._given[hashes[ended].given] = ended
                finished += 1
            self._link_call(tree, call, latest[call])
        self._set_apart(tool_of)

    def paths(self) -> list[list[int]]:
        """Return every root-to-leaf path, in order of their last step.

        A path ends where a conversation was shortened.
        """
        pairs = zip(self.before, self.is_compacted, strict=True)
        before = [NONE if is_compacted else previous for previous, is_compacted in pairs]
        followed = set(before)
        found = []
        for leaf in range(len(before)):
            if leaf in followed:
                continue
            path = [leaf]
            while before[path[-1]] != NONE:
                path.append(before[path[-1]])
            found.append(path[::-1])
        return found

    def _link_call(self, tree: Tree, call: int, latest: int) -> None:
        """Find what a call follows, given the latest by time, once all before it are linked."""
        previous, is_continued = self._find_continued(call, latest)
        is_plain = is_continued and previous == latest
        if latest != NONE and not self.is_beside[call] and not is_plain:
            again = NONE if is_continued else self._find_repeated(call)
            if again != NONE and is_after(tree, self.positions[again], self.positions[call]):
                self.repeats[call] = again
                self.is_compacted[call] = self.is_compacted[again]
                previous = self.before[again]
            elif self._is_shortened(call, latest, previous):
                self.is_compacted[call] = True
                previous, is_continued = latest, False
        self.before[call] = previous
        self.is_continued[call] = is_continued
        if is_continued:
            self._root[call] = self._root[previous]

    def _find_continued(self, call: int, latest: int) -> tuple[int, bool]:
        """Return the call whose conversation this one's messages begin with, else the one by time.

        Where several left the same conversation behind, it is the one by time if that is among
        them, else the latest. And whether it is by conversation.
        """
        prefixes = self.hashes[call].prefixes
        length = histories.longest_prefix(prefixes, self._left) if self._may_continue[call] else 0
        if not length:
            return latest, False
        is_latest = latest != NONE and prefixes[length - 1] in self.hashes[latest].left
        return latest if is_latest else self._left[prefixes[length - 1]], True

    def _find_repeated(self, call: int) -> int:
        """Return the latest call that was asked the same and whose answer was thrown away, or -1.

        It was so if the call failed, or if what was asked was ever gone on with by repeating it and
        its answer: such an agent repeats what was said, and here it did not repeat that answer.
        """
        given = self.hashes[call].given
        earlier = self._given.get(given, NONE)
        has_failed = earlier != NONE and self.calls[earlier].span.status == "ERROR"
        return earlier if has_failed or given in self._gone_on_with else NONE

    def _is_shortened(self, call: int, latest: int, continued: int) -> bool:
        """Return whether a call goes on with less of the history than the latest one held.

        It has fewer messages or tokens than that, and some of what was said in that conversation:
        an answer or tool's result of later than its beginning, or its whole beginning and more.
        The one that it would follow else, `continued`, may be one that it begins with.
        """
        root, hashes = self._root[latest], self.hashes
        if root == latest or not self._is_smaller(call, latest):
            return False
        hashed, beginning = hashes[call], hashes[root]
        size, heard = len(beginning.prefixes), 0
        if continued != latest:
            size = heard = len(hashes[continued].prefixes) + 1
        elif len(hashed.prefixes) > size and hashed.prefixes[size - 1] == beginning.given:
            return True
        held = self.calls[latest]
        words = histories.agent_messages((*held.observation[size:], *held.action))
        said = histories.agent_messages(self.calls[call].observation[heard:])
        return not words.isdisjoint(said)

    def _is_smaller(self, call: int, previous: int) -> bool:
        if 0 < len(self.hashes[call].prefixes) < len(self.hashes[previous].prefixes):
            return True
        size, other = (
            get_integer(self.calls[i].span.attributes, c.INPUT_TOKENS) for i in (call, previous)
        )
        return size is not None and other is not None and size < other

    def _set_apart(self, tool_of: Sequence[int]) -> None:
        """Begin a path with each call that follows one whose conversation goes on elsewhere.

        It follows by time alone, or asks with that conversation from inside a tool.
        """
        before, is_continued = self.before, self.is_continued
        gone_on = {
            (before[call], tool_of[call])
            for call, by_history in enumerate(is_continued)
            if by_history
        }
        apart: set[int] = set()
        for call, previous in enumerate(before) if gone_on else ():
            if previous == NONE or self.is_compacted[call]:
                continue
            is_elsewhere = (previous, tool_of[previous]) in gone_on
            if is_continued[call]:
                is_elsewhere &= tool_of[call] != tool_of[previous]
            elif self.repeats[call] != NONE:
                is_elsewhere &= self.repeats[call] in apart
            if is_elsewhere:
                apart.add(call)
        for call in apart:
            before[call] = NONE
            is_continued[call] = 0
            self.is_beside[call] = 1


def _follow_time(
    tree: Tree, positions: Sequence[int], tool_of: Sequence[int]
) -> tuple[list[int], bytearray]:
    """Return the latest call that had ended before each one, on branches that had ended too.

    And whether the branch that it begins ran beside others. The calls inside a tool that their own
    agent runs follow one another, and none outside of it.
    """
    groups: dict[int, list[int]] = {}
    for call, tool in enumerate(tool_of):
        groups.setdefault(tool, []).append(call)
    before, is_beside = [NONE] * len(positions), bytearray(len(positions))
    for tool, group in groups.items():
        is_inside = tool != NONE and NONE in groups
        index = {positions[call]: call for call in group}
        for position, (latest, beside) in _follow_branches(tree, index).items():
            call = index[position]
            before[call] = index.get(latest, NONE)
            is_beside[call] = beside or (is_inside and before[call] == NONE)
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
    found = {NO_PARENT: (NONE, False)}
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
            before, inherited = found[upper] if latest == NONE else (latest, False)
            found[node] = before, is_beside or inherited
    return {position: found[position] for position in calls}


def _find_meetings(tree: Tree, calls: Mapping[int, int]) -> dict[int, int]:
    """Return calls and the spans where they meet, each with the next one above, parents first."""
    nodes = set(calls)
    for left, right in pairwise(sorted(calls, key=tree.first.__getitem__)):
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


def find_tools(tree: Tree, calls: Mapping[int, Call]) -> dict[int, int]:
    """Return for each call the innermost tool of its own agent that holds it, or -1."""
    found = dict.fromkeys(calls, NONE)
    tools = [
        at
        for at, each in enumerate(tree.spans)
        if each.attributes.get(c.OPERATION) == c.EXECUTE_TOOL
    ]
    above: dict[str, list[int]] = {}
    for node in sorted({*tools, *calls}, key=tree.first.__getitem__) if tools else ():
        call = calls.get(node)
        own = above.setdefault(tree.agents[node] if call is None else call.agent, [])
        while own and not tree.contains(own[-1], node):
            own.pop()
        if call is None:
            own.append(node)
        elif own:
            found[node] = own[-1]
    return found


def is_after(tree: Tree, earlier: int, later: int) -> bool:
    """Return whether the part of the tree around one call ended before another's began."""
    meeting = tree.meet(earlier, later)
    if meeting in (earlier, later):
        return False
    return tree.ends[tree.below(meeting, earlier)] <= tree.starts[tree.below(meeting, later)]


def order_by_messages(
    tree: Tree, calls: Mapping[int, Call], hashes: Mapping[int, History]
) -> list[tuple[int, int]]:
    """Positions of calls and of those that continue them, if the tree has some of them in disorder.

    Only where one call alone left behind what another repeats, and no count speaks against it.
    """
    every = {left for hashed in hashes.values() for left in hashed.left}
    later = [i for i, hashed in hashes.items() if not every.isdisjoint(hashed.prefixes)]
    holders: dict[tuple[str, int], list[int]] = {}
    for position, hashed in hashes.items() if later else ():
        for left in set(hashed.left):
            holders.setdefault((calls[position].agent, left), []).append(position)
    found = []
    for position in later:
        agent = calls[position].agent
        prefixes = (holders.get((agent, each)) for each in reversed(hashes[position].prefixes))
        held = next(filter(None, prefixes), ())
        if len(held) == 1 and not _is_counted_otherwise(tree, held[0], position):
            found.append((held[0], position))
    is_disordered = any(tree.ends[one] > tree.starts[other] for one, other in found)
    return found if is_disordered else []


def _is_counted_otherwise(tree: Tree, earlier: int, later: int) -> bool:
    """Return whether a process counted both, and not one's end before the other's start."""
    one, other = tree.spans[earlier], tree.spans[later]
    if one.process != other.process or one.end_sequence < 0 or other.sequence < 0:
        return earlier == later
    return one.end_sequence > other.sequence


def is_known(tree: Tree, earlier: int, later: int) -> bool:
    """Return whether something but clocks says that one call ended before another began.

    One process counted both; or it counted the parts of the tree that hold them, and the earlier
    call's part waited for it.
    """
    spans = tree.spans
    if tree.is_counted or ordering.is_counted_before(spans[earlier], spans[later]):
        return True
    meeting = tree.meet(earlier, later)
    if meeting in (earlier, later):
        return False
    top, node = tree.below(meeting, earlier), earlier
    if not ordering.is_counted_before(spans[top], spans[tree.below(meeting, later)]):
        return False
    for _ in range(_MOST_ABOVE):
        if node == top:
            return True
        if not ordering.is_enclosed(spans[node], spans[tree.parents[node]]):
            return False
        node = tree.parents[node]
    return False
