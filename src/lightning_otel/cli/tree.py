"""A trace as an indented tree of lines, with what was said beside each call."""

from collections.abc import Iterator, Sequence

from lightning_otel import conventions as c
from lightning_otel.adapter import readers
from lightning_otel.adapter.messages import parse_messages, plain_text
from lightning_otel.cli.output import cut, seconds
from lightning_otel.types import Span

_DEEPEST = 120


def tree_lines(spans: Sequence[Span], width: int | None = None) -> Iterator[str]:
    """One line a span, children under their parents, without recursion.

    Args:
        spans: In the order in which siblings are to stand.
        width: Cells of the terminal the lines are meant for; None shortens nothing.
    """
    deepest = _DEEPEST if width is None else max(12, width // 3)
    text_width = None if width is None else max(20, (width - 40) // 2)
    known = {span.span_id for span in spans}
    children: dict[str | None, list[Span]] = {}
    for span in readers.read(spans):
        parent = span.parent_span_id if span.parent_span_id in known else None
        children.setdefault(parent if parent != span.span_id else None, []).append(span)
    stack = [(span, "", True, True) for span in reversed(children.get(None, []))]
    while stack:
        span, indent, is_last, is_root = stack.pop()
        branch = "" if is_root else "└─ " if is_last else "├─ "
        yield f"{indent}{branch}{describe(span, text_width)}"
        deeper = indent if is_root else indent + ("   " if is_last else "│  ")
        below = children.get(span.span_id, [])
        stack += [
            (child, deeper[:deepest], position == len(below) - 1, False)
            for position, child in reversed(list(enumerate(below)))
        ]


def describe(span: Span, text_width: int | None = None) -> str:
    """A span in one line: name, tokens, time, reward, error, what was said."""
    get = span.attributes.get
    pieces = [_title(span)]
    if get(c.OUTPUT_TOKENS) is not None:
        pieces.append(f"{get(c.INPUT_TOKENS, 0)}→{get(c.OUTPUT_TOKENS)} tok")
    if span.end_ns is None:
        pieces.append("incomplete")
    elif span.end_ns > span.start_ns and c.REWARD_VALUE not in span.attributes:
        pieces.append(seconds(span.end_ns - span.start_ns))
    if span.status == "ERROR":
        pieces.append(f"ERROR {get(c.ERROR_TYPE, '')}".rstrip())
        pieces.append(cut(span.status_message, text_width))
    if get(c.ABANDONED):
        pieces.append("abandoned")
    pieces.append(_said(span, text_width))
    return "  ".join(filter(None, pieces))


def _title(span: Span) -> str:
    if span.name == c.SPAN_ROLLOUT:
        return f"rollout {span.attributes.get(c.OPERATION_NAME, '')} ({span.rollout_id})"
    if span.name == c.SPAN_ANNOTATION and c.REWARD_VALUE in span.attributes:
        return f"reward {_rewards(span)}"
    named = span.attributes.get(c.OPERATION_NAME) or span.attributes.get(c.MARK_NAME)
    return f"{span.name} {named}" if named else span.name


def _rewards(span: Span) -> str:
    """Every number of a reward, the primary one first, and what it is linked to."""
    get = span.attributes.get
    found: list[str] = []
    while (value := get(f"{c.REWARD_PREFIX}.{len(found)}.value")) is not None:
        name = get(f"{c.REWARD_PREFIX}.{len(found)}.name")
        found.append(f"{value:g}" if name in (None, c.PRIMARY_REWARD) else f"{name} {value:g}")
    target = get(f"{c.LINK_PREFIX}.0.value_match")
    return ", ".join(found) + (f" for {target}" if target else "")


def _said(span: Span, text_width: int | None) -> str:
    get = span.attributes.get
    asked = parse_messages(get(c.INPUT_MESSAGES)) or ()
    answered = parse_messages(get(c.OUTPUT_MESSAGES)) or ()
    if not asked and not answered:
        found = get(c.MESSAGE_BODY) or get(c.OBJECT_LITERAL) or get(c.OBJECT_JSON)
        return _short(str(found or ""), text_width)
    question = _short(plain_text(asked[-1:]), text_width)
    return f"{question} → {_short(plain_text(answered[:1]), text_width)}"


def _short(text: str, text_width: int | None) -> str:
    return cut(" ".join(text.split()), text_width)
