"""The spans of one attempt as a forest: parents, order, and the agent each span belongs to.

Near-linear and without recursion; orphans, self-parents and cycles become roots of their own.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from lightning_otel import conventions as c
from lightning_otel.adapter.attributes import text
from lightning_otel.types import Span

NO_PARENT: Final = -1
_NEVER: Final = 1 << 100


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

    def contains(self, node: int, other: int) -> bool:
        """Whether a span lies in the subtree of another one, or is that one."""
        return self.first[node] <= self.first[other] <= self.last[node]

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


class _Ordered(NamedTuple):
    spans: list[Span]
    starts: list[int]
    ends: list[int]


class _Walk(NamedTuple):
    order: list[int]
    first: list[int]
    last: list[int]


def build(spans: Iterable[Span]) -> Tree:
    """The forest of one attempt's spans, each given once, in any order."""
    found, starts, ends = _ordered(list(spans))
    parents = _parents(found)
    order, first, last = _walked(parents)
    depths, jumps = _jumps(parents, order)
    return Tree(
        spans=found,
        parents=parents,
        agents=_agents(found, parents, order),
        first=first,
        last=last,
        depths=depths,
        jumps=jumps,
        starts=starts,
        ends=[max(start, end) for start, end in zip(starts, ends, strict=True)],
    )


def _ordered(spans: list[Span]) -> _Ordered:
    """Spans by start. One process counts its starts and ends; several have only their clocks."""
    if len({span.process for span in spans}) == 1 and all(map(_is_counted, spans)):
        spans.sort(key=lambda span: (span.sequence, span.trace_id, span.span_id))
        ends = [span.end_sequence if span.end_ns is not None else _NEVER for span in spans]
        return _Ordered(spans, [span.sequence for span in spans], ends)
    spans.sort(key=lambda span: (span.start_ns, span.trace_id, span.span_id))
    if any(span.sequence >= 0 or span.end_sequence >= 0 for span in spans):
        return _merged(spans)
    # At one instant ends come before starts.
    ends = [2 * span.end_ns if span.end_ns is not None else _NEVER for span in spans]
    return _Ordered(spans, [2 * span.start_ns + 1 for span in spans], ends)


def _is_counted(span: Span) -> bool:
    return span.sequence >= 0 and (span.end_sequence >= 0 or span.end_ns is None)


def _merged(spans: list[Span]) -> _Ordered:
    """Spans of several processes by their clocks, each process's own in the order it counted.

    At one instant ends come before starts, except where a process's count says otherwise.
    """
    events: list[tuple[int, int, str, int, bool, int]] = []
    counted: list[tuple[str, int, int, bool, int]] = []
    for position, span in enumerate(spans):
        for is_start, time_ns, count in (
            (True, span.start_ns, span.sequence),
            (False, span.end_ns, span.end_sequence),
        ):
            if time_ns is None:
                continue
            if count >= 0:
                counted.append((span.process, count, time_ns, is_start, position))
            else:
                events.append((time_ns, 1 if is_start else -1, "", -1, is_start, position))
    counted.sort()
    latest, clock = "", 0
    for process, count, time_ns, is_start, position in counted:
        clock = time_ns if process != latest else max(clock, time_ns)  # a clock may step back
        latest = process
        events.append((clock, 0, process, count, is_start, position))
    events.sort()
    starts, ends = [0] * len(spans), [_NEVER] * len(spans)
    for rank, (*_, is_start, position) in enumerate(events):
        (starts if is_start else ends)[position] = rank
    by_start = sorted(range(len(spans)), key=starts.__getitem__)
    return _Ordered(
        [spans[position] for position in by_start],
        [starts[position] for position in by_start],
        [ends[position] for position in by_start],
    )


def _parents(spans: Sequence[Span]) -> list[int]:
    position = {(span.trace_id, span.span_id): i for i, span in enumerate(spans)}
    parents = [
        position.get((span.trace_id, span.parent_span_id), NO_PARENT)
        if span.parent_span_id
        else NO_PARENT
        for span in spans
    ]
    _break_cycles(parents)
    return parents


def _break_cycles(parents: list[int]) -> None:
    """Make one span of each cycle a root: the one its walk came back to."""
    state = bytearray(len(parents))  # 0 unseen, 1 on this walk, 2 known to end at a root
    for start in range(len(parents)):
        walk = []
        node = start
        while node != NO_PARENT and state[node] == 0:
            state[node] = 1
            walk.append(node)
            node = parents[node]
        if node != NO_PARENT and state[node] == 1:
            parents[node] = NO_PARENT
        for seen in walk:
            state[seen] = 2


def _walked(parents: Sequence[int]) -> _Walk:
    """A depth-first walk, children in order: it keeps each subtree in one piece."""
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
    return _Walk(order, first, last)


def _jumps(parents: Sequence[int], order: Sequence[int]) -> tuple[list[int], list[int]]:
    """Depths, and ancestors such that any one of them is a logarithmic number of steps away.

    Source: Myers, An applicative random-access stack, Information Processing Letters 17 (1983).
    """
    # The last place, index -1, stands for what is above the roots.
    depths = [-1] * (len(parents) + 1)
    jumps = [NO_PARENT] * (len(parents) + 1)
    for node in order:
        parent = parents[node]
        far = jumps[parent]
        is_even = depths[parent] - depths[far] == depths[far] - depths[jumps[far]]
        depths[node] = depths[parent] + 1
        jumps[node] = jumps[far] if is_even else parent
    return depths, jumps


def _agents(spans: Sequence[Span], parents: Sequence[int], order: Sequence[int]) -> list[str]:
    """The nearest agent's name at or above each span."""
    agents = [""] * len(spans)
    for node in order:  # parents before children
        name = text(spans[node].attributes, c.AGENT_NAME)
        if name is not None:
            agents[node] = name
        elif parents[node] != NO_PARENT:
            agents[node] = agents[parents[node]]
    return agents
