"""Conversations, and requests with their answers, in files of the chat API: model calls.

A row of ``messages``, as for fine-tuning, is a rollout in which each answer is a call. A request
beside its response is one call, read by the dialect of its path or form. Calls without a time stand
in 1970, in their order; equal rows are one.

Source: OpenAI's guides to fine-tuning and to its Batch API; TRL's conversational data sets;
LiteLLM's ``StandardLoggingPayload``.
"""

import math
from collections.abc import Iterator, Mapping
from hashlib import sha256
from typing import Any, Final

from lightning_otel.dialects import Dialect, find_dialect
from lightning_otel.messages import flatten_tools, object_of, objects
from lightning_otel.messages.exchanges import read_exchange, read_messages
from lightning_otel.receivers.builder import Builder, parse_time
from lightning_otel.receivers.otlp import TIMES, InvalidSpanError, Object
from lightning_otel.types import Span
from lightning_otel.types import conventions as c
from lightning_otel.types.values import json_text, parse_json, text_or_none, write_json

_REQUESTS: Final = ("request", "request_body", "requestBody")
_RESPONSES: Final = ("response", "response_body", "responseBody")
_QUESTIONS: Final = ("messages", "input", "contents", "prompt")
_PATHS: Final = ("url", "path", "endpoint")
_CONVERSATIONS: Final = ("conversation_id", "session_id", "trace_id", "rollout_id")
_STARTS: Final = ("start_time", "startTime", "timestamp", "created_at", "time")
_ENDS: Final = ("end_time", "endTime")
_SECONDS_UNTIL: Final = 1e11
"""A time above is in nanoseconds already."""
_FORMS: Final = (
    ("contents", "candidates", "/models/-:generateContent"),
    ("messages", "stop_reason", "/v1/messages"),
    ("messages", "choices", "/chat/completions"), ("input", "output", "/responses"),
    ("prompt", "choices", "/completions"), ("messages", "", "/chat/completions"),
    ("contents", "", "/models/-:generateContent"), ("input", "", "/responses"),
)  # fmt: skip
"""By a field of the request and one of the answer the path of a dialect."""
_NO_ANSWER: Final = "the conversation has no answer of the assistant to learn from"
_NAMED: Final = frozenset(
    {"messages", "prompt", "completion", "tools", "functions", "model", "reward",
     *_REQUESTS, *_RESPONSES, *_STARTS, *_ENDS}
)  # fmt: skip


def is_chat(row: Object) -> bool:
    """Return whether a row is a conversation, or a request with its response."""
    if {"chosen", "rejected"} <= row.keys():  # a preference
        return False
    if _are_messages(row.get("messages")):
        return True
    if _are_messages(row.get("prompt")) and _are_messages(row.get("completion")):
        return True
    request, response = _find_exchange(row)
    return response is not None and any(name in request for name in _QUESTIONS)


def read_row(row: Object) -> Iterator[Span]:
    """Yield the calls of a row, and its reward.

    Raises:
        InvalidSpanError: It cannot be kept.
    """
    digest = sha256(write_json(row)).hexdigest()
    ids = (row.get(name) for name in _CONVERSATIONS)
    trace = next((entry for entry in ids if isinstance(entry, str) and entry), digest)
    builder = Builder("chat", trace, {})
    extra = {f"chat.{name}": json_text(row[name]) for name in sorted(row.keys() - _NAMED)}
    request, response = _find_exchange(row)
    if response is None:
        calls = list(_read_conversation(row, builder, digest, extra))
    else:
        calls = [_read_exchange(row, request, response, builder, digest, extra)]
    if not calls:
        raise InvalidSpanError(_NO_ANSWER)
    yield from calls
    reward = parse_json(row.get("reward"))
    if isinstance(reward, (int, float)) and math.isfinite(reward):
        key, last = f"reward of {digest}", calls[-1]
        yield builder.make_reward(key, last.span_id, {c.PRIMARY_REWARD: reward}, last.start_ns)
    elif reward is not None:
        raise InvalidSpanError(f"reward is {json_text(reward)}, no number; the rest is kept")


def _are_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(
        isinstance(object_of(entry).get("role"), str) for entry in value
    )  # fmt: skip


def _read_conversation(
    row: Object, builder: Builder, digest: str, extra: Mapping[str, Any]
) -> Iterator[Span]:
    prompt = objects(row.get("prompt")) if "messages" not in row else []
    rows = [*prompt, *objects(row.get("messages") or row.get("completion"))]
    turns = read_messages(rows, "user")
    tools = flatten_tools(parse_json(row.get("tools") or row.get("functions")))
    start_ns, _ = _read_times(row, {})
    for place, (message, turn) in enumerate(zip(rows, turns, strict=True)):
        # An answer of weight 0 is history alone.
        if turn["role"] != "assistant" or message.get("weight") == 0 or place < len(prompt):
            continue
        attributes = {
            c.OPERATION: c.CHAT,
            c.REQUEST_MODEL: text_or_none(row.get("model")),
            c.INPUT_MESSAGES: json_text(turns[:place]),
            c.OUTPUT_MESSAGES: json_text([turn]),
            c.TOOL_DEFINITIONS: json_text(tools) if tools else None,
            **extra,
        }
        extra = {}
        times_ns = start_ns + 2 * place, start_ns + 2 * place + 1
        yield builder.make_span((digest, place), None, c.CHAT, *times_ns, attributes=attributes)


def _find_exchange(row: Object) -> tuple[Object, Any]:
    response = next((row[name] for name in _RESPONSES if row.get(name) is not None), None)
    value = next((row[name] for name in _REQUESTS if name in row), row)
    request = object_of(parse_json(value))
    return object_of(parse_json(request.get("body"))) or request, parse_json(response)


def _read_exchange(
    row: Object, request: Object, response: Any, builder: Builder, digest: str,
    extra: Mapping[str, Any],
) -> Span:  # fmt: skip
    places = (row, object_of(row.get("request")))
    path = next((value[name] for value in places for name in _PATHS if value.get(name)), "")
    inner = object_of(response)
    response = parse_json(inner.get("body")) if "body" in inner else response
    dialect = _find_dialect(str(path), request, response)
    start_ns, end_ns = _read_times(row, object_of(response))
    error: Any = row.get("error")
    if dialect is None or (isinstance(response, str) and "data:" not in response):
        turns = read_exchange(request, response)
        attributes: dict[str, Any] = {
            c.OPERATION: c.CHAT,
            c.REQUEST_MODEL: text_or_none(request.get("model")),
            c.INPUT_MESSAGES: json_text(turns.messages),
            c.OUTPUT_MESSAGES: json_text(turns.answer) if turns.answer else None,
            c.TOOL_DEFINITIONS: json_text(turns.tools) if turns.tools else None,
        }
    else:
        data = response.encode() if isinstance(response, str) else write_json(response)
        body = dialect.read_body(data).body
        error = error or dialect.error_of(body)
        attributes = {
            c.OPERATION: dialect.operation,
            c.PROVIDER: dialect.provider or None,
            c.REQUEST_MODEL: dialect.model_of(request, str(path)),
            **dialect.request_attributes(request), **dialect.request_content(request),
            **dialect.response_attributes(body), **dialect.response_content(body),
        }  # fmt: skip
    key = attributes.get(c.RESPONSE_ID) or digest
    name, attributes = str(attributes[c.OPERATION]), {**attributes, **extra}
    return builder.make_span(
        key, None, name, start_ns, end_ns, attributes=attributes,
        status="ERROR" if error else "OK", status_message=json_text(error) if error else "",
    )  # fmt: skip


def _find_dialect(path: str, request: Object, response: Any) -> Dialect | None:
    match = find_dialect("POST", path) if path else None
    answer = object_of(response)
    forms = (
        find_dialect("POST", place)
        for question, answered, place in _FORMS
        if question in request and (answered in answer or not answered)
    )
    return match or next(forms, None)


def _read_times(row: Object, response: Object) -> tuple[int, int]:
    """Return when a call began and ended; 1 and 2 where nothing says it."""
    start = _first_time(row, _STARTS) or _first_time(response, ("created", "created_at"))
    start = start if start in TIMES else TIMES.start
    end = _first_time(row, _ENDS)
    return start, end if end in TIMES and end > start else start + 1


def _first_time(row: Object, names: tuple[str, ...]) -> int:
    value = next((row[name] for name in names if row.get(name)), None)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return int(value * 1_000_000_000) if value < _SECONDS_UNTIL else int(value)
    return parse_time(value) if isinstance(value, str) else 0
