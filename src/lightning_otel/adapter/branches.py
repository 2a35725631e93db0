"""Which call follows which: the calls of one agent in one attempt as a forest of paths.

A call follows the latest earlier one whose conversation it continues. One that continues none
follows the latest one that had ended before it began, as long as the parts of the tree that hold
the two had not run side by side. So concurrent calls, operations and agents are branches.

One that asks again what an earlier call was asked, whose answer was thrown away, follows what that
one followed. One that goes on with a shortened conversation follows by time, and begins a path.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

from lightning_otel import conventions as c
from lightning_otel.adapter import conversations, order
from lightning_otel.adapter.attributes import integer
from lightning_otel.adapter.conversations import Conversation
from lightning_otel.adapter.tree import NO_PARENT, Tree
from lightning_otel.types import Call, Span

NONE: Final = -1
_MOST_ABOVE: Final = 64
"""How far up is looked for who waited for a call."""


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


class Links(NamedTuple):
    """How one agent's calls hang together, by index; -1 stands for none.

    Attributes:
        before: The earlier call that each one follows.
        is_continued: Whether it continues that one's conversation, and not only its time.
        is_beside: Whether it began beside another branch of its agent.
        repeats: The earlier call that each one asks again.
        is_compacted: Whether it goes on with a shortened conversation.
    """

    before: list[int]
    is_continued: bytearray
    is_beside: bytearray
    repeats: list[int]
    is_compacted: bytearray

    @property
    def path_before(self) -> list[int]:
        """The call that each one follows on its path: none where a conversation was shortened."""
        return [
            NONE if is_compacted else previous
            for previous, is_compacted in zip(self.before, self.is_compacted, strict=True)
        ]


def predecessors(tree: Tree, positions: Sequence[int], calls: Sequence[Call]) -> list[int]:
    """For each of one agent's calls the index of the one it follows, or -1.

    Args:
        tree: The attempt's spans.
        positions: The calls' positions in the tree, in order.
        calls: The calls.
    """
    return links(tree, positions, calls, [conversations.read(call) for call in calls]).before


def links(
    tree: Tree, positions: Sequence[int], calls: Sequence[Call], talks: Sequence[Conversation]
) -> Links:
    """How one agent's calls hang together.

    Args:
        tree: The attempt's spans.
        positions: The calls' positions in the tree, in order.
        calls: The calls.
        talks: Their conversations.
    """
    by_time, is_beside = _by_time(tree, positions)
    found = Links(
        [NONE] * len(calls),
        bytearray(len(calls)),
        is_beside,
        [NONE] * len(calls),
        bytearray(len(calls)),
    )
    history = _History(calls, talks)
    by_end = sorted(range(len(calls)), key=lambda call: (tree.ends[positions[call]], call))
    finished = 0
    for call, position in enumerate(positions):
        while by_end[finished] < call and (
            tree.ends[positions[by_end[finished]]] <= tree.starts[position]
        ):
            history.add(by_end[finished])
            finished += 1
        previous, found.is_continued[call] = history.continued_by(call, by_time[call])
        if not found.is_continued[call] and previous != NONE and not is_beside[call]:
            again = history.asked_before(call)
            if again != NONE and is_after(tree, positions[again], position):
                found.repeats[call] = again
                found.is_compacted[call] = found.is_compacted[again]
                previous = found.before[again]
            else:
                found.is_compacted[call] = history.is_shortened(call, previous)
        found.before[call] = previous
        history.join(call, previous if found.is_continued[call] else NONE)
    return found


def is_after(tree: Tree, earlier: int, later: int) -> bool:
    """Whether the part of the tree around one call had ended before that of another one began."""
    meeting = tree.meet(earlier, later)
    if meeting in (earlier, later):
        return False
    return tree.ends[tree.below(meeting, earlier)] <= tree.starts[tree.below(meeting, later)]


class _History:
    """Conversations of one agent so far."""

    def __init__(self, calls: Sequence[Call], talks: Sequence[Conversation]) -> None:
        self._calls = calls
        self._talks = talks
        self._left: dict[int, int] = {}
        self._known: set[int] = set()
        self._asked: dict[int, int] = {}
        self._root = list(range(len(calls)))
        left = {each for talk in talks for each in talk.left}
        self._may_continue = [not left.isdisjoint(talk.prefixes) for talk in talks]
        continued = {
            talk.prefixes[conversations.longest(talk.prefixes, left) - 1]
            for talk, may_continue in zip(talks, self._may_continue, strict=True)
            if may_continue
        }
        self._gone_on_with = {
            talk.given for talk in talks if continued and not continued.isdisjoint(talk.left)
        }

    def continued_by(self, call: int, by_time: int) -> tuple[int, bool]:
        """The call whose whole conversation this one's messages begin with, else the one by time.

        Where several left the same conversation behind, it is the one by time if that is among
        them, else the latest. And whether it is by conversation.
        """
        if not self._may_continue[call]:
            return by_time, False
        prefixes = self._talks[call].prefixes
        length = conversations.longest(prefixes, self._left)
        if not length:
            return by_time, False
        conversation = prefixes[length - 1]
        if hash((by_time, conversation)) in self._known:
            return by_time, True
        return self._left[conversation], True

    def add(self, call: int) -> None:
        """Know the conversation a call leaves behind: what it was given and each of its answers."""
        for conversation in self._talks[call].left:
            self._left[conversation] = call
            self._known.add(hash((call, conversation)))
        if self._talks[call].prefixes:
            self._asked[self._talks[call].given] = call

    def join(self, call: int, continued: int) -> None:
        """Know where the conversation of a call began."""
        if continued != NONE:
            self._root[call] = self._root[continued]

    def asked_before(self, call: int) -> int:
        """The latest call that was asked the same and whose answer the agent threw away, or -1.

        It did so if it failed, or if what was asked was ever gone on with by repeating it and its
        answer: such an agent repeats what was said, and here it did not repeat that answer.
        """
        given = self._talks[call].given
        earlier = self._asked.get(given, NONE)
        if earlier == NONE:
            return NONE
        has_failed = self._calls[earlier].span.status == "ERROR"
        return earlier if has_failed or given in self._gone_on_with else NONE

    def is_shortened(self, call: int, previous: int) -> bool:
        """Whether a call goes on with less of the conversation that the one before it held.

        It has fewer messages or tokens than that, and some of what was said in that conversation:
        an answer or tool's result of later than its beginning, or its whole beginning and more.
        """
        root = self._root[previous]
        if root == previous or not self._is_smaller(call, previous):
            return False
        talk, beginning = self._talks[call], self._talks[root]
        size = len(beginning.prefixes)
        if len(talk.prefixes) > size and talk.prefixes[size - 1] == beginning.given:
            return True
        held = self._calls[previous]
        words = conversations.own_words((*held.observation[size:], *held.action))
        return not words.isdisjoint(conversations.own_words(self._calls[call].observation))

    def _is_smaller(self, call: int, previous: int) -> bool:
        if 0 < len(self._talks[call].prefixes) < len(self._talks[previous].prefixes):
            return True
        sizes = [integer(self._calls[i].span.attributes, c.INPUT_TOKENS) for i in (call, previous)]
        return None not in sizes and sizes[0] < sizes[1]  # type: ignore[operator]  # None is out


def out_of_order(
    tree: Tree, calls: Mapping[int, Call], talks: Mapping[int, Conversation]
) -> list[tuple[int, int]]:
    """Positions of calls that by the tree's clock come too late for those that continue them.

    Only where one call alone left behind what another repeats, and no count speaks against it.
    """
    every = {left for talk in talks.values() for left in talk.left}
    late = [i for i, talk in talks.items() if not every.isdisjoint(talk.prefixes)]
    holders: dict[tuple[str, int], list[int]] = {}
    for position, talk in talks.items() if late else ():
        for left in talk.left:
            holders.setdefault((calls[position].agent, left), []).append(position)
    ended = {key: min(tree.ends[each] for each in held) for key, held in holders.items()}
    found = []
    for position in late:
        agent = calls[position].agent
        for prefix in reversed(talks[position].prefixes):
            held = holders.get((agent, prefix))
            if held is None:
                continue
            earlier = held[0]
            if ended[agent, prefix] > tree.starts[position] and len(held) == 1:
                one, other = tree.spans[earlier], tree.spans[position]
                if earlier != position and not _is_counted_otherwise(one, other):
                    found.append((earlier, position))
            break
    return found


def _is_counted_otherwise(one: Span, other: Span) -> bool:
    """Whether their process counted both, and not the end of one before the start of the other."""
    if one.process != other.process or one.end_sequence < 0 or other.sequence < 0:
        return False
    return one.end_sequence > other.sequence


def is_known(tree: Tree, earlier: int, later: int) -> bool:
    """Whether something but clocks says that one call ended before another one began.

    One process counted both; or it counted the parts of the tree that hold them, and the earlier
    call's part waited for it.
    """
    spans = tree.spans
    if tree.is_counted or order.is_told(spans[earlier], spans[later]):
        return True
    meeting = tree.meet(earlier, later)
    if meeting in (earlier, later):
        return False
    top = tree.below(meeting, earlier)
    if not order.is_told(spans[top], spans[tree.below(meeting, later)]):
        return False
    node = earlier
    for _ in range(_MOST_ABOVE):
        if node == top:
            return True
        if not order.is_awaited(spans[node], spans[tree.parents[node]]):
            return False
        node = tree.parents[node]
    return False


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


def _by_time(tree: Tree, positions: Sequence[int]) -> tuple[list[int], bytearray]:
    """For each call the latest one that had ended before it, on branches that had ended too.

    And whether the branch that it begins ran beside others.
    """
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
            _follow(tree, siblings[node], branches[node])
    before = [index.get(branches[position].before, NONE) for position in positions]
    return before, bytearray(branches[position].is_beside for position in positions)


def _follow(tree: Tree, siblings: list[_Branch], upper: _Branch) -> None:
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
            newest = _later(tree, newest, by_end[finished].newest)
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
