"""Models that CrewAI reaches by other clients than ``openai``: custom ones, and other vendors'.

Their class is known once an agent with such a model acts. Its call then stands ready for whichever
client sends the request; where none of those we know does, it is told by what CrewAI was given.
"""

from collections.abc import Mapping
from typing import Any

from opentelemetry.trace import SpanKind
from opentelemetry.util.types import AttributeValue

from lightning_otel import call_slot, capture
from lightning_otel import conventions as c
from lightning_otel.instrumentors.doors import Run, named
from lightning_otel.instrumentors.steps import word
from lightning_otel.messages import message, read_message, text_part, tool_call_part
from lightning_otel.messages.values import text_of

_BY_OPENAI = "OpenAICompletion"
"""CrewAI's class of the models that go through the ``openai`` client and are seen there."""


def methods_of(model: Any) -> list[tuple[type, str]]:
    """Where the model's class has its ways of being called; none where ``openai`` sends for it."""
    classes = type(model).__mro__
    if any(cls.__name__ == _BY_OPENAI for cls in classes):
        return []
    return [
        (cls, name)
        for cls in classes
        if cls.__name__ != "BaseLLM"
        for name in ("call", "acall")
        if name in vars(cls)
    ]


class _Call(Run):
    """A call of a model, for whichever client sends its request to claim."""

    def __init__(self, operation: capture.Operation) -> None:
        self._operation = operation
        self.context = call_slot.CallSlot(operation).within()

    def returned(self, result: Any) -> None:
        """End it with its answer; a claimed one is its client's to end."""
        if not self._operation.is_over:
            self._operation.body[c.OUTPUT_MESSAGES] = text_of(
                [message("assistant", _answer(result))]
            )
            self._operation.stop()

    def fail(self, exc: BaseException) -> None:
        """End it with what was raised."""
        self._operation.fail(exc)


def begin_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Run | None:
    """Begin a call, unless it is made by that of a subclass."""
    held = call_slot.open_slot()
    if held is not None and held.operation is not None:
        return None
    model, messages = args[0], named(("messages",), args, kwargs).get("messages")
    attributes: dict[str, AttributeValue] = {c.OPERATION: c.CHAT}
    for key, value in ((c.REQUEST_MODEL, model.model), (c.PROVIDER, model.provider)):
        if word(value):
            attributes[key] = value
    name = capture.clean(f"{c.CHAT} {model.model}")
    body = {c.INPUT_MESSAGES: text_of(_messages(messages))}
    return _Call(capture.Operation(name, SpanKind.CLIENT, attributes, body))


def _messages(given: Any) -> list[dict[str, Any]]:
    if isinstance(given, str):
        return [message("user", [text_part(given)])]
    if type(given) is not list:
        return []
    return [_message(item) for item in given if isinstance(item, dict)]


def _message(item: dict[str, Any]) -> dict[str, Any]:
    content = item.get("content")
    return read_message({**item, "content": None if content is None else text_of(content)})


def _answer(result: Any) -> list[dict[str, Any]]:
    """The parts of an answer: calls of tools, or words."""
    if type(result) is not list:
        return [] if result is None else [text_part(text_of(result))]
    parts = []
    for call in result:
        function = _field(call, "function")
        name = _field(function, "name") or _field(call, "name")
        arguments = _field(function, "arguments") or _field(call, "input")
        said = arguments if isinstance(arguments, str) else text_of(arguments)
        parts.append(tool_call_part(word(_field(call, "id")), word(name), said))
    return parts


def _field(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else getattr(value, name, None)
