"""Sessions of Claude Code: a tree of records, of which each names the one before it.

An answer comes in a record for each of its blocks, with results of its first tools between them. A
record that starts anew begins a conversation: after a compaction, of a subagent, or after a rewind.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from lightning_otel.dialects.anthropic import Anthropic
from lightning_otel.messages import message, object_of, read_message
from lightning_otel.receivers.otlp import Object
from lightning_otel.receivers.sessions import Messages, Session, list_parts
from lightning_otel.types import Span
from lightning_otel.types import conventions as c
from lightning_otel.types.values import json_text

NAME: Final = "claude-code"
_SPOKEN: Final = frozenset({"user", "assistant", "attachment"})
_MESSAGES: Final = Anthropic()
_FAILED: Final = "isApiErrorMessage"
_SYNTHETIC: Final = "<synthetic>"
"""The model of an answer that no model gave."""
_ABOUT: Final = ("cwd", "gitBranch", "version")


@dataclass(slots=True)
class _Turn:
    """A message: what a user or a tool said, or all blocks of an answer.

    Attributes:
        parent: The turn before it; None where a conversation begins.
        agent: The id of the subagent, empty for the agent itself.
        answers: Messages with results of the tools that this turn asked for.
    """

    parent: _Turn | None
    agent: str
    messages: Messages
    start_ns: int
    end_ns: int
    response_id: str = ""
    body: dict[str, Any] = field(default_factory=dict)
    is_written: bool = False
    answers: list[_Turn] = field(default_factory=list)


@dataclass(slots=True)
class _Agent:
    """A conversation's agent: when it spoke, and the key of the span that it stands below."""

    name: str
    start_ns: int
    end_ns: int
    above: object = None
    attributes: dict[str, Any] = field(default_factory=dict)


class ClaudeCode:
    """Reads the records of a session, or of one of its subagents.

    Args:
        session_id: Of the session; a subagent's records state the one they belong to.
        about: What Claude Code keeps of a subagent beside its file, ``agent-ID.meta.json``.
    """

    def __init__(self, session_id: str, about: Object) -> None:
        self._session = Session(NAME, session_id)
        self._about = about
        self._turns: dict[object, _Turn | None] = {}
        self._askers: dict[object, tuple[_Turn, Object]] = {}
        self._open: dict[str, _Turn] = {}
        self._agents: dict[str, _Agent] = {}

    def feed(self, record: Object) -> Iterator[Span]:
        """Return the spans that a record completes."""
        kind, own_id = str(record.get("type")), record.get("uuid")
        parent = self._turns.get(record.get("parentUuid"))
        if own_id in self._turns and own_id is not None:  # a resumed session repeats the earlier
            return
        body = dict(object_of(record.get("message")))
        if kind == "attachment":
            told = object_of(record.get("attachment"))
            body = {"role": "user", "parts": [{**told, "type": f"{NAME}.{told.get('type')}"}]}
        if own_id is None or kind not in _SPOKEN or not body:
            subtype = record.get("subtype")
            self._session.others[f"{kind}/{subtype}" if subtype else kind] += 1
            self._turns[own_id] = parent
            return
        now_ns = self._session.read_time(record)
        agent = self._find_agent(record, parent)
        self._note_agent(agent, record, now_ns)
        if kind != "assistant":
            yield from self._take_input(own_id, parent, agent, body, now_ns)
        elif record.get(_FAILED):
            yield self._make_failure(own_id, parent, agent, body, now_ns)
        else:
            yield from self._take_answer(own_id, parent, agent, body, now_ns)

    def flush(self, *, is_over: bool = True) -> Iterator[Span]:
        """Return the latest answers, and the agents as far as they are known."""
        for turn in list(self._open.values()):
            if is_over or turn.body.get("stop_reason"):
                yield from self._close(turn)
        for agent_id, agent in self._agents.items() if is_over else ():
            times_ns = agent.start_ns, agent.end_ns
            yield self._session.make_agent(
                agent_id, agent.name, times_ns, agent.above, agent.attributes
            )

    def _find_agent(self, record: Object, parent: _Turn | None) -> str:
        if isinstance(record.get("agentId"), str):
            return str(record["agentId"])
        if not record.get("isSidechain"):
            return ""
        return parent.agent if parent else str(record.get("uuid"))

    def _note_agent(self, agent_id: str, record: Object, now_ns: int) -> None:
        if agent := self._agents.get(agent_id):
            agent.end_ns = max(agent.end_ns, now_ns)
            return
        agent = self._agents[agent_id] = _Agent(NAME, now_ns, now_ns)
        if not agent_id:
            agent.attributes = {f"{NAME}.{name}": record.get(name) for name in _ABOUT}
            return
        agent.name = str(self._about.get("agentType") or "subagent")
        tool_id = self._about.get("toolUseId")
        agent.above = ("tool", tool_id) if tool_id else ("agent", "")

    def _take_input(
        self, own_id: object, parent: _Turn | None, agent: str, body: Object, now_ns: int
    ) -> Iterator[Span]:
        messages: Messages = [read_message(body, "user")]
        turn = self._turns[own_id] = _Turn(parent, agent, messages, now_ns, now_ns)
        results = list_parts(messages, "tool_call_response")
        if not results:
            yield from self._close(self._open.get(agent))
            root = self._agents[agent]
            if list_parts(messages, "text") and c.TASK not in root.attributes:
                root.attributes[c.TASK] = json_text(body.get("content"))
        for part in results:
            asker, call = self._askers.get(part.get("id"), (None, {}))
            if asker is not None:
                asker.answers.append(turn)
                yield self._session.make_tool(
                    agent, self._agents[agent].name, (asker.end_ns, max(asker.end_ns, now_ns)),
                    call, part.get("response"), is_error=bool(part.get("is_error")),
                )  # fmt: skip

    def _take_answer(
        self, own_id: object, parent: _Turn | None, agent: str, body: dict[str, Any], now_ns: int
    ) -> Iterator[Span]:
        turn = self._open.get(agent)
        if turn is None or turn.response_id != (body.get("id") or own_id) or turn.is_written:
            yield from self._close(turn)
            start_ns = parent.end_ns if parent else now_ns
            start_ns, answer = min(start_ns, now_ns), message("assistant", [])
            turn = _Turn(parent, agent, [answer], start_ns, now_ns, str(body.get("id") or own_id))
            self._open[agent] = turn
        self._turns[own_id] = turn
        turn.end_ns = max(turn.end_ns, now_ns)
        block = read_message({**body, "role": "assistant"})
        turn.messages[0]["parts"] += block["parts"]
        turn.body |= {name: value for name, value in body.items() if value is not None}
        for part in list_parts([block], "tool_call"):
            self._askers[part.get("id")] = turn, part

    def _close(self, turn: _Turn | None) -> Iterator[Span]:
        """Yield the call of an answer that is whole."""
        if turn is None or turn.is_written:
            return
        turn.is_written = True
        if turn.body.get("model") == _SYNTHETIC:  # said in the model's name, and never asked
            turn.response_id = ""
            return
        attributes = {
            **_MESSAGES.response_attributes(turn.body),
            c.PROVIDER: _MESSAGES.provider,
            c.REQUEST_MODEL: turn.body.get("model"),
        }
        for reason in attributes.get(c.FINISH_REASONS, ()):
            turn.messages[0]["finish_reason"] = reason
        previous, messages = _find_history(turn.parent)
        yield self._session.make_call(
            turn.agent, self._agents[turn.agent].name, (turn.start_ns, turn.end_ns),
            response_id=turn.response_id, previous_id=previous, messages=messages,
            answer=turn.messages, attributes=attributes,
        )  # fmt: skip

    def _make_failure(
        self, own_id: object, parent: _Turn | None, agent: str, body: Object, now_ns: int
    ) -> Span:
        """Return the call that failed; what was asked is asked anew by the next one."""
        self._turns[own_id] = parent
        previous, messages = _find_history(parent)
        said = read_message(body, "assistant")
        error = "\n".join(str(part.get("content")) for part in said["parts"])
        start_ns = min(parent.end_ns, now_ns) if parent else now_ns
        return self._session.make_call(
            agent, self._agents[agent].name, (start_ns, now_ns), response_id=str(own_id),
            previous_id=previous, messages=messages, answer=(), error=error or "the request failed",
            attributes={c.PROVIDER: _MESSAGES.provider},
        )  # fmt: skip


def _find_history(turn: _Turn | None) -> tuple[str | None, Messages]:
    """Return the id of the answer that a turn goes on from, and what was said since then.

    Results of parallel tools stand beside the path from one answer to the next: each is sent.
    """
    path: list[_Turn] = []
    while turn is not None and not turn.response_id:
        path.append(turn)
        turn = turn.parent
    path.reverse()
    if turn is not None:
        beside = [each for each in turn.answers if all(each is not other for other in path)]
        path = sorted([*beside, *path], key=lambda each: each.start_ns)
    return (turn.response_id if turn else None), [each for at in path for each in at.messages]
