"""The SDK's requests to models: opened here, filled and ended by the client that sends them.

Without such a client the call says what the SDK knows. Requests and answers are items of the
Responses API or chat messages, as plain objects or the client's classes; plain copies are read.
"""

import contextlib
import json
from collections.abc import Mapping
from typing import Any, Final

from opentelemetry.context import Context
from opentelemetry.util.types import AttributeValue

from lightning_otel import capture
from lightning_otel.capture import operations
from lightning_otel.instrumentors import steps
from lightning_otel.messages import (
    field_of,
    fields_of,
    read_items,
    read_settings,
    text_part,
    token_counts,
)
from lightning_otel.types import conventions as c
from lightning_otel.types.values import dump, text_of

_PARAMETERS: Final = (
    "system_instructions",
    "input",
    "model_settings",
    "tools",
    "output_schema",
    "handoffs",
)
"""Of ``get_response`` and ``stream_response``, in order."""
_FINAL: Final = ("response.completed", "response.incomplete", "response.failed")
_PLACEHOLDER_ID: Final = "__fake_id__"
"""The SDK's id for answers that have none."""


class AgentsModelCall(steps.ModelCall):
    """A model's ``get_response`` or ``stream_response`` under way."""

    def __init__(
        self,
        model: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        conversation: str | None,
        parent: Context | None,
    ) -> None:
        name = capture.read_attribute(model, "model")
        name = name if isinstance(name, str) else None
        facts = ((c.REQUEST_MODEL, name), (c.CONVERSATION_ID, conversation))
        attributes = {key: value for key, value in facts if value is not None}
        super().__init__(c.CHAT, name, attributes, parent)
        self._request = {**dict(zip(_PARAMETERS, args, strict=False)), **kwargs}
        self._response: Any = None

    def note_item(self, item: Any) -> None:
        """Note an event of a stream: the closing one holds the whole answer."""
        if getattr(item, "type", None) in _FINAL:
            self._response = item.response

    def stop(self) -> None:
        """End the call of a stream that is over, or was left early."""
        self.end(self._response, GeneratorExit() if self._response is None else None)

    def fail(self, exc: BaseException) -> None:
        """End the call with what the program is about to see, or as that of a stream left early."""
        if isinstance(exc, GeneratorExit):
            self.stop()
        else:
            self.end(self._response, exc)

    def fill(self, answer: Any) -> None:
        """Put on the span what the SDK knows, as far as its own span has not said it."""
        operation = self.operation
        attributes, content = capture.guard_call(_read_request, self._request) or ({}, {})
        operation.attributes = {**attributes, **operation.attributes}
        operation.body = {**content, **operation.body}
        add_facts(operation, capture.guard_call(_read_response, answer))


Facts = tuple[dict[str, AttributeValue], dict[str, str]]
"""Attributes, and the content to keep beside the span."""


def add_facts(operation: operations.Operation, facts: Facts | None) -> None:
    """Put what was read of a call on it."""
    attributes, content = facts or ({}, {})
    operation.attributes.update(attributes)
    operation.body.update(content)
    name = attributes.get(c.REQUEST_MODEL)
    if isinstance(name, str):
        operation.rename(f"{c.CHAT} {name}")


def read_span(data: object) -> Facts:
    """Read a call from the SDK's own span, as far as it was filled."""
    answer, body = _read_response(getattr(data, "response", None))
    attributes, content = _read_response(data, c.REQUEST_MODEL)
    if (model_input := getattr(data, "input", None)) is not None:
        content[c.INPUT_MESSAGES] = dump(_read_messages(model_input, "user"))
    return {**answer, **attributes}, {**body, **content}


def _read_request(request: Mapping[str, Any]) -> Facts:
    content = {c.INPUT_MESSAGES: dump(_read_messages(request.get("input"), "user"))}
    instructions = request.get("system_instructions")
    if isinstance(instructions, str) and instructions:
        content[c.SYSTEM_INSTRUCTIONS] = dump([text_part(instructions)])
    offers = (request.get("tools"), request.get("handoffs"))
    tools = [tool for group in offers if isinstance(group, (list, tuple)) for tool in group]
    if tools:
        content[c.TOOL_DEFINITIONS] = dump([_read_tool(tool) for tool in tools])
    return read_settings(fields_of(request.get("model_settings"))), content


def _read_response(response: object, model_key: str = c.RESPONSE_MODEL) -> Facts:
    if response is None:
        return {}, {}
    attributes = token_counts(_copy_plain(field_of(response, "usage")), is_zero_known=False)
    ids = [field_of(response, name) for name in ("response_id", "id")]
    response_ids = [text for text in ids if isinstance(text, str) and text != _PLACEHOLDER_ID]
    if response_ids:
        attributes[c.RESPONSE_ID] = response_ids[0]
    if isinstance(model := field_of(response, "model"), str):
        attributes[model_key] = model
    messages = _read_messages(field_of(response, "output"), "assistant")
    if not messages:
        return attributes, {}
    called = any(part.get("type") == "tool_call" for part in messages[-1]["parts"])
    messages[-1]["finish_reason"] = reason = "tool_calls" if called else "stop"
    return {**attributes, c.FINISH_REASONS: [reason]}, {c.OUTPUT_MESSAGES: dump(messages)}


def _read_messages(content: object, role: str) -> list[dict[str, Any]]:
    items = [text_of(content)] if isinstance(content, str) else _copy_plain(content)
    return read_items(items if isinstance(items, list) else (), role)


def _read_tool(tool: object) -> dict[str, Any]:
    definition: dict[str, Any] = {"type": "function"}
    for key, names in (
        ("name", ("tool_name", "name")),
        ("description", ("tool_description", "description")),
        ("parameters", ("input_json_schema", "params_json_schema")),
    ):
        values = (field_of(tool, name) for name in names)
        value = next((item for item in values if isinstance(item, (str, dict))), None)
        if value is not None:
            definition[key] = _copy_plain(value)
    return definition


def _copy_plain(value: object) -> Any:
    if value is None or isinstance(value, str):
        return value
    with contextlib.suppress(ValueError):
        return json.loads(text_of(value))
    return None
