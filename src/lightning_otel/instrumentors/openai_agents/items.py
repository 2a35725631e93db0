"""Readers of the SDK's calls: attributes and messages.

Requests and answers come as items of the Responses API or as chat messages, as plain objects or the
client's own classes; whatever they are, only plain copies of them are read.
"""

import contextlib
import json
from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeAlias

from opentelemetry.util.types import AttributeValue

from lightning_otel import conventions as c
from lightning_otel.instrumentors.reading import field_of, token_counts
from lightning_otel.messages import read_items, text_part
from lightning_otel.values import dump, text_of

_SETTINGS: Final = {
    "temperature": c.REQUEST_TEMPERATURE,
    "top_p": c.REQUEST_TOP_P,
    "frequency_penalty": c.REQUEST_FREQUENCY_PENALTY,
    "presence_penalty": c.REQUEST_PRESENCE_PENALTY,
}
_PLACEHOLDER_ID: Final = "__fake_id__"
"""The SDK's id for answers that have none."""

Json = Mapping[str, Any]


Reading: TypeAlias = tuple[dict[str, AttributeValue], dict[str, str]]
"""Attributes, and the content to keep beside the span."""


def of_request(request: Mapping[str, Any]) -> Reading:
    """Read a model's input from the call's arguments."""
    settings = request.get("model_settings")
    attributes: dict[str, AttributeValue] = {}
    for name, key in _SETTINGS.items():
        value = getattr(settings, name, None)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            attributes[key] = float(value)
    limit = getattr(settings, "max_tokens", None)
    if isinstance(limit, int) and not isinstance(limit, bool):
        attributes[c.REQUEST_MAX_TOKENS] = limit
    content = {c.INPUT_MESSAGES: dump(_read_messages(request.get("input"), "user"))}
    instructions = request.get("system_instructions")
    if isinstance(instructions, str) and instructions:
        content[c.SYSTEM_INSTRUCTIONS] = dump([text_part(instructions)])
    tools = [*_each_item(request.get("tools")), *_each_item(request.get("handoffs"))]
    if tools:
        content[c.TOOL_DEFINITIONS] = dump([_read_tool(tool) for tool in tools])
    return attributes, content


def of_response(response: object, model_key: str = c.RESPONSE_MODEL) -> Reading:
    """Read a model's answer: the SDK's ``ModelResponse``, or the API's own response object.

    Args:
        response: The answer, if there is one.
        model_key: Whose model it names.
    """
    if response is None:
        return {}, {}
    attributes = token_counts(_plain_value(field_of(response, "usage")), is_zero_known=False)
    given = [field_of(response, name) for name in ("response_id", "id")]
    named = [text for text in given if isinstance(text, str) and text != _PLACEHOLDER_ID]
    if named:
        attributes[c.RESPONSE_ID] = named[0]
    if isinstance(model := field_of(response, "model"), str):
        attributes[model_key] = model
    messages = _read_messages(field_of(response, "output"), "assistant")
    if not messages:
        return attributes, {}
    called = any(part.get("type") == "tool_call" for part in messages[-1]["parts"])
    messages[-1]["finish_reason"] = reason = "tool_calls" if called else "stop"
    return {**attributes, c.FINISH_REASONS: [reason]}, {c.OUTPUT_MESSAGES: dump(messages)}


def of_span(data: object) -> Reading:
    """Read a call from the SDK's own span, as far as it was filled."""
    answer, said = of_response(getattr(data, "response", None))
    attributes, content = of_response(data, c.REQUEST_MODEL)
    if (given := getattr(data, "input", None)) is not None:
        content[c.INPUT_MESSAGES] = dump(_read_messages(given, "user"))
    return {**answer, **attributes}, {**said, **content}


def _read_messages(given: object, role: str) -> list[dict[str, Any]]:
    """Return items as messages; what one turn of the model made is one message."""
    items = [text_of(given)] if isinstance(given, str) else _plain_value(given)
    return read_items(items if isinstance(items, list) else (), role)


def _read_tool(tool: object) -> dict[str, Any]:
    """A function tool, or a hand-off, in the conventions' flat form; another tool by its name."""
    found = {
        "type": "function",
        "name": _first_item(tool, "tool_name", "name"),
        "description": _first_item(tool, "tool_description", "description"),
        "parameters": _plain_value(_first_item(tool, "input_json_schema", "params_json_schema")),
    }
    return {key: value for key, value in found.items() if value is not None}


def _first_item(holder: object, *names: str) -> object:
    found = (field_of(holder, name) for name in names)
    return next((value for value in found if isinstance(value, (str, dict))), None)


def _each_item(found: object) -> Iterable[Any]:
    return found if isinstance(found, (list, tuple)) else ()


def _plain_value(value: object) -> Any:
    """A bounded copy of plain types only; text stays text."""
    if value is None or isinstance(value, str):
        return value
    with contextlib.suppress(ValueError):
        # Not orjson, which makes a great integer a float.
        return json.loads(text_of(value))
    return None
