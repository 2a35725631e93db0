"""A trace as rows: each span at its place, its kind, and what the adapter made of it.

The one model of the terminal, the pages, notebooks and assistants. Pure, and without recursion.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

from lightning_otel.adapter import Adaptation, TripletAdapter, readers
from lightning_otel.adapter.attempts import sort_attempts
from lightning_otel.adapter.attributes import get_text, read_links, to_number, to_text
from lightning_otel.adapter.calls import is_call, is_mark
from lightning_otel.adapter.ordering import NO_PARENT
from lightning_otel.adapter.rewards import RETRACTED
from lightning_otel.adapter.tree import Walk, build_tree, find_origins
from lightning_otel.adapter.triplet import span_of
from lightning_otel.types import Report, Span, Trajectory, Transition
from lightning_otel.types import conventions as c

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

Kind: TypeAlias = Literal["rollout", "agent", "call", "tool", "reward", "mark", "plumbing", "work"]
"""What a span is to a person; plumbing is a request or query of another instrumentor."""
SpanKey: TypeAlias = tuple[str, str]
"""Trace and span id."""

_OPERATIONS: Final[Mapping[str, Kind]] = {c.INVOKE_AGENT: "agent", c.EXECUTE_TOOL: "tool"}
_NAMES: Final = {c.SPAN_ROLLOUT: "rollout", "": "(no name)"}
_SUBJECTS: Final = (c.TOOL_NAME, c.OPERATION_NAME, c.MARK_NAME)


@dataclass(slots=True)
class Row:
    """A span at its place, with what became of it.

    Attributes:
        span: The span; of a trace read from a store it has no content and few attributes.
        agent: The agent it belongs to; empty where none is named.
        parent: Position of the row above it, or -1.
        depth: Number of rows above it.
        size: Number of rows below it, at any depth.
        step: The transition it became, if it did.
        branch: The first branch that this step lies on.
        label: A short name of this step.
        cause: The reason why a branch begins with this step; empty if none does.
        credited: Positions of the rows whose steps this reward was given to.
        by: What this reward was given by: its link, its parent, or the rule's name.
        left_out: Why it is in no transition; empty if it is, or is nothing that could be.
        repair: The rule by which it stands elsewhere than it was recorded; empty if it does not.
        is_later: It is a reward that was given in a trace of its own.
        is_propagated: Its error arose below it.
        is_record: It is one more record of a call, and counts as none.
    """

    span: Span
    kind: Kind
    agent: str
    repair: str = ""
    is_later: bool = False
    parent: int = NO_PARENT
    depth: int = 0
    size: int = 0
    step: Transition | None = None
    branch: int = 0
    label: str = ""
    cause: str = ""
    credited: tuple[int, ...] = ()
    by: str = ""
    left_out: str = ""
    is_propagated: bool = False
    is_record: bool = False

    @property
    def key(self) -> SpanKey:
        """Its trace and span id."""
        return self.span.trace_id, self.span.span_id

    @property
    def name(self) -> str:
        """Its name, for people: of our own kinds the word for it."""
        if self.kind == "reward":
            return "retraction" if c.REWARD_RETRACTED in self.span.attributes else "reward"
        return _NAMES.get(self.span.name, self.span.name)

    @property
    def subject(self) -> str:
        """Its tool, operation, mark or agent, as far as its name leaves it out."""
        get = self.span.attributes.get
        names = [*map(get, _SUBJECTS), self.agent if self.kind == "agent" else ""]
        return " ".join(text for text in map(to_text, filter(None, names)) if text not in self.name)

    @property
    def duration_ns(self) -> int | None:
        """The duration; None if the span never ended. A clock set back makes it negative."""
        return None if self.span.end_ns is None else self.span.end_ns - self.span.start_ns

    @property
    def tokens(self) -> tuple[int, int] | None:
        """The tokens that a call was given and answered; None where nobody counted."""
        get, step = self.span.attributes.get, self.step
        counts = [get(c.INPUT_TOKENS), get(c.OUTPUT_TOKENS)]
        if counts[1] is None and step is not None:
            counts = [step.input_tokens, step.output_tokens]
        return None if counts[1] is None else (counts[0] or 0, counts[1])

    @property
    def is_fault(self) -> bool:
        """True where an error arose."""
        return self.span.status == "ERROR" and not self.is_propagated

    @property
    def is_call(self) -> bool:
        """Whether it is a call to a model, and the first record of it."""
        return self.kind == "call" and not self.is_record

    @property
    def reward(self) -> float | None:
        """The primary number of a reward; None if it has none."""
        return to_number(self.span.attributes.get(c.REWARD_VALUE))

    @property
    def reward_name(self) -> str:
        """The name of this number."""
        return get_text(self.span.attributes, c.REWARD_NAME) or c.PRIMARY_REWARD

    @property
    def author(self) -> str:
        """Who gave a reward; empty if nobody is named."""
        return get_text(self.span.attributes, c.REWARD_AUTHOR) or ""

    @property
    def judges(self) -> str:
        """What a reward is linked to; empty if it is to nothing."""
        links = read_links(self.span.attributes).items()
        return next((f"{key} {value}" for key, value in links), "")

    @property
    def counts_as_reward(self) -> bool:
        """Whether it is a reward with a number that was not retracted."""
        return self.kind == "reward" and self.reward is not None and self.left_out != RETRACTED


class Trace(NamedTuple):
    """A trace, or all that a rollout did.

    Attributes:
        rows: Every span, each after what is above it.
        trajectories: Those of its rollouts; without bodies where it was read from a store.
        report: The funnel of its rollouts.
        trace_id: Its id; empty for a rollout, or a part.
        words: The first words of its task, or of what a user asked; empty likewise.
    """

    rows: list[Row]
    trajectories: list[Trajectory]
    report: Report
    trace_id: str = ""
    words: str = ""

    @property
    def own(self) -> list[Row]:
        """Its rows without the rewards given later, unless there is nothing else."""
        return [row for row in self.rows if not row.is_later] or self.rows

    @property
    def rollout_ids(self) -> list[str]:
        """The rollouts it is part of; most often one."""
        return list(dict.fromkeys(row.span.rollout_id for row in self.own))

    @property
    def start_ns(self) -> int:
        """The start of its first span."""
        return min(row.span.start_ns for row in self.own)

    @property
    def end_ns(self) -> int:
        """The end of its last span, as far as they ended."""
        return max(max(row.span.start_ns, row.span.end_ns or 0) for row in self.own)

    def find(self, span_id: str) -> int | None:
        """Return the position of a span's row."""
        return next((i for i, row in enumerate(self.rows) if row.span.span_id == span_id), None)

    def part(self, is_kept: Sequence[bool]) -> "Trace":
        """Return the same with some rows alone; one whose parent is gone becomes a root."""
        positions = [position for position, is_one in enumerate(is_kept) if is_one]
        places = {position: place for place, position in enumerate(positions)}
        rows: list[Row] = []
        for row in map(self.rows.__getitem__, positions):
            parent = places.get(row.parent, NO_PARENT)
            depth = 0 if parent == NO_PARENT else rows[parent].depth + 1
            credited = tuple(places[target] for target in row.credited if target in places)
            rows.append(replace(row, parent=parent, depth=depth, size=0, credited=credited))
        for row in reversed(rows):
            if row.parent != NO_PARENT:
                rows[row.parent].size += row.size + 1
        return self._replace(rows=rows)

    def below(self, root: int) -> "Trace":
        """Return one row with everything below it, and the rewards of what it holds."""
        last = root + self.rows[root].size
        return self.part(self.with_rewards([root <= i <= last for i in range(len(self.rows))]))

    def with_rewards(self, is_kept: Sequence[bool]) -> list[bool]:
        """Return the rows that are kept, and the rewards that were given to one of them."""
        return [
            is_one or any(is_kept[target] for target in row.credited)
            for is_one, row in zip(is_kept, self.rows, strict=True)
        ]


def make_trace(
    spans: "Iterable[Span | ReadableSpan]",
    adapter: TripletAdapter | None = None,
    *,
    incomplete: Collection[tuple[str, str]] = (),
) -> Trace:
    """Return the rows of whole rollouts' spans in memory, each tree after the other, parents first.

    The adapter's credit decides where rewards go; ``incomplete`` attempts make no transitions.
    """
    read = list(readers.read(map(span_of, spans)))
    return assemble(read, (adapter or TripletAdapter()).explain(read, incomplete=incomplete))


def assemble(spans: Sequence[Span], adaptation: Adaptation) -> Trace:
    """Return the rows of spans with what the adapter made of them."""
    rows = _place_rows(spans)
    _add_steps(rows, adaptation)
    _add_credit(rows, adaptation)
    faults = [
        row.span.status_message or str(row.span.attributes.get(c.ERROR_TYPE, ""))
        if row.span.status == "ERROR"
        else None
        for row in rows
    ]
    for position in find_origins([row.parent for row in rows], faults):
        rows[position].is_propagated = True
    return Trace(rows, adaptation.trajectories, adaptation.report)


def _place_rows(spans: Sequence[Span]) -> list[Row]:
    """Put every row after its parent, a reward given later below what it judges."""
    rows: list[Row] = []
    parents: list[int] = []
    for tree in map(build_tree, sort_attempts(spans).members.values()):
        base = len(rows)
        rules = {(repair.trace_id, repair.span_id): repair.rule for repair in tree.repairs}
        for span, parent, agent in zip(tree.spans, tree.parents, tree.agents, strict=True):
            rule = rules.get((span.trace_id, span.span_id), "") if rules else ""
            rows.append(Row(span, kind_of(span), agent, rule))
            parents.append(parent if parent == NO_PARENT else base + parent)
    # Rewards that wait for what they judge, and retractions, are in no attempt.
    placed = {row.key for row in rows}
    unplaced = {key: span for span in spans if (key := (span.trace_id, span.span_id)) not in placed}
    for span in unplaced.values():
        agent = get_text(span.attributes, c.AGENT_NAME) or ""
        rows.append(Row(span, kind_of(span), agent))
        parents.append(NO_PARENT)
    targets = _find_later(rows)
    order = sorted(range(len(rows)), key=lambda at: _rank(rows[at], targets.get(at)))
    places = {position: place for place, position in enumerate(order)}
    above = [targets.get(position, parents[position]) for position in order]
    walk = Walk([places.get(parent, NO_PARENT) for parent in above])
    arranged = [rows[order[node]] for node in walk.order]
    for node, row in zip(walk.order, arranged, strict=True):
        parent = walk.parents[node]
        row.size = walk.last[node] - walk.first[node]
        if parent != NO_PARENT:
            row.parent = walk.first[parent]
            row.depth = arranged[row.parent].depth + 1
    return arranged


def _rank(row: Row, target: int | None) -> int:
    return 0 if target is not None else 2 if row.is_later else 1


def _find_later(rows: Sequence[Row]) -> dict[int, int]:
    """Mark the rewards given in traces of their own; return the row that each is linked to."""
    worked = {row.span.trace_id for row in rows if row.kind != "reward"}
    positions = [at for at, row in enumerate(rows) if row.span.trace_id not in worked]
    if not worked or not positions:
        return {}
    names: dict[tuple[str, str], int] = {}
    for at, row in enumerate(rows):
        if row.span.trace_id in worked:
            response_id = get_text(row.span.attributes, c.RESPONSE_ID)
            names.setdefault((c.LINK_SPAN_ID, row.span.span_id), at)
            if response_id:
                names.setdefault((c.RESPONSE_ID, response_id), at)
    targets: dict[int, int] = {}
    for at in positions:
        rows[at].is_later = True
        links = read_links(rows[at].span.attributes).items()
        target = next((names[link] for link in links if link in names), None)
        if target is not None:
            targets[at] = target
    return targets


def _add_steps(rows: Iterable[Row], adaptation: Adaptation) -> None:
    paths, dropped = adaptation.trajectories, adaptation.report.dropped
    attempts, agents = len({path.attempt_id for path in paths}), len({path.agent for path in paths})
    steps: dict[SpanKey, tuple[Transition, int, str]] = {}
    for path in paths:
        cause = "" if path.cause == "start" else path.cause
        for step in path.transitions:
            key = (step.trace_id, step.span_id)
            if key not in steps:
                steps[key] = step, path.branch, cause
                cause = ""
    reasons = {(drop.trace_id, drop.span_id): drop.reason for drop in dropped}
    calls = {(e.trace_id, e.span_id): e.noun for e in dropped if e.noun in ("call", "record")}
    for row in rows:
        key = row.key
        if row.kind == "work" and (key in steps or key in calls):  # only its content says so
            row.kind = "call"
        if key in steps:
            row.step, row.branch, row.cause = steps[key]
            row.label = label_of(row.step, row.branch, attempts, agents)
        else:
            row.left_out, row.is_record = reasons.get(key, ""), calls.get(key) == "record"


def _add_credit(rows: Sequence[Row], adaptation: Adaptation) -> None:
    credit = {(credit.trace_id, credit.span_id): credit for credit in adaptation.credited}
    if not credit:
        return
    places: dict[str, list[int]] = {}
    for position, row in enumerate(rows):
        if row.step is not None:
            places.setdefault(row.span.span_id, []).append(position)
    for row in rows:
        credited = credit.get(row.key) if row.kind == "reward" else None
        if credited is not None:
            targets = (target for call in credited.calls for target in places.get(call, ()))
            row.credited, row.by = tuple(sorted(targets)), credited.by


def label_of(step: Transition, branch: int, attempts: int, agents: int) -> str:
    """Return a short name of a step, as far as it must be told apart."""
    words = [f"attempt {step.attempt_id}"] if attempts > 1 else []
    words += [step.agent or "nobody"] if agents > 1 else []
    words.append(f"#{step.step}")
    words += [f"branch {branch}"] if branch else []
    return " ".join(words)


def kind_of(span: Span) -> Kind:
    """Return a span's kind, for people."""
    attributes = span.attributes
    if span.name == c.SPAN_ROLLOUT:
        return "rollout"
    if is_call(span):
        return "call"
    if c.REWARD_VALUE in attributes or span.name == c.SPAN_ANNOTATION:
        return "reward"
    if is_mark(span):
        return "mark"
    operation = get_text(attributes, c.OPERATION)
    if operation is not None:
        return _OPERATIONS.get(operation, "work")
    return "plumbing" if any(key in attributes for key in c.PLUMBING_KEYS) else "work"
