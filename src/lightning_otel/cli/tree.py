"""A trace as an indented tree of lines, with what was said beside each call."""

from collections.abc import Iterator, Sequence

from lightning_otel import conventions as c
from lightning_otel.adapter.messages import parse_messages, plain_text
from lightning_otel.types import Span

_TEXT = 60
_DEEPEST = 40


def tree_lines(spans: Sequence[Span]) -> Iterator[str]:
    """One line a span, children under their parents, without recursion."""
    known = {span.span_id for span in spans}
    children: dict[str | None, list[Span]] = {}
    for span in spans:
        parent = span.parent_span_id if span.parent_span_id in known else None
        children.setdefault(parent if parent != span.span_id else None, []).append(span)
    stack = [(span, "", True, True) for span in reversed(children.get(None, []))]
    while stack:
        span, indent, is_last, is_root = stack.pop()
        branch = "" if is_root else "└─ " if is_last else "├─ "
        yield f"{indent}{branch}{describe(span)}"
        deeper = indent if is_root else indent + ("   " if is_last else "│  ")
        if len(deeper) > 3 * _DEEPEST:
            deeper = deeper[: 3 * _DEEPEST]
        below = children.get(span.span_id, [])
        stack += [
            (child, deeper, position == len(below) - 1, False)
            for position, child in reversed(list(enumerate(below)))
        ]


def describe(span: Span) -> str:
    """A span in one line: name, tokens, time, what was said, reward, error."""
    get = span.attributes.get
    pieces = [_title(span)]
    if get(c.OUTPUT_TOKENS) is not None:
        pieces.append(f"{get(c.INPUT_TOKENS, 0)}→{get(c.OUTPUT_TOKENS)} tok")
    if span.end_ns is None:
        pieces.append("incomplete")
    elif span.end_ns > span.start_ns:
        pieces.append(f"{(span.end_ns - span.start_ns) / 1e9:.2f} s")
    if get(c.REWARD_VALUE) is not None:
        pieces.append(f"{get(c.REWARD_NAME, 'reward')} = {get(c.REWARD_VALUE):+g}")
    if span.status == "ERROR":
        pieces.append(f"ERROR {get(c.ERROR_TYPE, '')}".rstrip())
    if get(c.ABANDONED):
        pieces.append("abandoned")
    said = _said(span)
    return "  ".join([*pieces, said] if said else pieces)


def _title(span: Span) -> str:
    if span.name == c.SPAN_ROLLOUT:
        return f"rollout {span.attributes.get(c.OPERATION_NAME, '')} ({span.rollout_id})"
    if span.name == c.SPAN_ANNOTATION and c.REWARD_VALUE in span.attributes:
        return "reward"
    named = span.attributes.get(c.OPERATION_NAME) or span.attributes.get(c.MARK_NAME)
    return f"{span.name} {named}" if named else span.name


def _said(span: Span) -> str:
    get = span.attributes.get
    asked = parse_messages(get(c.INPUT_MESSAGES)) or ()
    answered = parse_messages(get(c.OUTPUT_MESSAGES)) or ()
    if not asked and not answered:
        return _short(str(get(c.MESSAGE_BODY) or get(c.OBJECT_LITERAL) or get(c.OBJECT_JSON) or ""))
    return f"{_short(plain_text(asked[-1:]))} → {_short(plain_text(answered[:1]))}"


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _TEXT else text[: _TEXT - 1] + "…"
