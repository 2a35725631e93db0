"""A rollout as a person looks at it: the span tree, and what the adapter made of each span.

Pure data; the terminal and the picture draw it.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

from lightning_otel.adapter import TripletAdapter, readers
from lightning_otel.adapter.attempts import sort_attempts
from lightning_otel.adapter.calls import is_call, is_mark
from lightning_otel.adapter.ordering import NO_PARENT
from lightning_otel.adapter.tree import build_tree
from lightning_otel.adapter.triplet import span_of
from lightning_otel.types import BranchCause, Report, Span, Trajectory, Transition
from lightning_otel.types import conventions as c
from lightning_otel.types.text import count_noun

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

Kind: TypeAlias = Literal["rollout", "agent", "call", "tool", "reward", "mark", "work"]
"""What a span is to a person."""

_OPERATIONS: Final[Mapping[object, Kind]] = {c.INVOKE_AGENT: "agent", c.EXECUTE_TOOL: "tool"}

_FAULTS: Final = 8
"""Errors below a span that its own is compared with."""

SpanId: TypeAlias = tuple[str, str]
"""Trace id and span id."""


@dataclass(frozen=True, slots=True)
class Node:
    """A span at its place in the tree, with what became of it.

    Attributes:
        parent: Position of the node above it, or -1.
        depth: Number of nodes above it.
        agent: The agent it belongs to; empty where none is named.
        step: The transition it became, if it did.
        branch: The first branch that this step lies on.
        credited: Positions of the nodes whose steps this reward was given to.
        by: What this reward was given by: its link, its parent, or the rule's name.
        left_out: Why this call, reward or mark is in no transition; empty if it is, or is neither.
        repair: The rule by which it was put elsewhere than it was recorded; empty if it was not.
        is_propagated: Its error arose below it.
        is_record: It is one more record of a call, and counts as none.
    """

    span: Span
    kind: Kind
    parent: int
    depth: int
    agent: str
    step: Transition | None = None
    branch: int = 0
    credited: tuple[int, ...] = ()
    by: str = ""
    left_out: str = ""
    repair: str = ""
    is_propagated: bool = False
    is_record: bool = False

    @property
    def is_fault(self) -> bool:
        """True where an error arose."""
        return self.span.status == "ERROR" and not self.is_propagated


class Outline(NamedTuple):
    """The nodes of one or several rollouts, each below its parent, and what they came to."""

    nodes: list[Node]
    trajectories: list[Trajectory]
    report: Report

    def labels(self) -> list[str]:
        """Return a short name of each node's step; empty for no step."""
        attempts = len({each.attempt_id for each in self.trajectories})
        agents = len({each.agent for each in self.trajectories})
        return [
            "" if node.step is None else label_of(node.step, node.branch, attempts, agents)
            for node in self.nodes
        ]

    def causes(self) -> dict[SpanId, BranchCause]:
        """Return why each trajectory begins at the first step that no earlier one has."""
        found: dict[SpanId, BranchCause] = {}
        seen: set[SpanId] = set()
        for path in self.trajectories:
            names = [(step.trace_id, step.span_id) for step in path.transitions]
            first = next((name for name in names if name not in seen), None)
            if first is not None and path.cause != "start":
                found[first] = path.cause
            seen.update(names)
        return found

    def part(self, is_kept: Sequence[bool]) -> "Outline":
        """Return the same with some nodes alone; one whose parent is gone becomes a root."""
        kept = [position for position, is_one in enumerate(is_kept) if is_one]
        places = {position: place for place, position in enumerate(kept)}
        nodes: list[Node] = []
        for node in map(self.nodes.__getitem__, kept):
            parent = places.get(node.parent, NO_PARENT)
            depth = 0 if parent == NO_PARENT else nodes[parent].depth + 1
            credited = tuple(places[target] for target in node.credited if target in places)
            nodes.append(replace(node, parent=parent, depth=depth, credited=credited))
        return self._replace(nodes=nodes)

    def below(self, root: int) -> "Outline":
        """Return one node with everything below it, and the rewards of what it holds."""
        inside: list[bool] = []
        for position, node in enumerate(self.nodes):
            inside.append(position == root or (node.parent != NO_PARENT and inside[node.parent]))
        return self.part(self.with_rewards(inside))

    def with_rewards(self, is_kept: Sequence[bool]) -> list[bool]:
        """Return the nodes that are kept, and the rewards that were given to one of them."""
        return [
            is_one or any(is_kept[target] for target in node.credited)
            for is_one, node in zip(is_kept, self.nodes, strict=True)
        ]


def outline(
    spans: "Iterable[Span | ReadableSpan]",
    adapter: TripletAdapter | None = None,
    *,
    incomplete: Collection[tuple[str, str]] = (),
) -> Outline:
    """Return the spans as a person is shown them, each tree after the other, parents first.

    Args:
        spans: Spans of ours or of OpenTelemetry's SDK, of whole rollouts, in any order.
        adapter: Makes the transitions; its credit decides where rewards go.
        incomplete: Rollout and attempt ids of attempts that broke off, and make no transitions.
    """
    read = list(readers.read(map(span_of, spans)))
    found = (adapter or TripletAdapter()).explain(read, incomplete=incomplete)
    report = found.report
    steps: dict[SpanId, tuple[Transition, int]] = {}
    for path in found.trajectories:
        for step in path.transitions:
            steps.setdefault((step.trace_id, step.span_id), (step, path.branch))
    reasons = {(each.trace_id, each.span_id): each.reason for each in report.dropped}
    records = {(each.trace_id, each.span_id) for each in report.dropped if each.noun == "record"}
    repairs = {(each.trace_id, each.span_id): each.rule for each in report.repairs}
    nodes: list[Node] = []
    places: dict[str, list[int]] = {}
    for tree in map(build_tree, sort_attempts(read).members.values()):
        base = len(nodes)
        for position in sorted(range(len(tree.spans)), key=tree.first.__getitem__):
            span, parent = tree.spans[position], tree.parents[position]
            name = (span.trace_id, span.span_id)
            own, branch = steps.get(name, (None, 0))
            if own is not None:
                places.setdefault(span.span_id, []).append(len(nodes))
            nodes.append(
                Node(
                    span=span,
                    kind=kind_of(span),
                    parent=NO_PARENT if parent == NO_PARENT else base + tree.first[parent],
                    depth=tree.depths[position],
                    agent=tree.agents[position],
                    step=own,
                    branch=branch,
                    left_out="" if own is not None else reasons.get(name, ""),
                    repair=repairs.get(name, ""),
                    is_record=name in records,
                )
            )
    credit = {(each.trace_id, each.span_id): each for each in found.credited}
    for position, node in enumerate(nodes):
        placed = credit.get((node.span.trace_id, node.span.span_id))
        if placed is not None and node.kind == "reward":
            targets = sorted(target for call in placed.calls for target in places.get(call, ()))
            nodes[position] = replace(node, credited=tuple(targets), by=placed.by)
    words = (n.span.status_message or str(n.span.attributes.get(c.ERROR_TYPE, "")) for n in nodes)
    faults = [w if n.span.status == "ERROR" else None for n, w in zip(nodes, words, strict=True)]
    for position in find_propagated([node.parent for node in nodes], faults):
        nodes[position] = replace(nodes[position], is_propagated=True)
    return Outline(nodes, found.trajectories, report)


def find_propagated(parents: Sequence[int], faults: Iterable[str | None]) -> list[int]:
    """Find errors that are those of a span below, in the same words or in others around them.

    Args:
        parents: The position above each span, or -1; each stands after its parent.
        faults: The words of each span's error; None without one.
    """
    found: list[int] = []
    below: list[tuple[str, ...]] = [()] * len(parents)
    for position, own in reversed(list(enumerate(faults))):
        known, parent = below[position], parents[position]
        if own is not None and any(not own or text in own or own in text for text in known):
            found.append(position)
        elif own is not None:
            known = (own, *known)
        if known and parent != NO_PARENT:
            below[parent] = (*known, *below[parent])[:_FAULTS]
    return found


def label_of(step: Transition, branch: int, attempts: int, agents: int) -> str:
    """Return a short name of a step, as far as it must be told apart."""
    words = [f"attempt {step.attempt_id}"] if attempts > 1 else []
    words += [step.agent or "nobody"] if agents > 1 else []
    words.append(f"#{step.step}")
    words += [f"branch {branch}"] if branch else []
    return " ".join(words)


def kind_of(span: Span) -> Kind:
    """Return a span's kind, for people."""
    if span.name == c.SPAN_ROLLOUT:
        return "rollout"
    if is_call(span):
        return "call"
    if c.REWARD_VALUE in span.attributes or span.name == c.SPAN_ANNOTATION:
        return "reward"
    if is_mark(span):
        return "mark"
    operation = span.attributes.get(c.OPERATION)
    return _OPERATIONS.get(operation, "work") if isinstance(operation, str) else "work"


class Gap(NamedTuple):
    """Nodes that are not shown, all below one parent and between two of its shown children."""

    nodes: list[Node]

    def told(self) -> str:
        """Word the number of hidden spans, and their kinds."""
        nodes = self.nodes
        counts = [
            (sum(node.kind == "call" for node in nodes), "call"),
            (sum(node.kind == "reward" for node in nodes), "reward"),
            (sum(node.is_fault for node in nodes), "error"),
            (sum(node.span.is_incomplete for node in nodes), "incomplete span"),
        ]
        told = ", ".join(count_noun(count, noun) for count, noun in counts if count)
        return f"⋯ {count_noun(len(nodes), 'more span')}{': ' if told else ''}{told}"


def children_of(
    nodes: Sequence[Node], is_shown: Sequence[bool] | None
) -> dict[int, list[int | Gap]]:
    """Return the children of each shown node: shown ones, and gaps for the hidden.

    Nodes stand after their parents, and are shown with these.
    """
    found: dict[int, list[int | Gap]] = {}
    above: list[int] = []  # for each node the shown node nearest above or at it
    for position, node in enumerate(nodes):
        nearest = NO_PARENT if node.parent == NO_PARENT else above[node.parent]
        if is_shown is None or is_shown[position]:
            found.setdefault(nearest, []).append(position)
            above.append(position)
            continue
        above.append(nearest)
        row = found.setdefault(nearest, [])
        if row and isinstance(row[-1], Gap):
            row[-1].nodes.append(node)
        else:
            row.append(Gap([node]))
    return found


def select_nodes(nodes: Sequence[Node], limit: int) -> list[bool]:
    """Choose the nodes to show where too many would not fit; they are a tree of their own.

    Those near a root come first, and of many siblings the first and the last ones.
    """
    if len(nodes) <= limit:
        return [True] * len(nodes)
    siblings: dict[int, list[int]] = {}
    for position, node in enumerate(nodes):
        siblings.setdefault(node.parent, []).append(position)
    costs = [0] * (len(nodes) + 1)  # the last one, index -1, stands for what is above the roots
    for parent, children in siblings.items():  # in order of the first child: parents come first
        for rank, child in enumerate(children):
            costs[child] = costs[parent] + 1 + min(rank, len(children) - 1 - rank)
    is_shown = [False] * len(nodes)
    for position in sorted(range(len(nodes)), key=costs.__getitem__)[:limit]:
        is_shown[position] = True
    return is_shown
