"""Spans as a conversation: who says what, which tools are called, which rewards are given."""

from collections import OrderedDict
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from lightning_otel import conventions as c
from lightning_otel.adapter import readers
from lightning_otel.adapter.differing import heard
from lightning_otel.adapter.outline import Kind, kind_of
from lightning_otel.adapter.rewards import read_reward
from lightning_otel.cli.output import seconds, shown
from lightning_otel.cli.tree import Line
from lightning_otel.messages import parse_messages, plain_text
from lightning_otel.types import Message, Span

_MOST_REMEMBERED: Final = 10_000
_CONTINUED: Final = " " * 9


class Chat:
    """Turns each span into lines, as it ends; what was said before is not said again."""

    def __init__(self) -> None:
        """Begin with nothing said."""
        self.counts: dict[str, int] = {}
        self._said: OrderedDict[tuple[str, str], None] = OrderedDict()

    def lines(self, span: Span) -> list[Line]:
        """The lines of a span; none for work that is neither a call, a tool's, a reward nor broken.

        Args:
            span: A span that ended.
        """
        (span,) = readers.read([span])
        kind = kind_of(span)
        self._count_name(kind)
        told = self._describe_span(span, kind)
        found = [[*self._word_head(span), *line] for line in told[:1]]
        found += [[(_CONTINUED, ""), *line] for line in told[1:]]
        if span.status == "ERROR":
            self._count_name("error")
            text = " ".join(
                shown(each)
                for each in (span.attributes.get(c.ERROR_TYPE), span.status_message)
                if each
            )
            begins = [(_CONTINUED, "")] if found else self._word_head(span)
            found.append([*begins, (f"✗ {shown(span.name)}: {text}", "bold red")])
        return found

    def _count_name(self, name: str) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1

    def _word_head(self, span: Span) -> Line:
        when = datetime.fromtimestamp((span.end_ns or span.start_ns) / 1e9)
        return [(f"{when:%H:%M:%S} ", "dim")]

    def _describe_span(self, span: Span, kind: Kind) -> list[Line]:
        """Return the lines of a span, without its time."""
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
            return [[(f"{shown(span.name)} ", "yellow"), (_one_line_of(body), "")]]
        if kind == "rollout":
            return [[(f"— rollout {shown(span.rollout_id)} ended, {_word_duration(span)}", "bold")]]
        if kind == "agent":
            return [[(f"— {_agent_of(span)} is done, {_word_duration(span)}", "cyan")]]
        return []

    def _describe_input(self, span: Span) -> list[Line]:
        """Return the new lines of a model's input: those after its own last answer."""
        lines: list[Line] = []
        for message in heard(span):
            role = shown(message.get("role"))
            for part in _message_parts(message):
                if part.get("type") == "tool_call_response":
                    if self._is_new(span.trace_id, str(part.get("id"))):
                        text = _one_line_of(part.get("response", part.get("result")))
                        lines.append([("tool ", "magenta"), (f"→ {text}", "")])
                else:
                    text = _one_line_of(plain_text([{**message, "parts": [part]}]))
                    lines.append([(f"{role} ", "bold"), (text, "")])
        return lines

    def _describe_output(self, span: Span) -> list[Line]:
        """Return the model's answer, its tokens and its time."""
        lines: list[Line] = []
        for message in (parse_messages(span.attributes.get(c.OUTPUT_MESSAGES)) or ())[:1]:
            for part in _message_parts(message):
                is_call = part.get("type") == "tool_call"
                text = _one_line_of(plain_text([{**message, "parts": [part]}]))
                style = "magenta" if is_call else ""
                verb = "calls " if is_call else ""
                lines.append([(f"{_agent_of(span)} ", "bold blue"), (f"{verb}{text}", style)])
        if not lines:
            lines.append(
                [(f"{_agent_of(span)} ", "bold blue"), ("(said nothing that is kept)", "dim")]
            )
        lines[-1].append((f"  {_word_tokens(span)}", "dim"))
        return lines

    def _describe_tool(self, span: Span) -> Line:
        get = span.attributes.get
        self._is_new(span.trace_id, str(get(c.TOOL_CALL_ID)))
        name = shown(get(c.TOOL_NAME) or span.name)
        return [
            (f"{name} ", "magenta"),
            (f"{_one_line_of(get(c.TOOL_ARGUMENTS))} → {_one_line_of(get(c.TOOL_RESULT))}", ""),
            (f"  {_word_duration(span)}", "dim"),
        ]

    def _describe_reward(self, span: Span) -> Line:
        found = read_reward(span)
        if found is None or isinstance(found, str):
            return [(f"★ {found or 'a reward'}", "yellow")]
        told = ", ".join(
            f"{value:g}" if name == c.PRIMARY_REWARD else f"{shown(name)} {value:g}"
            for name, value in found.values.items()
        )
        return [(f"★ reward {told}", "green"), (f"  {shown(span.rollout_id)}", "dim")]

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
    return shown(get(c.AGENT_NAME) or get(c.RESPONSE_MODEL) or get(c.REQUEST_MODEL) or "model")


def _word_duration(span: Span) -> str:
    return "" if span.end_ns is None else seconds(span.end_ns - span.start_ns)


def _word_tokens(span: Span) -> str:
    get = span.attributes.get
    tokens = get(c.OUTPUT_TOKENS)
    counted = "" if tokens is None else f"{get(c.INPUT_TOKENS, 0)}→{tokens} tok, "
    return f"{counted}{_word_duration(span)}"


def _message_parts(message: Message) -> list[Mapping[str, Any]]:
    found = message.get("parts")
    listed = found if isinstance(found, (list, tuple)) else ()
    return [part for part in listed if isinstance(part, Mapping)]


def _one_line_of(value: object) -> str:
    return " ".join(shown(value).split())
