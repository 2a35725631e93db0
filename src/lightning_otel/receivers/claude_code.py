"""Sessions of Claude Code: a tree of records, of which each names the one before it.

An answer has a record for each of its blocks, with others between. After a compaction, of a
subagent, or after a rewind a record begins a conversation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from lightning_otel.dialects.anthropic import Anthropic
from lightning_otel.messages import message, object_of, objects, read_message
from lightning_otel.messages.media import to_text
from lightning_otel.receivers.otlp import Object
from lightning_otel.receivers.sessions import (
    ROOT,
    Messages,
    SessionAgent,
    SessionLinks,
    SessionSpans,
    digest_record,
    is_thought,
    list_parts,
    order_results,
)
from lightning_otel.types import Span
from lightning_otel.types import conventions as c
from lightning_otel.types.values import json_text

NAME: Final = "claude-code"
_SPOKEN: Final = frozenset({"user", "assistant", "attachment"})
_MESSAGES: Final = Anthropic()
_FAILED: Final = "isApiErrorMessage"
_SYNTHETIC: Final = "<synthetic>"
"""The model of an answer that no model gave."""
_LOCAL: Final = "local_command"
_TURN_ENDS: Final = frozenset({"turn_duration", "stop_hook_summary"})
"""What a system record says when the model is done."""
_GOES_ON: Final = frozenset({None, "tool_use", "pause_turn"})
"""Stop reasons of answers of which another block may come."""
_UNFINISHED: Final = frozenset({"reasoning", "redacted_thinking", "tool_call"})
"""Parts after which another may come."""
_ABOUT: Final = ("cwd", "gitBranch", "version")
_REQUEST: Final = "requestId"
RECORD_IDS: Final = (f"{NAME}.uuid", f"{NAME}.digest")
"""Attributes of a call: of its first record what the copies of that have, too."""


@dataclass(slots=True)
class _Turn:
    """A message: what a user or a tool said, or all blocks of an answer.

    Attributes:
        parent: The turn before it; None where a conversation begins.
        agent_id: Of the subagent, empty for the agent itself.
        message_id: Of an answer; some endpoints reuse it.
        request_id: Of the request that it answers, if known.
        response_id: Of a call that others follow; empty for other turns.
        record_ids: Attributes of that call.
        stop_reason: Of its latest block; may be empty.
        history: The call that an answer follows, and the messages since.
        results: Of the tools that it asked for, by id, each with its number.
        between: The messages between its blocks.
        is_failure: Whether it is a call that failed.
    """

    parent: _Turn | None
    agent_id: str
    messages: Messages
    start_ns: int
    end_ns: int
    message_id: str = ""
    request_id: object = None
    response_id: str = ""
    record_ids: dict[str, object] = field(default_factory=dict)
    stop_reason: str | None = None
    body: dict[str, Any] = field(default_factory=dict)
    history: tuple[str | None, Messages] = (None, [])
    results: dict[object, dict[int, _Turn]] = field(default_factory=dict)
    between: list[_Turn] = field(default_factory=list)
    is_failure: bool = False


class ClaudeCode:
    """Reads the records of a session, or of one of its subagents.

    Args:
        session_id: Of the session; a subagent's records state the one they belong to.
        about: Claude Code's ``agent-ID.meta.json`` of a subagent.
        links: What other files say.
    """

    def __init__(self, session_id: str, about: Object, links: SessionLinks) -> None:
        self.session = SessionSpans(NAME, session_id)
        self._about = about
        self._links = links
        self._turns: dict[object, _Turn | None] = {}
        self._askers: dict[object, tuple[_Turn, Object]] = {}
        self._seen: set[object] = set()  # results, by the ids of their tools
        self._answers: dict[str, _Turn] = {}  # the latest of an id
        self._open: dict[str, _Turn] = {}
        self._kept: dict[object, Object] = {}  # segments that compactions keep, by what is before

    def feed(self, record: Object) -> Iterator[Span]:
        """Return the spans that a record completes."""
        kind, own_id = str(record.get("type")), record.get("uuid")
        parent = self._turns.get(record.get("parentUuid"))
        if own_id in self._turns and own_id is not None:  # a resumed session repeats the earlier
            return
        body = dict(object_of(record.get("message")))
        if segment := object_of(object_of(record.get("compactMetadata")).get("preservedSegment")):
            self._kept[segment.get("anchorUuid")] = segment
        if record.get("subtype") == _LOCAL:  # it is sent in the user's name
            kind, body = "user", {"role": "user", "content": record.get("content")}
        if kind == "attachment":
            content = object_of(record.get("attachment"))
            body = {"role": "user", "parts": [{**content, "type": f"{NAME}.{content.get('type')}"}]}
        if own_id is None or kind not in _SPOKEN or not body:
            self.session.count_other(kind, record.get("subtype"))
            if own_id is not None:
                self._turns[own_id] = parent
                self._keep_segment(own_id)
            for change in objects(record.get("replacements")):
                self._replace_result(change)
            if record.get("subtype") in _TURN_ENDS:
                yield from self._close(parent.agent_id if parent else ROOT)
            return
        now_ns = self.session.read_time(record)
        agent_id = self._find_agent(record, parent)
        if parent is not None and agent_id not in (ROOT, parent.agent_id):
            parent = None  # a subagent begins a conversation of its own
        self._note_agent(agent_id, record, body, now_ns)
        if kind != "assistant":
            yield from self._take_input(record, parent, agent_id, body, now_ns)
            self._keep_segment(own_id)
        elif record.get(_FAILED):
            yield self._make_failure(own_id, parent, agent_id, body, now_ns)
        else:
            yield from self._take_answer(record, parent, agent_id, body, now_ns)

    def flush(self, *, is_over: bool) -> Iterator[Span]:
        """Return the answers at the end that are whole; all of them if the session is over."""
        for agent_id, turn in list(self._open.items()):
            if _is_whole(turn) or (is_over and not is_thought(turn.messages)):
                yield from self._close(agent_id)

    def count_open(self) -> int:
        """Return the number of answers that may be half written."""
        return sum(bool(turn.response_id) for turn in self._open.values())

    def _find_agent(self, record: Object, parent: _Turn | None) -> str:
        if isinstance(record.get("agentId"), str):
            return str(record["agentId"])
        if not record.get("isSidechain"):
            return ROOT
        return parent.agent_id if parent and parent.agent_id else str(record.get("uuid"))

    def _note_agent(self, agent_id: str, record: Object, body: Object, now_ns: int) -> None:
        agents = self.session.agents
        if agent := agents.get(agent_id):
            agent.end_ns = max(agent.end_ns, now_ns)
            return
        agent = agents[agent_id] = SessionAgent(NAME, now_ns, now_ns, {})
        if agent_id == ROOT:
            agent.attributes = {f"{NAME}.{name}": record.get(name) for name in _ABOUT}
            return
        session_id, tools = self.session.id, self._links.tools
        content = list_parts([read_message(body, "user")], "text")
        task = content[0].get("content") if content else None
        keys = agent_id, ("task", task), ("block", record.get("parentUuid"))
        agent.origins = [(session_id, key) for key in keys]
        if tool_id := self._about.get("toolUseId"):
            self._links.add_tool(agent.origins[0], str(tool_id))
        tool_ids = next((tools[key] for key in agent.origins if key in tools), [""])
        kind = self._about.get("agentType") or self._links.kinds.get(tool_ids[0])
        agent.name = str(kind or "subagent")

    def _keep_segment(self, own_id: object) -> None:
        if not (segment := self._kept.pop(own_id, None)):
            return
        head, turn = (self._turns.get(segment.get(f"{end}Uuid")) for end in ("head", "tail"))
        path: list[_Turn] = []
        while turn and turn is not head:
            path.append(turn)
            turn = turn.parent
        if turn is None:
            self.session.problem = "a compaction keeps what is not there"
            return
        path.append(turn)
        before = self._turns[own_id]
        times_ns = turn.start_ns, path[0].end_ns
        summary = _Turn(before, turn.agent_id, _tell(path), *times_ns)
        self._turns[own_id] = self._turns[segment.get("tailUuid")] = summary

    def _replace_result(self, change: Object) -> None:
        tool_id, content = change.get("toolUseId"), change.get("replacement")
        asker, _ = self._askers.get(tool_id, (None, {}))
        for turn in asker.results.get(tool_id, {}).values() if asker else ():
            for part in turn.messages[0]["parts"]:
                if part.get("id") == tool_id and content:
                    part["response"] = content

    def _take_input(
        self, record: Object, parent: _Turn | None, agent_id: str, body: Object, now_ns: int
    ) -> Iterator[Span]:
        messages: Messages = [read_message(body, "user")]
        turn = self._turns[record["uuid"]] = _Turn(parent, agent_id, messages, now_ns, now_ns)
        results = list_parts(messages, "tool_call_response")
        agent = self.session.agents[agent_id]
        if not results and list_parts(messages, "text") and record.get("type") == "user":
            agent.attributes.setdefault(c.TASK, json_text(body.get("content")))
        for part in results:
            tool_id = part.get("id")
            asker, call = self._askers.get(tool_id, (None, {}))
            if asker is None:
                continue
            number = sum(map(len, asker.results.values()))
            asker.results.setdefault(tool_id, {})[number] = turn
            subagent_id = object_of(record.get("toolUseResult")).get("agentId")
            if isinstance(subagent_id, str):
                self._links.add_tool((self.session.id, subagent_id), str(tool_id))
            if asker.response_id and tool_id not in self._seen:  # a branch may have it anew
                self._seen.add(tool_id)
                yield self.session.make_tool(
                    agent_id, (asker.end_ns, max(asker.end_ns, now_ns)), call,
                    part.get("response"), is_error=bool(part.get("is_error")),
                )  # fmt: skip

    def _take_answer(
        self, record: Object, parent: _Turn | None, agent_id: str, body: dict[str, Any], now_ns: int
    ) -> Iterator[Span]:
        message_id = str(body.get("id") or record["uuid"])
        turn = self._open.get(agent_id)
        answer = self._answers.get(message_id)
        is_late = answer is not None and _is_same(answer, record, parent, agent_id)
        if turn is None or turn is not answer or not is_late:
            yield from self._close(agent_id)
            turn = self._begin_answer(record, parent, agent_id, message_id, now_ns)
            if is_late:
                turn.response_id = ""
            if body.get("model") == _SYNTHETIC:  # said in the model's name, and never asked
                turn.response_id = ""
        else:
            turn.between += _find_path(parent, turn)
        self._turns[record["uuid"]] = turn
        turn.end_ns = max(turn.end_ns, now_ns)
        block = read_message({**body, "role": "assistant"})
        turn.messages[0]["parts"] += block["parts"]
        turn.body |= {name: value for name, value in body.items() if value is not None}
        if (stop_reason := body.get("stop_reason", "")) is not None:
            turn.body["stop_reason"] = stop_reason = to_text(stop_reason)
        turn.stop_reason = stop_reason
        for part in list_parts([block], "tool_call"):
            self._askers[part.get("id")] = turn, part
            arguments, tool_id = object_of(part.get("arguments")), str(part.get("id"))
            self._links.add_tool((self.session.id, ("block", record["uuid"])), tool_id)
            if isinstance(task := arguments.get("prompt"), str):
                self._links.add_tool((self.session.id, ("task", task)), tool_id)
            if isinstance(kind := arguments.get("subagent_type"), str):
                self._links.kinds[tool_id] = kind

    def _begin_answer(
        self, record: Object, parent: _Turn | None, agent_id: str, message_id: str, now_ns: int
    ) -> _Turn:
        start_ns = min(parent.end_ns, now_ns) if parent else now_ns
        turn = _Turn(
            parent, agent_id, [message("assistant", [])], start_ns, now_ns, message_id,
            record.get(_REQUEST),
        )  # fmt: skip
        uuid = str(record["uuid"])
        owner = self.session.id, self.session.find_span_id(agent_id), uuid
        ids = [uuid, digest_record(record)]
        if not record.get("forkedFrom") and self._links.claim_answer(message_id, ids, owner):
            first = self._links.answers.setdefault((message_id, self.session.id), owner)
            turn.response_id = message_id if first == owner else f"{message_id}/{uuid}"
            turn.history = _find_history(parent)
            turn.record_ids = dict(zip(RECORD_IDS, ids, strict=True))
        self._open[agent_id] = self._answers[message_id] = turn
        return turn

    def _close(self, agent_id: str) -> Iterator[Span]:
        turn = self._open.pop(agent_id, None)
        if turn is None or not turn.response_id:
            return
        attributes = {
            **_MESSAGES.response_attributes(turn.body),
            c.PROVIDER: _MESSAGES.provider,
            c.REQUEST_MODEL: turn.body.get("model"),
            c.RESPONSE_ID: turn.response_id,
            **turn.record_ids,
        }
        for reason in attributes.get(c.FINISH_REASONS, ()):
            turn.messages[0]["finish_reason"] = reason
        previous_id, messages = turn.history
        yield self.session.make_call(
            agent_id, (turn.start_ns, turn.end_ns), response_id=turn.response_id,
            previous_id=previous_id, messages=messages, answer=turn.messages, attributes=attributes,
        )  # fmt: skip
        turn.history, turn.body = (None, []), {}

    def _make_failure(
        self, own_id: object, parent: _Turn | None, agent_id: str, body: Object, now_ns: int
    ) -> Span:
        """Return the failed call; each of several in a row holds only what came since the last."""
        start_ns = min(parent.end_ns, now_ns) if parent else now_ns
        history = previous_id, messages = _find_history(parent, is_failure=True)
        turn = _Turn(parent, agent_id, [], start_ns, now_ns, history=history, is_failure=True)
        self._turns[own_id] = turn
        parts = read_message(body, "assistant")["parts"]
        error = "\n".join(str(part.get("content")) for part in parts)
        return self.session.make_call(
            agent_id, (start_ns, now_ns), response_id=str(own_id), previous_id=previous_id,
            messages=messages, answer=(), error=error or "the request failed",
            attributes={c.PROVIDER: _MESSAGES.provider},
        )  # fmt: skip


def _is_whole(turn: _Turn) -> bool:
    """Return whether an answer says that it is; one of its first blocks may say so, too."""
    kinds = [part.get("type") for part in turn.messages[0]["parts"][-1:]]
    return turn.stop_reason not in _GOES_ON and not _UNFINISHED.intersection(kinds)


def _is_same(answer: _Turn, record: Object, parent: _Turn | None, agent_id: str) -> bool:
    """Return whether a block with an answer's id is of it: same request, and no later prompt."""
    ids = answer.request_id, record.get(_REQUEST)
    if answer.agent_id != agent_id or (all(ids) and ids[0] != ids[1]):
        return False
    is_told = False
    while parent and parent is not answer:
        is_told = is_told or bool(list_parts(parent.messages, "text") and not parent.message_id)
        parent = parent.parent
    return not (is_told and _is_whole(answer))


def _find_path(turn: _Turn | None, answer: _Turn) -> list[_Turn]:
    """Return what came between the blocks of an answer, up to a turn; nothing of another's."""
    path: list[_Turn] = []
    ids = {id(answer), *map(id, answer.between)}
    while turn and id(turn) not in ids and not turn.message_id:
        path.append(turn)
        turn = turn.parent
    return path[::-1] if id(turn) in ids else []


def _find_history(turn: _Turn | None, *, is_failure: bool = False) -> tuple[str | None, Messages]:
    """Return the id of the call that a turn goes on from, and what was said since then.

    Results of parallel tools stand beside that path, each below the block that asked for it.
    """
    path: list[_Turn] = []
    while turn and not (turn.response_id or (is_failure and turn.is_failure)):
        path.append(turn)
        turn = turn.parent
    path += [turn] if turn else []
    messages = _tell(path, turn)
    return (turn.response_id or turn.history[0] if turn else None), messages


def _tell(path: list[_Turn], call: _Turn | None = None) -> Messages:
    ids = {id(turn) for at in path for turn in (at, *at.between)}
    messages: Messages = []
    for at in reversed(path):
        messages += [] if at is call else at.messages
        for turn in (*at.between, *_find_beside(at, ids)):
            messages += turn.messages
    return order_results(messages)


def _find_beside(asker: _Turn, path: set[int]) -> list[_Turn]:
    """Return the results of tools that a path lacks, by time; of several, the next to the path."""
    numbers = [n for item in asker.results.values() for n, turn in item.items() if id(turn) in path]
    latest = max(numbers, default=sum(map(len, asker.results.values())))
    siblings: dict[int, tuple[int, int, _Turn]] = {}
    for results in asker.results.values():
        if not any(id(turn) in path for turn in results.values()):
            distances = {abs(n - latest): n for n, turn in results.items() if turn.parent is asker}
            if distances:
                number = distances[min(distances)]
                turn = results[number]
                siblings[id(turn)] = turn.start_ns, number, turn
    return [turn for *_, turn in sorted(siblings.values(), key=lambda entry: entry[:2])]
