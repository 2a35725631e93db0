"""The Vercel AI SDK, which keeps messages, tools and answers under ``ai.*``.

A span such as ``ai.generateText`` is a loop around its calls, ``ai.generateText.doGenerate``, and
an agent where it has a name. Its seventh release writes today's conventions, which need no reader.

Source: ``ai`` 4.3, 5.0 and 6.0; ``LegacyOpenTelemetry`` of ``@ai-sdk/otel`` for 7.0.
"""

from collections.abc import Mapping
from typing import Any, Final

from lightning_otel.adapter.attributes import get_text
from lightning_otel.adapter.readers import chat
from lightning_otel.adapter.readers.chat import drop_none
from lightning_otel.messages import message, objects, part_of, reasoning_part, text_part
from lightning_otel.messages.exchanges import read_messages
from lightning_otel.types import Span
from lightning_otel.types import conventions as c
from lightning_otel.types.values import parse_json

_KIND: Final = "ai.operationId"
_FUNCTION: Final = "ai.telemetry.functionId"
_MESSAGES: Final = "ai.prompt.messages"
_TOOLS: Final = "ai.prompt.tools"
_REASON: Final = "ai.response.finishReason"
_TOOL: Final = {
    c.TOOL_NAME: "ai.toolCall.name",
    c.TOOL_CALL_ID: "ai.toolCall.id",
    c.TOOL_ARGUMENTS: "ai.toolCall.args",
    c.TOOL_RESULT: "ai.toolCall.result",
}
_USAGE: Final = {
    c.CACHED_TOKENS: "ai.usage.cachedInputTokens",
    c.REASONING_TOKENS: "ai.usage.reasoningTokens",
}
_OPERATIONS: Final = {
    ".doGenerate": c.CHAT, ".doStream": c.CHAT, ".doEmbed": c.EMBEDDINGS,
    "ai.generateText": c.INVOKE_AGENT, "ai.streamText": c.INVOKE_AGENT,
}  # fmt: skip

MARKS = (_KIND, _TOOL[c.TOOL_NAME])


def summary(name: str, attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Operation, tool and usage."""
    operation = _operation_of(attributes)
    fields: dict[str, Any] = {c.OPERATION: operation}
    if operation == c.EXECUTE_TOOL:
        fields |= {key: attributes.get(_TOOL[key]) for key in (c.TOOL_NAME, c.TOOL_CALL_ID)}
    elif operation == c.INVOKE_AGENT:  # under the name that the program gave it, if it did
        name = get_text(attributes, _FUNCTION) or ""
        return {c.OPERATION: operation, c.AGENT_NAME: name} if name else {}
    elif operation is not None:
        fields |= {key: attributes.get(theirs) for key, theirs in _USAGE.items()}
        reason = _finish_reason(attributes)
        fields[c.FINISH_REASONS] = [reason] if reason else None
    return drop_none(fields)


def content(span: Span) -> dict[str, Any]:
    """Messages and tools of a call; arguments and result of a tool."""
    get, operation = span.attributes.get, _operation_of(span.attributes)
    if operation == c.EXECUTE_TOOL:
        return drop_none({key: get(_TOOL[key]) for key in (c.TOOL_ARGUMENTS, c.TOOL_RESULT)})
    if operation != c.CHAT:
        return {}
    fields: dict[str, Any] = {}
    if (prompt := get(_MESSAGES)) is not None:
        fields[c.INPUT_MESSAGES] = chat.dump(read_messages(prompt, "user"))
    if parts := _read_answer(span.attributes):
        answer = message("assistant", parts, finish_reason=_finish_reason(span.attributes))
        fields[c.OUTPUT_MESSAGES] = chat.dump([answer])
    offers = get(_TOOLS)
    if isinstance(offers, (list, tuple)):
        fields[c.TOOL_DEFINITIONS] = chat.dump_tools([parse_json(offer) for offer in offers])
    return drop_none(fields)


def _read_answer(attributes: Mapping[str, Any]) -> list[Any]:
    parts: list[Any] = []
    if thought := get_text(attributes, "ai.response.reasoning"):
        parts.append(reasoning_part(thought))
    for name in ("text", "object"):
        if text := get_text(attributes, f"ai.response.{name}"):
            parts.append(text_part(text))
    files = objects(parse_json(attributes.get("ai.response.files")))
    calls = objects(parse_json(attributes.get("ai.response.toolCalls")))
    parts += [part_of({"type": "file", **file}) for file in files]
    return parts + [part_of({**call, "type": "tool-call"}) for call in calls]


def _operation_of(attributes: Mapping[str, Any]) -> str | None:
    if _TOOL[c.TOOL_NAME] in attributes:
        return c.EXECUTE_TOOL
    kind = get_text(attributes, _KIND) or ""
    return next((_OPERATIONS[end] for end in _OPERATIONS if kind.endswith(end)), None)


def _finish_reason(attributes: Mapping[str, Any]) -> str | None:
    reason = get_text(attributes, _REASON)
    return reason.replace("-", "_") if reason else None
