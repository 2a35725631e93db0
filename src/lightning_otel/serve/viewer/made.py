"""The adapter's view of a trace for pages: credit, exactness, tool calls."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from lightning_otel import conventions as c
from lightning_otel.adapter.exactness import notes_of
from lightning_otel.adapter.outline import Outline, outline
from lightning_otel.dataset import Store
from lightning_otel.dataset.batches import incomplete
from lightning_otel.serve.viewer.said import Part, part_of, value_part
from lightning_otel.serve.viewer.span import read_spans
from lightning_otel.serve.viewer.tree import Row, Trace
from lightning_otel.types import Span, Transition
from lightning_otel.views.trace_rows import Size, size_of, spans_around

MOST_SPANS: Final = 5_000
MOST_BYTES: Final = 64 << 20
"""What is read at once for a page, bodies and all; a larger trace is told of without."""
TOOLS: Final = 100
"""Calls of tools on a page."""


class Credit(NamedTuple):
    """A reward, and where it went.

    Attributes:
        trace_id: Of its span; it may have been given in another trace.
        targets: Label and span id of each step it was given to.
        by: What it was given by; empty if it was not.
        left_out: Why it was not; empty if it was.
    """

    trace_id: str
    span_id: str
    name: str
    value: object
    given_ns: int
    targets: list[tuple[str, str]]
    by: str
    left_out: str


class Step(NamedTuple):
    """A transition, with what a trainer should know of its tokens."""

    step: Transition
    label: str
    notes: list[str]


class ToolCall(NamedTuple):
    """A call of a tool.

    Attributes:
        span_id: Its span; that of the model's call that asked for it, if it has none.
        duration_ns: How long it took; None if nothing says so.
        is_told: Whether a span of its own tells of it.
    """

    name: str
    call_id: str
    span_id: str
    agent: str
    start_ns: int
    duration_ns: int | None
    status: str
    status_message: str
    arguments: Part | None
    result: Part | None
    is_told: bool


def adapted(store: Store, trace_id: str) -> tuple[Outline | None, Size]:
    """Adapt a trace unless it is too large; return its size as well."""
    size = size_of(store.source, trace_id)
    if size.spans > MOST_SPANS or size.bytes > MOST_BYTES:
        return None, size
    spans = spans_around(store.source, trace_id)
    # To say which attempts broke off costs a look at the whole store.
    is_open = any(span.is_incomplete for span in spans)
    found = outline(spans, incomplete=incomplete(store.source) if is_open else ())
    is_own = [node.span.trace_id == trace_id for node in found.nodes]
    kept = found.with_rewards(is_own)
    # A reward given elsewhere that reached nothing is told of, too.
    lost = [node.kind == "reward" and bool(node.left_out) for node in found.nodes]
    return found.part([one or other for one, other in zip(kept, lost, strict=True)]), size


def credits(found: Outline) -> list[Credit]:
    """Every reward of a trace."""
    labels = found.labels()
    told = []
    for node in found.nodes:
        if node.kind == "reward":
            span, get = node.span, node.span.attributes.get
            told.append(
                Credit(
                    trace_id=span.trace_id,
                    span_id=span.span_id,
                    name=str(get(c.REWARD_NAME) or c.PRIMARY_REWARD),
                    value=get(c.REWARD_VALUE),
                    given_ns=span.start_ns,
                    targets=[(labels[at], found.nodes[at].span.span_id) for at in node.credited],
                    by=node.by,
                    left_out=node.left_out,
                )
            )
    return told


def steps(found: Outline) -> list[Step]:
    """Every transition of a trace, once."""
    return [
        Step(node.step, label, notes_of(node.step))
        for node, label in zip(found.nodes, found.labels(), strict=True)
        if node.step is not None
    ]


def tool_calls(store: Store, trace: Trace, found: Outline | None, first: int) -> list[ToolCall]:
    """A page of the calls of tools that have spans, and after them those that only models tell of.

    Args:
        store: Where the trace is.
        trace: The trace.
        found: What the adapter made of it, if it is not too large.
        first: The position of the first one.
    """
    rows = [row for row in trace.rows if row.kind == "tool"]
    page = rows[first : first + TOOLS]
    told = list(_with_spans(page, read_spans(store, page)))
    if found is None or len(page) == TOOLS:
        return told
    known = read_spans(store, rows)
    names = {str(span.attributes.get(c.TOOL_CALL_ID)) for span in known.values()}
    asked = list(_without_spans(found, names, has_spans=bool(rows)))
    return told + asked[max(0, first - len(rows)) :][: TOOLS - len(told)]


def _with_spans(rows: Sequence[Row], spans: Mapping[str, Span]) -> Iterator[ToolCall]:
    for row in rows:
        span = spans.get(row.span_id)
        get: Any = span.attributes.get if span is not None else {}.get
        arguments, result = get(c.TOOL_ARGUMENTS), get(c.TOOL_RESULT)
        yield ToolCall(
            name=str(get(c.TOOL_NAME) or row.name),
            call_id=str(get(c.TOOL_CALL_ID) or ""),
            span_id=row.span_id,
            agent=row.agent,
            start_ns=row.start_ns,
            duration_ns=row.duration_ns,
            status=row.status,
            status_message=row.status_message,
            arguments=None if arguments is None else value_part(arguments),
            result=None if result is None else value_part(result),
            is_told=True,
        )


def _without_spans(found: Outline, known: set[str], *, has_spans: bool) -> Iterator[ToolCall]:
    """Calls of tools in what models answered that no span of a tool names."""
    for node in found.nodes:
        step = node.step
        for part in _find_parts(step.action if step is not None else (), "tool_call"):
            call_id = str(part.get("id") or "")
            if call_id in known or (has_spans and not call_id):
                continue
            assert step is not None
            answers = _find_parts(step.next_observation or (), "tool_call_response")
            result = next((each for each in answers if str(each.get("id") or "") == call_id), None)
            yield ToolCall(
                name=str(part.get("name") or "a tool"),
                call_id=call_id,
                span_id=step.span_id,
                agent=step.agent,
                start_ns=step.end_ns,
                duration_ns=None,
                status="UNSET",
                status_message="",
                arguments=part_of(part),
                result=None if result is None else part_of(result),
                is_told=False,
            )


def _find_parts(messages: Sequence[Mapping[str, Any]], kind: str) -> Iterator[Mapping[str, Any]]:
    for message in messages:
        parts = message.get("parts")
        for part in parts if isinstance(parts, (list, tuple)) else ():
            if isinstance(part, Mapping) and part.get("type") == kind:
                yield part
