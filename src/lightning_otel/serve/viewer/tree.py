"""A trace as rows: each span at its place, what it is, and what was made of it.

Narrow columns alone are read, so that a trace of 30,000 spans is rows in a second or two; and
nothing in here recurses, so that neither depth nor a loop of parents matters.
"""

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

from lightning_otel import conventions as c
from lightning_otel.adapter.tree import NO_PARENT, build
from lightning_otel.dataset import Store
from lightning_otel.errors import NotFoundError
from lightning_otel.serve.api.fresh import Mark, mark_of
from lightning_otel.types import Report, Span, Transition
from lightning_otel.views.trace_rows import SpanRow, trace_rows

Kind: TypeAlias = Literal["rollout", "agent", "call", "tool", "reward", "mark", "plumbing", "work"]
"""What a span is to a person."""

_KINDS: Final[Mapping[str, Kind]] = {c.INVOKE_AGENT: "agent", c.EXECUTE_TOOL: "tool"}
_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Row:
    """A span at its place.

    Attributes:
        parent: Position of the row above it, or -1.
        depth: Number of rows above it.
        size: Number of rows below it, at any depth.
        agent: The agent it belongs to; empty where none is named.
        is_later: Whether it is a reward that was given in a trace of its own.
        facts: Short attributes, by name.
        step: The transition it became, if it did.
        left_out: Why it is in no transition; empty if it is, or is nothing that could be.
        moved: The rule by which it stands elsewhere than it was recorded; empty if it does not.
    """

    trace_id: str
    span_id: str
    name: str
    kind: Kind
    parent: int
    depth: int
    size: int
    agent: str
    start_ns: int
    end_ns: int | None
    status: str
    status_message: str
    model: str | None
    input_tokens: int | None
    output_tokens: int | None
    reward: float | None
    rollout_id: str
    response_id: str | None
    is_later: bool
    facts: Mapping[str, str]
    step: Transition | None = None
    left_out: str = ""
    moved: str = ""

    @property
    def duration_ns(self) -> int | None:
        """The duration; None if the span never ended. A clock set back makes it negative."""
        return None if self.end_ns is None else self.end_ns - self.start_ns


class Trace(NamedTuple):
    """A trace.

    Attributes:
        trace_id: Its id.
        rows: Every span, each after what is above it, with the rewards that were given to it later.
        report: The funnel of its rollouts.
        steps: Trace and span id of every transition of its rollouts.
    """

    trace_id: str
    rows: list[Row]
    report: Report
    steps: Collection[tuple[str, str]]

    @property
    def rollout_ids(self) -> list[str]:
        """The rollouts it is part of; most often one."""
        return list(dict.fromkeys(row.rollout_id for row in self.rows if not row.is_later))

    @property
    def start_ns(self) -> int:
        """The start of its first span."""
        return min(row.start_ns for row in self.own)

    @property
    def end_ns(self) -> int:
        """The end of its last span, as far as they ended."""
        return max(max(row.start_ns, row.end_ns or 0) for row in self.own)

    @property
    def own(self) -> list[Row]:
        """Its rows without the rewards given later, unless there is nothing else."""
        return [row for row in self.rows if not row.is_later] or self.rows

    def find(self, span_id: str) -> int | None:
        """The position of a span's row."""
        return next((i for i, row in enumerate(self.rows) if row.span_id == span_id), None)


def read_trace(store: Store, trace_id: str) -> Trace:
    """A trace of any size, as it is now; the one read last, where nothing was written since.

    Raises:
        NotFoundError: There is none.
    """
    # Taken before it is read: what comes meanwhile makes it old.
    mark = None if store.layout is None else mark_of(store.layout)
    kept = _find_kept(store, trace_id)
    if kept is not None and mark is not None and kept.mark == mark:
        return kept.trace
    del kept
    _LAST.pop(store, None)  # before another one takes as much again
    own, later = trace_rows(store.source, trace_id)
    if not own:
        raise NotFoundError(f"there is no trace {trace_id!r}; see the list of traces")
    steps, report = _read_steps(store, list(dict.fromkeys(row.rollout_id for row in own)))
    found = Trace(
        trace_id, _make_rows(_place_rows(own, later), steps, report), report, steps.keys()
    )
    _LAST[store] = _Kept(found, mark, time.monotonic())
    return found


def held_trace(store: Store, trace_id: str) -> Trace:
    """A trace as the page that asks for a part of it was made, if that was just now.

    Raises:
        NotFoundError: There is none.
    """
    kept = _find_kept(store, trace_id)
    return read_trace(store, trace_id) if kept is None else kept.trace


def let_go() -> None:
    """Let go of traces that were read too long ago for a page to ask for its parts."""
    now_s = time.monotonic()
    for store, kept in list(_LAST.items()):
        if now_s - kept.since_s >= _KEPT_S:
            _LAST.pop(store, None)


class _Kept(NamedTuple):
    """The trace that was read last, what the store was like before that, and when."""

    trace: Trace
    mark: Mark | None
    since_s: float


_LAST: "WeakKeyDictionary[Store, _Kept]" = WeakKeyDictionary()
_KEPT_S: Final = 60.0
"""A process that dies ends its attempts, and writes nothing."""


def _find_kept(store: Store, trace_id: str) -> _Kept | None:
    kept = _LAST.get(store)
    if kept is None or kept.trace.trace_id != trace_id:
        return None
    if time.monotonic() - kept.since_s >= _KEPT_S:
        _LAST.pop(store, None)
        return None
    return kept


def _read_steps(
    store: Store, rollout_ids: Sequence[str]
) -> tuple[dict[tuple[str, str], Transition], Report]:
    table = store.transitions(rollout_id=rollout_ids, bodies=False)
    return {(step.trace_id, step.span_id): step for step in table}, table.report()


class _Placed(NamedTuple):
    """The places of rows, and the repair rule of each that was moved."""

    places: "list[_Place]"
    moved: dict[tuple[str, str], str]


class _Place(NamedTuple):
    """The place of a row."""

    raw: SpanRow
    parent: int
    depth: int
    agent: str
    is_later: bool


def _place_rows(own: Sequence[SpanRow], later: Sequence[SpanRow]) -> _Placed:
    """Every row below its parent, a reward given later below what it judges."""
    by_id = {row.span_id: row for row in own}
    tree = build(map(_make_span, own))
    given = _by_target(own, later)
    found: list[_Place] = []
    positions = [NO_PARENT] * len(tree.spans)
    for node in sorted(range(len(tree.spans)), key=tree.first.__getitem__):
        span_id, above, depth = tree.spans[node].span_id, tree.parents[node], tree.depths[node]
        parent = NO_PARENT if above == NO_PARENT else positions[above]
        place = positions[node] = len(found)
        found.append(_Place(by_id[span_id], parent, depth, tree.agents[node], False))
        for row in given.pop(span_id, ()):
            found.append(_Place(row, place, depth + 1, "", True))
    for row in (each for waiting in given.values() for each in waiting):
        found.append(_Place(row, NO_PARENT, 0, "", True))
    return _Placed(found, {(each.trace_id, each.span_id): each.rule for each in tree.repairs})


def _by_target(own: Iterable[SpanRow], later: Iterable[SpanRow]) -> dict[str, list[SpanRow]]:
    """Rewards given later by the span they are linked to; by an empty id where that is not here."""
    spans = {row.span_id for row in own}
    responses = {row.response_id: row.span_id for row in own if row.response_id}
    found: dict[str, list[SpanRow]] = {}
    for row in later:
        value = row.facts.get("link_value", "")
        if row.facts.get("link_key") == c.RESPONSE_ID:
            value = responses.get(value, "")
        found.setdefault(value if value in spans else "", []).append(row)
    return found


def _make_span(row: SpanRow) -> Span:
    """As much of a span as its place in the tree depends on."""
    return Span(
        trace_id=row.trace_id,
        span_id=row.span_id,
        parent_span_id=row.parent_span_id,
        name=row.name,
        start_ns=row.start_ns,
        end_ns=row.end_ns,
        attributes=_make_attributes(row.agent, row.operation),
        otel_resource=_NOTHING,
        process=row.process or "",
        sequence=row.sequence,
        end_sequence=row.end_sequence,
    )


@lru_cache(maxsize=256)  # of 30,000 spans all but a few have what another one has
def _make_attributes(agent: str | None, operation: str | None) -> Mapping[str, str]:
    named = {c.AGENT_NAME: agent, c.OPERATION: operation}
    return {key: value for key, value in named.items() if value}


def _make_rows(
    placed: _Placed, steps: Mapping[tuple[str, str], Transition], report: Report
) -> list[Row]:
    """The rows with what the adapter says of them."""
    reasons = {(each.trace_id, each.span_id): each.reason for each in report.dropped}
    sizes = [0] * len(placed.places)
    for position in range(len(sizes) - 1, -1, -1):
        parent = placed.places[position].parent
        if parent != NO_PARENT:
            sizes[parent] += sizes[position] + 1
    found = []
    for (row, parent, depth, agent, is_later), size in zip(placed.places, sizes, strict=True):
        name = (row.trace_id, row.span_id)
        step = steps.get(name)
        found.append(
            Row(
                trace_id=row.trace_id,
                span_id=row.span_id,
                name=row.name,
                kind=_kind_of(row),
                parent=parent,
                depth=depth,
                size=size,
                agent=agent or row.agent or "",
                start_ns=row.start_ns,
                end_ns=row.end_ns,
                status=row.status,
                status_message=row.status_message or "",
                model=row.model,
                input_tokens=row.input_tokens,
                output_tokens=row.output_tokens,
                reward=row.reward,
                rollout_id=row.rollout_id,
                response_id=row.response_id,
                is_later=is_later,
                facts=row.facts,
                step=step,
                left_out="" if step is not None else reasons.get(name, ""),
                moved=placed.moved.get(name, ""),
            )
        )
    return found


def _kind_of(row: SpanRow) -> Kind:
    operation = row.operation
    if row.name == c.SPAN_ROLLOUT:
        return "rollout"
    if operation in c.CALL_OPERATIONS:
        return "call"
    if row.reward is not None or row.name == c.SPAN_ANNOTATION:
        return "reward"
    if row.name in (c.SPAN_ACTION, c.SPAN_OBSERVATION):
        return "mark"
    return "plumbing" if row.is_plumbing else _KINDS.get(operation or "", "work")


class Shown(NamedTuple):
    """A row that is shown.

    Attributes:
        row: It.
        position: Its position among all.
        folded: How many spans right below it are folded away.
        is_closed: Whether what is below it is not shown.
    """

    row: Row
    position: int
    folded: int
    is_closed: bool


class Folded(NamedTuple):
    """The rows to show, and how many spans of other instrumentors are folded away."""

    shown: list[Shown]
    others: int


def fold(rows: Sequence[Row], closed: Iterable[str] = (), *, others: bool = False) -> Folded:
    """The rows to show.

    Requests, queries and messages of other instrumentors are folded away where nothing else lies
    below them, unless there is nothing else at all.

    Args:
        rows: All of a trace, each after its parent.
        closed: Ids of the spans below which nothing is shown.
        others: Whether those of other instrumentors are shown.
    """
    is_other = _find_others(rows)
    count = sum(is_other)
    if others or count == len(rows):
        is_other = [False] * len(rows)
        count = count if others else 0
    shut = frozenset(closed)
    is_hidden = list(is_other)
    folded = [0] * len(rows)
    shown: list[int] = []
    for position, row in enumerate(rows):
        parent = row.parent
        if parent != NO_PARENT and (is_hidden[parent] or rows[parent].span_id in shut):
            is_hidden[position] = True
        elif is_other[position] and parent != NO_PARENT:
            folded[parent] += row.size + 1
        if not is_hidden[position]:
            shown.append(position)
    found = [
        Shown(rows[at], at, folded[at], is_closed=rows[at].span_id in shut and rows[at].size > 0)
        for at in shown
    ]
    return Folded(found, count)


def _find_others(rows: Sequence[Row]) -> list[bool]:
    """Return for each row whether it and all below are of other instrumentors."""
    found = [row.kind == "plumbing" for row in rows]
    for position in range(len(rows) - 1, -1, -1):
        parent = rows[position].parent
        if parent != NO_PARENT and not found[position]:
            found[parent] = False
    return found
