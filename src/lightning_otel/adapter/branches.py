"""The order of calls: those of one agent in one attempt as a forest of paths.

A call follows the latest earlier one whose conversation it continues. One that continues none
follows the latest one that had ended before it began, as long as the parts of the tree that hold
the two had not run side by side. So concurrent calls, operations and agents are branches. It is a
branch, too, where that one's conversation goes on elsewhere, and inside a tool of its own agent.

One that asks again what an earlier call was asked, whose answer was thrown away, follows what that
one followed. One that goes on with a shortened conversation follows by time, and begins a path.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from lightning_otel import conventions as c
from lightning_otel.adapter import conversations, order, siblings
from lightning_otel.adapter.attributes import integer
from lightning_otel.adapter.conversations import Conversation
from lightning_otel.adapter.siblings import NONE
from lightning_otel.adapter.tree import Tree
from lightning_otel.types import Call

_MOST_ABOVE: Final = 64
"""How far up is looked for who waited for a call."""


@dataclass(frozen=True, slots=True)
class Links:
    """One agent's calls, in order, and how they hang together, by index; -1 stands for none.

    Attributes:
        positions: Their positions in the tree.
        calls: The calls.
        talks: Their conversations.
        before: The earlier call that each one follows.
        is_continued: Whether it continues that one's conversation, and not only its time.
        is_beside: Whether it began beside another branch of its agent.
        repeats: The earlier call that each one asks again.
        is_compacted: Whether it goes on with a shortened conversation.
    """

    positions: Sequence[int]
    calls: Sequence[Call]
    talks: Sequence[Conversation]
    before: list[int]
    is_continued: bytearray
    is_beside: bytearray
    repeats: list[int]
    is_compacted: bytearray

    def paths(self) -> list[list[int]]:
        """Return every root-to-leaf path, in order of their last step.

        A path ends where a conversation was shortened.
        """
        before = [
            NONE if is_compacted else previous
            for previous, is_compacted in zip(self.before, self.is_compacted, strict=True)
        ]
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


def link_calls(
    tree: Tree,
    positions: Sequence[int],
    calls: Sequence[Call],
    talks: Sequence[Conversation],
    tools: Sequence[int],
) -> Links:
    """Return how one agent's calls hang together.

    Args:
        tree: The attempt's spans.
        positions: The calls' positions in the tree, in order.
        calls: The calls.
        talks: Their conversations.
        tools: Positions of the agent's tools, in the order of the walk.
    """
    count = len(calls)
    tool_of = siblings.tool_of_each(tree, positions, tools) if tools else [NONE] * count
    by_time, is_beside = siblings.by_time(tree, positions, tool_of)
    found = Links(
        positions, calls, talks, [NONE] * count, bytearray(count), is_beside, [NONE] * count,
        bytearray(count),
    )  # fmt: skip
    history = _History(calls, talks)
    by_end = sorted(range(count), key=lambda call: (tree.ends[positions[call]], call))
    finished = 0
    for call, position in enumerate(positions):
        while by_end[finished] < call and (
            tree.ends[positions[by_end[finished]]] <= tree.starts[position]
        ):
            history.add(by_end[finished])
            finished += 1
        _link_call(found, history, call, by_time[call], tree)
    _set_apart(found, tool_of)
    return found


def _set_apart(found: Links, tool_of: Sequence[int]) -> None:
    """Begin a path with each call that follows one whose conversation goes on elsewhere.

    It follows by time alone, or asks with that conversation from inside a tool.
    """
    before, is_continued = found.before, found.is_continued
    gone_on = {
        (before[call], tool_of[call]) for call, by_history in enumerate(is_continued) if by_history
    }
    is_apart = bytearray(len(before))
    for call, previous in enumerate(before) if gone_on else ():
        if previous == NONE or found.is_compacted[call]:
            continue
        if is_continued[call]:
            inside = tool_of[call] != tool_of[previous]
            is_apart[call] = inside and (previous, tool_of[previous]) in gone_on
        elif (previous, tool_of[previous]) in gone_on:
            again = found.repeats[call]
            is_apart[call] = again == NONE or is_apart[again]
    for call, apart in enumerate(is_apart):
        if apart:
            before[call] = NONE
            is_continued[call] = 0
            found.is_beside[call] = 1


def _link_call(found: Links, history: "_History", call: int, latest: int, tree: Tree) -> None:
    """Find what one call follows, given the latest by time, once all before it are linked."""
    previous, is_continued = history.continued_by(call, latest)
    is_plain = is_continued and previous == latest
    if latest != NONE and not found.is_beside[call] and not is_plain:
        again = NONE if is_continued else history.asked_before(call)
        if again != NONE and siblings.is_after(tree, found.positions[again], found.positions[call]):
            found.repeats[call] = again
            found.is_compacted[call] = found.is_compacted[again]
            previous = found.before[again]
        elif history.is_shortened(call, latest, previous):
            found.is_compacted[call] = True
            previous, is_continued = latest, False
    found.before[call] = previous
    found.is_continued[call] = is_continued
    history.join(call, previous if is_continued else NONE)


class _History:
    """Conversations of one agent so far."""

    def __init__(self, calls: Sequence[Call], talks: Sequence[Conversation]) -> None:
        self._calls = calls
        self._talks = talks
        self._left: dict[int, int] = {}
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
        self._may_ask_again = bool(self._gone_on_with) or any(
            call.span.status == "ERROR" for call in calls
        )

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
        if by_time != NONE and conversation in self._talks[by_time].left:
            return by_time, True
        return self._left[conversation], True

    def add(self, call: int) -> None:
        """Know the conversation a call leaves behind: what it was given and each of its answers."""
        for conversation in self._talks[call].left:
            self._left[conversation] = call
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
        if not self._may_ask_again:
            return NONE
        given = self._talks[call].given
        earlier = self._asked.get(given, NONE)
        if earlier == NONE:
            return NONE
        has_failed = self._calls[earlier].span.status == "ERROR"
        return earlier if has_failed or given in self._gone_on_with else NONE

    def is_shortened(self, call: int, latest: int, continued: int) -> bool:
        """Return whether a call goes on with less of the history than the latest one held.

        It has fewer messages or tokens than that, and some of what was said in that conversation:
        an answer or tool's result of later than its beginning, or its whole beginning and more.

        Args:
            call: The call.
            latest: The one before it by time.
            continued: The one that it would follow else; it may begin with that one's conversation.
        """
        root = self._root[latest]
        if root == latest or not self._is_smaller(call, latest):
            return False
        talk, beginning = self._talks[call], self._talks[root]
        size = len(beginning.prefixes)
        if continued != latest:
            size = len(self._talks[continued].prefixes) + 1
        elif len(talk.prefixes) > size and talk.prefixes[size - 1] == beginning.given:
            return True
        held = self._calls[latest]
        words = conversations.own_words((*held.observation[size:], *held.action))
        said = self._calls[call].observation[size if continued != latest else 0 :]
        return not words.isdisjoint(conversations.own_words(said))

    def _is_smaller(self, call: int, previous: int) -> bool:
        if 0 < len(self._talks[call].prefixes) < len(self._talks[previous].prefixes):
            return True
        sizes = [integer(self._calls[i].span.attributes, c.INPUT_TOKENS) for i in (call, previous)]
        return None not in sizes and sizes[0] < sizes[1]  # type: ignore[operator]  # None is out


def told_by_messages(
    tree: Tree, calls: Mapping[int, Call], talks: Mapping[int, Conversation]
) -> list[tuple[int, int]]:
    """Positions of calls and of those that continue them, if the tree has some of them in disorder.

    Only where one call alone left behind what another repeats, and no count speaks against it.
    """
    every = {left for talk in talks.values() for left in talk.left}
    later = [i for i, talk in talks.items() if not every.isdisjoint(talk.prefixes)]
    holders: dict[tuple[str, int], list[int]] = {}
    for position, talk in talks.items() if later else ():
        for left in set(talk.left):
            holders.setdefault((calls[position].agent, left), []).append(position)
    found = []
    for position in later:
        for prefix in reversed(talks[position].prefixes):
            held = holders.get((calls[position].agent, prefix))
            if held is None:
                continue
            if len(held) == 1 and not _is_counted_otherwise(tree, held[0], position):
                found.append((held[0], position))
            break
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
