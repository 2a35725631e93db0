"""A trace as rows: each span at its place, its kind, and what the adapter made of it.

Narrow columns alone are read, so that a trace of 30,000 spans is rows in a second or two; and
nothing in here recurses, so that neither depth nor a loop of parents matters.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

from lightning_otel.adapter.ordering import NO_PARENT
from lightning_otel.adapter.outline import find_propagated
from lightning_otel.adapter.rewards import RETRACTED
from lightning_otel.adapter.tree import build_tree
from lightning_otel.dataset import Store
from lightning_otel.dataset.formats.transition_rows import transition
from lightning_otel.errors import NotFoundError
from lightning_otel.store.schema import NARROW_COLUMNS
from lightning_otel.store.sql import ROLLOUT, attribute_sql, quote_text
from lightning_otel.store.table import Query
from lightning_otel.store.views import NARROW
from lightning_otel.types import Report, Span, Transition
from lightning_otel.types import conventions as c
from lightning_otel.views.previews import read_title, sql_of
from lightning_otel.views.traces import REWARDS_SINCE, may_link

if TYPE_CHECKING:
    import duckdb

Kind: TypeAlias = Literal["rollout", "agent", "call", "tool", "reward", "mark", "plumbing", "work"]
"""What a span is to a person; plumbing is a request or query of another instrumentor."""
SpanId: TypeAlias = tuple[str, str]

FACTS: Final = {
    "error_type": c.ERROR_TYPE,
    "operation_name": c.OPERATION_NAME,
    "mark": c.MARK_NAME,
    "tool": c.TOOL_NAME,
    "reward_name": c.REWARD_NAME,
    "link_key": f"{c.LINK_PREFIX}.0.key_match",
    "link_value": f"{c.LINK_PREFIX}.0.value_match",
    "abandoned": c.ABANDONED,
    "retracted": c.REWARD_RETRACTED,
}
"""Attributes that a row tells, by what it calls them; read out of the JSON where it lies."""
_KINDS: Final[Mapping[str | None, Kind]] = {c.INVOKE_AGENT: "agent", c.EXECUTE_TOOL: "tool"}
_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})
_UNREAD: Final[Mapping[str, Any]] = {"observation": (), "action": (), "next_observation": None}
_SHORT: Final = 200
_AT_ONCE: Final = 2048
_PLUMBING: Final = "|".join(key.replace(".", r"\.") for key in c.PLUMBING_KEYS)
_COLUMNS: Final = f"""trace_id, span_id, parent_span_id, left(name, {_SHORT}), start_ns, end_ns,
  status, coalesce(left(status_message, {_SHORT}), ''), operation, coalesce(agent, ''), model,
  response_id, input_tokens, output_tokens, {ROLLOUT}, reward, coalesce(process, ''), sequence,
  end_sequence,
  operation IS NULL AND reward IS NULL
    AND regexp_matches(attributes::VARCHAR, {quote_text(f'"({_PLUMBING})":')}),
  [left(fact, {_SHORT}) for fact in json_extract_string(attributes,
    [{", ".join(quote_text(f'$."{key}"') for key in FACTS.values())}])]"""
_LATER: Final = f"""
SELECT trace_id, span_id, start_ns FROM narrow WHERE {REWARDS_SINCE} AND trace_id <> ?
  AND {ROLLOUT} IN (SELECT {ROLLOUT} FROM narrow WHERE trace_id = ?)"""
_LINKED: Final = f"""
SELECT trace_id, span_id, start_ns FROM spans WHERE {REWARDS_SINCE} AND trace_id <> ?
  AND contains(attributes::VARCHAR, {quote_text(c.LINK_PREFIX)})
  AND {attribute_sql(f"{c.LINK_PREFIX}.0.value_match")} IN (SELECT unnest(?))"""


@dataclass(slots=True)
class Row:
    """A span without its content, texts cut short, at its place.

    Attributes:
        agent: The agent it belongs to; empty where none is named.
        facts: Those of ``FACTS`` that it has; shared by rows, and not to be changed.
        is_later: It is a reward that was given in a trace of its own.
        parent: Position of the row above it, or -1.
        depth: Number of rows above it.
        size: Number of rows below it, at any depth.
        step: The transition it became, if it did, without messages and tokens.
        branch: The first branch that this step lies on.
        left_out: Why it is in no transition; empty if it is, or is nothing that could be.
        moved: The rule by which it stands elsewhere than it was recorded; empty if it does not.
        is_propagated: Its error arose below it.
        is_record: It is one more record of a call, and counts as none.
    """

    trace_id: str
    span_id: str
    parent_span_id: str | None
    name: str
    start_ns: int
    end_ns: int | None
    status: str
    status_message: str
    operation: str | None
    agent: str
    model: str | None
    response_id: str | None
    input_tokens: int | None
    output_tokens: int | None
    rollout_id: str
    reward: float | None
    process: str
    sequence: int
    end_sequence: int
    is_plumbing: bool
    facts: Mapping[str, str]
    is_later: bool = False
    parent: int = NO_PARENT
    depth: int = 0
    size: int = 0
    step: Transition | None = None
    branch: int = 0
    left_out: str = ""
    moved: str = ""
    is_propagated: bool = False
    is_record: bool = False

    @property
    def duration_ns(self) -> int | None:
        """The duration; None if the span never ended. A clock set back makes it negative."""
        return None if self.end_ns is None else self.end_ns - self.start_ns

    @property
    def kind(self) -> Kind:
        """Its kind, for people."""
        if self.name == c.SPAN_ROLLOUT:
            return "rollout"
        if self.operation in c.CALL_OPERATIONS:
            return "call"
        if self.reward is not None or self.name == c.SPAN_ANNOTATION:
            return "reward"
        if self.name in (c.SPAN_ACTION, c.SPAN_OBSERVATION):
            return "mark"
        return "plumbing" if self.is_plumbing else _KINDS.get(self.operation, "work")

    @property
    def is_call(self) -> bool:
        """Whether it is a call to a model, and the first record of it."""
        return self.kind == "call" and not self.is_record

    @property
    def counts_as_reward(self) -> bool:
        """Whether it is a reward with a number that was not retracted."""
        return self.kind == "reward" and self.reward is not None and self.left_out != RETRACTED


class Trace(NamedTuple):
    """A trace.

    Attributes:
        rows: Every span, each after what is above it, with the rewards that were given to it later.
        report: The funnel of its rollouts.
        step_ids: Every transition of its rollouts, in this trace or not.
        attempts: The number of attempts that these are of.
        agents: The number of agents.
        words: The first words of its task, or of what a user asked.
    """

    trace_id: str
    rows: list[Row]
    report: Report
    step_ids: Collection[SpanId]
    attempts: int
    agents: int
    words: str = ""

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
    """Read a trace of any size.

    Raises:
        NotFoundError: There is none.
    """
    own, later, words = _read_spans(store, trace_id)
    if not own:
        raise NotFoundError(f"there is no trace {trace_id!r}; see the list of traces")
    rows = _place_rows(own, later)
    steps, report = read_steps(store, rollout_id=list(dict.fromkeys(row.rollout_id for row in own)))
    by_name = {(step.trace_id, step.span_id): (step, branch) for step, branch in steps}
    dropped = {(each.trace_id, each.span_id): each for each in report.dropped}
    for row in rows:
        name = row.trace_id, row.span_id
        row.step, row.branch = by_name.get(name, (None, 0))
        if row.step is None and (loss := dropped.get(name)) is not None:
            row.left_out, row.is_record = loss.reason, loss.noun == "record"
    attempts = len({(step.rollout_id, step.attempt_id) for step, _ in steps})
    agents = len({step.agent for step, _ in steps})
    return Trace(trace_id, rows, report, by_name.keys(), attempts, agents, words)


def read_steps(store: Store, **keywords: Any) -> tuple[list[tuple[Transition, int]], Report]:
    """Read transitions without what was said in them, each with its branch, and their funnel."""
    table = store.transitions(bodies=False, **keywords)
    steps = [(transition({**_UNREAD, **row}), row["branch"]) for row in table.dicts()]
    return steps, table.report()


def _read_spans(store: Store, trace_id: str) -> tuple[list[Row], list[Row], str]:
    """Read a trace's rows, those of rewards given to it later, and its title."""
    con = store.source.connect(("spans", NARROW), (*NARROW_COLUMNS, "attributes"))
    own = _read_rows(con, f"trace_id = {quote_text(trace_id)}")
    later = _read_later(con, trace_id, own) if own else []
    return own, later, read_title(sql_of(store, con), own)


def _read_later(con: "duckdb.DuckDBPyConnection", trace_id: str, own: list[Row]) -> list[Row]:
    low = min(row.start_ns for row in own)
    found = con.execute(_LATER, [low, trace_id, trace_id]).fetchall()
    if may_link(con, low):
        ids = [name for row in own for name in (row.span_id, row.response_id) if name]
        found += con.execute(_LINKED, [low, trace_id, ids]).fetchall()
    if not found:
        return []
    names = ", ".join(f"({quote_text(trace)}, {quote_text(span)})" for trace, span, _ in found)
    times = [start_ns for _, _, start_ns in found]
    where = f"start_ns BETWEEN {min(times)} AND {max(times)} AND (trace_id, span_id) IN ({names})"
    rows = _read_rows(con, where)
    for row in rows:
        row.is_later = True
    return rows


def _read_rows(con: "duckdb.DuckDBPyConnection", where: str) -> list[Row]:
    query = f"SELECT {_COLUMNS} FROM spans WHERE {where} ORDER BY start_ns"
    found: list[Row] = []
    # DuckDB makes an object of every value; most of them say what another row said already.
    known: dict[Any, Any] = {}
    for some in Query(con, query).batches(_AT_ONCE)[1]:
        for *columns, facts in some:
            key = tuple(facts or ())
            if key not in known:
                pairs = zip(FACTS, key, strict=False)
                known[key] = {name: text for name, text in pairs if text is not None} or _NOTHING
            shared = [known.setdefault(one, one) if type(one) is str else one for one in columns]
            found.append(Row(*shared, known[key]))  # type: ignore[call-arg]  # as _COLUMNS has them
    return found


def _place_rows(own: Sequence[Row], later: Sequence[Row]) -> list[Row]:
    """Put every row after its parent, a reward given later below what it judges."""
    by_id = {row.span_id: row for row in own}
    responses = {row.response_id: row.span_id for row in own if row.response_id}
    given: dict[str, list[Row]] = {}
    for row in later:
        target = row.facts.get("link_value", "")
        if row.facts.get("link_key") == c.RESPONSE_ID:
            target = responses.get(target, "")
        given.setdefault(target if target in by_id else "", []).append(row)
    tree = build_tree(map(_make_span, own))
    found: list[Row] = []
    positions = [NO_PARENT] * len(tree.spans)
    for node in sorted(range(len(tree.spans)), key=tree.first.__getitem__):
        row, above = by_id[tree.spans[node].span_id], tree.parents[node]
        row.parent = NO_PARENT if above == NO_PARENT else positions[above]
        row.depth, row.agent = tree.depths[node], tree.agents[node] or row.agent
        positions[node] = len(found)
        found.append(row)
        for reward in given.pop(row.span_id, ()):
            reward.parent, reward.depth = positions[node], row.depth + 1
            found.append(reward)
    found += (row for waiting in given.values() for row in waiting)
    for row in reversed(found):
        if row.parent != NO_PARENT:
            found[row.parent].size += row.size + 1
    rules = {repair.span_id: repair.rule for repair in tree.repairs}
    for row in own:
        row.moved = rules.get(row.span_id, "")
    faults = [
        row.status_message or row.facts.get("error_type", "") if row.status == "ERROR" else None
        for row in found
    ]
    for position in find_propagated([row.parent for row in found], faults):
        found[position].is_propagated = True
    return found


def _make_span(row: Row) -> Span:
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
        process=row.process,
        sequence=row.sequence,
        end_sequence=row.end_sequence,
    )


@lru_cache(maxsize=256)  # of 30,000 spans all but a few have what another one has
def _make_attributes(agent: str, operation: str | None) -> Mapping[str, str]:
    named = {c.AGENT_NAME: agent, c.OPERATION: operation}
    return {key: value for key, value in named.items() if value}


class Shown(NamedTuple):
    """A row that is shown; ``folded`` counts the spans right below it that are folded away."""

    row: Row
    folded: int
    is_closed: bool


class Folded(NamedTuple):
    """The rows to show, and how many spans of other instrumentors are folded away."""

    shown: list[Shown]
    others: int


def fold(
    rows: Sequence[Row],
    closed: Iterable[str] = (),
    *,
    others: bool = False,
    only: Collection[str] | None = None,
) -> Folded:
    """Choose the rows to show.

    Requests, queries and messages of other instrumentors are folded away where nothing else lies
    below them, unless there is nothing else at all.

    Args:
        rows: All of a trace, each after its parent.
        closed: Ids of the spans below which nothing is shown.
        others: Whether those of other instrumentors are shown.
        only: Ids of the spans that are shown, with what is above them; None for all.
    """
    is_other = _keep_above(rows, [row.kind == "plumbing" for row in rows])
    count = sum(is_other)
    if others or count == len(rows):
        is_other = [False] * len(rows)
        count = count if others else 0
    shut = frozenset(closed)
    is_hidden = list(is_other)
    if only is not None:
        is_other, count = [False] * len(rows), 0
        is_hidden = _keep_above(rows, [row.span_id not in only for row in rows])
    folded = [0] * len(rows)
    for position, row in enumerate(rows):
        parent = row.parent
        if parent != NO_PARENT and (is_hidden[parent] or rows[parent].span_id in shut):
            is_hidden[position] = True
        elif is_other[position] and parent != NO_PARENT:
            folded[parent] += row.size + 1
    shown = [
        Shown(row, folded[at], is_closed=row.span_id in shut and row.size > 0)
        for at, row in enumerate(rows)
        if not is_hidden[at]
    ]
    return Folded(shown, count)


def _keep_above(rows: Sequence[Row], is_left_out: list[bool]) -> list[bool]:
    """Return which rows are left out: none that has a row below it that is not."""
    for position in range(len(rows) - 1, -1, -1):
        if not is_left_out[position] and rows[position].parent != NO_PARENT:
            is_left_out[rows[position].parent] = False
    return is_left_out
