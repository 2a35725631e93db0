"""LiteLLM: the spans of its proxy and of its callback.

It tells each call twice: as ``litellm_request`` in ``gen_ai.*``, without ids of tool calls and what
the server said of tokens; and below it as ``raw_gen_ai_request``, which quotes the body as Python
writes it, but holds nothing of a stream.

Source: LiteLLM 1.106, ``integrations/opentelemetry.py``.
"""

import ast
from collections.abc import Mapping
from typing import Any, Final

from lightning_otel.adapter.readers import chat
from lightning_otel.adapter.readers.chat import drop_none, read_rows
from lightning_otel.messages import object_of, objects, read_message
from lightning_otel.types import Span
from lightning_otel.types import conventions as c
from lightning_otel.types.values import parse_json

_CALL_ID: Final = "litellm.call_id"
_STREAMING: Final = "llm.is_streaming"
_RAW: Final = "llm."
# A raw body's keys carry the provider's name.
_PROVIDERS: Final = ("openai", "hosted_vllm", "azure", "openrouter", "vllm")

MARKS = (_CALL_ID, _STREAMING, *(f"{_RAW}{provider}.choices" for provider in _PROVIDERS))


def summary(name: str, attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Of a raw body who answered, and its usage; the request's own span has today's keys."""
    prefix = _raw_prefix(attributes)
    if prefix is None:
        return {}
    usage = object_of(_parse_literal(attributes.get(f"{prefix}usage")))
    return drop_none(
        {
            c.OPERATION: c.CHAT,
            c.RESPONSE_ID: attributes.get(f"{prefix}id"),
            c.RESPONSE_MODEL: attributes.get(f"{prefix}model"),
            c.INPUT_TOKENS: usage.get("prompt_tokens"),
            c.OUTPUT_TOKENS: usage.get("completion_tokens"),
        }
    )


def content(span: Span) -> dict[str, Any]:
    """The whole of a raw body; of a request the tool calls that its answer lacks."""
    attributes = span.attributes
    prefix = _raw_prefix(attributes)
    if prefix is not None:
        return _read_raw(attributes, prefix)
    rows = objects(parse_json(attributes.get(c.OUTPUT_MESSAGES)))
    if not rows or rows[0].get("parts"):
        return {}
    calls = [read_message(row) for row in read_rows(attributes, "gen_ai.completion")]
    parts = [part for call in calls for part in call["parts"]]
    return {c.OUTPUT_MESSAGES: chat.dump([{**rows[0], "parts": parts}, *rows[1:]])} if parts else {}


def _raw_prefix(attributes: Mapping[str, Any]) -> str | None:
    prefixes = (f"{_RAW}{provider}." for provider in _PROVIDERS)
    return next((prefix for prefix in prefixes if f"{prefix}choices" in attributes), None)


def _read_raw(attributes: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    body = {
        name: _parse_literal(attributes.get(prefix + name))
        for name in ("choices", "messages", "tools", "prompt_token_ids")
    }
    choices, turns = objects(body["choices"]), objects(body["messages"])
    quoted = attributes.get(f"{prefix}choices")
    # What cannot be read is told as it is: the call is unreadable, and not without an answer.
    unread = quoted if body["choices"] is None and quoted != "None" else None
    return drop_none(
        {
            c.FINISH_REASONS: chat.read_reasons(choices),
            c.INPUT_MESSAGES: chat.dump([read_message(item) for item in turns]) if turns else None,
            c.OUTPUT_MESSAGES: chat.dump(chat.read_choices(choices)) if choices else unread,
            c.TOOL_DEFINITIONS: chat.dump_tools(objects(body["tools"])),
            **chat.choice_tokens(body),
        }
    )


def _parse_literal(text: object) -> Any:
    if not isinstance(text, str):
        return text
    try:
        return ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
