"""Models that CrewAI reaches by other clients than ``openai``: custom ones, and other vendors'.

Their class is known once an agent with such a model acts. Its call then stands ready for whichever
client sends the request; where none of those we know does, it is told by what CrewAI was given.
"""

from collections.abc import Callable
from typing import Any

from opentelemetry.trace import SpanKind
from opentelemetry.util.types import AttributeValue

from lightning_otel import call_slot, capture
from lightning_otel import conventions as c
from lightning_otel.adapter.messages import message, text_part, tool_call_part, tool_response_part
from lightning_otel.instrumentors.content import text_of
from lightning_otel.instrumentors.steps import word

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


def called(is_wanted: Callable[[], bool]) -> Callable[[Any], Any]:
    """What makes a call of a model's ``call``."""

    def make(original: Any) -> Any:
        def call(self: Any, messages: Any, *args: Any, **kwargs: Any) -> Any:
            slot = capture.guarded(_open, is_wanted, self, messages)
            operation = slot.operation if slot is not None else None
            if slot is None or operation is None:
                return original(self, messages, *args, **kwargs)
            try:
                with capture.attached(slot.within()):
                    result = original(self, messages, *args, **kwargs)
            except BaseException as exc:
                capture.guarded(operation.fail, exc)
                raise
            capture.guarded(_over, operation, result)
            return result

        return call

    return make


def called_async(is_wanted: Callable[[], bool]) -> Callable[[Any], Any]:
    """What makes a call of a model's ``acall``."""

    def make(original: Any) -> Any:
        async def acall(self: Any, messages: Any, *args: Any, **kwargs: Any) -> Any:
            slot = capture.guarded(_open, is_wanted, self, messages)
            operation = slot.operation if slot is not None else None
            if slot is None or operation is None:
                return await original(self, messages, *args, **kwargs)
            try:
                with capture.attached(slot.within()):
                    result = await original(self, messages, *args, **kwargs)
            except BaseException as exc:
                capture.guarded(operation.fail, exc)
                raise
            capture.guarded(_over, operation, result)
            return result

        return acall

    return make


def _open(is_wanted: Callable[[], bool], model: Any, messages: Any) -> call_slot.CallSlot | None:
    held = call_slot.open_slot()
    if not is_wanted() or (held is not None and held.operation is not None):
        return None  # a class's own call may be made by that of its subclass
    attributes: dict[str, AttributeValue] = {c.OPERATION: c.CHAT}
    for key, value in ((c.REQUEST_MODEL, model.model), (c.PROVIDER, model.provider)):
        if word(value):
            attributes[key] = value
    name = capture.clean(f"{c.CHAT} {model.model}")
    body = {c.INPUT_MESSAGES: text_of(_messages(messages))}
    return call_slot.CallSlot(capture.Operation(name, SpanKind.CLIENT, attributes, body))


def _over(operation: capture.Operation, result: Any) -> None:
    """End a call that no client has claimed: a claimed one is its client's to end."""
    if operation.is_over:
        return
    answer = message("assistant", _answer(result))
    operation.body[c.OUTPUT_MESSAGES] = text_of([answer])
    operation.stop()


def _messages(given: Any) -> list[dict[str, Any]]:
    if isinstance(given, str):
        return [message("user", [text_part(given)])]
    if type(given) is not list:
        return []
    return [_message(item) for item in given if isinstance(item, dict)]


def _message(item: dict[str, Any]) -> dict[str, Any]:
    role, content = word(item.get("role")) or "user", item.get("content")
    text = None if content is None else text_of(content)
    if role == "tool":
        return message(role, [tool_response_part(word(item.get("tool_call_id")), text)])
    parts = [text_part(text)] if text else []
    calls = item.get("tool_calls")
    return message(role, parts + (_answer(calls) if type(calls) is list else []))


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
