"""Session files of coding agents, read line by line as they grow.

A session is a rollout: a span for the agent and one for each subagent, model call and tool. A call
holds what was said since the answer that it goes on from, and names that answer: a session of
200 MB stays one of 200 MB.

Source: the files that Claude Code keeps below ``~/.claude/projects``, and Codex below
``~/.codex/sessions`` since its records have a type and a payload; neither format is documented.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

from lightning_otel.messages.media import to_text
from lightning_otel.receivers.builder import Builder, parse_time
from lightning_otel.receivers.otlp import TIMES, Object
from lightning_otel.types import Span
from lightning_otel.types import conventions as c
from lightning_otel.types.values import json_text

Messages = list[dict[str, Any]]
_ATTEMPT: Final = "1"


class SessionReader(Protocol):
    """Reads the records of one session file, in their order."""

    def feed(self, record: Object) -> Iterator[Span]:
        """Return the spans that a record completes."""

    def flush(self, *, is_over: bool = True) -> Iterator[Span]:
        """Return the spans that nothing completed so far.

        While the session may still grow these are the answers that say that they are whole.
        """


class Session:
    """The maker of one session's spans.

    Attributes:
        others: Records that are no part of a conversation, counted by their kind.
        clock_ns: The time of the latest record.
    """

    def __init__(self, tool: str, session_id: str) -> None:
        self.others: Counter[str] = Counter()
        self.clock_ns = 0
        self._tool = tool
        common = {c.ROLLOUT_ID: session_id, c.ATTEMPT_ID: _ATTEMPT, c.CONVERSATION_ID: session_id}
        self._builder = Builder(tool, session_id, common)

    def read_time(self, record: Object) -> int:
        """Return the time of a record in nanoseconds, the one before where it states none."""
        time_ns = parse_time(record.get("timestamp"))
        self.clock_ns = time_ns if time_ns in TIMES else self.clock_ns or TIMES.start
        return self.clock_ns

    def make_agent(
        self, agent: str, name: str, times_ns: tuple[int, int], above: object = None,
        attributes: Mapping[str, Any] | None = None,
    ) -> Span:  # fmt: skip
        """Return the span of the agent, or of a subagent by its id, below a key."""
        known = {
            c.OPERATION: c.INVOKE_AGENT, c.AGENT_NAME: name, c.AGENT_ID: agent or None,
            **(attributes or {}),
        }  # fmt: skip
        if not agent and self.others:
            known[f"{self._tool}.other_records"] = json_text(dict(self.others))
        title = f"invoke_agent {name}"
        return self._builder.make_span(("agent", agent), above, title, *times_ns, attributes=known)

    def make_call(
        self, agent: str, name: str, times_ns: tuple[int, int], *, response_id: str,
        previous_id: str | None, messages: Messages, answer: Sequence[Mapping[str, Any]],
        attributes: Mapping[str, Any], error: str = "",
    ) -> Span:  # fmt: skip
        """Return the span of a model call; one that failed has no answer."""
        known = {
            c.OPERATION: c.CHAT, c.AGENT_NAME: name, c.REQUEST_PREVIOUS_RESPONSE: previous_id,
            c.RESPONSE_ID: None if error else response_id,
            c.INPUT_MESSAGES: json_text(messages),
            c.OUTPUT_MESSAGES: json_text(answer) if answer else None,
            **attributes,
        }  # fmt: skip
        if error:
            known[c.ERROR_TYPE] = "error"
        title = f"chat {attributes.get(c.REQUEST_MODEL) or ''}".strip()
        return self._builder.make_span(
            ("call", response_id), ("agent", agent), title, *times_ns, attributes=known,
            kind="CLIENT", status="ERROR" if error else "OK", status_message=error,
        )  # fmt: skip

    def make_tool(
        self, agent: str, name: str, times_ns: tuple[int, int], call: Object, result: object,
        *, is_error: bool = False,
    ) -> Span:  # fmt: skip
        """Return the span of a tool, from the part that asked for it and what came of it."""
        known = {
            c.OPERATION: c.EXECUTE_TOOL, c.AGENT_NAME: name, c.TOOL_NAME: call.get("name"),
            c.TOOL_CALL_ID: call.get("id"), c.TOOL_ARGUMENTS: to_text(call.get("arguments")),
            c.TOOL_RESULT: to_text(result), c.ERROR_TYPE: "tool_error" if is_error else None,
        }  # fmt: skip
        return self._builder.make_span(
            ("tool", call.get("id")), ("agent", agent), f"execute_tool {call.get('name')}",
            *times_ns, attributes=known, status="ERROR" if is_error else "OK",
        )  # fmt: skip


def list_parts(messages: Sequence[Mapping[str, Any]], kind: str) -> list[Object]:
    """Return the parts of one kind of messages."""
    return [part for each in messages for part in each["parts"] if part.get("type") == kind]
