"""The wire format of ``/responses``.

Source: OpenAI's API reference for responses; its streams end with an event that holds the whole
answer, so only a stream that was left early is put together from its pieces.
"""

from collections.abc import Sequence
from typing import Any, Final

from lightning_otel import conventions as c
from lightning_otel.adapter.tokens import token_content
from lightning_otel.instrumentors.openai import fields
from lightning_otel.instrumentors.openai.fields import Attributes, Json
from lightning_otel.instrumentors.reading import token_counts
from lightning_otel.messages import called_part, content_parts, object_of, objects, read_items

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


def request_attributes(body: Json) -> Attributes:
    """Attributes of the request."""
    found: Attributes = {c.OPENAI_API: "responses", **fields.request_scalars(body)}
    wanted = object_of(object_of(body.get("text")).get("format"))
    found.update(fields.output_type(wanted.get("type")))
    effort = object_of(body.get("reasoning")).get("effort")
    if isinstance(effort, str):
        found[c.REQUEST_REASONING_LEVEL] = effort
    found.update(_conversation_id(body))
    return found


def _conversation_id(body: Json) -> Attributes:
    conversation = body.get("conversation")
    held = conversation.get("id") if isinstance(conversation, dict) else conversation
    return {c.CONVERSATION_ID: held} if isinstance(held, str) else {}


def request_content(body: Json) -> dict[str, str]:
    """Instructions, messages and tools of the request."""
    given = body.get("input")
    messages = read_items([given] if isinstance(given, str) else objects(given), call=called_part)
    content = {c.INPUT_MESSAGES: fields.dump(messages)}
    instructions = content_parts(body.get("instructions"))
    if instructions:
        content[c.SYSTEM_INSTRUCTIONS] = fields.dump(instructions)
    tools = fields.tool_definitions(body.get("tools"))
    if tools:
        content[c.TOOL_DEFINITIONS] = tools
    return content


def response_attributes(body: Json) -> Attributes:
    """Attributes of the answer."""
    found = {
        **fields.response_scalars(body),
        **token_counts(body.get("usage")),
        **_conversation_id(body),
    }
    reason = _finish_reason(body)
    if reason:
        found[c.FINISH_REASONS] = [reason]
    return found


def _finish_reason(body: Json) -> str | None:
    """The conventions' finish reason, which this API says by status and kind of output."""
    status = body.get("status")
    if status == "completed":
        called = any(item.get("type") in _CALLS for item in objects(body.get("output")))
        return "tool_calls" if called else "stop"
    if status == "incomplete":
        why = object_of(body.get("incomplete_details")).get("reason")
        return "length" if why == "max_output_tokens" else str(why or "length")
    return "error" if status == "failed" else None


def response_content(body: Json) -> dict[str, str]:
    """The answer as one message; token ids and logprobs where an engine gives them."""
    output = objects(body.get("output"))
    messages = read_items(output, "assistant", called_part)
    reason = _finish_reason(body)
    if messages and reason:
        messages[-1]["finish_reason"] = reason
    logprobs = [
        token.get("logprob")
        for item in output
        for part in objects(item.get("content"))
        for token in objects(part.get("logprobs"))
    ]
    return {
        c.OUTPUT_MESSAGES: fields.dump(messages),
        **token_content(body.get("prompt_token_ids"), [body.get("token_ids")], [logprobs]),
    }


def is_complete(events: Sequence[Json]) -> bool:
    """Return whether the event that closes an answer came."""
    return any(event.get("type") in _FINAL for event in reversed(events))


def assemble(events: Sequence[Json]) -> Json:
    """The whole answer: the closing event's, else what the pieces so far add up to."""
    whole: dict[str, Any] = {}
    items: dict[int, Json] = {}
    texts: dict[int, list[str]] = {}
    for event in events:
        kind, index = event.get("type"), event.get("output_index")
        whole.update(object_of(event.get("response")))
        if kind == "error" or isinstance(event.get("error"), dict):
            whole["error"] = event.get("error") or {**event, "type": event.get("code")}
        elif isinstance(index, int):
            items[index] = object_of(event.get("item")) or items.get(index, {})
            if kind in _DELTAS and isinstance(event.get("delta"), str):
                texts.setdefault(index, []).append(event["delta"])
    if not is_complete(events):
        whole["output"] = [
            _unfinished_item(items[index], "".join(texts.get(index, ()))) for index in sorted(items)
        ]
    return whole


def _unfinished_item(item: Json, text: str) -> Json:
    """An output item with what came of it; one that is done has it all."""
    if item.get("status") == "completed" or not text:
        return item
    if item.get("type") in _CALLS:
        return {**item, "arguments": text}
    part = {"type": "output_text", "text": text}
    return {"type": "message", "role": "assistant", **item, "content": [part]}
