"""A recording's spans as an outline, and its calls held against the server's own log."""

import json
import random
from collections.abc import Iterable, Mapping
from typing import Any

from lightning_otel import Recording
from lightning_otel.demo.policy import Policy, Reply, ToolCall
from lightning_otel.demo.server import DemoServer
from lightning_otel.types import Span
from lightning_otel.types import conventions as c


def outline(recording: Recording, *, is_ordered: bool = True) -> str:
    """The names of what was recorded, as a tree; asserts that nothing is lost."""
    spans = recording.spans()
    below: dict[str | None, list[Span]] = {}
    for span in spans:
        assert span.end_ns is not None, f"{span.name} never ended"
        below.setdefault(span.parent_span_id, []).append(span)
    assert {span.trace_id for span in spans} == {recording.trace_id}
    lines: list[str] = []

    def write(parent_id: str, depth: int) -> None:
        found = below.pop(parent_id, [])
        for span in found if is_ordered else sorted(found, key=lambda span: span.name):
            lines.append("  " * depth + span.name)
            write(span.span_id, depth + 1)

    write(recording.span_id, 0)
    below.pop(None, None)
    assert not below, f"orphans: {below}"
    return "\n".join(lines)


def calls_of(recording: Recording) -> list[Span]:
    """The spans that are requests to a model."""
    return [
        span for span in recording.spans() if span.attributes.get(c.OPERATION) in c.CALL_OPERATIONS
    ]


def assert_each_call_once(
    recording: Recording, server: DemoServer, facts: Any, **more: Any
) -> None:
    """Every request the server saw is one call span that says exactly what was sent and answered.

    Of a failed request only the number is compared.
    """
    calls = {span.attributes.get(c.RESPONSE_ID): span for span in calls_of(recording)}
    answered = {exchange.response_id: exchange for exchange in server.log if exchange.status == 200}
    assert len(calls_of(recording)) == len(server.log)
    assert {call for call in calls if call is not None} == set(answered)
    for response_id, exchange in answered.items():
        facts.agree(calls[response_id], exchange, **more)


def agents_of(recording: Recording) -> list[str]:
    """For each call the innermost agent it stands in, in order."""
    by_id = {span.span_id: span for span in recording.spans()}
    found = []
    for span in calls_of(recording):
        inner: Span | None = span
        while inner is not None and c.AGENT_NAME not in inner.attributes:
            inner = by_id.get(inner.parent_span_id or "")
        found.append(str(inner.attributes[c.AGENT_NAME]) if inner else "")
    return found


def named(recording: Recording, name: str) -> Span:
    (span,) = all_named(recording, name)
    return span


def all_named(recording: Recording, name: str) -> list[Span]:
    return [span for span in recording.spans() if span.name == name]


class CallsOnce(Policy):
    """Calls the first tool of that name that it is offered, once, and then says a word."""

    def __init__(self, tool: str = "", arguments: str = "{}", text: str = "done") -> None:
        self._tool, self._arguments, self._text = tool, arguments, text

    def reply(self, body: Mapping[str, Any], rng: random.Random) -> Reply:
        """A call, where nothing came of it yet."""
        names = [tool["function"]["name"] for tool in body.get("tools") or ()]
        wanted = [name for name in names if self._tool in name]
        if not wanted or any(message["role"] == "tool" for message in body["messages"]):
            return Reply(self._text)
        call = ToolCall("call_1", wanted[0], self._arguments)
        return Reply("", tool_calls=(call,), finish_reason="tool_calls")


def without_call_ids(found: Any, messages: Iterable[Mapping[str, Any]]) -> str:
    """Return a value as JSON, without the ids of tool calls, which differ from run to run."""
    text = json.dumps(found)
    for message in messages:
        for call in message.get("tool_calls") or ():
            text = text.replace(call["id"], "call")
    return text
