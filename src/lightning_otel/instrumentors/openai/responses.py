"""The wire format of ``/responses``.

Source: OpenAI's API reference for responses; its streams end with an event that holds the whole
answer, so only a stream that was left early is put together from its pieces.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from lightning_otel import conventions as c
from lightning_otel.adapter.messages import (
    message,
    reasoning_part,
    tool_call_part,
    tool_response_part,
)
from lightning_otel.instrumentors.openai import fields
from lightning_otel.instrumentors.openai.fields import Attributes, Json

OPERATION: Final = c.CHAT

_FINAL: Final = ("response.completed", "response.incomplete", "response.failed")
_CALLS: Final = ("function_call", "custom_tool_call")
_RESULTS: Final = ("function_call_output", "custom_tool_call_output")


def request_attributes(body: Json) -> Attributes:
    """Attributes of the request."""
    found: Attributes = {c.OPENAI_API: "responses", **fields.request_scalars(body)}
    text = body.get("text")
    wanted = text.get("format") if isinstance(text, Mapping) else None
    if isinstance(wanted, Mapping):
        found.update(fields.output_type(wanted.get("type")))
    reasoning = body.get("reasoning")
    if isinstance(reasoning, Mapping) and isinstance(reasoning.get("effort"), str):
        found[c.REQUEST_REASONING_LEVEL] = reasoning["effort"]
    conversation = body.get("conversation")
    conversation_id = conversation.get("id") if isinstance(conversation, Mapping) else conversation
    if isinstance(conversation_id, str):
        found[c.CONVERSATION_ID] = conversation_id
    return found


def request_content(body: Json) -> dict[str, str]:
    """Instructions, messages and tools of the request."""
    given = body.get("input")
    messages = (
        [message("user", fields.content_parts(given))]
        if isinstance(given, str)
        else _messages(given or ())
    )
    content = {c.INPUT_MESSAGES: fields.dump(messages)}
    instructions = body.get("instructions")
    if instructions:
        content[c.SYSTEM_INSTRUCTIONS] = fields.dump(fields.content_parts(instructions))
    tools = fields.tool_definitions(body.get("tools"))
    if tools:
        content[c.TOOL_DEFINITIONS] = tools
    return content


def _messages(items: Iterable[Any]) -> list[dict[str, Any]]:
    """Input or output items as messages; what one turn of the model made is one message."""
    messages: list[dict[str, Any]] = []
    for item in items:
        if not isinstance(item, Mapping):
            continue
        role, parts = _item(item)
        is_same_turn = messages and role == "assistant" and messages[-1]["role"] == role
        if is_same_turn:
            messages[-1]["parts"] += parts
        else:
            messages.append(message(role, parts))
    return messages


def _item(item: Json) -> tuple[str, list[dict[str, Any]]]:
    kind = item.get("type", "message")
    if kind == "message":
        return str(item.get("role", "user")), fields.content_parts(item.get("content"))
    if kind in _CALLS:
        arguments = item.get("arguments", item.get("input"))
        call_id = item.get("call_id") or item.get("id")
        return "assistant", [tool_call_part(call_id, item.get("name"), arguments)]
    if kind in _RESULTS:
        return "tool", [tool_response_part(item.get("call_id"), item.get("output"))]
    if kind == "reasoning":
        pieces = [*(item.get("summary") or ()), *(item.get("content") or ())]
        text = "\n".join(str(piece.get("text", "")) for piece in pieces)
        return "assistant", [reasoning_part(text)] if text else []
    return "assistant", [{**item, "type": f"openai.{kind}"}]


def response_attributes(body: Json) -> Attributes:
    """Attributes of the answer."""
    found = {**fields.response_scalars(body), **fields.usage(body)}
    reason = _finish_reason(body)
    if reason:
        found[c.FINISH_REASONS] = [reason]
    conversation = body.get("conversation")
    if isinstance(conversation, Mapping) and isinstance(conversation.get("id"), str):
        found[c.CONVERSATION_ID] = conversation["id"]
    return found


def _finish_reason(body: Json) -> str | None:
    """The conventions' finish reason, which this API says by status and kind of output."""
    status = body.get("status")
    if status == "completed":
        called = any(item.get("type") in _CALLS for item in body.get("output") or ())
        return "tool_calls" if called else "stop"
    if status == "incomplete":
        why = (body.get("incomplete_details") or {}).get("reason")
        return "length" if why == "max_output_tokens" else str(why or "length")
    return "error" if status == "failed" else None


def response_content(body: Json) -> dict[str, str]:
    """The answer as one message; token ids and logprobs where an engine gives them."""
    output = [item for item in body.get("output") or () if isinstance(item, Mapping)]
    messages = _messages(output)
    reason = _finish_reason(body)
    if messages and reason:
        messages[-1]["finish_reason"] = reason
    logprobs = [
        token["logprob"]
        for item in output
        for part in item.get("content") or ()
        if isinstance(part, Mapping)
        for token in part.get("logprobs") or ()
    ]
    return {
        c.OUTPUT_MESSAGES: fields.dump(messages),
        **fields.token_content(
            body.get("prompt_token_ids"), [body.get("token_ids")], [logprobs or None]
        ),
    }


def is_complete(events: list[Json]) -> bool:
    """Whether the event that closes an answer came."""
    return any(event.get("type") in _FINAL for event in reversed(events))


def assemble(events: list[Json]) -> Json:
    """The whole answer: the closing event's, else what the pieces so far add up to."""
    for event in reversed(events):
        if event.get("type") in _FINAL and isinstance(event.get("response"), Mapping):
            return dict(event["response"])
        if event.get("type") == "error":
            return {"error": event}
        if isinstance(event.get("error"), Mapping):
            return {"error": event["error"]}
    whole: dict[str, Any] = {}
    items: dict[int, dict[str, Any]] = {}
    for event in events:
        if isinstance(event.get("response"), Mapping):
            whole.update(event["response"])
        _extend(items, event)
    whole["output"] = [items[index] for index in sorted(items)]
    return whole


def _extend(items: dict[int, dict[str, Any]], event: Json) -> None:
    kind = event.get("type")
    index = event.get("output_index", 0)
    if kind in ("response.output_item.added", "response.output_item.done"):
        items[index] = dict(event.get("item") or {})
    elif kind == "response.output_text.delta":
        item = items.setdefault(index, {"type": "message", "role": "assistant"})
        parts = item.setdefault("content", [])
        if not parts:
            parts = item["content"] = [{"type": "output_text", "text": ""}]
        parts[-1]["text"] = parts[-1].get("text", "") + str(event.get("delta", ""))
    elif kind == "response.function_call_arguments.delta":
        item = items.setdefault(index, {"type": "function_call"})
        item["arguments"] = (item.get("arguments") or "") + str(event.get("delta", ""))
