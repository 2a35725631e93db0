"""Walks over a forest that is given as the position of each node's parent: linear, no recursion.

Belongs here: what is true of any such forest. What its nodes are is not known here.
"""

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

NO_PARENT: Final = -1


class Walk(NamedTuple):
    """A depth-first walk, children in order: it keeps each subtree in one piece.

    Attributes:
        order: The nodes as they are met, parents before children.
        first: Place of each node in the walk.
        last: The greatest place within the node's subtree.
    """

    order: list[int]
    first: list[int]
    last: list[int]

    def contains(self, node: int, other: int) -> bool:
        """Return whether a node is another one, or lies in its subtree."""
        return self.first[node] <= self.first[other] <= self.last[node]


def walked(parents: Sequence[int]) -> Walk:
    """The walk over a forest."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    order: list[int] = []
    first = [0] * len(parents)
    stack = children.get(NO_PARENT, [])[::-1]
    while stack:
        node = stack.pop()
        first[node] = len(order)
        order.append(node)
        if node in children:
            stack.extend(reversed(children[node]))
    last = first.copy()
    for node in reversed(order):
        parent = parents[node]
        if parent != NO_PARENT and last[node] > last[parent]:
            last[parent] = last[node]
    return Walk(order, first, last)


def cycles(parents: Sequence[int]) -> Iterator[int]:
    """The first node of each cycle; whoever takes one cuts it off before asking for the next."""
    state = bytearray(len(parents))  # 0 unseen, 1 on this walk, 2 known to end at a root
    for start in range(len(parents)):
        walk = []
        node = start
        while node != NO_PARENT and state[node] == 0:
            state[node] = 1
            walk.append(node)
            node = parents[node]
        if node != NO_PARENT and state[node] == 1:
            yield min(walk[walk.index(node) :])
        for seen in walk:
            state[seen] = 2


def jumps(parents: Sequence[int], order: Sequence[int]) -> tuple[list[int], list[int]]:
    """Depths, and ancestors such that any one of them is a logarithmic number of steps away.

    Source: Myers, An applicative random-access stack, Information Processing Letters 17 (1983).
    """
    # The last place, index -1, stands for what is above the roots.
    depths = [-1] * (len(parents) + 1)
    found = [NO_PARENT] * (len(parents) + 1)
    for node in order:
        parent = parents[node]
        far = found[parent]
        is_even = depths[parent] - depths[far] == depths[far] - depths[found[far]]
        depths[node] = depths[parent] + 1
        found[node] = found[far] if is_even else parent
    return depths, found
