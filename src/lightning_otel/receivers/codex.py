"""Sessions of Codex: items of the Responses API in the order in which they were said."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from lightning_otel.messages import message, object_of, read_items, text_part
from lightning_otel.receivers.otlp import Object
from lightning_otel.receivers.sessions import Messages, Session, list_parts
from lightning_otel.types import Span
from lightning_otel.types import conventions as c
from lightning_otel.types.values import json_text

NAME: Final = "codex"
_AGENT: Final = ""
_ABOUT: Final = ("cwd", "cli_version", "originator")
_COUNTS: Final = {
    c.INPUT_TOKENS: "input_tokens", c.OUTPUT_TOKENS: "output_tokens",
    c.CACHED_TOKENS: "cached_input_tokens", c.REASONING_TOKENS: "reasoning_output_tokens",
}  # fmt: skip


class Codex:
    """Reads the records of a session.

    Attributes:
        session_id: Of the session; answers are told by it and their number, as no record has their
            ids.
    """

    def __init__(self, session_id: str, head: Object) -> None:
        self._session = Session(NAME, session_id)
        self._id = session_id
        self._head = head
        self._model: object = None
        self._previous: str | None = None
        self._said: Messages = self._instruct()
        self._made: Messages = []
        self._answers = 0
        self._usage: dict[str, Any] = {}
        self._total: object = None
        self._last: dict[str, Any] | None = None
        self._said_ns = self._made_ns = 0
        self._start_ns = 0
        self._prompts: list[str | None] = []
        self._calls: dict[object, tuple[int, Object]] = {}
        self._task: str | None = None

    def feed(self, record: Object) -> Iterator[Span]:
        """Return the spans that a record completes."""
        kind, payload = str(record.get("type")), object_of(record.get("payload"))
        now_ns = self._session.read_time(record)
        self._start_ns = self._start_ns or now_ns
        if kind == "response_item":
            yield from self._take_item(payload, record, now_ns)
        elif kind == "event_msg" and payload.get("type") == "token_count":
            self._take_usage(object_of(payload.get("info")))
        elif kind == "event_msg" and payload.get("type") == "thread_rolled_back":
            yield from self._close()
            self._roll_back(payload.get("num_turns"))
        elif kind == "compacted":
            yield from self._close()
            history = payload.get("replacement_history") or [
                {"role": "user", "content": payload.get("message")}
            ]
            self._previous, self._said = None, [*self._instruct(), *read_items(history)]
        else:
            self._model = payload.get("model") or self._model
            inner = payload.get("type") if kind == "event_msg" else None
            self._session.others[f"{kind}/{inner}" if inner else kind] += 1

    def flush(self, *, is_over: bool = True) -> Iterator[Span]:
        """Return the latest answer, and the agent as far as it is known."""
        if is_over or self._usage:
            yield from self._close()
            yield from self._write_last()
        if not is_over:
            return
        about = {f"{NAME}.{name}": self._head.get(name) for name in _ABOUT}
        times_ns = self._start_ns or self._session.clock_ns, self._session.clock_ns
        attributes = {**about, c.TASK: self._task}
        yield self._session.make_agent(_AGENT, NAME, times_ns, None, attributes)

    def _instruct(self) -> Messages:
        given = self._head.get("base_instructions") or self._head.get("instructions")
        text = object_of(given).get("text", given)
        return [message("system", [text_part(text)])] if isinstance(text, str) else []

    def _take_item(self, item: Object, record: Object, now_ns: int) -> Iterator[Span]:
        messages: Messages = read_items([item])
        if all(each["role"] == "assistant" for each in messages):
            start = self._head.get("subagent_history_start_ordinal")
            ordinal = record.get("ordinal")
            if isinstance(start, int) and isinstance(ordinal, int) and ordinal < start:
                self._said += messages  # its parent's answer, and no call of its own
                return
            if self._made and self._usage:  # it was counted: what comes is the next answer
                yield from self._close()
            for part in list_parts(messages, "tool_call"):
                self._calls[part.get("id")] = now_ns, part
            self._made, self._made_ns = read_items([*self._made, *messages]), now_ns
            return
        yield from self._close()
        if item.get("role") == "user":
            self._prompts.append(self._previous)
            self._task = self._task or json_text(item.get("content"))
        self._said += messages
        self._said_ns = now_ns
        for part in list_parts(messages, "tool_call_response"):
            start_ns, call = self._calls.get(part.get("id"), (0, None))
            if call is not None:
                yield self._session.make_tool(
                    _AGENT, NAME, (min(start_ns, now_ns), now_ns), call, part.get("response")
                )

    def _take_usage(self, info: Object) -> None:
        """Count the tokens of an answer; they stand behind its items, its tools or before it."""
        usage, total = object_of(info.get("last_token_usage")), info.get("total_token_usage")
        if not usage or (total and total == self._total):
            return
        self._total = total
        counts = {key: usage.get(name) for key, name in _COUNTS.items()}
        if not self._made and self._last and not self._last["usage"]:
            self._last["usage"] = counts
        else:
            self._usage = counts

    def _roll_back(self, count: object) -> None:
        """Go back to before the latest prompts; what stood before the first is said anew."""
        if isinstance(count, int) and 0 < count <= len(self._prompts):
            self._previous = self._prompts[-count]
            del self._prompts[-count:]
            self._said = [] if self._previous else self._instruct()

    def _close(self) -> Iterator[Span]:
        """End the answer whose items came; yield the call before it."""
        if not self._made:
            return
        yield from self._write_last()
        self._answers += 1
        response_id = f"{self._id}/{self._answers}"
        self._last = {
            "times_ns": (min(self._said_ns or self._start_ns, self._made_ns), self._made_ns),
            "response_id": response_id, "previous_id": self._previous, "messages": self._said,
            "answer": self._made, "model": self._model, "usage": self._usage,
        }  # fmt: skip
        self._previous, self._said, self._made, self._usage = response_id, [], [], {}

    def _write_last(self) -> Iterator[Span]:
        if (call := self._last) is None:
            return
        self._last = None
        attributes = {
            c.PROVIDER: self._head.get("model_provider") or "openai",
            c.REQUEST_MODEL: call.pop("model"), **call.pop("usage"),
        }  # fmt: skip
        times_ns = call.pop("times_ns")
        yield self._session.make_call(_AGENT, NAME, times_ns, **call, attributes=attributes)
