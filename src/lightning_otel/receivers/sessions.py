"""Session files of coding agents, read line by line as they grow.

A session is a rollout: a span for the agent and one for each subagent, model call and tool. A call
holds only what was said since the answer that it follows, which it names.

Source: the files that Claude Code keeps below ``~/.claude/projects``, and Codex below
``~/.codex/sessions``; neither format is documented.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, Final

from lightning_otel.messages import object_of
from lightning_otel.messages.media import to_text
from lightning_otel.receivers.builder import Builder, parse_time
from lightning_otel.receivers.otlp import TIMES, InvalidSpanError, Object
from lightning_otel.types import Span
from lightning_otel.types import conventions as c
from lightning_otel.types.values import json_text

Messages = list[dict[str, Any]]
ROOT: Final = ""
"""The agent whose session it is, among its subagents' ids."""
_ATTEMPT: Final = "1"


@dataclass(slots=True)
class SessionLinks:
    """What session files say of each other.

    Attributes:
        tools: Tools that began a subagent, by its session and by its id or what it was asked.
        kinds: The kind of subagent that a tool began.
        answers: By id and fingerprint of an answer: the session, its agent's span and the record.
        items: Digests of each item by session, to detect copies.
    """

    tools: dict[Hashable, list[str]] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    answers: dict[tuple[str, str], tuple[str, str, str]] = field(default_factory=dict)
    items: dict[str, list[str]] = field(default_factory=dict)

    def add_tool(self, key: Hashable, tool_id: str) -> None:
        """Note that a tool began a subagent."""
        tools = self.tools.setdefault(key, [])
        if tool_id not in tools:
            tools.append(tool_id)

    def claim_answer(
        self, message_id: str, record_ids: Iterable[object], owner: tuple[str, str, str]
    ) -> bool:
        """Note who gave an answer; return whether nobody else did before."""
        keys = [(message_id, str(record_id)) for record_id in record_ids if record_id]
        first = next((self.answers[key] for key in keys if key in self.answers), owner)
        for key in keys:
            self.answers.setdefault(key, first)
        return first == owner

    def take_tool(self, keys: Sequence[Hashable]) -> str | None:
        """Return the tool of the first key that is known; of several, each is returned once."""
        tools = next((self.tools[key] for key in keys if key in self.tools), None)
        return None if tools is None else tools.pop(0) if len(tools) > 1 else tools[0]


@dataclass(slots=True)
class SessionAgent:
    """A conversation's agent; ``origins`` are keys in :class:`SessionLinks` of its tool."""

    name: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    origins: list[Hashable] = field(default_factory=list)


class SessionSpans:
    """The maker of one session's spans.

    Attributes:
        others: Records that are no part of a conversation, counted by their kind.
        problem: What could not be read of the latest record.
    """

    def __init__(self, tool: str, session_id: str) -> None:
        self.id = session_id
        self.others: Counter[str] = Counter()
        self.agents: dict[str, SessionAgent] = {}
        self.clock_ns = 0
        self.problem = ""
        self._tool = tool
        common = {c.ROLLOUT_ID: session_id, c.ATTEMPT_ID: _ATTEMPT, c.CONVERSATION_ID: session_id}
        self._builder = Builder(tool, session_id, common)

    def read_time(self, record: Object) -> int:
        """Return the time of a record in nanoseconds, the one before where it states none."""
        value, self.problem = record.get("timestamp"), ""
        try:
            time_ns = parse_time(value)
        except (InvalidSpanError, OverflowError):
            time_ns = 0
        if time_ns in TIMES:
            self.clock_ns = time_ns
        elif value:
            self.problem = "the timestamp is no time; that of the record before counts"
        self.clock_ns = self.clock_ns or TIMES.start
        return self.clock_ns

    def find_span_id(self, agent_id: str) -> str:
        """Return the id of an agent's span."""
        return self._builder.id_of(("agent", agent_id))

    def count_other(self, *kinds: object) -> None:
        """Count a record that is no part of a conversation."""
        self.others["/".join(str(kind) for kind in kinds if kind)] += 1

    def make_agents(self, links: SessionLinks) -> Iterator[Span]:
        """Yield the spans of the agent and its subagents, each below the tool that began it."""
        for agent_id, agent in self.agents.items():
            tool_id = links.take_tool(agent.origins) if agent_id else None
            attributes = {
                c.OPERATION: c.INVOKE_AGENT, c.AGENT_NAME: agent.name, c.AGENT_ID: agent_id or None,
                **agent.attributes,
            }  # fmt: skip
            if self.others and agent_id == next(iter(self.agents)):
                attributes[f"{self._tool}.other_records"] = json_text(dict(self.others))
            above = ("tool", tool_id) if tool_id else ("agent", ROOT) if agent_id else None
            yield self._builder.make_span(
                ("agent", agent_id), above, f"invoke_agent {agent.name}", agent.start_ns,
                agent.end_ns, attributes=attributes,
            )  # fmt: skip

    def make_call(
        self, agent_id: str, times_ns: tuple[int, int], *, response_id: str,
        previous_id: str | None, messages: Messages, answer: Sequence[Mapping[str, Any]],
        attributes: Mapping[str, Any], error: str = "",
    ) -> Span:  # fmt: skip
        """Return the span of a model call; one that failed has no answer."""
        call_facts = {
            c.OPERATION: c.CHAT, c.AGENT_NAME: self.agents[agent_id].name,
            c.REQUEST_PREVIOUS_RESPONSE: previous_id,
            c.RESPONSE_ID: None if error else response_id,
            c.INPUT_MESSAGES: json_text(messages),
            c.OUTPUT_MESSAGES: json_text(answer) if answer else None,
            **attributes,
        }  # fmt: skip
        if error:
            call_facts[c.ERROR_TYPE] = "error"
        title = f"chat {attributes.get(c.REQUEST_MODEL) or ''}".strip()
        return self._builder.make_span(
            ("call", response_id), ("agent", agent_id), title, *times_ns, attributes=call_facts,
            kind="CLIENT", status="ERROR" if error else "OK", status_message=error,
        )  # fmt: skip

    def make_tool(
        self, agent_id: str, times_ns: tuple[int, int], call: Object, result: object,
        *, is_error: bool = False,
    ) -> Span:  # fmt: skip
        """Return the span of a tool, from the part that asked for it and what came of it."""
        attributes = {
            c.OPERATION: c.EXECUTE_TOOL, c.AGENT_NAME: self.agents[agent_id].name,
            c.TOOL_NAME: call.get("name"),
            c.TOOL_CALL_ID: call.get("id"), c.TOOL_ARGUMENTS: to_text(call.get("arguments")),
            c.TOOL_RESULT: to_text(result), c.ERROR_TYPE: "tool_error" if is_error else None,
        }  # fmt: skip
        return self._builder.make_span(
            ("tool", call.get("id")), ("agent", agent_id), f"execute_tool {call.get('name')}",
            *times_ns, attributes=attributes, status="ERROR" if is_error else "OK",
        )  # fmt: skip


def make_agents(sessions: Iterable[SessionSpans], links: SessionLinks) -> Iterable[Span]:
    """Return the spans of the agents of session files; of several of one session they are one."""
    agents: dict[tuple[str, str], Span] = {}
    for session in sessions:
        for span in session.make_agents(links):
            key = span.trace_id, span.span_id
            agent = agents.setdefault(key, span)
            end_ns = max(agent.end_ns or 0, span.end_ns or 0)
            start_ns = min(agent.start_ns, span.start_ns)
            agents[key] = replace(agent, start_ns=start_ns, end_ns=end_ns)
    return agents.values()


def is_thought(messages: Messages) -> bool:
    """Return whether messages have no more than reasoning, which is no answer yet."""
    kinds = {part.get("type") for message in messages for part in message["parts"]}
    return kinds <= {"reasoning", "redacted_thinking"}


def order_results(messages: Messages) -> Messages:
    """Return messages, after each answer the results first: coding agents send them so."""
    number, places = 0, []
    for message in messages:
        number += message["role"] == "assistant"
        is_said = message["role"] != "assistant" and not list_parts([message], "tool_call_response")
        places.append((number, is_said))
    order = sorted(range(len(messages)), key=places.__getitem__)
    return [messages[place] for place in order]


def digest_record(record: Object) -> str | None:
    """Return what tells an answer's record from others where a copy has an id of its own."""
    if not (time := record.get("timestamp")):
        return None
    content = json_text([time, object_of(record.get("message")).get("content")])
    return blake2b(content.encode("utf-8", "replace"), digest_size=8).hexdigest()


def list_parts(messages: Sequence[Mapping[str, Any]], kind: str) -> list[Object]:
    """Return the parts of one kind of messages."""
    return [part for message in messages for part in message["parts"] if part.get("type") == kind]
