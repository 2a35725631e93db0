"""One request to a model as the server saw it, and as a call span tells it, in one form.

Two facts are equal if the span is right; nothing here knows how spans are made.
"""

import base64
import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from lightning_otel import conventions as c
from lightning_otel.demo.server import Exchange
from lightning_otel.types import Span

Facts = dict[str, Any]


def final_exchanges(log: Iterable[Exchange]) -> list[Exchange]:
    """The exchanges without those that the client itself repeated: one request each."""
    found: list[Exchange] = []
    for exchange in log:
        if int(exchange.headers.get("x-stainless-retry-count", 0)):
            found.remove(_repeated(exchange, found))
        found.append(exchange)
    return found


def _repeated(exchange: Exchange, earlier: Sequence[Exchange]) -> Exchange:
    """The refused exchange that this one tries again."""
    return next(
        each
        for each in reversed(earlier)
        if each.status != 200 and each.request == exchange.request
    )


def is_generative(exchange: Exchange) -> bool:
    """Whether an answer was asked for, and came to its end."""
    is_asked = operation_of(exchange) in c.GENERATIVE_OPERATIONS
    return is_asked and exchange.status == 200 and not exchange.client_gone


def operation_of(exchange: Exchange) -> str:
    """The GenAI operation of an endpoint."""
    endpoint = urlsplit(exchange.path).path.rsplit("/", 1)[-1]
    return c.EMBEDDINGS if endpoint == "embeddings" else c.CHAT


def of_exchange(exchange: Exchange) -> Facts:
    """What the server's log says of a request."""
    request, response = exchange.request or {}, exchange.response or {}
    has_failed = exchange.status != 200
    response = {} if has_failed else response
    usage = _usage(exchange, response)
    return {
        "operation": operation_of(exchange),
        "model": request["model"],
        "temperature": request.get("temperature"),
        "response model": None if has_failed else _answered_model(exchange),
        "response id": None if has_failed else exchange.response_id,
        "is stream": exchange.is_stream,
        "has failed": has_failed,
        "is left": exchange.client_gone,
        "finish reasons": _finish_reasons(response),
        "input tokens": usage.get("prompt_tokens", usage.get("input_tokens")),
        "output tokens": usage.get("completion_tokens", usage.get("output_tokens")),
        "instructions": request.get("instructions"),
        "offered": [tool.get("function", tool)["name"] for tool in request.get("tools") or ()],
        "given": _given(request),
        # What was under way when the client left, nobody can tell.
        "answered": None if exchange.client_gone else _answered(response),
        "prompt ids": [] if exchange.client_gone else response.get("prompt_token_ids", []),
        "response ids": [choice.get("token_ids") or [] for choice in response.get("choices", ())],
        "logprobs": _logprobs(response),
    }


def of_span(span: Span) -> Facts:
    """What a call span says of a request."""
    get = span.attributes.get
    is_left = bool(get(c.ABANDONED))
    instructions = json.loads(get(c.SYSTEM_INSTRUCTIONS) or "[]")
    answered = [_read(item)[1] for item in json.loads(get(c.OUTPUT_MESSAGES) or "[]")]
    return {
        "operation": span.operation,
        "model": get(c.REQUEST_MODEL),
        "temperature": get(c.REQUEST_TEMPERATURE),
        "response model": get(c.RESPONSE_MODEL),
        "response id": get(c.RESPONSE_ID),
        "is stream": bool(get(c.REQUEST_STREAM)),
        # An answer that came to its end may still have failed to validate.
        "has failed": span.status == "ERROR" and not get(c.FINISH_REASONS),
        "is left": is_left,
        "finish reasons": list(get(c.FINISH_REASONS) or ()),
        "input tokens": get(c.INPUT_TOKENS),
        "output tokens": get(c.OUTPUT_TOKENS),
        "instructions": "".join(part["content"] for part in instructions) or None,
        "offered": [tool["name"] for tool in json.loads(get(c.TOOL_DEFINITIONS) or "[]")],
        "given": [_read(item) for item in json.loads(get(c.INPUT_MESSAGES) or "[]")],
        "answered": None if is_left else answered,
        "prompt ids": [] if is_left else _unpacked(get(c.PROMPT_TOKEN_IDS), "i")[0],
        "response ids": [] if is_left else _per_choice(span, c.RESPONSE_TOKEN_IDS, "i"),
        "logprobs": [] if is_left else _per_choice(span, c.RESPONSE_LOGPROBS, "d"),
    }


def _unpacked(packed: str | None, code: str) -> list[list[Any]]:
    """Numbers as base64 of little-endian values, one list per choice."""
    raw = [base64.b64decode(part) for part in (packed or "").split(",")]
    size = struct.calcsize(code)
    return [list(struct.unpack(f"<{len(data) // size}{code}", data)) for data in raw]


def _per_choice(span: Span, key: str, code: str) -> list[list[Any]]:
    found = _unpacked(span.attributes.get(key), code)
    choices = len(json.loads(span.attributes.get(c.OUTPUT_MESSAGES) or "[]"))
    is_chat = "chat" in str(span.attributes.get(c.OPENAI_API)) or key == c.RESPONSE_LOGPROBS
    return found if any(found) else [[] for _ in range(choices if is_chat else 0)]


def _answered_model(exchange: Exchange) -> object:
    first: Mapping[str, Any] = exchange.chunks[0] if exchange.chunks else {}
    return (exchange.response or first.get("response") or first).get("model")


def _usage(exchange: Exchange, response: Mapping[str, Any]) -> Mapping[str, Any]:
    # A chat stream tells its usage only where it was asked to.
    is_told = not exchange.is_stream or "output" in response
    is_told = is_told or any(chunk.get("usage") for chunk in exchange.chunks)
    return (response.get("usage") or {}) if is_told else {}


def _finish_reasons(response: Mapping[str, Any]) -> list[str]:
    if "output" in response:
        has_called = any(item["type"] == "function_call" for item in response["output"])
        return ["tool_calls" if has_called else "stop"]
    return [choice["finish_reason"] for choice in response.get("choices", ())]


def _logprobs(response: Mapping[str, Any]) -> list[list[float]]:
    if "output" in response:
        contents = [part for item in response["output"] for part in item.get("content", ())]
        return [[entry["logprob"] for part in contents for entry in part.get("logprobs") or ()]]
    return [
        [entry["logprob"] for entry in (choice.get("logprobs") or {}).get("content") or ()]
        for choice in response.get("choices", ())
    ]


def _given(request: Mapping[str, Any]) -> list[list[Any]]:
    given = request.get("messages", request.get("input"))
    if isinstance(given, str):
        return [["user", [["text", given]]]]
    assert isinstance(given, list)
    return [
        ["user", [["text", item]]] if isinstance(item, str) else [_role(item), _parts(item)]
        for item in given
    ]


def _role(item: Mapping[str, Any]) -> str:
    roles = {"function_call": "assistant", "reasoning": "assistant", "function_call_output": "tool"}
    return roles.get(str(item.get("type"))) or str(item["role"])


def _answered(response: Mapping[str, Any]) -> list[list[Any]]:
    if "output" in response:
        return [[part for item in response["output"] for part in _parts(item)]]
    return [_parts(choice["message"]) for choice in response.get("choices", ())]


def _parts(item: Mapping[str, Any]) -> list[list[Any]]:
    """The parts of a chat message or of an item of the Responses API."""
    if item.get("type") == "function_call":
        return [_call(item["call_id"], item)]
    if item.get("type") == "function_call_output":
        return [["result", item["call_id"], _text(item["output"])]]
    if item.get("role") == "tool":
        return [["result", item["tool_call_id"], _text(item.get("content"))]]
    texts = [_text(item.get("content"))]
    parts = [["text", text] for text in texts if text]
    return parts + [_call(call["id"], call["function"]) for call in item.get("tool_calls") or ()]


def _call(call_id: str, function: Mapping[str, Any]) -> list[Any]:
    return ["call", call_id, function["name"], json.loads(function["arguments"])]


def _text(content: object) -> str:
    if isinstance(content, Sequence) and not isinstance(content, str):
        return "".join(part["text"] for part in content)
    return str(content or "")


def _read(item: Mapping[str, Any]) -> list[Any]:
    """A message of the GenAI conventions in the form above."""
    texts = [part["content"] for part in item["parts"] if part["type"] == "text"]
    parts: list[list[Any]] = [["text", "".join(texts)]] if any(texts) else []
    for part in item["parts"]:
        if part["type"] == "tool_call":
            parts.append(["call", part["id"], part["name"], part["arguments"]])
        elif part["type"] == "tool_call_response":
            parts.append(["result", part["id"], _text(part["response"])])
    return [item["role"], parts]
