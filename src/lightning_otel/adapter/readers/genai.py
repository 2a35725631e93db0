"""Today's ``gen_ai.*`` as others write it: the same keys, in a few other shapes.

Source: the GenAI semantic conventions, those of MCP among them; ``opentelemetry-util-genai`` 1.3b0;
Traceloop's 0.62; ``mcp`` 2.3.
"""

from collections.abc import Mapping
from typing import Any, Final

from lightning_otel.adapter.attributes import to_number, to_text
from lightning_otel.adapter.readers import chat
from lightning_otel.messages import object_of, objects, part_of, read_call, read_message
from lightning_otel.types import Span
from lightning_otel.types import conventions as c
from lightning_otel.types.values import parse_json

_PARAMETERS: Final = "model_request_parameters"
"""Where Pydantic AI has a call's tools."""
_MCP_METHOD: Final = "mcp.method.name"
_CALL_TOOL: Final = "tools/call"

MARKS = (
    c.INPUT_MESSAGES, c.OUTPUT_MESSAGES, c.FINISH_REASONS, c.EVALUATION_SCORE, _PARAMETERS,
    _MCP_METHOD,
)  # fmt: skip

# The conventions name it in the singular, the servers do not.
_REASONS: Final = {"tool_call": "tool_calls"}


def summary(name: str, attributes: Mapping[str, Any]) -> dict[str, Any]:
    """A tool called by MCP, why the choices ended, and an evaluation as a reward."""
    values: dict[str, Any] = {}
    if attributes.get(_MCP_METHOD) == _CALL_TOOL:
        values[c.OPERATION] = c.EXECUTE_TOOL
        tool = name.partition(f"{_CALL_TOOL} ")[2]
        if tool and c.TOOL_NAME not in attributes:
            values[c.TOOL_NAME] = tool
    score = attributes.get(c.EVALUATION_SCORE)
    if to_number(score) is not None and c.REWARD_VALUE not in attributes:
        values |= {c.REWARD_VALUE: score, c.REWARD_NAME: attributes.get(c.EVALUATION_NAME)}
    reasons = attributes.get(c.FINISH_REASONS)
    if isinstance(reasons, str) and reasons.startswith("["):
        reasons = parse_json(reasons)
    if not isinstance(reasons, (list, tuple)):
        return values
    spelt = [_REASONS.get(reason, reason) for reason in reasons if isinstance(reason, str)]
    return {**values, c.FINISH_REASONS: spelt}


def content(span: Span) -> dict[str, Any]:
    """Messages and tools as ours are, where they are not."""
    values = {}
    parameters = object_of(parse_json(span.attributes.get(_PARAMETERS)))
    offers = [*objects(parameters.get("function_tools")), *objects(parameters.get("output_tools"))]
    if offers and c.TOOL_DEFINITIONS not in span.attributes:
        values[c.TOOL_DEFINITIONS] = chat.dump_tools(offers)
    for key in (c.INPUT_MESSAGES, c.OUTPUT_MESSAGES):
        # Structured values may stand on events; some put them on spans.
        messages = parse_json(span.attributes.get(key))
        if isinstance(messages, (list, tuple)) and all(
            isinstance(item, Mapping) for item in messages
        ):
            text = span.attributes[key]
            if not isinstance(text, str) or chat.RESULT in text:
                messages = [part for item in messages for part in chat.split_results(item)]
            values[key] = chat.dump([_normalize_message(item) for item in messages])
    return values


def _normalize_message(item: Mapping[str, Any]) -> dict[str, Any]:
    body = {key: value for key, value in item.items() if value is not None}
    reason = body.get("finish_reason")
    if isinstance(reason, str):
        body["finish_reason"] = _REASONS.get(reason, reason)
    parts = body.get("parts")
    if not isinstance(parts, list):
        is_chat = parts is None and ("content" in body or "tool_calls" in body)
        return read_message(body, finish_reason=body.get("finish_reason")) if is_chat else body
    if "tool_call_id" in body:
        text = "".join(to_text(p.get("content", "")) for p in parts if isinstance(p, Mapping))
        return read_message({"role": "tool", "content": text, "id": body["tool_call_id"]})
    calls = body.pop("tool_calls", None)
    if isinstance(calls, list):
        parts = [*parts, *(read_call(call) for call in calls if isinstance(call, Mapping))]
    parts = [part_of(p) if object_of(p).get("type") == "tool_call" else p for p in parts]
    if len(parts) > 1:
        parts = [part for part in parts if not _is_empty(part)]
    return {**body, "parts": parts}


def _is_empty(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and not part.get("content")
