"""Bodies of the chat API, quoted or flattened into keys, read into messages and token ids.

Source: OpenAI's API reference for chat completions; vLLM's ``return_token_ids``.
"""

import json
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any, Final

from lightning_otel.adapter.tokens import sampled_ids, token_content
from lightning_otel.messages import (
    flatten_tools,
    message,
    object_of,
    objects,
    read_message,
    text_part,
)
from lightning_otel.types import Message

RESULT: Final = "tool_call_response"
"""The kind of a part that a tool answered with."""
_DEEPEST: Final = 64
"""How many levels a key tells of; what is below them is one name."""


def read_rows(attributes: Mapping[str, Any], prefix: str) -> list[dict[str, Any]]:
    """The objects under ``prefix.N.…``, in order of N; inner ones with only numbers are lists."""
    tree: dict[str, Any] = {}
    start = len(prefix) + 1
    for key, value in attributes.items():
        if key.startswith(prefix) and key[start - 1 : start] == ".":
            node = tree
            *above, leaf = key[start:].split(".", _DEEPEST)
            for step in above:
                inner = node.setdefault(step, {})
                if not isinstance(inner, dict):
                    break
                node = inner
            else:
                node.setdefault(leaf, value)
    items = _as_list(tree)
    return [row for row in items if isinstance(row, dict)] if isinstance(items, list) else []


def _as_list(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    inner = {key: _as_list(value) for key, value in node.items()}
    # Longer numbers are nobody's index, and int() refuses very long ones.
    if inner and all(key.isascii() and key.isdigit() and len(key) < 10 for key in inner):
        return [inner[key] for key in sorted(inner, key=int)]
    return inner


def drop_none(values: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes without those that nothing is known of."""
    return {key: value for key, value in values.items() if value is not None}


def dump(value: object) -> str:
    """JSON text; empty, which is none, of what cannot be written."""
    try:
        return json.dumps(value, default=lambda other: f"<{type(other).__name__}>")
    except (TypeError, ValueError, RecursionError):
        return ""  # Python's literals may have tuples as keys, and JSON be as deep as the stack.


def split_results(item: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return a message with the results of tools in it as messages of their own: the tool's."""
    parts = item.get("parts")
    if item.get("role") == "tool" or not isinstance(parts, list):
        return [item]
    runs = [
        (is_result, list(run))
        for is_result, run in groupby(
            parts, lambda part: isinstance(part, Mapping) and part.get("type") == RESULT
        )
    ]
    if not any(is_result for is_result, _ in runs):
        return [item]
    return [
        {**item, "role": "tool" if is_result else item.get("role"), "parts": run}
        for is_result, run in runs
    ]


def read_choices(choices: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages of an answer's choices."""
    return [
        read_message(
            object_of(choice.get("message")),
            "assistant",
            finish_reason=choice.get("finish_reason"),
        )
        for choice in choices
    ]


def read_reasons(choices: Iterable[Mapping[str, Any]]) -> list[str] | None:
    """Return the finish reason of each choice that has one; None if none has."""
    reasons = [choice.get("finish_reason") for choice in choices]
    return [reason for reason in reasons if isinstance(reason, str)] or None


def dump_tools(definitions: Iterable[object]) -> str | None:
    """Tool definitions, nested as in the chat API or flat, in the conventions' flat form."""
    flat = flatten_tools(list(definitions))
    return dump(flat) if flat else None


def choice_tokens(body: Mapping[str, Any]) -> dict[str, str]:
    """Token ids and logprobs of a whole answer as vLLM gives it."""
    choices = objects(body.get("choices"))
    return token_content(
        body.get("prompt_token_ids"),
        sampled_ids(body, [_token_ids(choice) for choice in choices]),
        [logprobs_of(object_of(choice.get("logprobs")).get("content")) for choice in choices],
    )


def _token_ids(choice: Mapping[str, Any]) -> object:
    """Return a choice's token ids; LiteLLM keeps them among what it does not know."""
    ids = choice.get("token_ids")
    return ids or object_of(choice.get("provider_specific_fields")).get("token_ids")


def logprobs_of(content: object) -> list[Any]:
    """The log-probability of each token in a choice's ``logprobs.content``."""
    return [token.get("logprob") for token in objects(content)]


def make_texts(role: str, texts: Iterable[object]) -> list[Message]:
    """Messages of plain text."""
    return [message(role, [text_part(text)]) for text in texts if isinstance(text, str)]
