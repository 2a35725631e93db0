"""Sessions of Codex: items of the Responses API in the order in which they were said."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain
from typing import Any, Final

from lightning_otel.messages import message, object_of, objects, read_items, text_part
from lightning_otel.messages.media import to_text
from lightning_otel.receivers.otlp import Object
from lightning_otel.receivers.sessions import (
    ROOT,
    Messages,
    SessionAgent,
    SessionLinks,
    SessionSpans,
    is_thought,
    list_parts,
)
from lightning_otel.types import Span
from lightning_otel.types import conventions as c
from lightning_otel.types.values import json_text, parse_json

NAME: Final = "codex"
ITEMS: Final = f"{NAME}.items"
"""Attribute of a call: digests of the items since the call before."""
_ABOUT: Final = ("cwd", "cli_version", "originator")
_COUNTS: Final = {
    c.INPUT_TOKENS: "input_tokens", c.OUTPUT_TOKENS: "output_tokens",
    c.CACHED_TOKENS: "cached_input_tokens", c.REASONING_TOKENS: "reasoning_output_tokens",
}  # fmt: skip
_CONTEXT: Final = (
    "<environment_context>", "<user_instructions>", "<turn_aborted>", "<skill>",
    "<user_shell_command>", "<subagent_notification>", "<additional_context>", "<hook_prompt",
    "<goal_context>", "<user_action>", "# agents.md instructions",
)  # fmt: skip
"""Beginnings of what Codex says in the user's name."""
_SPAWN: Final = "spawn_agent"
_NO_ITEMS: Final = frozenset({"ghost_snapshot", "compaction_trigger"})
_CALLS: Final = frozenset({"function_call", "custom_tool_call"})
_SUMMARIES: Final = frozenset({"compaction", "context_compaction"})
_WORDS_BYTES: Final = 20_000 * 4
"""Of users that are told after a compaction, the latest: 20,000 tokens as Codex estimates them."""
_TURN_STARTS: Final = frozenset({"task_started", "turn_started", "user_message"})
"""Events of a Codex that counts the tokens of each answer."""
_TURN_ENDS: Final = frozenset({"task_complete", "turn_complete", "turn_aborted"})


@dataclass(slots=True)
class _CodexAnswer:
    """An answer as its items come.

    Attributes:
        said_ns: The time of what it answers.
        is_message: Whether its latest item is a message.
        is_counted: Whether its tokens were counted after its first item.
        end: The number of items with its latest.
    """

    model: object
    said_ns: int
    end_ns: int
    messages: Messages
    previous_id: str | None
    said: Messages
    usage: dict[str, Any] = field(default_factory=dict)
    response_id: str = ""
    is_message: bool = False
    is_counted: bool = False
    end: int = 0


class Codex:
    """Reads the records of a session, or of one of its subagents.

    Args:
        head: The file's first record. Answers get ids by session and number, as records have none.
        links: What other files say.
    """

    def __init__(self, head: Object, links: SessionLinks) -> None:
        self._id = str(head["id"])
        spawn, parent_id = _find_parent(head)
        self._agent_id = self._id if parent_id else ROOT
        session_id = str((head.get("session_id") or parent_id) if parent_id else self._id)
        self.session = SessionSpans(NAME, session_id)
        self._begun_ns = now_ns = self.session.read_time(head)
        name = spawn.get("agent_role") or spawn.get("agent_nickname") or "subagent"
        self._agent = SessionAgent(str(name) if parent_id else NAME, 0, now_ns, {
            f"{NAME}.{name}": head.get(name) for name in _ABOUT
        })  # fmt: skip
        places = self._id, spawn.get("agent_path")
        self._agent.origins = [(session_id, str(place)) for place in places if place]
        self.session.agents[self._agent_id] = self._agent
        self._head = head
        self._links = links
        self._model: object = None
        self._previous: str | None = None
        self._said: Messages = self._instruct()
        self._said_ns = 0
        self._answer: _CodexAnswer | None = None
        self._last: _CodexAnswer | None = None
        self._answers = 0
        self._usage: dict[str, Any] = {}
        self._total: object = None
        self._is_counting = False
        self._prompts: list[tuple[str | None, Messages, int]] = []
        self._context: Messages = []  # what was said before the first prompt
        self._words: list[Messages] = []  # of the prompts
        self._calls: dict[object, tuple[int, Object]] = {}
        self._source: list[str] = []
        self._items: list[str] = []
        self._written = 0  # of those, in calls

    def feed(self, record: Object) -> Iterator[Span]:
        """Return the spans that a record completes."""
        payload = object_of(record.get("payload"))
        kind = str(record.get("type") or record.get("record_type") or "session_meta")
        if "payload" not in record and "type" in record:  # as Codex wrote items in its first year
            kind, payload = "response_item", record
        elif kind == "inter_agent_communication":
            kind, payload = "response_item", {**payload, "type": "agent_message"}
        event = payload.get("type") if kind == "event_msg" else None
        now_ns = self.session.read_time(record)
        self._agent.start_ns = self._agent.start_ns or now_ns
        self._agent.end_ns = max(self._agent.end_ns, now_ns)
        if kind == "response_item" and payload.get("type") not in _NO_ITEMS:
            yield from self._take_item(payload, record, now_ns)
        elif kind == "compacted":
            yield from self._close()
            yield from self._write_last()
            self._compact(payload)
        elif event == "token_count":
            self._take_usage(object_of(payload.get("info")))
        elif event == "thread_rolled_back":
            yield from self._close()
            self._roll_back(payload.get("num_turns"))
        else:
            yield from self._take_other(kind, payload, event)

    def flush(self, *, is_over: bool) -> Iterator[Span]:
        """Return the answers at the end that are whole; all of them if the session is over."""
        if answer := self._answer:
            is_told = answer.is_message and (answer.usage or not self._is_counting)
            is_end = is_over and not (self._is_counting or is_thought(answer.messages))
            if is_end or is_told or answer.is_counted:
                yield from self._close()
        if last := self._last:
            is_counted = last.usage or self._answer or not self._is_counting
            if is_over or is_counted:
                yield from self._write_last()

    def count_open(self) -> int:
        """Return the number of answers that may be half written."""
        return sum(answer is not None for answer in (self._answer, self._last))

    def _instruct(self) -> Messages:
        instructions = self._head.get("base_instructions") or self._head.get("instructions")
        text = object_of(instructions).get("text", instructions)
        return [message("system", [text_part(text)])] if isinstance(text, str) else []

    def _note_context(self, messages: Messages) -> None:
        """Note what is said before the first prompt: instructions, too, that are no system's."""
        self._context += messages
        text = self._head.get("instructions")
        parts = list_parts(messages, "text")
        if isinstance(text, str) and any(text in str(part.get("content")) for part in parts):
            self._head = {**self._head, "instructions": None}
            self._said = [*self._instruct(), *self._context[: -len(messages)]]

    def _compact(self, payload: Object) -> None:
        """Begin anew: with the stated history, else with what users said and a summary.

        Source: ``build_compacted_history`` in ``codex-rs/core/src/compact.rs``.
        """
        if history := payload.get("replacement_history"):
            turns: Messages = read_items(history)
        else:
            words, budget = list[Messages](), _WORDS_BYTES
            for messages in reversed(self._words):
                if budget > 0:
                    words.insert(0, messages)
                budget -= sum(len(to_text(part.get("content")).encode("utf-8", "replace"))
                            for part in list_parts(messages, "text"))  # fmt: skip
            summary = read_items([{"role": "user", "content": payload.get("message")}])
            turns = [*self._context, *chain.from_iterable(words), *summary]
        self._previous, self._said = None, [*self._instruct(), *turns]
        self._prompts, self._usage = [], {}

    def _take_other(self, kind: str, payload: Object, event: object) -> Iterator[Span]:
        if kind == "session_meta" and not (find_origin(self._head) or self._items):
            self._head = {**self._head, "forked_from_id": find_copied(self._id, payload)}
        if kind == "turn_context":
            self._model = payload.get("model") or self._model
        if event in _TURN_ENDS:
            yield from self._close()
            yield from self._write_last()
        self._is_counting = self._is_counting or event in _TURN_STARTS
        if event == "collab_agent_spawn_end":
            self._link_subagent(to_text(payload.get("new_thread_id")), payload.get("call_id"))
        self.session.count_other(payload.get("type") if kind == "response_item" else kind, event)

    def _take_item(self, item: Object, record: Object, now_ns: int) -> Iterator[Span]:
        is_copied = self._is_copied(item, record)
        kind = str(item.get("type") or "message")
        messages: Messages = read_items([_name_tool(item, kind)])
        is_made = all(item["role"] == "assistant" for item in messages) and kind not in _SUMMARIES
        if is_made and not is_copied:
            yield from self._extend_answer(messages, kind, now_ns)
            return
        yield from self._close()
        if _is_prompt(item):
            yield from self._write_last()
            self._usage = {}
            self._prompts.append((self._previous, self._said, len(self._said)))
            texts = [{**part} for part in list_parts(messages, "text")]
            self._words.append([message("user", texts)])
            self._begin_task(item, messages)
        elif not (self._words or is_made):
            self._note_context(messages)
        if is_made and self._said and self._said[-1]["role"] == "assistant":
            self._said[-1]["parts"] += [part for item in messages for part in item["parts"]]
        else:
            self._said += messages
        self._said_ns = now_ns
        for part in list_parts(messages, "tool_call_response"):
            start_ns, call = self._calls.pop(part.get("id"), (0, None))
            if call is None:
                continue
            if call.get("name") == _SPAWN:
                output = object_of(parse_json(part.get("response")))
                for name in ("agent_id", "task_name"):
                    self._link_subagent(to_text(output.get(name)), part.get("id"))
            yield self.session.make_tool(
                self._agent_id, (min(start_ns, now_ns), now_ns), call, part.get("response")
            )

    def _extend_answer(self, messages: Messages, kind: str, now_ns: int) -> Iterator[Span]:
        if self._answer and self._answer.is_counted:  # what comes is the next answer
            yield from self._close()
        for part in list_parts(messages, "tool_call"):
            self._calls[part.get("id")] = now_ns, part
            if part.get("name") == _SPAWN:
                task = object_of(part.get("arguments")).get("message")
                self._link_subagent(("task", task), part.get("id"))
        if (answer := self._answer) is None:
            answer = self._answer = _CodexAnswer(
                self._model, self._said_ns or self._agent.start_ns, now_ns,
                [message("assistant", [])], self._previous, self._said, self._usage,
            )  # fmt: skip
            self._said, self._usage = [], {}
        for item in messages:
            answer.messages[0]["parts"] += item["parts"]
        answer.end_ns, answer.is_message = now_ns, kind == "message"
        answer.end = len(self._items)

    def _is_copied(self, item: Object, record: Object) -> bool:
        head = self._head
        if not self._items:
            self._source = self._links.items.get(find_origin(head), [])
            self._links.items[self._id] = self._items
        text = json_text(item).encode("utf-8", "replace")
        self._items.append(blake2b(text, digest_size=8).hexdigest())
        number = len(self._items)
        if self._source[number - 1 : number] == self._items[-1:]:
            return True
        self._source = []
        start, ordinal = head.get("subagent_history_start_ordinal"), record.get("ordinal")
        is_earlier = bool(find_origin(head)) and self.session.clock_ns < self._begun_ns
        return is_earlier or (
            isinstance(start, int) and isinstance(ordinal, int) and ordinal < start
        )

    def _begin_task(self, item: Object, messages: Messages) -> None:
        attributes = self._agent.attributes
        if c.TASK not in attributes:
            attributes[c.TASK] = json_text(item.get("content"))
            texts = [part.get("content") for part in list_parts(messages, "text")]
            self._agent.origins += [(self.session.id, ("task", text)) for text in texts]

    def _link_subagent(self, key: Hashable, call_id: object) -> None:
        if isinstance(call_id, str):
            self._links.add_tool((self.session.id, key), call_id)

    def _take_usage(self, info: Object) -> None:
        """Count the tokens of an answer; they stand behind its items, its tools or before it."""
        usage, total = object_of(info.get("last_token_usage")), info.get("total_token_usage")
        if not usage or (total and total == self._total):
            return
        self._total, self._is_counting = total, True
        counts = {key: usage.get(name) for key, name in _COUNTS.items()}
        if (answer := self._answer) is not None:
            if not answer.is_counted:  # a second one is a compaction's
                answer.usage, answer.is_counted = counts, True
        elif self._last is not None and not self._last.usage:
            self._last.usage = counts
        else:
            self._usage = counts

    def _roll_back(self, count: object) -> None:
        """Go back to before the latest prompts; of more than are known to before the first."""
        if isinstance(count, int) and count > 0:
            del self._words[-count:]
        if isinstance(count, int) and count > 0 and self._prompts:
            first = max(0, len(self._prompts) - count)
            self._previous, message, length = self._prompts[first]
            self._said = message[:length]
            del self._prompts[first:]

    def _close(self) -> Iterator[Span]:
        if (answer := self._answer) is None:
            return
        yield from self._write_last()
        self._answers += 1
        answer.response_id = self._previous = f"{self._id}/{self._answers}"
        self._answer, self._last = None, answer

    def _write_last(self) -> Iterator[Span]:
        if (answer := self._last) is None:
            return
        self._last = None
        attributes = {
            c.PROVIDER: self._head.get("model_provider") or "openai",
            c.REQUEST_MODEL: answer.model, **answer.usage,
            ITEMS: " ".join(self._items[self._written : answer.end]),
        }  # fmt: skip
        self._written = answer.end
        yield self.session.make_call(
            self._agent_id, (min(answer.said_ns, answer.end_ns), answer.end_ns),
            response_id=answer.response_id, previous_id=answer.previous_id, messages=answer.said,
            answer=answer.messages, attributes=attributes,
        )  # fmt: skip


def find_origin(head: Object) -> str:
    """Return the session whose items another may have copied; empty for none."""
    return str(head.get("forked_from_id") or _find_parent(head)[1] or "")


def find_copied(own_id: str, head: Object) -> str | None:
    """Return the session of a second head, with which old forks begin what they copied."""
    return str(head["id"]) if head.get("id") not in (None, own_id) else None


def _find_parent(head: Object) -> tuple[Object, object]:
    spawn = object_of(object_of(head.get("source")).get("subagent"))
    spawn = object_of(spawn.get("thread_spawn"))
    return spawn, head.get("parent_thread_id") or spawn.get("parent_thread_id")


def _name_tool(item: Object, kind: str) -> Object:
    call_id = item.get("call_id") or (item.get("id") if kind == "local_shell_call" else None)
    if kind.endswith("_call") and call_id and kind not in _CALLS:
        arguments = item.get("action", item.get("arguments", item.get("input")))
        name = kind.removesuffix("_call")
        return {"type": "function_call", "name": name, "call_id": call_id, "arguments": arguments}
    if kind.endswith("_output") and "output" not in item:
        return {**item, "output": item.get("tools")}
    return item


def _is_prompt(item: Object) -> bool:
    if item.get("type") == "agent_message":
        return True
    content = item.get("content")
    texts = [content] if isinstance(content, str) else [p.get("text") for p in objects(content)]
    starts = [text.lstrip()[:40].lower() for text in texts if isinstance(text, str)]
    return item.get("role") == "user" and not any(start.startswith(_CONTEXT) for start in starts)
