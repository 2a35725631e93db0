"""Calls in the attributes that Agent Lightning 0.3's adapters read, beside those of ours.

Source: Agent Lightning 0.3.0, ``adapter/triplet.py``: calls by the name ``openai.chat.completion``,
messages flattened under ``gen_ai.prompt`` and ``gen_ai.completion``, token ids as lists of whole
numbers, logprobs as JSON text; an agent by ``agent.name`` of the span around its calls.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from lightning_otel.adapter.attributes import get_text
from lightning_otel.adapter.calls import is_call, read_call
from lightning_otel.messages.chat import messages_of
from lightning_otel.types import Span
from lightning_otel.types import conventions as c

CALL_NAME: Final = "openai.chat.completion"
_AGENT: Final = "agent.name"


def to_agentlightning(span: Span, *, with_content: bool) -> Span:
    """The span as their adapters read it; what ours reads stays on it."""
    attributes = span.attributes
    if not is_call(span) or attributes.get(c.OPERATION) == c.EMBEDDINGS:
        agent = get_text(attributes, c.AGENT_NAME)
        is_named = agent is None or _AGENT in attributes
        return span if is_named else replace(span, attributes={**attributes, _AGENT: agent})
    # Not by its name alone: a call that came to nothing has no action to learn from.
    call = read_call(span, get_text(attributes, c.AGENT_NAME) or "")
    if isinstance(call, str):
        return span
    flat: dict[str, Any] = {}
    if with_content:
        flat |= _flatten_messages("gen_ai.prompt", messages_of(call.observation))
        flat |= _flatten_messages("gen_ai.completion", messages_of(call.action))
        if len(call.prompt_ids) and len(call.response_ids):
            flat["prompt_token_ids"] = list(call.prompt_ids)
            flat["response_token_ids"] = list(call.response_ids)
        if len(call.logprobs):
            flat["logprobs.content"] = json.dumps([{"logprob": value} for value in call.logprobs])
    return replace(span, name=CALL_NAME, attributes={**attributes, **flat})


def _flatten_messages(prefix: str, messages: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    attributes: dict[str, Any] = {}
    for index, message in enumerate(messages):
        row = f"{prefix}.{index}"
        attributes[f"{row}.role"] = message["role"]
        content = message.get("content")
        attributes[f"{row}.content"] = (
            content if isinstance(content, str) else "" if content is None else json.dumps(content)
        )
        if "tool_call_id" in message:
            attributes[f"{row}.tool_call_id"] = message["tool_call_id"]
        for place, call in enumerate(message.get("tool_calls") or ()):
            function = call.get("function", {})
            attributes[f"{row}.tool_calls.{place}.id"] = call.get("id") or ""
            attributes[f"{row}.tool_calls.{place}.type"] = "function"
            attributes[f"{row}.tool_calls.{place}.name"] = function.get("name") or ""
            attributes[f"{row}.tool_calls.{place}.arguments"] = function.get("arguments") or "{}"
    return attributes
