"""Steps and tool calls of a trace, a page at a time; messages are read of the page alone."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from lightning_otel.adapter.calls import is_mark, mark_message, observation_of
from lightning_otel.adapter.tokens import notes_of, read_tokens
from lightning_otel.dataset import Store
from lightning_otel.messages import objects
from lightning_otel.serve.viewer.span_detail import messages_of
from lightning_otel.types import Message, Span, Trajectory, Transition
from lightning_otel.types import conventions as c
from lightning_otel.views.messages import (
    LONGEST,
    MessageLimits,
    ShownMessage,
    Thread,
    show_messages,
    show_part,
    show_thread,
    show_value,
)
from lightning_otel.views.stored_trace import SPAN_COLUMNS, read_spans
from lightning_otel.views.trace import Row, SpanKey, Trace

CALLS: Final = 50
"""Calls on a page of the chat, or of tools."""
_MESSAGES: Final = 400
_CHARACTERS: Final = 100_000
"""Of the calls on a page: so that it stays below 300 KB where messages are not all long."""
SMALL: Final = 5_000
"""Spans of a trace whose chat stands whole on a page, but for very many or very long messages."""
_BODIES: Final = ("input_messages", "output_messages", "system_instructions")
_SAMPLED: Final = ("prompt_token_ids", "response_token_ids", "response_logprobs")
_TOOL_CALLS: Final = f"""
SELECT span_id, operation = '{c.EXECUTE_TOOL}' AS is_tool,
  coalesce(json_extract_string(attributes, '$."{c.TOOL_CALL_ID}"'),
    json_extract_string(attributes, '$."tool_call.id"')) AS call_id
FROM spans WHERE trace_id = ? AND (is_tool OR contains(output_messages::VARCHAR, 'tool_call')
  OR contains(attributes::VARCHAR, 'tool_call'))"""


class Range(NamedTuple):
    """A part of a long list; the address holds the position of its first member."""

    first: int
    size: int
    total: int
    noun: str

    @classmethod
    def of(cls, total: int, size: int, first: int, noun: str) -> "Range":
        """The part that begins at a position; the last one, where the list ends before it."""
        range_ = cls(first, size, total, noun)
        return range_._replace(first=min(first, range_.last))

    @property
    def end(self) -> int:
        """Position after its last member."""
        return min(self.first + self.size, self.total)

    @property
    def last(self) -> int:
        """The position of the last page."""
        return max(0, self.total - 1) // self.size * self.size

    @property
    def places(self) -> slice:
        """Its members among all."""
        return slice(self.first, self.end)


def list_steps(trace: Trace) -> list[tuple[Row, Transition]]:
    """Return every row of a trace that is a step, with it."""
    return [(row, row.step) for row in trace.rows if row.step is not None]


def add_tokens(
    store: Store, steps: Sequence[tuple[Row, Transition]]
) -> list[tuple[Row, Transition, list[str]]]:
    """Return some steps with their tokens, and what a trainer should know of these."""
    spans = read_spans(store, [step for _, step in steps], (*SPAN_COLUMNS, *_SAMPLED))
    rows = []
    for row, narrow in steps:
        span = spans.get(row.key, row.span)
        prompt_ids, response_ids, logprobs, _ = read_tokens(span.attributes)
        step = replace(narrow, prompt_ids=prompt_ids, response_ids=response_ids, logprobs=logprobs)
        rows.append((row, step, list(notes_of(step))))
    return rows


def read_threads(store: Store, trace: Trace, part: Range, until: int | None = None) -> list[Thread]:
    """Read the messages of some of a trace's steps, by agent and branch."""
    all_steps = list_steps(trace)
    latest: dict[object, int] = {}
    previous: dict[int, int] = {}
    positions: dict[tuple[object, int], list[int]] = {}
    for at, (row, step) in enumerate(all_steps[: part.end]):
        agent = _agent_of(step)
        key = agent, row.branch
        before = latest.get(key, latest.get(agent))
        latest[key] = latest[agent] = at
        if at >= part.first:
            # An agent begins another history with its first step.
            if key not in positions and step.step and before is not None:
                previous[at] = before
            positions.setdefault(key, []).append(at)
    numbers = sorted({*range(part.first, part.end), *previous.values()})
    messages = _read_messages(store, trace, {at: all_steps[at][1] for at in numbers})
    count = max(1, part.end - part.first)
    labels = {row.span.span_id: row.label for row, _ in all_steps[part.places]}

    def show(limits: MessageLimits) -> list[Thread]:
        talks = []
        for (_, branch), places in positions.items():
            cause: Any = all_steps[places[0]][0].cause or "start"
            steps = tuple(messages[at] for at in places)
            path = Trajectory(*_agent_of(steps[0]), branch, steps, cause=cause)
            before = previous.get(places[0])
            previous_messages = None if before is None else messages[before]
            talks.append(show_thread(path, labels, previous_messages, limits=limits))
        return [talk for talk in talks if talk.messages]

    if len(trace.rows) <= SMALL:
        talks = show(MessageLimits(until=until))
        if sum(len(talk.messages) for talk in talks) <= _MESSAGES:
            return talks
    characters = max(2_000, min(LONGEST, _CHARACTERS // count))
    return show(MessageLimits(max(8, _MESSAGES // count), characters, until))


def read_ends(
    store: Store, trace: Trace, rows: Sequence[Row]
) -> tuple[list[ShownMessage], list[ShownMessage]]:
    """Read what the first step of some rows was asked last, and what the last one answered."""
    steps = [row.step for row in rows if row.step is not None]
    if not steps:
        return [], []
    messages = _read_messages(store, trace, {0: steps[0], 1: steps[-1]})
    prompt, answered = messages[0].observation, messages[1].action[:1]
    last_prompt = show_messages(prompt, steps[0].span_id, "input", max(0, len(prompt) - 1))
    return last_prompt, show_messages(answered, steps[-1].span_id, "output")


def _read_messages(
    store: Store, trace: Trace, transitions: Mapping[int, Transition]
) -> dict[int, Transition]:
    marks = _find_seen(trace)
    marked = [row.span for step in transitions.values() for row in marks.get(step.span_id, ())]
    spans = read_spans(store, [*transitions.values(), *marked], (*SPAN_COLUMNS, *_BODIES))
    whole = dict(transitions)
    for at, step in transitions.items():
        span = spans.get((step.trace_id, step.span_id))
        if span is not None and is_mark(span):
            before = (spans.get(row.key) for row in marks.get(step.span_id, ()))
            observation = tuple(mark_message(message) for message in before if message is not None)
            whole[at] = replace(step, observation=observation, action=(mark_message(span),))
        elif span is not None:
            answers = tuple(messages_of(span, "output"))
            whole[at] = replace(step, observation=observation_of(span), action=answers)
    return whole


def _find_seen(trace: Trace) -> dict[str, list[Row]]:
    """Return the observations marked by hand that each action answers, by its span id."""
    marks: dict[str, list[Row]] = {}
    pending: dict[tuple[str, str], list[Row]] = {}
    marked = (row for row in trace.rows if row.kind == "mark" and not row.left_out)
    for row in sorted(marked, key=lambda row: (row.span.start_ns, row.span.sequence)):
        agent = row.span.rollout_id, row.agent
        if row.step is not None:
            marks[row.span.span_id] = pending.pop(agent, [])
        else:
            pending.setdefault(agent, []).append(row)
    return marks


def read_tool_calls(store: Store, trace: Trace, first: int) -> tuple[Range, list[dict[str, Any]]]:
    """A page of the tool calls that have spans, and after them those that only models tell of."""
    rows = store.sql(_TOOL_CALLS, [trace.trace_id]).rows()
    call_ids = {row["call_id"] for row in rows if row["is_tool"]}
    asking = {row["span_id"] for row in rows if not row["is_tool"]}
    tools = [row for row in trace.rows if row.kind == "tool"]
    all_steps = [step for _, step in list_steps(trace)]
    steps = [at for at, step in enumerate(all_steps) if step.span_id in asking]
    part = Range.of(len(tools) + len(steps), CALLS, first, "span")
    page_tools = tools[part.places]
    spans = read_spans(store, [row.span for row in page_tools], SPAN_COLUMNS)
    calls = list(_with_spans(page_tools, spans))
    places = steps[max(0, part.first - len(tools)) : max(0, part.end - len(tools))]
    # What a tool answered is told by the agent's next step.
    following = {at: _find_next(all_steps, at) for at in places}
    needed = {*places, *(at for at in following.values() if at is not None)}
    read = _read_messages(store, trace, {at: all_steps[at] for at in sorted(needed)})
    for at in places:
        after = following[at]
        answers = () if after is None else read[after].observation
        calls += _without_spans(read[at], answers, call_ids, has_spans=bool(tools))
    return part, calls


def _agent_of(step: Transition) -> tuple[str, str, str]:
    return step.rollout_id, step.attempt_id, step.agent


def _find_next(all_steps: Sequence[Transition], at: int) -> int | None:
    agent = _agent_of(all_steps[at])
    return next(
        (i for i in range(at + 1, len(all_steps)) if _agent_of(all_steps[i]) == agent), None
    )


def _with_spans(rows: Sequence[Row], spans: Mapping[SpanKey, Span]) -> Iterator[dict[str, Any]]:
    for row in rows:
        span = spans.get(row.key, row.span)
        get = span.attributes.get
        arguments, result = get(c.TOOL_ARGUMENTS), get(c.TOOL_RESULT)
        yield {
            "name": str(get(c.TOOL_NAME) or span.name),
            "call_id": str(get(c.TOOL_CALL_ID) or ""),
            "span_id": span.span_id,
            "agent": row.agent,
            "duration_ns": row.duration_ns,
            "status": span.status,
            "status_message": span.status_message,
            "arguments": None if arguments is None else show_value(arguments),
            "result": None if result is None else show_value(result),
            "is_told": True,
        }


def _without_spans(
    step: Transition, answers: Sequence[Message], call_ids: Collection[str], *, has_spans: bool
) -> Iterator[dict[str, Any]]:
    """Yield calls of tools in what a model answered that no span of a tool names."""
    results: dict[str, Mapping[str, Any]] = {}
    for part in _find_parts(answers, "tool_call_response"):
        results.setdefault(str(part.get("id") or ""), part)
    for part in _find_parts(step.action, "tool_call"):
        call_id = str(part.get("id") or "")
        if call_id in call_ids or (has_spans and not call_id):
            continue
        yield {
            "name": str(part.get("name") or "a tool"),
            "call_id": call_id,
            "span_id": step.span_id,
            "agent": step.agent,
            "duration_ns": None,
            "status": "UNSET",
            "status_message": "",
            "arguments": show_part(part),
            "result": show_part(results[call_id]) if call_id in results else None,
            "is_told": False,
        }


def _find_parts(messages: Sequence[Message], kind: str) -> Iterator[Mapping[str, Any]]:
    for message in messages:
        for part in objects(message.get("parts")):
            if part.get("type") == kind:
                yield part
