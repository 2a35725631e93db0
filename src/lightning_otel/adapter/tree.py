"""The spans of one attempt as a forest: parents, order, and the agent each span belongs to.

Linear and without recursion; orphans, self-parents and cycles become roots of their own.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lightning_otel import conventions as c
from lightning_otel.types import Span

NO_PARENT = -1


@dataclass(frozen=True, slots=True)
class Tree:
    """Spans in causal order with their links, by position in ``spans``.

    Attributes:
        spans: Each span once, ordered by start.
        parents: Position of each span's parent, or -1.
        agents: Name of the agent each span belongs to; empty where none is named.
        first: Position of each span in a walk that keeps every subtree together.
        last: The greatest ``first`` within the span's subtree.
        starts: A clock of starts, comparable with ``ends``.
        ends: A clock of ends; for an unended span it lies after everything.
        is_guess: Whether the order rests on wall clocks of several processes.
    """

    spans: Sequence[Span]
    parents: Sequence[int]
    agents: Sequence[str]
    first: Sequence[int]
    last: Sequence[int]
    starts: Sequence[int]
    ends: Sequence[int]
    is_guess: bool


def build(spans: Iterable[Span]) -> Tree:
    """The forest of one attempt's spans, given in any order; of equal ids the first one counts."""
    unique: dict[tuple[str, str], Span] = {}
    for span in spans:
        unique.setdefault((span.trace_id, span.span_id), span)
    found = list(unique.values())
    processes = {span.process for span in found}
    has_sequence = len(processes) == 1 and all(span.sequence >= 0 for span in found)
    # One process counts its starts and ends; its wall clock may step, and two clocks never agree.
    if has_sequence:
        found.sort(key=lambda span: span.sequence)
        starts = [span.sequence for span in found]
        ends = [span.end_sequence if span.end_sequence >= 0 else 1 << 62 for span in found]
    else:
        found.sort(key=lambda span: (span.start_ns, span.sequence, span.span_id))
        starts = [span.start_ns for span in found]
        ends = [span.end_ns if span.end_ns is not None else 1 << 62 for span in found]
    parents = _parents(found)
    first, last = _intervals(parents)
    return Tree(
        spans=found,
        parents=parents,
        agents=_agents(found, parents, first),
        first=first,
        last=last,
        starts=starts,
        ends=ends,
        is_guess=not has_sequence and len(processes) > 1,
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


def _intervals(parents: Sequence[int]) -> tuple[list[int], list[int]]:
    """First and last position of each subtree in a depth-first walk, children in order."""
    children: list[list[int]] = [[] for _ in parents]
    roots: list[int] = []
    for node, parent in enumerate(parents):
        (roots if parent == NO_PARENT else children[parent]).append(node)
    first = [0] * len(parents)
    last = [0] * len(parents)
    clock = 0
    stack = [*reversed(roots)]
    order = []
    while stack:
        node = stack.pop()
        first[node] = clock
        clock += 1
        order.append(node)
        stack.extend(reversed(children[node]))
    for node in reversed(order):
        last[node] = max([first[node], *(last[child] for child in children[node])])
    return first, last


def _agents(spans: Sequence[Span], parents: Sequence[int], first: Sequence[int]) -> list[str]:
    """The nearest agent's name at or above each span."""
    agents = [""] * len(spans)
    for node in sorted(range(len(spans)), key=first.__getitem__):  # parents before children
        name = spans[node].attributes.get(c.AGENT_NAME)
        if isinstance(name, str) and name:
            agents[node] = name
        elif parents[node] != NO_PARENT:
            agents[node] = agents[parents[node]]
    return agents
