"""Models that CrewAI reaches by other clients than ``openai``: custom ones, and other vendors'.

Their class is known once an agent with such a model acts. Its call then stands ready for whichever
client sends the request; where none of those we know does, it is told by what CrewAI was given.
"""

from collections.abc import Mapping
from typing import Any

from opentelemetry.util.types import AttributeValue

from lightning_otel import call_slot
from lightning_otel import conventions as c
from lightning_otel.instrumentors.doors import Run, named
from lightning_otel.instrumentors.reading import field_of, word
from lightning_otel.instrumentors.steps import ModelCall
from lightning_otel.messages import message, read_message, text_part, tool_call_part
from lightning_otel.values import text_of

_BY_OPENAI = "OpenAICompletion"
"""CrewAI's class of the models that go through the ``openai`` client and are seen there."""


def methods_of(model: Any) -> list[tuple[type, str]]:
    """Return the call methods of a model's class; none if ``openai`` sends its requests."""
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


def begin_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Run | None:
    """Begin a call, unless it is made by that of a subclass."""
    if call_slot.unclaimed_call() is not None:
        return None
    model, messages = args[0], named(("messages",), args, kwargs).get("messages")
    known = ((c.REQUEST_MODEL, model.model), (c.PROVIDER, model.provider))
    attributes: dict[str, AttributeValue] = {key: value for key, value in known if word(value)}
    call = _Call(c.CHAT, str(model.model), attributes)
    call.operation.body[c.INPUT_MESSAGES] = text_of(_read_messages(messages))
    return call


class _Call(ModelCall):
    def fill(self, answer: Any) -> None:
        if answer is not None:
            said = text_of([message("assistant", _read_answer(answer))])
            self.operation.body[c.OUTPUT_MESSAGES] = said


def _read_messages(given: Any) -> list[dict[str, Any]]:
    if isinstance(given, str):
        return [message("user", [text_part(given)])]
    if type(given) is not list:
        return []
    return [_read_message(item) for item in given if isinstance(item, dict)]


def _read_message(item: dict[str, Any]) -> dict[str, Any]:
    content = item.get("content")
    return read_message({**item, "content": None if content is None else text_of(content)})


def _read_answer(result: Any) -> list[dict[str, Any]]:
    """The parts of an answer: calls of tools, or words."""
    if type(result) is not list:
        return [] if result is None else [text_part(text_of(result))]
    parts = []
    for call in result:
        function = field_of(call, "function")
        name = field_of(function, "name") or field_of(call, "name")
        arguments = field_of(function, "arguments") or field_of(call, "input")
        said = arguments if isinstance(arguments, str) else text_of(arguments)
        parts.append(tool_call_part(word(field_of(call, "id")), word(name), said))
    return parts
