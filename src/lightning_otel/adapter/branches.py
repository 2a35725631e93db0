"""The order of calls: those of one agent in one attempt as a forest of paths.

A call follows the latest earlier one whose conversation it continues: whose messages and answer its
own begin with or, where a history was edited, whose answer is the last in it. One that asks again
after a thrown-away answer follows what that one followed. One that goes on with less of a
conversation follows its latest call, and begins a path.

Any other begins a conversation of its own. Calls of one identity that repeat nothing follow one
another in time, if no conversation stands between and their parts of the tree did not overlap.
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Final

from lightning_otel.adapter import histories, ordering
from lightning_otel.adapter.histories import History
from lightning_otel.adapter.identities import NONE, Identities, Remarks, Tails
from lightning_otel.adapter.timeline import follow_time, is_after
from lightning_otel.adapter.tree import Tree
from lightning_otel.types import Call

_MOST_ABOVE: Final = 64
"""How far up is looked for who waited for a call."""


class Links:
    """The call that each of an agent's calls follows, by index in their order; -1 is none.

    Attributes:
        positions: Their positions in the tree.
        before: The earlier call that each one follows.
        conversations: The first call of the conversation that each one belongs to.
        is_continued: Whether it continues that one's conversation, and not only its time.
        is_beside: Whether it began beside another branch of its agent.
        is_doubtful: Whether it may belong elsewhere, by all that is known of who asked.
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
        *,
        are_marks: bool = False,
    ) -> None:
        """Link the calls; ``tool_of`` has the innermost tool of its agent around each, or -1."""
        count = len(calls)
        self.positions, self.calls, self.hashes = positions, calls, hashes
        self.before, self.repeats = [NONE] * count, [NONE] * count
        self.is_continued, self.is_compacted = bytearray(count), bytearray(count)
        self.is_doubtful = bytearray(count)
        self.conversations = [0] * count
        self._tree, self._tool_of, self._are_marks = tree, tool_of, are_marks
        self._latest, self.is_beside = follow_time(tree, positions, tool_of)
        self._root = list(range(count))  # where the history of each call began
        self._shared = [0] * count  # messages of it that the call it continues left behind
        self._identities = Identities(calls)
        self._continue_histories()
        self._gone_on = {
            (previous, tool_of[call])
            for call, previous in enumerate(self.before)
            if self.is_continued[call]
        }
        if not all(map(self._is_plain, range(1, count))):
            self._place_others()
            self._set_apart()

    def paths(self) -> list[list[int]]:
        """Return every path from a root by its last step; shortened conversations end it."""
        pairs = zip(self.before, self.is_compacted, strict=True)
        before = [NONE if is_compacted else previous for previous, is_compacted in pairs]
        followed = set(before)
        paths = []
        for leaf in range(len(before)):
            if leaf in followed:
                continue
            path = [leaf]
            while before[path[-1]] != NONE:
                path.append(before[path[-1]])
            paths.append(path[::-1])
        return paths

    def _is_plain(self, call: int) -> bool:
        return self.is_continued[call] != 0 and self.before[call] == self._latest[call]

    def _is_over(self, first: int, second: int) -> bool:
        tree, positions = self._tree, self.positions
        return tree.ends[positions[first]] <= tree.starts[positions[second]]

    def _sweep(self) -> Iterator[tuple[int, Sequence[int]]]:
        ends, positions = self._tree.ends, self.positions
        by_end = sorted(range(len(positions)), key=lambda call: (ends[positions[call]], call))
        finished = 0
        for call in range(len(positions)):
            start = finished
            while by_end[finished] < call and self._is_over(by_end[finished], call):
                finished += 1
            yield call, by_end[start:finished]

    def _continue_histories(self) -> None:
        hashes = self.hashes
        answers = {answer for hashed in hashes for answer in hashed.left}
        lengths = [
            0
            if answers.isdisjoint(hashed.prefixes)
            else histories.longest_prefix(hashed.prefixes, answers)
            for hashed in hashes
        ]
        ends = {
            hashed.prefixes[length - 1]
            for hashed, length in zip(hashes, lengths, strict=True)
            if length
        }
        self._gone_on_with = {
            hashed.given for hashed in hashes if ends and not ends.isdisjoint(hashed.left)
        }
        tails = Tails(self.calls, lengths, self._identities)
        owners: dict[int, int] = {}
        for call, ended in self._sweep():
            for other in ended:
                owners.update(dict.fromkeys(hashes[other].left, other))
                tails.add(other, self.before[other], self._shared[other])
            prefixes = hashes[call].prefixes
            length = histories.longest_prefix(prefixes, owners) if lengths[call] else 0
            previous = tails.find(call, length)
            if previous != NONE:
                self.is_doubtful[call] = call in tails.doubtful
            elif length:
                end, latest = prefixes[length - 1], self._latest[call]
                is_latest = latest != NONE and end in hashes[latest].left
                previous = latest if is_latest else owners[end]
                self._shared[call] = length
            if previous != NONE:
                self.before[call], self.is_continued[call] = previous, 1
                self._root[call] = self._root[previous]

    def _place_others(self) -> None:
        final = {root: call for call, root in enumerate(self._root)}
        grown = {root for call, root in enumerate(self._root) if call != root}
        is_mixed = _are_mixed(root for root in self._root if root in grown)
        remarks = Remarks(self.calls, self.hashes, self._identities)
        prompts: dict[int, int] = {}
        groups: set[object] = set()
        over: set[object] = set()
        host = NONE  # the latest call of a conversation that goes on
        for call, ended in self._sweep():
            for other in ended:
                if self.hashes[other].prefixes:
                    prompts[self.hashes[other].given] = other
                if final[self._root[other]] == other and self._root[other] in grown:
                    over.add(self._identities.group(other))
                is_grown = self._root[other] in grown
                thread = self.conversations[other]
                remarks.add(other, thread, self._shared[other], is_grown=is_grown)
            previous = self.before[call]
            repeat = shortened = NONE
            if previous == NONE:
                repeat = self._find_repeated(call, prompts)
            if repeat == NONE and not self._are_marks:
                thread = NONE if previous == NONE else self.conversations[previous]
                if thread == NONE or remarks.latest_of(thread) != previous:

                    def is_over(latest: int, call: int = call, thread: int = thread) -> bool:
                        if thread != NONE:
                            is_own = self.conversations[latest] == thread
                            return is_own and remarks.is_smaller(call, latest)
                        return self._is_over(final[self._root[latest]], call)

                    shortened = remarks.find(call, self._shared[call], is_over)
            if repeat != NONE:
                self.repeats[call] = repeat
                self.is_compacted[call] = self.is_compacted[repeat]
                self.before[call] = self.before[repeat]
                self.conversations[call] = self.conversations[repeat]
            elif shortened != NONE:
                self.is_compacted[call] = remarks.is_smaller(call, shortened)
                self.is_continued[call] = 0
                self.is_doubtful[call] |= call in remarks.doubtful
                self.before[call] = shortened
            elif previous == NONE:
                is_lone = grown.isdisjoint((call, self._root[self._latest[call]]))
                if grown:  # what repeats nothing beside them may be a tool's, within one of them
                    is_inside = host != NONE and final[self._root[host]] > call
                    is_lone = (
                        is_lone and is_inside and self._identities[host] == self._identities[call]
                    )
                self._begin(call, groups, over, is_lone=is_lone and not is_mixed)
            if repeat == NONE:
                before = self.before[call]
                self.conversations[call] = call if before == NONE else self.conversations[before]
            if not self.is_continued[call]:
                groups.add(self._identities.group(call))
            if self._root[call] in grown:
                host = call

    def _begin(
        self, call: int, groups: Container[object], over: Container[object], *, is_lone: bool
    ) -> None:
        """Begin a conversation, or follow the latest call where both repeat nothing.

        ``groups`` are the identities of those before, ``over`` of those that do not go on.
        """
        latest, group = self._latest[call], self._identities.group(call)
        if latest == NONE:
            return
        if self._are_marks or (is_lone and group == self._identities.group(latest)):
            self.before[call] = latest
            return
        goes_on = (latest, self._tool_of[latest]) in self._gone_on
        self.is_beside[call] |= goes_on
        self.is_doubtful[call] = group in groups and (group in over or not goes_on)

    def _find_repeated(self, call: int, prompts: Mapping[int, int]) -> int:
        """Return the latest call that was asked the same and whose answer was thrown away, or -1.

        It failed, or its agent repeats answers that it goes on with, and did not repeat that one.
        """
        if self._latest[call] == NONE or self.is_beside[call]:
            return NONE
        prompt = self.hashes[call].given
        first = prompts.get(prompt, NONE)
        has_failed = first != NONE and self.calls[first].span.status == "ERROR"
        if first == NONE or not (has_failed or prompt in self._gone_on_with):
            return NONE
        is_past = is_after(self._tree, self.positions[first], self.positions[call])
        return first if is_past else NONE

    def _set_apart(self) -> None:
        """Begin a path with each call in a tool whose conversation goes on outside, and repeats."""
        before, tool_of = self.before, self._tool_of
        strays: set[int] = set()
        for call, previous in enumerate(before) if self._gone_on else ():
            if previous == NONE or self.is_compacted[call]:
                continue
            is_elsewhere = (previous, tool_of[previous]) in self._gone_on
            if self.is_continued[call]:
                is_elsewhere &= tool_of[call] != tool_of[previous]
            elif self.repeats[call] != NONE:
                is_elsewhere &= self.repeats[call] in strays
            if is_elsewhere:
                strays.add(call)
        for call in strays:
            before[call] = NONE
            self.is_continued[call] = 0
            self.is_beside[call] = 1


def _are_mixed(roots: Iterable[int]) -> bool:
    """Return whether of two conversations one goes on after a call of the other, and that again."""
    opened: dict[int, None] = {}
    closed: set[int] = set()
    for root in roots:
        if root in closed:
            return True
        while root in opened and next(reversed(opened)) != root:
            closed.add(opened.popitem()[0])
        opened[root] = None
    return False


def order_by_messages(
    tree: Tree, calls: Mapping[int, Call], hashes: Mapping[int, History]
) -> list[tuple[int, int]]:
    """Return calls and those that continue them, if the tree has some of them in disorder.

    Only where one call alone left behind what another repeats, and no count speaks against it.
    """
    answers = {answer for hashed in hashes.values() for answer in hashed.left}
    followers = [i for i, hashed in hashes.items() if not answers.isdisjoint(hashed.prefixes)]
    holders: dict[tuple[str, int], list[int]] = {}
    for position, hashed in hashes.items() if followers else ():
        for answer in set(hashed.left):
            holders.setdefault((calls[position].agent, answer), []).append(position)
    pairs = []
    for position in followers:
        agent = calls[position].agent
        prefixes = (holders.get((agent, prefix)) for prefix in reversed(hashes[position].prefixes))
        sources = next(filter(None, prefixes), ())
        if len(sources) == 1 and not _is_counted_otherwise(tree, sources[0], position):
            pairs.append((sources[0], position))
    is_disordered = any(tree.ends[one] > tree.starts[other] for one, other in pairs)
    return pairs if is_disordered else []


def _is_counted_otherwise(tree: Tree, first: int, second: int) -> bool:
    """Return whether a process counted both, and not one's end before the other's start."""
    one, other = tree.spans[first], tree.spans[second]
    if one.process != other.process or one.end_sequence < 0 or other.sequence < 0:
        return first == second
    return one.end_sequence > other.sequence


def is_known(tree: Tree, first: int, second: int) -> bool:
    """Return whether something but clocks says that one call ended before another began.

    A process counted both; or their parts of the tree, of which the later waited.
    """
    spans = tree.spans
    if tree.is_counted or ordering.is_counted_before(spans[first], spans[second]):
        return True
    meeting = tree.meet(first, second)
    if meeting in (first, second):
        return False
    top, node = tree.below(meeting, first), first
    if not ordering.is_counted_before(spans[top], spans[tree.below(meeting, second)]):
        return False
    for _ in range(_MOST_ABOVE):
        if node == top:
            return True
        if not ordering.is_enclosed(spans[node], spans[tree.parents[node]]):
            return False
        node = tree.parents[node]
    return False
