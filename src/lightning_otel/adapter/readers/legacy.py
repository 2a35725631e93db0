"""``gen_ai.*`` as it was: ``gen_ai.system``, messages flattened into keys or told as events.

Also how OpenLLMetry, AgentOps and Agent Lightning flatten a call, which they took over from it.

Source: the GenAI semantic conventions up to 1.36; ``opentelemetry-instrumentation-openai-v2`` 2.1;
OpenLLMetry up to 0.5x; AgentOps 0.4; Strands Agents 1.62, whose messages are Bedrock's blocks.
"""

from collections.abc import Mapping
from typing import Any, Final

from lightning_otel.adapter.attributes import to_text
from lightning_otel.adapter.readers import chat
from lightning_otel.adapter.readers.chat import drop_none, read_rows
from lightning_otel.messages import objects, read_message
from lightning_otel.types import Span
from lightning_otel.types import conventions as c
from lightning_otel.types.values import is_object, parse_json

_SYSTEM: Final = "gen_ai.system"
_PROMPT: Final = "gen_ai.prompt"
_COMPLETION: Final = "gen_ai.completion"
_PROMPT_TOKENS: Final = "gen_ai.usage.prompt_tokens"
_USAGE: Final = {
    c.INPUT_TOKENS: _PROMPT_TOKENS,
    c.OUTPUT_TOKENS: "gen_ai.usage.completion_tokens",
    c.CACHED_TOKENS: "gen_ai.usage.cache_read_input_tokens",
    c.REASONING_TOKENS: "gen_ai.usage.reasoning_tokens",
}
_REQUEST_TYPES: Final = ("llm.request.type", "gen_ai.request.type")
_FUNCTIONS: Final = ("llm.request.functions", "gen_ai.request.functions")

MARKS = (_SYSTEM, *_REQUEST_TYPES, f"{_PROMPT}.0.role", _PROMPT_TOKENS)

_OPERATIONS: Final = {
    "chat": c.CHAT,
    "completion": c.TEXT_COMPLETION,
    "embedding": c.EMBEDDINGS,
}
_EVENTS: Final = {
    "gen_ai.system.message": "system",
    "gen_ai.user.message": "user",
    "gen_ai.assistant.message": "assistant",
    "gen_ai.tool.message": "tool",
}
_BLOCKS: Final = frozenset(
    {
        "text", "toolUse", "toolResult", "reasoningContent", "image", "document", "video",
        "cachePoint", "guardContent", "citationsContent",
    }
)  # fmt: skip
_CHOICE_EVENT: Final = "gen_ai.choice"
_EVENT_CONTENT: Final = "gen_ai.event.content"


def summary(name: str, attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Operation, provider and usage under today's names, where those are not there."""
    get = attributes.get
    values: dict[str, Any] = {}
    if c.OPERATION not in attributes:
        request = next((kind for key in _REQUEST_TYPES if (kind := get(key))), None)
        operation = _OPERATIONS.get(to_text(request))
        if operation == c.TEXT_COMPLETION and f"{_PROMPT}.0.role" in attributes:
            operation = c.CHAT
        values[c.OPERATION] = operation or (c.CHAT if f"{_PROMPT}.0.role" in attributes else None)
    system = get(_SYSTEM)
    if c.PROVIDER not in attributes and isinstance(system, str):
        values[c.PROVIDER] = system.lower()
    for key, old in _USAGE.items():
        if key not in attributes:
            values[key] = get(old)
    reason = get(f"{_COMPLETION}.0.finish_reason")
    if c.FINISH_REASONS not in attributes and isinstance(reason, str):
        values[c.FINISH_REASONS] = [reason]
    return drop_none(values)


def content(span: Span) -> dict[str, Any]:
    """Messages and tools, where they are not told in today's form too."""
    attributes = span.attributes
    values: dict[str, Any] = {}
    if c.INPUT_MESSAGES not in attributes and c.OUTPUT_MESSAGES not in attributes:
        rows = read_rows(attributes, _PROMPT)
        prompt: list[Mapping[str, Any]] = [read_message(_parse_parts(row), "user") for row in rows]
        answered = [
            read_message(_parse_parts(row), "assistant", finish_reason=row.get("finish_reason"))
            for row in read_rows(attributes, _COMPLETION)
        ]
        for event in () if prompt or answered else tuple(span.events):
            # The body as JSON in one attribute, or its fields as attributes.
            value = parse_json(event.attributes.get(_EVENT_CONTENT))
            body = value if isinstance(value, Mapping) else event.attributes
            if event.name in _EVENTS:
                fields = {**body, **_read_blocks(body.get("content"))}
                prompt += chat.split_results(read_message(fields, _EVENTS[event.name]))
            elif event.name == _CHOICE_EVENT:
                blocks = _read_blocks(body.get("message"))
                answered += chat.read_choices([{**body, "message": blocks} if blocks else body])
        if attributes.get(c.OPERATION) == c.EXECUTE_TOOL and span.events:
            return _read_tool(span)
        if prompt:
            values[c.INPUT_MESSAGES] = chat.dump(prompt)
        if answered:
            values[c.OUTPUT_MESSAGES] = chat.dump(answered)
            if c.FINISH_REASONS not in attributes:
                values[c.FINISH_REASONS] = chat.read_reasons(answered)
    prefix = next((key for key in reversed(_FUNCTIONS) if f"{key}.0.name" in attributes), None)
    if c.TOOL_DEFINITIONS not in attributes and prefix is not None:
        tools = read_rows(attributes, prefix)
        for tool in tools:
            if (parameters := parse_json(tool.get("parameters"))) is not None:
                tool["parameters"] = parameters
        values[c.TOOL_DEFINITIONS] = chat.dump_tools(tools)
    return drop_none(values)


def _read_blocks(value: object) -> dict[str, Any]:
    blocks = parse_json(value)
    if not isinstance(blocks, list):
        return {"content": value} if isinstance(value, str) else {}
    are_blocks = bool(blocks) and all(is_object(b) and not _BLOCKS.isdisjoint(b) for b in blocks)
    return {"content": blocks} if are_blocks else {}


def _read_tool(span: Span) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for event in span.events:
        if event.name == _CHOICE_EVENT and c.TOOL_RESULT not in span.attributes:
            blocks = objects(parse_json(event.attributes.get("message")))
            texts = [block["text"] for block in blocks if isinstance(block.get("text"), str)]
            whole = "\n".join(texts) if texts and len(texts) == len(blocks) else None
            values[c.TOOL_RESULT] = whole or event.attributes.get("message")
        elif _EVENTS.get(event.name) == "tool" and c.TOOL_ARGUMENTS not in span.attributes:
            values[c.TOOL_ARGUMENTS] = event.attributes.get("content")
    return drop_none(values)


def _parse_parts(row: dict[str, Any]) -> dict[str, Any]:
    text = row.get("content")
    if isinstance(text, str) and text.startswith('[{"type"'):
        parts = parse_json(text)
        return {**row, "content": parts} if isinstance(parts, list) else row
    return row
