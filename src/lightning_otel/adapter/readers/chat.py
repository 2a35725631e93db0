"""Bodies of the chat API, as many conventions quote them, read into messages and token ids.

Source: OpenAI's API reference for chat completions; vLLM's ``return_token_ids``.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from lightning_otel import conventions as c
from lightning_otel.adapter.attributes import shown
from lightning_otel.adapter.messages import (
    message,
    reasoning_part,
    text_part,
    tool_call_part,
    tool_response_part,
)
from lightning_otel.adapter.tokens import encode_ids, encode_logprobs, sampled_ids
from lightning_otel.types import Message

_TEXTS: Final = frozenset({"text", "input_text", "output_text"})


def dump(value: object) -> str:
    """JSON text; empty, which is none, of what cannot be written."""
    try:
        return json.dumps(value, default=lambda other: f"<{type(other).__name__}>")
    except (TypeError, ValueError, RecursionError):
        return ""  # Python's literals may have tuples as keys, and JSON be as deep as the stack.


def said(item: Mapping[str, Any], *, role: str = "", **extra: Any) -> dict[str, Any]:
    """A message of the chat API as today's conventions write it.

    Args:
        item: The message.
        role: Its role, where the message does not say it.
        extra: Further fields of the result.
    """
    role = shown(item.get("role") or role)
    content = item.get("content")
    if role == "tool":
        call_id = item.get("tool_call_id", item.get("id"))
        return message(role, [tool_response_part(call_id, _plain(content))], **extra)
    parts = []
    reasoning = item.get("reasoning_content") or item.get("reasoning")
    if isinstance(reasoning, str):
        parts.append(reasoning_part(reasoning))
    parts += content_parts(content)
    if isinstance(item.get("refusal"), str) and item["refusal"]:
        parts.append({"type": "refusal", "content": item["refusal"]})
    calls = item.get("tool_calls")
    parts += [tool_call(call) for call in objects(calls)]
    if not calls and isinstance(item.get("function_call"), Mapping):
        parts.append(tool_call(item["function_call"]))
    return message(role, parts, name=item.get("name"), **extra)


def tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """A tool call of the chat API, nested in ``function`` or flat, as a part."""
    held = call.get("function")
    held = held if isinstance(held, Mapping) else call
    return tool_call_part(call.get("id"), held.get("name"), held.get("arguments"))


def content_parts(content: object) -> list[dict[str, Any]]:
    """A message's content, text or list of parts."""
    if isinstance(content, str):
        return [text_part(content)] if content else []
    found = []
    for part in objects(content):
        text = part.get("text")
        if part.get("type") in _TEXTS and isinstance(text, str):
            found.append(text_part(text))
        else:
            found.append(dict(part))
    return found


def _plain(content: object) -> object:
    """A tool's answer: a list that holds one text is that text."""
    if isinstance(content, str) or not isinstance(content, list) or len(content) != 1:
        return content
    (only,) = content_parts(content) or [{}]
    return only.get("content", content)


def answered(choices: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages of an answer's choices."""
    return [
        said(
            object_of(choice.get("message")),
            role="assistant",
            finish_reason=choice.get("finish_reason"),
        )
        for choice in choices
    ]


def reasons(choices: Iterable[Mapping[str, Any]]) -> list[str] | None:
    """Why each choice ended, of those that did; None if none says."""
    found = [choice.get("finish_reason") for choice in choices]
    return [reason for reason in found if isinstance(reason, str)] or None


def tools(definitions: Iterable[object]) -> str | None:
    """Tool definitions, nested as in the chat API or flat, in the conventions' flat form."""
    flat = []
    for tool in definitions:
        if isinstance(tool, Mapping):
            function = tool.get("function")
            held = function if isinstance(function, Mapping) else tool
            flat.append({"type": "function", **held})
    return dump(flat) if flat else None


def tokens(
    prompt_ids: object, response_ids: Sequence[object], logprobs: Sequence[object]
) -> dict[str, str]:
    """Token ids and logprobs by attribute; what is not whole numbers, or numbers, is left out.

    Args:
        prompt_ids: Ids of the prompt, [P].
        response_ids: Ids of each choice, [choices][R].
        logprobs: Log-probabilities of each choice, [choices][R].
    """
    found: dict[str, str] = {}
    try:
        if isinstance(prompt_ids, (list, tuple)) and prompt_ids:
            found[c.PROMPT_TOKEN_IDS] = encode_ids([prompt_ids])
        sampled = [ids if isinstance(ids, (list, tuple)) else () for ids in response_ids]
        if any(sampled):
            found[c.RESPONSE_TOKEN_IDS] = encode_ids(sampled)
        values = [each if isinstance(each, (list, tuple)) else () for each in logprobs]
        if any(values):
            found[c.RESPONSE_LOGPROBS] = encode_logprobs(values)
    except (TypeError, OverflowError):
        pass  # What was found before the fault still holds.
    return found


def choice_tokens(body: Mapping[str, Any]) -> dict[str, str]:
    """Token ids and logprobs of a whole answer as vLLM gives it."""
    choices = objects(body.get("choices"))
    return tokens(
        body.get("prompt_token_ids"),
        sampled_ids(body, [_ids(choice) for choice in choices]),
        [logprobs_of(object_of(choice.get("logprobs")).get("content")) for choice in choices],
    )


def _ids(choice: Mapping[str, Any]) -> object:
    """A choice's token ids; LiteLLM keeps them among what it does not know."""
    held = choice.get("token_ids")
    return held or object_of(choice.get("provider_specific_fields")).get("token_ids")


def logprobs_of(content: object) -> list[Any]:
    """The log-probability of each token in a choice's ``logprobs.content``."""
    return [token.get("logprob") for token in objects(content)]


def objects(value: object) -> list[Mapping[str, Any]]:
    """The objects in a list; empty for anything else."""
    if not isinstance(value, (list, tuple)):
        return []
    return [item for item in value if isinstance(item, Mapping)]


def object_of(value: object) -> Mapping[str, Any]:
    """The value if it is an object, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def texts(role: str, found: Iterable[object]) -> list[Message]:
    """Messages of plain text."""
    return [message(role, [text_part(text)]) for text in found if isinstance(text, str)]
