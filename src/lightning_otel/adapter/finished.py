"""Calls that had ended by some instant, and the last of those within a part of the tree."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence

from lightning_otel.adapter.tree import NO_PARENT, Tree


class Finished:
    """Calls in the order of their end, and the last of those within a part of the tree.

    A subtree is an interval of the walk, and its last call a maximum over a segment tree.
    """

    def __init__(self, tree: Tree, calls: Iterable[int], ended: Sequence[int] = ()) -> None:
        """Take the calls that will end, in any order.

        Args:
            tree: The attempt's spans.
            calls: Positions of the calls.
            ended: Those that have ended, in order of their end.
        """
        self._tree = tree
        self._by_place = sorted(calls, key=tree.first.__getitem__)
        self._places = [tree.first[call] for call in self._by_place]
        self._ranks = Ranks(len(self._places))
        self._added = list(ended)
        self._entered = 0  # how many are in the segment tree; the newest is mostly enough

    def __len__(self) -> int:
        """Count the calls that have ended."""
        return len(self._added)

    def add(self, call: int) -> None:
        """Another one has ended."""
        self._added.append(call)

    def part(self, position: int) -> int:
        """The smallest part around a span that has any: its root, or -1 for all there is."""
        tree = self._tree
        return tree.climb(tree.parents[position], lambda n: self.last_within(n) is not None)

    def nearest(self, position: int) -> int | None:
        """The last one within the smallest part around a span that has any."""
        return self.last_within(self.part(position)) if self._added else None

    def last_within(self, node: int) -> int | None:
        """The last one in a subtree; of -1 the last of all."""
        if node == NO_PARENT:
            return self._added[-1] if self._added else None
        if self._added and self._tree.contains(node, self._added[-1]):
            return self._added[-1]
        for place, rank in self.entries(self._entered):
            self._ranks.put(place, rank)
        self._entered = len(self._added)
        rank = self._ranks.best(*self.interval(node))
        return self._added[rank - 1] if rank else None

    def entries(self, known: int = 0) -> Iterator[tuple[int, int]]:
        """Place and rank of those that ended, without the first so many; ranks begin at 1."""
        for rank in range(known + 1, len(self._added) + 1):
            yield self.place(rank), rank

    def interval(self, node: int) -> tuple[int, int]:
        """The places of the calls in a subtree, from and up to; of -1 all places."""
        if node == NO_PARENT:
            return 0, len(self._places)
        low = bisect_left(self._places, self._tree.first[node])
        return low, bisect_right(self._places, self._tree.last[node])

    def all_within(self, node: int) -> list[int]:
        """Every call in a subtree, ended or not, in the order of a walk."""
        low, high = self.interval(node)
        return self._by_place[low:high]

    def place(self, rank: int) -> int:
        """The place of the call of a rank."""
        return bisect_left(self._places, self._tree.first[self.ranked(rank)])

    def ranked(self, rank: int) -> int:
        """The call of a rank."""
        return self._added[rank - 1]

    @property
    def size(self) -> int:
        """The number of calls that will end."""
        return len(self._places)


class Ranks:
    """A rank at each of some places, 0 at first, and the greatest in any interval."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._greatest = [0] * (2 * size)

    def put(self, place: int, rank: int) -> None:
        """Set a place's rank."""
        found = self._greatest
        slot = place + self._size
        found[slot] = rank
        slot //= 2
        while slot:
            found[slot] = max(found[2 * slot], found[2 * slot + 1])
            slot //= 2

    def best(self, low: int, high: int) -> int:
        """The greatest rank from one place up to another; 0 if there is none."""
        best = 0
        low += self._size
        high += self._size
        while low < high:
            if low & 1:
                best = max(best, self._greatest[low])
                low += 1
            if high & 1:
                high -= 1
                best = max(best, self._greatest[high])
            low //= 2
            high //= 2
        return best
