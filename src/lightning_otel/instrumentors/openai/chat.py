"""The wire format of ``/chat/completions``, with vLLM's token ids.

Source: OpenAI's API reference for chat completions; vLLM's ``return_token_ids``: prompt ids at the
top level (in a stream on its first chunk), sampled ids on each choice.
"""

from collections.abc import Mapping
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


def request_attributes(body: Json) -> Attributes:
    """Attributes of the request."""
    wanted = body.get("response_format")
    kind = wanted.get("type") if isinstance(wanted, Mapping) else None
    return {
        c.OPENAI_API: "chat_completions",
        **fields.request_scalars(body),
        **fields.output_type(kind),
    }


def request_content(body: Json) -> dict[str, str]:
    """Messages and tools of the request."""
    given = body.get("messages") or ()
    messages = [_message(item) for item in given if isinstance(item, Mapping)]
    content = {c.INPUT_MESSAGES: fields.dump(messages)}
    tools = fields.tool_definitions(body.get("tools"))
    if tools:
        content[c.TOOL_DEFINITIONS] = tools
    return content


def _message(item: Json) -> dict[str, Any]:
    role = str(item.get("role", ""))
    if role == "tool":
        return message(role, [tool_response_part(item.get("tool_call_id"), item.get("content"))])
    return message(role, _parts(item), name=item.get("name"))


def _parts(item: Json) -> list[dict[str, Any]]:
    """Reasoning, content, refusal and tool calls of a message, in that order."""
    parts = []
    reasoning = item.get("reasoning_content") or item.get("reasoning")
    if isinstance(reasoning, str):
        parts.append(reasoning_part(reasoning))
    parts += fields.content_parts(item.get("content"))
    if isinstance(item.get("refusal"), str):
        parts.append({"type": "refusal", "content": item["refusal"]})
    for call in item.get("tool_calls") or ():
        function = call.get("function") or call.get("custom") or {}
        arguments = function.get("arguments", function.get("input"))
        parts.append(tool_call_part(call.get("id"), function.get("name"), arguments))
    return parts


def response_attributes(body: Json) -> Attributes:
    """Attributes of the answer."""
    reasons = [
        reason
        for choice in _choices(body)
        if isinstance(reason := choice.get("finish_reason"), str)
    ]
    found = {**fields.response_scalars(body), **fields.usage(body)}
    if reasons:
        found[c.FINISH_REASONS] = reasons
    return found


def response_content(body: Json) -> dict[str, str]:
    """Messages, token ids and logprobs of the answer."""
    choices = _choices(body)
    messages = [
        message(
            str((choice.get("message") or {}).get("role") or "assistant"),
            _parts(choice.get("message") or {}),
            finish_reason=choice.get("finish_reason"),
        )
        for choice in choices
    ]
    return {
        c.OUTPUT_MESSAGES: fields.dump(messages),
        **fields.token_content(
            body.get("prompt_token_ids"),
            [choice.get("token_ids") for choice in choices],
            [_logprobs(choice) for choice in choices],
        ),
    }


def _choices(body: Json) -> list[Json]:
    return [choice for choice in body.get("choices") or () if isinstance(choice, Mapping)]


def _logprobs(choice: Json) -> list[float] | None:
    held = choice.get("logprobs") or {}
    tokens = (held.get("content") or []) + (held.get("refusal") or [])
    return [token["logprob"] for token in tokens] or None


def is_complete(events: list[Json]) -> bool:
    """Whether the stream said so, or every choice has its finish reason."""
    if any(event.get("done") for event in events[-1:]):
        return True
    open_choices: dict[int, bool] = {}
    for event in events:
        for choice in _choices(event):
            index = choice.get("index", 0)
            open_choices[index] = open_choices.get(index, True) and not choice.get("finish_reason")
    return bool(open_choices) and not any(open_choices.values())


def assemble(events: list[Json]) -> Json:
    """The answer that the chunks add up to."""
    whole: dict[str, Any] = {}
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        for name, value in event.items():
            if name not in ("choices", "done", "object") and value is not None:
                whole[name] = value
        for delta in _choices(event):
            _extend(choices.setdefault(delta.get("index") or 0, {}), delta)
    whole["choices"] = [choices[index] for index in sorted(choices)]
    return whole


def _extend(choice: dict[str, Any], chunk: Json) -> None:
    for name, value in chunk.items():
        if name == "delta":
            _extend_message(choice.setdefault("message", {}), value or {})
        elif name == "logprobs":
            held = choice.setdefault("logprobs", {})
            for kind, tokens in (value or {}).items():
                held[kind] = fields.extended(held.get(kind), tokens)
        else:
            choice[name] = (
                fields.extended(choice.get(name) if name == "token_ids" else None, value)
                if value is not None
                else choice.get(name)
            )


def _extend_message(held: dict[str, Any], delta: Json) -> None:
    for name, value in delta.items():
        if name == "tool_calls":
            for call in value or ():
                _extend_call(held.setdefault("tool_calls", []), call)
        elif name == "role":
            held["role"] = value or held.get("role")
        else:
            held[name] = fields.extended(held.get(name), value)


def _extend_call(calls: list[dict[str, Any]], delta: Json) -> None:
    """Add a tool call's piece to the call it belongs to: by index, else by id, else the last one."""
    index, call_id = delta.get("index"), delta.get("id")
    if not isinstance(index, int):
        known = [i for i, call in enumerate(calls) if call_id and call.get("id") == call_id]
        index = known[0] if known else len(calls) if call_id or not calls else len(calls) - 1
    while len(calls) <= index:
        calls.append({"function": {}})
    call = calls[index]
    for name in ("id", "type"):
        if delta.get(name):
            call[name] = delta[name]
    for name, value in (delta.get("function") or {}).items():
        call["function"][name] = fields.extended(call["function"].get(name), value)
