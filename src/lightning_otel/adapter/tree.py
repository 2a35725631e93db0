"""The spans of one attempt as a forest: parents, order, and the agent each span belongs to.

Near-linear and without recursion. Who comes first says ``order``, who lies below whom ``repair``.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

from lightning_otel import conventions as c
from lightning_otel.adapter import order, repair
from lightning_otel.adapter.attributes import text
from lightning_otel.adapter.order import NO_PARENT
from lightning_otel.adapter.repair import Walk
from lightning_otel.types import Repair, Span

__all__ = ["NO_PARENT", "Tree", "build", "reordered"]


class Tree(Walk):
    """Spans in causal order with their links, by position in ``spans``.

    Attributes:
        spans: Each span once, ordered by start.
        agents: Name of the agent each span belongs to; empty where none is named.
        depths: Number of ancestors of each span; at -1 stands -1.
        jumps: An ancestor of each span, some way up, or -1.
        starts: A clock of starts, comparable with ``ends``.
        ends: A clock of ends, never before the start; of an unended span it lies after everything.
        repairs: The spans that were put elsewhere than they were recorded.
        is_counted: Whether one process counted all of them, so that no clock was needed.
    """

    __slots__ = ("agents", "depths", "ends", "is_counted", "jumps", "repairs", "spans", "starts")

    def __init__(
        self, found: order.Ordered, parents: Sequence[int], repairs: tuple[Repair, ...]
    ) -> None:
        super().__init__(parents)
        self.spans: Sequence[Span] = found.spans
        self.starts = found.starts
        self.ends = [max(start, end) for start, end in zip(found.starts, found.ends, strict=True)]
        self.repairs = repairs
        self.is_counted = found.is_counted
        self.agents = [""] * len(parents)
        # Any ancestor is a logarithmic number of jumps away: Myers, An applicative random-access
        # stack, Information Processing Letters 17 (1983). Index -1 stands for what is above roots.
        depths = self.depths = [-1] * (len(parents) + 1)
        jumps = self.jumps = [NO_PARENT] * (len(parents) + 1)
        for node in self.order:  # parents before children
            parent = parents[node]
            far = jumps[parent]
            is_even = depths[parent] - depths[far] == depths[far] - depths[jumps[far]]
            depths[node] = depths[parent] + 1
            jumps[node] = jumps[far] if is_even else parent
            name = text(self.spans[node].attributes, c.AGENT_NAME)
            self.agents[node] = name or (self.agents[parent] if parent != NO_PARENT else "")

    def apart(self, nodes: Iterable[int], others: Iterable[int]) -> list[int]:
        """Return those of some spans that neither hold one of the others nor lie in one."""
        by_first = sorted(others, key=self.first.__getitem__)
        firsts = [self.first[other] for other in by_first]
        reach = [-1, *accumulate((self.last[other] for other in by_first), max)]
        found = []
        for node in nodes:
            before = bisect_left(firsts, self.first[node])
            holds = before < len(firsts) and firsts[before] <= self.last[node]
            if not holds and reach[before] < self.first[node]:
                found.append(node)
        return found

    def climb(self, node: int, is_there: Callable[[int], bool]) -> int:
        """Return the nearest span at or above a span for which something holds, or -1.

        It must hold for everything above a span for which it holds.
        """
        while node != NO_PARENT and not is_there(node):
            jump = self.jumps[node]
            node = jump if jump != NO_PARENT and not is_there(jump) else self.parents[node]
        return node

    def meet(self, node: int, other: int) -> int:
        """Return the lowest span with both in its subtree, or -1."""
        return self.climb(node, lambda above: self.contains(above, other))

    def below(self, node: int, inside: int) -> int:
        """Return the child of a span (of -1: the root) whose subtree holds another one."""
        depth = self.depths[node] + 1
        return self.climb(inside, lambda above: self.depths[above] <= depth)


def build(spans: Iterable[Span], after: Sequence[tuple[Span, Span]] = ()) -> Tree:
    """Build the forest of one attempt's spans, each given once, in any order.

    Args:
        spans: The spans.
        after: Two of them each, the first of which is known to have ended before the second began.
    """
    found = order.order_by_time(list(spans))
    parents, repairs = repair.mend(found.spans, found.starts, found.ends)
    places = {id(span): i for i, span in enumerate(found.spans)} if after else {}
    known = [(places[id(one)], places[id(other)]) for one, other in after]
    if known or order.needs_causes(found, parents):
        found, parents = order.order_by_cause(found, parents, known)
    return Tree(found, parents, repairs)


def reordered(tree: Tree, told: Iterable[tuple[int, int]]) -> tuple[Tree, list[int]]:
    """Build the tree anew; return it and the new position of each span.

    Args:
        tree: The tree.
        told: Positions of spans, the first of which is known to have ended before the second began.
    """
    spans = tree.spans
    found = build(spans, [(spans[one], spans[other]) for one, other in told])
    places = {id(span): position for position, span in enumerate(found.spans)}
    return found, [places[id(span)] for span in spans]
