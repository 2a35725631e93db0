"""Spans in words: one as the SDK prints it, a rollout as a tree, what comes as a conversation."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, TypeAlias

from lightning_otel.adapter import readers
from lightning_otel.adapter.rewards import read_reward, reward_words
from lightning_otel.cli.output import format_ns, printable
from lightning_otel.messages import objects
from lightning_otel.receivers.documents import OURS
from lightning_otel.types import Span
from lightning_otel.types import conventions as c
from lightning_otel.types.text import format_number, one_line
from lightning_otel.views.folding import Gap, children_of
from lightning_otel.views.messages import first_answer, new_input, word_messages
from lightning_otel.views.trace import Kind, Row, SpanKey, Trace, kind_of

_DEEPEST: Final = 120
_AT_ONCE: Final = 4_000
"""Lines whose previews are read together."""
_STYLES: Final = {"rollout": "bold", "agent": "cyan", "tool": "magenta", "reward": "green"}
_STEPS: Final = 5
"""Steps that are named where a reward went to more."""
_STYLES_OF_CALLS: Final = "bold blue"

Line: TypeAlias = list[tuple[str, str]]
"""Pieces of text, each with its style; empty for none."""
ReadPreviews: TypeAlias = Callable[[Sequence[Row], int | None], Mapping[SpanKey, str]]
_MOST_REMEMBERED: Final = 10_000
_CONTINUED: Final = " " * 9


def sdk_json(span: Span) -> dict[str, Any]:
    """Return a span in the shape of the SDK's ``to_json()``, and what that leaves out or raises on.

    Source: ``opentelemetry.sdk.trace.ReadableSpan.to_json``.
    """
    status: dict[str, Any] = {"status_code": span.status}
    if span.status_message:
        status["description"] = span.status_message
    return {
        "name": span.name,
        "context": _span_context(span.trace_id, span.span_id),
        "kind": f"SpanKind.{span.kind}",
        "parent_id": f"0x{span.parent_span_id}" if span.parent_span_id else None,
        "start_time": _iso_time(span.start_ns),
        "end_time": _iso_time(span.end_ns) if span.end_ns is not None else None,
        "status": status,
        "attributes": dict(span.attributes),
        "events": [
            {
                "name": event.name,
                "timestamp": _iso_time(event.time_ns),
                "attributes": dict(event.attributes),
            }
            for event in span.events
        ],
        "links": [
            {
                "context": _span_context(link.trace_id, link.span_id),
                "attributes": dict(link.attributes),
            }
            for link in span.links
        ],
        "resource": {"attributes": dict(span.otel_resource), "schema_url": ""},
        OURS: {
            "scope": span.scope,
            "start_ns": span.start_ns,
            "end_ns": span.end_ns,
            "events_ns": [event.time_ns for event in span.events],
            "process": span.process,
            "sequence": span.sequence,
            "end_sequence": span.end_sequence,
        },
    }


def _span_context(trace_id: str, span_id: str) -> dict[str, str]:
    return {"trace_id": f"0x{trace_id}", "span_id": f"0x{span_id}", "trace_state": "[]"}


def _iso_time(time_ns: int) -> str:
    # Through a float, as the SDK does it: so both print the same microsecond.
    return datetime.fromtimestamp(time_ns / 1e9, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def tree_lines(
    trace: Trace,
    read: ReadPreviews,
    width: int | None = None,
    is_shown: Sequence[bool] | None = None,
) -> Iterator[Line]:
    """Yield a line for each row below its parent, and one for each gap.

    ``read`` returns what was said in rows, each side as wide as told; ``width`` is in cells.
    """
    deepest = _DEEPEST if width is None else max(12, width // 3)
    text_width = None if width is None else max(20, (width - 40) // 2)
    branches = list(_draw_branches(children_of(trace.rows, is_shown), trace.rows, deepest))
    for at in range(0, len(branches), _AT_ONCE):
        part = branches[at : at + _AT_ONCE]
        previews = read([trace.rows[item] for _, item in part if isinstance(item, int)], text_width)
        for branch, item in part:
            if isinstance(item, Gap):
                yield [(f"{branch}{item}", "dim")]
            else:
                line = _describe_row(trace.rows, item, previews, text_width)
                yield [(branch, "dim"), *line]


def _draw_branches(
    children: Mapping[int, Sequence[int | Gap]], rows: Sequence[Row], deepest: int
) -> Iterator[tuple[str, int | Gap]]:
    stack = _stack_rows(children.get(-1, []), "")
    while stack:
        item, indent, is_last = stack.pop()
        is_root = isinstance(item, int) and rows[item].depth == 0
        yield indent + ("" if is_root else "└─ " if is_last else "├─ "), item
        if not isinstance(item, Gap):
            deeper = indent if is_root else indent + ("   " if is_last else "│  ")
            stack += _stack_rows(children.get(item, []), deeper[:deepest])


def _stack_rows(items: Sequence[int | Gap], indent: str) -> list[tuple[int | Gap, str, bool]]:
    return [(item, indent, item is items[-1]) for item in reversed(items)]


def _describe_row(
    rows: Sequence[Row], position: int, previews: Mapping[SpanKey, str], text_width: int | None
) -> Line:
    row, step = rows[position], rows[position].step
    span, preview = row.span, previews.get(row.key, "")
    is_lasting = row.kind != "reward" and (span.end_ns or 0) > span.start_ns
    value = None if step is None else step.reward
    reward = "" if value is None else f"reward {format_number(value, 6)}"
    pieces = [
        (row.label, _STYLES_OF_CALLS),
        (_title_of(row, preview), "" if row.label else _STYLES.get(row.kind, "")),
        (_describe_credit(rows, row), "green"),
        (reward, "green"),
        (f"branch: {row.cause.replace('_', ' ')}" if row.cause else "", "yellow"),
        ("{}→{} tok".format(*row.tokens) if row.tokens else "", ""),
        (_duration_text(span) if is_lasting else "", ""),
        *_describe_faults(row, text_width),
        (preview if row.kind != "reward" else "", "dim" if row.kind != "call" else ""),
    ]
    words = [(printable(text), style) for text, style in pieces if text]
    return [(text if not at else f"  {text}", style) for at, (text, style) in enumerate(words)]


def _describe_credit(rows: Sequence[Row], row: Row) -> str:
    if not row.credited:
        return ""
    steps = [rows[target].label for target in row.credited]
    more = f" and {len(steps) - _STEPS} more" if len(steps) > _STEPS else ""
    return f"→ {', '.join(steps[:_STEPS])}{more} by {row.by}"


def _token_text(span: Span) -> str:
    get = span.attributes.get
    tokens = get(c.OUTPUT_TOKENS)
    return "" if tokens is None else f"{get(c.INPUT_TOKENS, 0)}→{tokens} tok"


def _duration_text(span: Span) -> str:
    return "" if span.end_ns is None else format_ns(span.end_ns - span.start_ns)


def _describe_faults(row: Row, text_width: int | None) -> Line:
    span, reason = row.span, row.left_out
    faults: Line = []
    if row.is_fault:
        faults.append((f"ERROR {span.attributes.get(c.ERROR_TYPE, '')}".rstrip(), "bold red"))
        faults.append((one_line(span.status_message, text_width), "red"))
    if span.is_incomplete and not reason.startswith("incomplete"):
        faults.append(("incomplete", "yellow"))
    if span.attributes.get(c.ABANDONED) and not reason.startswith("abandoned"):
        faults.append(("abandoned", "yellow"))
    if row.repair:
        faults.append((f"moved: {row.repair}", "yellow"))
    if reason:
        faults.append((f"left out: {reason}", "yellow"))
    return faults


def _title_of(row: Row, preview: str) -> str:
    get = row.span.attributes.get
    if row.kind == "rollout":
        return " ".join(filter(None, (row.name, row.subject, f"({row.span.rollout_id})")))
    if row.kind == "reward":
        target = get(c.LINK_VALUE)
        return f"{row.name} {printable(preview)}{f' for {target}' if target else ''}"
    return f"{row.name} {row.subject}".rstrip()


def row_json(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Each row as an object, for programs."""
    for row in rows:
        span, step = row.span, row.step
        yield {
            "span_id": span.span_id,
            "trace_id": span.trace_id,
            "parent_span_id": rows[row.parent].span.span_id if row.parent >= 0 else None,
            "depth": row.depth,
            "kind": row.kind,
            "name": span.name,
            "agent": row.agent,
            "start_ns": span.start_ns,
            "end_ns": span.end_ns,
            "status": span.status,
            "label": row.label,
            "branch": row.branch if step is not None else None,
            "cause": row.cause or None,
            "step": step.step if step is not None else None,
            "reward": step.reward if step is not None else None,
            "credited_to": [rows[target].span.span_id for target in row.credited],
            "credited_by": row.by or None,
            "left_out": row.left_out or None,
            "repair": row.repair or None,
        }


class ChatLines:
    """Turns each span into lines, as it ends; what was said before is not said again."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._said: OrderedDict[tuple[str, str], None] = OrderedDict()

    def lines(self, span: Span) -> list[Line]:
        """The lines of a span; none for other work than of a model or tool, unless it failed."""
        (span,) = readers.read([span])
        kind = kind_of(span)
        self.counts[kind] += 1
        lines = self._describe_span(span, kind)
        if span.status == "ERROR":
            self.counts["error"] += 1
            text = " ".join(
                printable(text)
                for text in (span.attributes.get(c.ERROR_TYPE), span.status_message)
                if text
            )
            lines.append([(f"✗ {printable(span.name)}: {text}", "bold red")])
        ended = datetime.fromtimestamp((span.end_ns or span.start_ns) / 1e9)
        head = (f"{ended:%H:%M:%S} ", "dim")
        return [[(_CONTINUED, "") if at else head, *line] for at, line in enumerate(lines)]

    def _describe_span(self, span: Span, kind: Kind) -> list[Line]:
        if kind == "call":
            is_answered = span.status != "ERROR" or c.OUTPUT_MESSAGES in span.attributes
            return [
                *self._describe_input(span),
                *(self._describe_output(span) if is_answered else ()),
            ]
        if kind == "tool":
            return [self._describe_tool(span)]
        if kind == "reward":
            return [self._describe_reward(span)]
        if kind == "mark":
            keys = (c.MESSAGE_BODY, c.OBJECT_JSON, c.OBJECT_LITERAL)
            body = next((span.attributes[key] for key in keys if key in span.attributes), "")
            return [[(f"{printable(span.name)} ", "yellow"), (_one_line_of(body), "")]]
        if kind == "rollout":
            return [
                [(f"— rollout {printable(span.rollout_id)} ended, {_duration_text(span)}", "bold")]
            ]
        if kind == "agent":
            return [[(f"— {_agent_of(span)} is done, {_duration_text(span)}", "cyan")]]
        return []

    def _describe_input(self, span: Span) -> list[Line]:
        lines: list[Line] = []
        for message in new_input(span):
            role = printable(message.get("role"))
            for part in objects(message.get("parts")):
                if part.get("type") == "tool_call_response":
                    if self._is_new(span.trace_id, str(part.get("id"))):
                        text = _one_line_of(part.get("response", part.get("result")))
                        lines.append([("tool ", "magenta"), (f"→ {text}", "")])
                else:
                    text = printable(word_messages([{**message, "parts": [part]}]))
                    lines.append([(f"{role} ", "bold"), (text, "")])
        return lines

    def _describe_output(self, span: Span) -> list[Line]:
        lines: list[Line] = []
        for message in first_answer(span):
            for part in objects(message.get("parts")):
                is_call = part.get("type") == "tool_call"
                text = printable(word_messages([{**message, "parts": [part]}]))
                style = "magenta" if is_call else ""
                verb = "calls " if is_call else ""
                lines.append([(f"{_agent_of(span)} ", "bold blue"), (f"{verb}{text}", style)])
        if not lines:
            lines.append(
                [(f"{_agent_of(span)} ", "bold blue"), ("(said nothing that is kept)", "dim")]
            )
        words = filter(None, (_token_text(span), _duration_text(span)))
        lines[-1].append((f"  {', '.join(words)}", "dim"))
        return lines

    def _describe_tool(self, span: Span) -> Line:
        get = span.attributes.get
        self._is_new(span.trace_id, str(get(c.TOOL_CALL_ID)))
        name = printable(get(c.TOOL_NAME) or span.name)
        return [
            (f"{name} ", "magenta"),
            (f"{_one_line_of(get(c.TOOL_ARGUMENTS))} → {_one_line_of(get(c.TOOL_RESULT))}", ""),
            (f"  {_duration_text(span)}", "dim"),
        ]

    def _describe_reward(self, span: Span) -> Line:
        reward = read_reward(span)
        if reward is None or isinstance(reward, str):
            return [(f"★ {reward or 'a reward'}", "yellow")]
        words = printable(reward_words(span))
        return [(f"★ reward {words}", "green"), (f"  {printable(span.rollout_id)}", "dim")]

    def _is_new(self, trace_id: str, call_id: str) -> bool:
        """Return whether a tool's answer is new: its own span and the next call both have it."""
        if (trace_id, call_id) in self._said:
            return False
        self._said[trace_id, call_id] = None
        if len(self._said) > _MOST_REMEMBERED:
            self._said.popitem(last=False)
        return True


def _agent_of(span: Span) -> str:
    get = span.attributes.get
    return printable(get(c.AGENT_NAME) or get(c.RESPONSE_MODEL) or get(c.REQUEST_MODEL) or "model")


def _one_line_of(value: object) -> str:
    return " ".join(printable(value).split())
