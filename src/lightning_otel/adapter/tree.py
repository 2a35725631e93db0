"""The spans of one attempt as a forest: parents, order, and the agent each span belongs to.

Near-linear and without recursion. Who comes first says ``order``, who lies below whom ``repair``.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from lightning_otel import conventions as c
from lightning_otel.adapter import order, repair, walk
from lightning_otel.adapter.attributes import text
from lightning_otel.types import Repair, Span

NO_PARENT: Final = walk.NO_PARENT


@dataclass(frozen=True, slots=True)
class Tree:
    """Spans in causal order with their links, by position in ``spans``.

    Attributes:
        spans: Each span once, ordered by start.
        parents: Position of each span's parent, or -1.
        agents: Name of the agent each span belongs to; empty where none is named.
        first: Place of each span in a walk that keeps every subtree together.
        last: The greatest ``first`` within the span's subtree.
        depths: Number of ancestors of each span; at -1 stands -1.
        jumps: An ancestor of each span, some way up, or -1.
        starts: A clock of starts, comparable with ``ends``.
        ends: A clock of ends, never before the start; of an unended span it lies after everything.
        repairs: The spans that were put elsewhere than they were recorded.
        is_counted: Whether one process counted all of them, so that no clock was needed.
    """

    spans: Sequence[Span]
    parents: Sequence[int]
    agents: Sequence[str]
    first: Sequence[int]
    last: Sequence[int]
    depths: Sequence[int]
    jumps: Sequence[int]
    starts: Sequence[int]
    ends: Sequence[int]
    repairs: tuple[Repair, ...] = ()
    is_counted: bool = True

    def contains(self, node: int, other: int) -> bool:
        """Return whether a span is another one, or lies in its subtree."""
        return self.first[node] <= self.first[other] <= self.last[node]

    def apart(self, nodes: Iterable[int], others: Iterable[int]) -> list[int]:
        """Those of some spans that neither hold one of the others nor lie in one."""
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
        """The nearest span at or above a span for which something holds, or -1.

        Args:
            node: Where to begin; -1 finds nothing.
            is_there: Must hold for everything above a span for which it holds.
        """
        while node != NO_PARENT and not is_there(node):
            jump = self.jumps[node]
            node = jump if jump != NO_PARENT and not is_there(jump) else self.parents[node]
        return node

    def meet(self, node: int, other: int) -> int:
        """The lowest span with both in its subtree, or -1."""
        return self.climb(node, lambda above: self.contains(above, other))

    def below(self, node: int, inside: int) -> int:
        """The child of a span (of -1: the root) whose subtree holds another one."""
        depth = self.depths[node] + 1
        return self.climb(inside, lambda above: self.depths[above] <= depth)


def build(spans: Iterable[Span], after: Sequence[tuple[Span, Span]] = ()) -> Tree:
    """The forest of one attempt's spans, each given once, in any order.

    Args:
        spans: The spans.
        after: Two of them each, the first of which is known to have ended before the second began.
    """
    found = order.by_time(list(spans))
    parents, repairs = repair.mend(found.spans, found.starts, found.ends)
    places = {id(span): i for i, span in enumerate(found.spans)} if after else {}
    known = [(places[id(one)], places[id(other)]) for one, other in after]
    if known or order.needs_causes(found, parents):
        moved = order.by_cause(found, parents, known)
        found, parents = _reorder_spans(found, parents, moved)
    walked = walk.walked(parents)
    depths, jumps = walk.jumps(parents, walked.order)
    return Tree(
        spans=found.spans,
        parents=parents,
        agents=_find_agents(found.spans, parents, walked.order),
        first=walked.first,
        last=walked.last,
        depths=depths,
        jumps=jumps,
        starts=found.starts,
        ends=[max(start, end) for start, end in zip(found.starts, found.ends, strict=True)],
        repairs=repairs,
        is_counted=found.is_counted,
    )


def reordered(tree: Tree, told: Iterable[tuple[int, int]]) -> tuple[Tree, list[int]]:
    """The tree built anew, and the new position of each span.

    Args:
        tree: The tree.
        told: Positions of spans, the first of which is known to have ended before the second began.
    """
    spans = tree.spans
    found = build(spans, [(spans[one], spans[other]) for one, other in told])
    places = {id(span): position for position, span in enumerate(found.spans)}
    return found, [places[id(span)] for span in spans]


def _reorder_spans(
    found: order.Ordered, parents: Sequence[int], moved: Sequence[int]
) -> tuple[order.Ordered, list[int]]:
    """The same spans and parents in a new order, given as the old positions."""
    places = [NO_PARENT] * (len(moved) + 1)  # the last place, index -1, stands for no parent
    for new, old in enumerate(moved):
        places[old] = new
    ordered = order.Ordered(
        [found.spans[old] for old in moved],
        [found.starts[old] for old in moved],
        [found.ends[old] for old in moved],
        is_counted=False,
    )
    return ordered, [places[parents[old]] for old in moved]


def _find_agents(spans: Sequence[Span], parents: Sequence[int], order: Sequence[int]) -> list[str]:
    """The nearest agent's name at or above each span."""
    agents = [""] * len(spans)
    for node in order:  # parents before children
        name = text(spans[node].attributes, c.AGENT_NAME)
        if name is not None:
            agents[node] = name
        elif parents[node] != NO_PARENT:
            agents[node] = agents[parents[node]]
    return agents
