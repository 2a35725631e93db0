"""A rollout as an indented tree of lines: who acted, what was said, and where credit went."""

from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeAlias

from lightning_otel import conventions as c
from lightning_otel.adapter.outline import Gap, Node, Outline, children_of
from lightning_otel.cli.output import cut, seconds, shown
from lightning_otel.messages import parse_messages, plain_text
from lightning_otel.types import Span

_DEEPEST: Final = 120
_STYLES: Final = {"rollout": "bold", "agent": "cyan", "tool": "magenta", "reward": "green"}
_STEPS: Final = 5
"""Steps that are named where a reward went to more."""
_STYLES_OF_CALLS: Final = "bold blue"

Line: TypeAlias = list[tuple[str, str]]
"""Pieces of text, each with its style; empty for none."""


def tree_lines(
    found: Outline, width: int | None = None, is_shown: Sequence[bool] | None = None
) -> Iterator[Line]:
    """One line a node, children under their parents, and one for each gap; without recursion.

    Args:
        found: The nodes.
        width: Cells of the terminal the lines are meant for; None shortens nothing.
        is_shown: Which nodes to show: each with its parent. All, if it is not said.
    """
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
    """Siblings for the stack, the first on top."""
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
        pieces = [
            (label, _STYLES_OF_CALLS),
            (_title_of(node), "" if label else _STYLES.get(node.kind, "")),
            (self._describe_credit(node), "green"),
            (_reward_text(node), "green"),
            (self._describe_cause(node), "yellow"),
            (_token_text(span), ""),
            (_duration_text(node), ""),
            *_describe_faults(node, self._text_width),
            (_describe_content(span, self._text_width), "dim" if node.kind != "call" else ""),
        ]
        told = [(shown(text), style) for text, style in pieces if text]
        return [(text if not at else f"  {text}", style) for at, (text, style) in enumerate(told)]

    def _describe_credit(self, node: Node) -> str:
        """Return the labels of the steps that a reward went to, and its rule."""
        if not node.credited:
            return ""
        steps = [self._labels[target] for target in node.credited]
        more = f" and {len(steps) - _STEPS} more" if len(steps) > _STEPS else ""
        return f"→ {', '.join(steps[:_STEPS])}{more} by {node.by}"

    def _describe_cause(self, node: Node) -> str:
        cause = self._causes.get((node.span.trace_id, node.span.span_id))
        return f"branch: {cause.replace('_', ' ')}" if cause and node.step is not None else ""


def _reward_text(node: Node) -> str:
    """Return a step's reward."""
    step = node.step
    return "" if step is None or step.reward is None else f"reward {step.reward:g}"


def _token_text(span: Span) -> str:
    get = span.attributes.get
    if get(c.OUTPUT_TOKENS) is None:
        return ""
    return f"{get(c.INPUT_TOKENS, 0)}→{get(c.OUTPUT_TOKENS)} tok"


def _duration_text(node: Node) -> str:
    span = node.span
    is_instant = span.end_ns is None or span.end_ns <= span.start_ns or node.kind == "reward"
    return "" if is_instant or span.end_ns is None else seconds(span.end_ns - span.start_ns)


def _describe_faults(node: Node, text_width: int | None) -> Line:
    """Return the errors, repairs, and the reason why it is in no transition."""
    span = node.span
    found: Line = []
    if span.status == "ERROR":
        found.append((f"ERROR {span.attributes.get(c.ERROR_TYPE, '')}".rstrip(), "bold red"))
        found.append((cut(span.status_message, text_width), "red"))
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
        return f"reward {_reward_values(span)}"
    named = span.attributes.get(c.OPERATION_NAME) or span.attributes.get(c.MARK_NAME)
    if node.kind == "agent" and node.agent not in span.name:
        named = node.agent
    return f"{span.name} {named}" if named else span.name


def _reward_values(span: Span) -> str:
    """Every number of a reward, the primary one first, and what it is linked to."""
    get = span.attributes.get
    found: list[str] = []
    while (value := get(f"{c.REWARD_PREFIX}.{len(found)}.value")) is not None:
        name = get(f"{c.REWARD_PREFIX}.{len(found)}.name")
        told = f"{value:g}" if isinstance(value, float) else shown(value)
        found.append(told if name in (None, c.PRIMARY_REWARD) else f"{name} {told}")
    target = get(f"{c.LINK_PREFIX}.0.value_match")
    return ", ".join(found) + (f" for {target}" if target else "")


def _describe_content(span: Span, text_width: int | None) -> str:
    """Return the last message and the answer of a call, a tool's input and result, or a mark."""
    get = span.attributes.get
    asked = parse_messages(get(c.INPUT_MESSAGES)) or ()
    answered = parse_messages(get(c.OUTPUT_MESSAGES)) or ()
    if asked or answered:
        question, answer = plain_text(asked[-1:]), plain_text(answered[:1])
    elif get(c.TOOL_ARGUMENTS) is not None or get(c.TOOL_RESULT) is not None:
        question, answer = shown(get(c.TOOL_ARGUMENTS)), shown(get(c.TOOL_RESULT))
    else:
        found = get(c.MESSAGE_BODY) or get(c.OBJECT_LITERAL) or get(c.OBJECT_JSON)
        return _shorten_text(str(found or ""), text_width)
    return f"{_shorten_text(question, text_width)} → {_shorten_text(answer, text_width)}"


def _shorten_text(text: str, text_width: int | None) -> str:
    return cut(" ".join(text.split()), text_width)
