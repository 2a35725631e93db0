"""What the SDK knows of a call, read into attributes and messages.

Requests and answers come as items of the Responses API or as chat messages, as plain objects or the
client's own classes; whatever they are, only plain copies of them are read.
"""

import contextlib
import json
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import orjson
from opentelemetry.util.types import AttributeValue

from lightning_otel import conventions as c
from lightning_otel.adapter.messages import (
    message,
    reasoning_part,
    text_part,
    tool_call_part,
    tool_response_part,
)
from lightning_otel.instrumentors.content import text_of

_SETTINGS: Final = {
    "temperature": c.REQUEST_TEMPERATURE,
    "top_p": c.REQUEST_TOP_P,
    "frequency_penalty": c.REQUEST_FREQUENCY_PENALTY,
    "presence_penalty": c.REQUEST_PRESENCE_PENALTY,
}
_USAGE: Final = {
    "input_tokens": c.INPUT_TOKENS,
    "prompt_tokens": c.INPUT_TOKENS,
    "output_tokens": c.OUTPUT_TOKENS,
    "completion_tokens": c.OUTPUT_TOKENS,
}
_CALLS: Final = ("function_call", "custom_tool_call")
_TEXTS: Final = ("text", "input_text", "output_text", "summary_text", "reasoning_text")
_PLACEHOLDER_ID: Final = "__fake_id__"
"""The SDK's id for answers that have none."""

Json = Mapping[str, Any]


class Reading(NamedTuple):
    """What was read: attributes, and content to keep beside the span."""

    attributes: dict[str, AttributeValue]
    content: dict[str, str]


def of_request(request: Mapping[str, Any]) -> Reading:
    """What a model was asked, of the arguments it was asked with."""
    settings = request.get("model_settings")
    attributes: dict[str, AttributeValue] = {}
    for name, key in _SETTINGS.items():
        value = getattr(settings, name, None)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            attributes[key] = float(value)
    limit = getattr(settings, "max_tokens", None)
    if isinstance(limit, int) and not isinstance(limit, bool):
        attributes[c.REQUEST_MAX_TOKENS] = limit
    content = {c.INPUT_MESSAGES: _dump(_messages(request.get("input"), "user"))}
    instructions = request.get("system_instructions")
    if isinstance(instructions, str) and instructions:
        content[c.SYSTEM_INSTRUCTIONS] = _dump([text_part(instructions)])
    tools = [*_each(request.get("tools")), *_each(request.get("handoffs"))]
    if tools:
        content[c.TOOL_DEFINITIONS] = _dump([_tool(tool) for tool in tools])
    return Reading(attributes, content)


def of_response(response: object) -> Reading | None:
    """What a model answered: the SDK's ``ModelResponse``, or the API's own response object."""
    if response is None:
        return None
    given = [_field(response, name) for name in ("response_id", "id")]
    named = [text for text in given if isinstance(text, str) and text != _PLACEHOLDER_ID]
    attributes = usage(_plain(_field(response, "usage")))
    if named:
        attributes[c.RESPONSE_ID] = named[0]
    if isinstance(model := _field(response, "model"), str):
        attributes[c.RESPONSE_MODEL] = model
    return Reading(*_answer(_field(response, "output"), attributes))


def of_span(data: object) -> Reading | None:
    """What the SDK's own span of a call says of it, as far as it was told."""
    if data is None:
        return None
    attributes: dict[str, AttributeValue] = {}
    content: dict[str, str] = {}
    response = of_response(getattr(data, "response", None))
    if response is not None:
        attributes.update(response.attributes)
        content.update(response.content)
    if isinstance(model := getattr(data, "model", None), str):
        attributes[c.REQUEST_MODEL] = model
    attributes.update(usage(_plain(getattr(data, "usage", None))))
    if (given := getattr(data, "input", None)) is not None:
        content[c.INPUT_MESSAGES] = _dump(_messages(given, "user"))
    if (answered := getattr(data, "output", None)) is not None:
        attributes, answer = _answer(answered, attributes)
        content.update(answer)
    return Reading(attributes, content)


def usage(counts: object) -> dict[str, AttributeValue]:
    """Token counts, under either of the two names there are for each; no usage counts nothing."""
    if not isinstance(counts, dict) or not any(counts.get(name) for name in _USAGE):
        return {}
    found: dict[str, AttributeValue] = {
        key: value for name, key in _USAGE.items() if isinstance(value := counts.get(name), int)
    }
    for holder, name, key in (
        ("input_tokens_details", "cached_tokens", c.CACHED_TOKENS),
        ("output_tokens_details", "reasoning_tokens", c.REASONING_TOKENS),
    ):
        details = counts.get(holder)
        value = details.get(name) if isinstance(details, dict) else None
        if isinstance(value, int):
            found[key] = value
    return found


def _answer(
    output: object, attributes: dict[str, AttributeValue]
) -> tuple[dict[str, AttributeValue], dict[str, str]]:
    messages = _messages(output, "assistant")
    if not messages:
        return attributes, {}
    called = any(part.get("type") == "tool_call" for part in messages[-1]["parts"])
    reason = "tool_calls" if called else "stop"
    messages[-1]["finish_reason"] = reason
    content = {c.OUTPUT_MESSAGES: _dump(messages)}
    return {**attributes, c.FINISH_REASONS: [reason]}, content


def _messages(given: object, role: str) -> list[dict[str, Any]]:
    """Items as messages; what one turn of the model made is one message."""
    if isinstance(given, str):
        return [message(role, [text_part(text_of(given))])]
    found: list[dict[str, Any]] = []
    for item in _each(_plain(given)):
        said, parts = (
            _item(item, role) if isinstance(item, dict) else (role, [text_part(str(item))])
        )
        if found and said == "assistant" and found[-1]["role"] == said:
            found[-1]["parts"] += parts
        else:
            found.append(message(said, parts))
    return found


def _item(item: Json, role: str) -> tuple[str, list[dict[str, Any]]]:
    kind = str(item.get("type") or "message")
    if kind in _CALLS:
        arguments = item.get("arguments", item.get("input"))
        return "assistant", [tool_call_part(_text(item, "call_id"), _text(item, "name"), arguments)]
    if kind.endswith("_output") and "call_id" in item:
        return "tool", [tool_response_part(_text(item, "call_id"), item.get("output"))]
    if kind == "reasoning":
        pieces = [*_each(item.get("summary")), *_each(item.get("content"))]
        said = "\n".join(str(piece.get("text", "")) for piece in pieces if isinstance(piece, dict))
        return "assistant", [reasoning_part(said)] if said else []
    if kind != "message":
        return "assistant", [{**item, "type": f"openai.{kind}"}]
    speaker = str(item.get("role") or role)
    if speaker == "tool":
        return "tool", [tool_response_part(_text(item, "tool_call_id"), item.get("content"))]
    called = [_chat_call(call) for call in _each(item.get("tool_calls")) if isinstance(call, dict)]
    return speaker, [*_parts(item.get("content")), *called]


def _chat_call(call: Json) -> dict[str, Any]:
    function = call.get("function")
    held = function if isinstance(function, dict) else {}
    return tool_call_part(_text(call, "id"), _text(held, "name"), held.get("arguments"))


def _parts(content: object) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [text_part(content)] if content else []
    return [
        _part(part) if isinstance(part, dict) else text_part(str(part)) for part in _each(content)
    ]


def _part(part: Json) -> dict[str, Any]:
    if part.get("type") in _TEXTS:
        return text_part(str(part.get("text", "")))
    if part.get("type") == "refusal":
        return {"type": "refusal", "content": part.get("refusal", "")}
    return dict(part)


def _tool(tool: object) -> dict[str, Any]:
    """A function tool, or a hand-off, in the conventions' flat form; another tool by its name."""
    found = {
        "type": "function",
        "name": _first(tool, "tool_name", "name"),
        "description": _first(tool, "tool_description", "description"),
        "parameters": _plain(_first(tool, "input_json_schema", "params_json_schema")),
    }
    return {key: value for key, value in found.items() if value is not None}


def _first(holder: object, *names: str) -> object:
    found = (_field(holder, name) for name in names)
    return next((value for value in found if isinstance(value, (str, dict))), None)


def _field(holder: object, name: str) -> object:
    return holder.get(name) if isinstance(holder, dict) else getattr(holder, name, None)


def _text(holder: Json, name: str) -> str | None:
    value = holder.get(name)
    return value if isinstance(value, str) else None


def _each(found: object) -> Iterable[Any]:
    return found if isinstance(found, (list, tuple)) else ()


def _plain(value: object) -> Any:
    """A bounded copy of plain types only; text stays text."""
    if value is None or isinstance(value, str):
        return value
    with contextlib.suppress(ValueError):
        # Not orjson, which makes a great integer a float.
        return json.loads(text_of(value))
    return None


def _dump(value: object) -> str:
    try:
        return orjson.dumps(value).decode()
    except (TypeError, ValueError):  # an integer of more than 64 bits, as arguments may hold
        return json.dumps(value, separators=(",", ":"))
