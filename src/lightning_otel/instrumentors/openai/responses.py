"""The wire format of ``/responses``.

Source: OpenAI's API reference for responses; its streams end with an event that holds the whole
answer, so only a stream that was left early is put together from its pieces.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Final

from lightning_otel import conventions as c
from lightning_otel.adapter.messages import (
    message,
    reasoning_part,
    tool_response_part,
)
from lightning_otel.instrumentors.openai import fields
from lightning_otel.instrumentors.openai.fields import Attributes, Json

OPERATION: Final = c.CHAT

_FINAL: Final = ("response.completed", "response.incomplete", "response.failed")
_DELTAS: Final = frozenset(
    {
        "response.output_text.delta",
        "response.function_call_arguments.delta",
        "response.custom_tool_call_input.delta",
    }
)
_CALLS: Final = ("function_call", "custom_tool_call")
_RESULTS: Final = ("function_call_output", "custom_tool_call_output")


def request_attributes(body: Json) -> Attributes:
    """Attributes of the request."""
    found: Attributes = {c.OPENAI_API: "responses", **fields.request_scalars(body)}
    wanted = fields.object_of(fields.object_of(body.get("text")).get("format"))
    found.update(fields.output_type(wanted.get("type")))
    effort = fields.object_of(body.get("reasoning")).get("effort")
    if isinstance(effort, str):
        found[c.REQUEST_REASONING_LEVEL] = effort
    found.update(_conversation(body))
    return found


def _conversation(body: Json) -> Attributes:
    conversation = body.get("conversation")
    held = conversation.get("id") if isinstance(conversation, dict) else conversation
    return {c.CONVERSATION_ID: held} if isinstance(held, str) else {}


def request_content(body: Json) -> dict[str, str]:
    """Instructions, messages and tools of the request."""
    given = body.get("input")
    messages = (
        [message("user", fields.content_parts(given))]
        if isinstance(given, str)
        else _messages(fields.objects(given))
    )
    content = {c.INPUT_MESSAGES: fields.dump(messages)}
    instructions = fields.content_parts(body.get("instructions"))
    if instructions:
        content[c.SYSTEM_INSTRUCTIONS] = fields.dump(instructions)
    tools = fields.tool_definitions(body.get("tools"))
    if tools:
        content[c.TOOL_DEFINITIONS] = tools
    return content


def _messages(items: Iterable[Json]) -> list[dict[str, Any]]:
    """Input or output items as messages; what one turn of the model made is one message."""
    messages: list[dict[str, Any]] = []
    for item in items:
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
        return "assistant", [fields.tool_call(call_id, item.get("name"), arguments)]
    if kind in _RESULTS:
        return "tool", [tool_response_part(item.get("call_id"), item.get("output"))]
    if kind == "reasoning":
        pieces = fields.objects(item.get("summary")) + fields.objects(item.get("content"))
        text = "\n".join(str(piece.get("text", "")) for piece in pieces)
        return "assistant", [reasoning_part(text)] if text else []
    return "assistant", [{**item, "type": f"openai.{kind}"}]


def response_attributes(body: Json) -> Attributes:
    """Attributes of the answer."""
    found = {**fields.response_scalars(body), **fields.usage(body), **_conversation(body)}
    reason = _finish_reason(body)
    if reason:
        found[c.FINISH_REASONS] = [reason]
    return found


def _finish_reason(body: Json) -> str | None:
    """The conventions' finish reason, which this API says by status and kind of output."""
    status = body.get("status")
    if status == "completed":
        called = any(item.get("type") in _CALLS for item in fields.objects(body.get("output")))
        return "tool_calls" if called else "stop"
    if status == "incomplete":
        why = fields.object_of(body.get("incomplete_details")).get("reason")
        return "length" if why == "max_output_tokens" else str(why or "length")
    return "error" if status == "failed" else None


def response_content(body: Json) -> dict[str, str]:
    """The answer as one message; token ids and logprobs where an engine gives them."""
    output = fields.objects(body.get("output"))
    messages = _messages(output)
    reason = _finish_reason(body)
    if messages and reason:
        messages[-1]["finish_reason"] = reason
    logprobs = [
        token.get("logprob")
        for item in output
        for part in fields.objects(item.get("content"))
        for token in fields.objects(part.get("logprobs"))
    ]
    return {
        c.OUTPUT_MESSAGES: fields.dump(messages),
        **fields.token_content(body.get("prompt_token_ids"), [body.get("token_ids")], [logprobs]),
    }


def is_complete(events: Sequence[Json]) -> bool:
    """Whether the event that closes an answer came."""
    return any(event.get("type") in _FINAL for event in reversed(events))


def assemble(events: Sequence[Json]) -> Json:
    """The whole answer: the closing event's, else what the pieces so far add up to."""
    whole: dict[str, Any] = {}
    items: dict[int, dict[str, Any]] = {}
    texts: dict[int, list[str]] = {}
    for event in events:
        kind, index = event.get("type"), event.get("output_index")
        whole.update(fields.object_of(event.get("response")))
        if kind == "error" or isinstance(event.get("error"), dict):
            whole["error"] = event.get("error") or {**event, "type": event.get("code")}
        elif isinstance(index, int):
            items[index] = fields.object_of(event.get("item")) or items.get(index, {})
            if kind in _DELTAS and isinstance(event.get("delta"), str):
                texts.setdefault(index, []).append(event["delta"])
    if not is_complete(events):
        whole["output"] = [
            _unfinished(items[index], "".join(texts.get(index, ()))) for index in sorted(items)
        ]
    return whole


def _unfinished(item: Json, text: str) -> Json:
    """An output item with what came of it; one that is done has it all."""
    if item.get("status") == "completed" or not text:
        return item
    if item.get("type") in _CALLS:
        return {**item, "arguments": text}
    part = {"type": "output_text", "text": text}
    return {"type": "message", "role": "assistant", **item, "content": [part]}
