"""Calls in the order of their end, and which of those within a part of the tree ended last."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

from lightning_otel.adapter.ordering import NO_PARENT
from lightning_otel.adapter.tree import Tree


class EndedCalls:
    """Calls in the order of their end, and the last of those within a part of the tree."""

    def __init__(self, tree: Tree, calls: Iterable[int], ended: Sequence[int] = ()) -> None:
        self._tree = tree
        self._by_place = sorted(calls, key=tree.first.__getitem__)
        self.places = [tree.first[call] for call in self._by_place]
        self.calls: list[int] = []
        self._ranks: dict[int, int] = {}
        self._greatest = Ranks(self.places)
        self._entered = 0  # how many are in the segment tree; the newest is mostly enough
        for call in ended:
            self.add(call)

    def add(self, call: int) -> None:
        """Add a call that ended, after all that ended before it."""
        self.calls.append(call)
        self._ranks[call] = len(self.calls)

    def part(self, position: int) -> int:
        """Return the smallest part around a span with any: its root, or -1 for all there is."""
        tree = self._tree
        return tree.climb(tree.parents[position], lambda n: self.last_within(n) is not None)

    def last_within(self, node: int) -> int | None:
        """Return the call within a span that ended last."""
        if not self.calls:
            return None
        if node == NO_PARENT or self._tree.contains(node, self.calls[-1]):
            return self.calls[-1]
        for call in self.calls[self._entered :]:
            self._greatest.put(self._tree.first[call], self._ranks[call])
        self._entered = len(self.calls)
        rank = self._greatest.best(self._tree, node)
        return self.calls[rank - 1] if rank else None

    def list_within(self, node: int) -> list[int]:
        """Return the calls within a span that end at any time."""
        low, high = _find_interval(self._tree, self.places, node)
        return self._by_place[low:high]

    def take(self, part: int, rewarded: "Ranks") -> list[int]:
        """Return the calls of a part that ended since its last one taken; else that last one."""
        tree, latest = self._tree, rewarded.best(self._tree, part)
        low, high = _find_interval(tree, self.places, part)
        newer = self.calls[latest:]
        if high - low < len(newer):
            newer = [call for call in self.list_within(part) if self._ranks.get(call, 0) > latest]
        calls = [call for call in newer if part == NO_PARENT or tree.contains(part, call)]
        for call in calls:
            rewarded.put(tree.first[call], self._ranks[call])
        return calls or [self.calls[latest - 1]]


def _find_interval(tree: Tree, places: Sequence[int], node: int) -> tuple[int, int]:
    """Return where the places of a subtree begin and end; of -1 all of them."""
    if node == NO_PARENT:
        return 0, len(places)
    return bisect_left(places, tree.first[node]), bisect_right(places, tree.last[node])


class Ranks:
    """A rank at each of some places of a walk, and the greatest in any subtree."""

    def __init__(self, places: Sequence[int]) -> None:
        self._places = places
        self._greatest = [0] * (2 * len(places))

    def put(self, place: int, rank: int) -> None:
        """Set the rank at a place, which is greater than all before."""
        slot = bisect_left(self._places, place) + len(self._places)
        while slot:
            self._greatest[slot] = max(self._greatest[slot], rank)
            slot //= 2

    def best(self, tree: Tree, node: int) -> int:
        """Return the greatest rank in a subtree; 0 if there is none."""
        size, greatest, best = len(self._places), self._greatest, 0
        low, high = (size + place for place in _find_interval(tree, self._places, node))
        while low < high:
            if low & 1:
                best = max(best, greatest[low])
                low += 1
            if high & 1:
                high -= 1
                best = max(best, greatest[high])
            low //= 2
            high //= 2
        return best
