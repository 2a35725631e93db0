"""Spans in words: one as the SDK prints it, a rollout as a tree, what comes as a conversation."""

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Final, TypeAlias

from lightning_otel.adapter import readers
from lightning_otel.adapter.differences import new_input
from lightning_otel.adapter.outline import Gap, Kind, Node, Outline, children_of, kind_of
from lightning_otel.adapter.rewards import read_reward, reward_words
from lightning_otel.cli.output import format_ns, printable
from lightning_otel.messages import objects, parse_messages, plain_text
from lightning_otel.receivers.documents import OURS
from lightning_otel.types import Span
from lightning_otel.types import conventions as c
from lightning_otel.types.text import one_line
from lightning_otel.views.previews import preview_of

_DEEPEST: Final = 120
_STYLES: Final = {"rollout": "bold", "agent": "cyan", "tool": "magenta", "reward": "green"}
_STEPS: Final = 5
"""Steps that are named where a reward went to more."""
_STYLES_OF_CALLS: Final = "bold blue"

Line: TypeAlias = list[tuple[str, str]]
"""Pieces of text, each with its style; empty for none."""
_MOST_REMEMBERED: Final = 10_000
_CONTINUED: Final = " " * 9


def sdk_json(span: Span) -> dict[str, Any]:
    """Return a span in the shape of the SDK's ``ReadableSpan.to_json()``, and what that leaves out.

    Values it would raise on (bytes) are kept in the store's text form.

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
    found: Outline, width: int | None = None, is_shown: Sequence[bool] | None = None
) -> Iterator[Line]:
    """One line a node below its parent, and one for each gap; None as width shortens nothing."""
    deepest = _DEEPEST if width is None else max(12, width // 3)
    describe = _Describer(found, None if width is None else max(20, (width - 40) // 2))
    children = children_of(found.nodes, is_shown)
    stack: list[tuple[int | Gap, str, bool]] = _stack_rows(children.get(-1, []), "")
    while stack:
        item, indent, is_last = stack.pop()
        is_root = isinstance(item, int) and found.nodes[item].depth == 0
        branch = "" if is_root else "└─ " if is_last else "├─ "
        if isinstance(item, Gap):
            yield [(f"{indent}{branch}{item.told()}", "dim")]
            continue
        yield [(f"{indent}{branch}", "dim"), *describe(item)]
        deeper = indent if is_root else indent + ("   " if is_last else "│  ")
        stack += _stack_rows(children.get(item, []), deeper[:deepest])


def _stack_rows(items: Sequence[int | Gap], indent: str) -> list[tuple[int | Gap, str, bool]]:
    return [(item, indent, item is items[-1]) for item in reversed(items)]


class _Describer:
    """Nodes in one line each: step, name, tokens, time, reward, credit, faults, what was said."""

    def __init__(self, found: Outline, text_width: int | None) -> None:
        self._nodes = found.nodes
        self._labels = found.labels()
        self._causes = found.causes()
        self._text_width = text_width

    def __call__(self, position: int) -> Line:
        node, label = self._nodes[position], self._labels[position]
        span = node.span
        is_lasting = node.kind != "reward" and (span.end_ns or 0) > span.start_ns
        step = node.step
        reward = "" if step is None or step.reward is None else f"reward {step.reward:g}"
        cause = self._causes.get((span.trace_id, span.span_id)) if step is not None else None
        pieces = [
            (label, _STYLES_OF_CALLS),
            (_title_of(node), "" if label else _STYLES.get(node.kind, "")),
            (self._describe_credit(node), "green"),
            (reward, "green"),
            (f"branch: {cause.replace('_', ' ')}" if cause else "", "yellow"),
            (_token_text(span), ""),
            (_duration_text(span) if is_lasting else "", ""),
            *_describe_faults(node, self._text_width),
            (preview_of(span.attributes, self._text_width), "dim" if node.kind != "call" else ""),
        ]
        told = [(printable(text), style) for text, style in pieces if text]
        return [(text if not at else f"  {text}", style) for at, (text, style) in enumerate(told)]

    def _describe_credit(self, node: Node) -> str:
        if not node.credited:
            return ""
        steps = [self._labels[target] for target in node.credited]
        more = f" and {len(steps) - _STEPS} more" if len(steps) > _STEPS else ""
        return f"→ {', '.join(steps[:_STEPS])}{more} by {node.by}"


def _token_text(span: Span) -> str:
    get = span.attributes.get
    tokens = get(c.OUTPUT_TOKENS)
    return "" if tokens is None else f"{get(c.INPUT_TOKENS, 0)}→{tokens} tok"


def _duration_text(span: Span) -> str:
    return "" if span.end_ns is None else format_ns(span.end_ns - span.start_ns)


def _describe_faults(node: Node, text_width: int | None) -> Line:
    span = node.span
    found: Line = []
    if node.is_fault:
        found.append((f"ERROR {span.attributes.get(c.ERROR_TYPE, '')}".rstrip(), "bold red"))
        found.append((one_line(span.status_message, text_width), "red"))
    reason = node.left_out
    if span.is_incomplete and not reason.startswith("incomplete"):
        found.append(("incomplete", "yellow"))
    if span.attributes.get(c.ABANDONED) and not reason.startswith("abandoned"):
        found.append(("abandoned", "yellow"))
    if node.repair:
        found.append((f"moved: {node.repair}", "yellow"))
    if reason:
        found.append((f"left out: {reason}", "yellow"))
    return found


def node_json(found: Outline) -> Iterator[dict[str, Any]]:
    """Each node as an object, for programs."""
    labels, causes = found.labels(), found.causes()
    for position, node in enumerate(found.nodes):
        span, step = node.span, node.step
        above = found.nodes[node.parent].span.span_id if node.parent >= 0 else None
        yield {
            "span_id": span.span_id,
            "trace_id": span.trace_id,
            "parent_span_id": above,
            "depth": node.depth,
            "kind": node.kind,
            "name": span.name,
            "agent": node.agent,
            "start_ns": span.start_ns,
            "end_ns": span.end_ns,
            "status": span.status,
            "label": labels[position],
            "branch": node.branch if step is not None else None,
            "cause": causes.get((span.trace_id, span.span_id)) if step is not None else None,
            "step": step.step if step is not None else None,
            "reward": step.reward if step is not None else None,
            "credited_to": [found.nodes[target].span.span_id for target in node.credited],
            "credited_by": node.by or None,
            "left_out": node.left_out or None,
            "repair": node.repair or None,
        }


def _title_of(node: Node) -> str:
    span = node.span
    if span.name == c.SPAN_ROLLOUT:
        return f"rollout {span.attributes.get(c.OPERATION_NAME, '')} ({span.rollout_id})"
    if span.name == c.SPAN_ANNOTATION and c.REWARD_VALUE in span.attributes:
        target = span.attributes.get(f"{c.LINK_PREFIX}.0.value_match")
        return f"reward {printable(reward_words(span))}{f' for {target}' if target else ''}"
    named = span.attributes.get(c.OPERATION_NAME) or span.attributes.get(c.MARK_NAME)
    if node.kind == "agent" and node.agent not in span.name:
        named = node.agent
    return f"{span.name} {named}" if named else span.name


class Chat:
    """Turns each span into lines, as it ends; what was said before is not said again."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._said: OrderedDict[tuple[str, str], None] = OrderedDict()

    def lines(self, span: Span) -> list[Line]:
        """The lines of a span; none for other work than of a model or tool, unless it failed."""
        (span,) = readers.read([span])
        kind = kind_of(span)
        self.counts[kind] += 1
        found = self._describe_span(span, kind)
        if span.status == "ERROR":
            self.counts["error"] += 1
            text = " ".join(
                printable(each)
                for each in (span.attributes.get(c.ERROR_TYPE), span.status_message)
                if each
            )
            found.append([(f"✗ {printable(span.name)}: {text}", "bold red")])
        ended = datetime.fromtimestamp((span.end_ns or span.start_ns) / 1e9)
        head = (f"{ended:%H:%M:%S} ", "dim")
        return [[(_CONTINUED, "") if at else head, *line] for at, line in enumerate(found)]

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
        """Return the new lines of a model's input: those after its own last answer."""
        lines: list[Line] = []
        for message in new_input(span):
            role = printable(message.get("role"))
            for part in objects(message.get("parts")):
                if part.get("type") == "tool_call_response":
                    if self._is_new(span.trace_id, str(part.get("id"))):
                        text = _one_line_of(part.get("response", part.get("result")))
                        lines.append([("tool ", "magenta"), (f"→ {text}", "")])
                else:
                    text = _one_line_of(plain_text([{**message, "parts": [part]}]))
                    lines.append([(f"{role} ", "bold"), (text, "")])
        return lines

    def _describe_output(self, span: Span) -> list[Line]:
        lines: list[Line] = []
        for message in (parse_messages(span.attributes.get(c.OUTPUT_MESSAGES)) or ())[:1]:
            for part in objects(message.get("parts")):
                is_call = part.get("type") == "tool_call"
                text = _one_line_of(plain_text([{**message, "parts": [part]}]))
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
        found = read_reward(span)
        if found is None or isinstance(found, str):
            return [(f"★ {found or 'a reward'}", "yellow")]
        told = printable(reward_words(span))
        return [(f"★ reward {told}", "green"), (f"  {printable(span.rollout_id)}", "dim")]

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
