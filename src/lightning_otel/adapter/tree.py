"""The spans of one attempt as a forest: parents, order, and the agent each span belongs to.

Near-linear and without recursion. Parents that tracers left broken are mended by the rules of
docs/transitions.md: the first that applies decides, each span that moved is reported.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Final

from lightning_otel.adapter import ordering
from lightning_otel.adapter.attempts import Ordered, may_move, order_by_time
from lightning_otel.adapter.attributes import get_text, has_id
from lightning_otel.adapter.calls import HOSTS, is_call
from lightning_otel.adapter.ordering import NO_PARENT
from lightning_otel.types import Repair, Span
from lightning_otel.types import conventions as c

ITSELF: Final = "self-parent: it named itself as its parent and became a root"
OTHER_TRACE: Final = "other trace: its parent lies in another trace of its attempt"
OTHER_TRACES: Final = "other traces: several spans have its parent's id, and it became a root"
NEVER_CAME: Final = "never came: its parent is not among the attempt's spans, and it became a root"
CIRCLE: Final = "circle: its parents led back to it, and it became a root"
ENCLOSED: Final = (
    "enclosed: no agent was its parent, and it went below the one agent or tool at work around it"
)
NO_ID: Final = "no id: its id is empty or zero, so nothing lies below it"
REPEATED: Final = "repeated id: another span has its ids, and this one was left out"

_FAULTS: Final = 8
"""Errors below a span that its own is compared with."""
_MOST_AT_ONCE: Final = 64
"""How many agents and tools at work at once are looked at for one call: each one costs."""


class Walk:
    """A depth-first walk over a forest, children in order: it keeps each subtree in one piece.

    ``order`` has parents before children; ``first`` and ``last`` are a subtree's places in it.
    """

    __slots__ = ("first", "last", "order", "parents")

    def __init__(self, parents: Sequence[int]) -> None:
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(parents):
            children.setdefault(parent, []).append(node)
        self.parents = parents
        self.order: list[int] = []
        self.first = [0] * len(parents)
        stack = children.get(NO_PARENT, [])[::-1]
        while stack:
            node = stack.pop()
            self.first[node] = len(self.order)
            self.order.append(node)
            if node in children:
                stack.extend(reversed(children[node]))
        last = self.last = self.first.copy()
        for node in reversed(self.order):
            parent = parents[node]
            if parent != NO_PARENT and last[node] > last[parent]:
                last[parent] = last[node]

    def contains(self, node: int, other: int) -> bool:
        """Return whether a node is another one, or lies in its subtree."""
        return self.first[node] <= self.first[other] <= self.last[node]


def repair_parents(
    spans: Sequence[Span], starts: Sequence[int], ends: Sequence[int]
) -> tuple[list[int], tuple[Repair, ...]]:
    """Return the position of each span's parent, or -1, and a repair for each span that moved.

    ``starts`` and ``ends`` are comparable clocks; within a process they follow its count.
    """
    places = {(span.trace_id, span.span_id): i for i, span in enumerate(spans)}
    parents = [NO_PARENT] * len(spans)
    rules: dict[int, str] = {}
    missing = []
    for position, span in enumerate(spans):
        parent_id = span.parent_span_id
        if parent_id and has_id(parent_id):
            parent = places.get((span.trace_id, parent_id), NO_PARENT)
            if parent == NO_PARENT:
                missing.append(position)
            elif parent == position or parent_id == span.span_id:
                rules[position] = ITSELF
            else:
                parents[position] = parent
        if not has_id(span.span_id):
            rules.setdefault(position, NO_ID)
    if missing:
        _look_elsewhere(spans, missing, parents, rules)
    _cut_cycles(parents, rules)
    # Some tracers put calls below the session that holds their agents, too.
    sessions = {position for position, span in enumerate(spans) if c.SESSION in span.attributes}
    homeless = [
        position
        for position, span in enumerate(spans)
        if (parents[position] == NO_PARENT and _may_be_enclosed(span, rules.get(position)))
        or (parents[position] in sessions and is_call(span))
    ]
    if homeless:
        _enclose_calls(spans, starts, ends, homeless, parents, rules)
    repairs = [
        Repair(spans[position].span_id, spans[position].trace_id, rules[position])
        for position in sorted(rules)
    ]
    return parents, tuple(repairs)


def _look_elsewhere(
    spans: Sequence[Span], missing: Iterable[int], parents: list[int], rules: dict[int, str]
) -> None:
    ids = {spans[position].parent_span_id for position in missing}
    holders: dict[str | None, list[int]] = {}
    for position, span in enumerate(spans):
        if span.span_id in ids:
            holders.setdefault(span.span_id, []).append(position)
    for position in missing:
        span = spans[position]
        hosts = holders.get(span.parent_span_id, ())
        if len(hosts) == 1:
            parents[position] = hosts[0]
            rules[position] = OTHER_TRACE
        elif hosts:
            rules[position] = OTHER_TRACES
        elif span.name != c.SPAN_ROLLOUT and not may_move(span):
            rules[position] = NEVER_CAME


def _cut_cycles(parents: list[int], rules: dict[int, str]) -> None:
    state = bytearray(len(parents))  # 0 unseen, 1 on this walk, 2 known to end at a root
    for start in range(len(parents)):
        walk = []
        node = start
        while node != NO_PARENT and state[node] == 0:
            state[node] = 1
            walk.append(node)
            node = parents[node]
        if node != NO_PARENT and state[node] == 1:
            first = min(walk[walk.index(node) :])
            parents[first] = NO_PARENT
            rules[first] = CIRCLE
        for step in walk:
            state[step] = 2


def _may_be_enclosed(span: Span, rule: str | None) -> bool:
    if rule in (OTHER_TRACES, NEVER_CAME) or not span.process:
        return False
    return is_call(span) and span.kind not in ("SERVER", "CONSUMER")


def _enclose_calls(
    spans: Sequence[Span],
    starts: Sequence[int],
    ends: Sequence[int],
    homeless: Iterable[int],
    parents: list[int],
    rules: dict[int, str],
) -> None:
    events: list[tuple[int, int, int]] = []
    for host, span in enumerate(spans):
        operation = span.attributes.get(c.OPERATION)
        is_host = isinstance(operation, str) and operation in HOSTS and has_id(span.span_id)
        if is_host and starts[host] < ends[host]:
            events += [(starts[host], 1, host), (ends[host], 0, host)]
    if not events:
        return
    events += [(starts[call], 2, call) for call in homeless]
    walk = Walk(parents.copy())
    at_work: dict[str, dict[int, None]] = {}  # by process, in order of their start
    everyone: dict[int, None] = {}  # likewise, for calls that lie in a session
    for _, kind, position in sorted(events):
        working = at_work.setdefault(spans[position].process, {})
        if kind == 1:
            working[position] = everyone[position] = None
        elif kind == 0:
            working.pop(position, None)
            everyone.pop(position, None)
        else:
            hosts = working if parents[position] == NO_PARENT else everyone
            caller = _find_host(spans, walk, hosts, position)
            if caller is not None and ends[position] <= ends[caller]:
                parents[position] = caller
                rules[position] = ENCLOSED
    _cut_cycles(parents, rules)


def _find_host(
    spans: Sequence[Span], walk: Walk, working: dict[int, None], call: int
) -> int | None:
    """Return the innermost of those at work, if they are nested and none knew of the call."""
    if len(working) > _MOST_AT_ONCE:
        return None
    session, hosts = walk.parents[call], list(reversed(working))
    if session != NO_PARENT:
        hosts = [host for host in hosts if walk.contains(session, host)]
    elif any(spans[host].scope == spans[call].scope for host in hosts):
        return None
    if any(walk.contains(call, host) for host in hosts) or not all(
        walk.contains(host, inside) for inside, host in pairwise(hosts)
    ):
        return None
    return hosts[0] if hosts else None


class Tree(Walk):
    """Spans in causal order with their links, by position in ``spans``.

    Attributes:
        agents: Name of the agent each span belongs to; empty where none is named.
        depths: Number of ancestors of each span; at -1 stands -1.
        jumps: An ancestor of each span, some way up, or -1.
        starts: A clock of starts, comparable with ``ends``, which is never before the start; of an
            unended span it lies after everything.
        repairs: The spans that were put elsewhere than they were recorded.
        is_counted: Whether one process counted all of them, so that no clock was needed.
    """

    __slots__ = ("agents", "depths", "ends", "is_counted", "jumps", "repairs", "spans", "starts")

    def __init__(self, order: Ordered, parents: Sequence[int], repairs: tuple[Repair, ...]) -> None:
        super().__init__(parents)
        self.spans: Sequence[Span] = order.spans
        self.starts = order.starts
        self.ends = [max(start, end) for start, end in zip(order.starts, order.ends, strict=True)]
        self.repairs = repairs
        self.is_counted = order.is_counted
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
            name = get_text(self.spans[node].attributes, c.AGENT_NAME)
            self.agents[node] = name or (self.agents[parent] if parent != NO_PARENT else "")

    def apart(self, nodes: Iterable[int], others: Iterable[int]) -> list[int]:
        """Return those of some spans that neither hold one of the others nor lie in one."""
        by_first = sorted(others, key=self.first.__getitem__)
        firsts = [self.first[other] for other in by_first]
        reach = [-1, *accumulate((self.last[other] for other in by_first), max)]
        result = []
        for node in nodes:
            before = bisect_left(firsts, self.first[node])
            holds = before < len(firsts) and firsts[before] <= self.last[node]
            if not holds and reach[before] < self.first[node]:
                result.append(node)
        return result

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


def build_tree(spans: Iterable[Span], after: Sequence[tuple[Span, Span]] = ()) -> Tree:
    """Build the forest of one attempt's spans, each given once, in any order.

    Of each two in ``after`` the first is known to have ended before the second began.
    """
    order = order_by_time(list(spans))
    parents, repairs = repair_parents(order.spans, order.starts, order.ends)
    places = {id(span): i for i, span in enumerate(order.spans)} if after else {}
    pairs = [(places[id(one)], places[id(other)]) for one, other in after]
    if pairs or ordering.needs_causes(order, parents):
        order, parents = ordering.order_by_cause(order, parents, pairs)
    return Tree(order, parents, repairs)


def rebuild_tree(tree: Tree, pairs: Iterable[tuple[int, int]]) -> tuple[Tree, list[int]]:
    """Build the tree anew, knowing what ended before what; return also each span's new position."""
    spans = tree.spans
    result = build_tree(spans, [(spans[one], spans[other]) for one, other in pairs])
    places = {id(span): position for position, span in enumerate(result.spans)}
    return result, [places[id(span)] for span in spans]


def find_origins(parents: Sequence[int], faults: Iterable[str | None]) -> dict[int, int]:
    """Return where errors arose that are those of a span below, in the same words or others around.

    ``parents`` has the position above each span, or -1; each stands after its parent. Of several
    errors in the same words the last one goes on.
    """
    origins: dict[int, int] = {}
    below: list[tuple[tuple[str, int], ...]] = [()] * len(parents)
    for position, fault in reversed(list(enumerate(faults))):
        words, parent = below[position], parents[position]
        if fault is not None:
            places = (at for text, at in words if not fault or text in fault or fault in text)
            origin = next(places, None)
            if origin is None:
                words = ((fault, position), *words)
            else:
                origins[position] = origin
        if words and parent != NO_PARENT:
            below[parent] = (*below[parent], *words)[:_FAULTS]
    return origins
