"""What the span of a call must say, worked out from the server's log alone."""

import base64
import json
import re
import struct
from typing import Any
from urllib.parse import urlsplit

from lightning_otel import Recording
from lightning_otel.demo.server import LogEntry
from lightning_otel.messages import read_items, read_message, text_part
from lightning_otel.types import Span
from lightning_otel.types import conventions as c

CALCULATOR: Any = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Works out an expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
OPERATIONS = {
    "chat/completions": "chat",
    "responses": "chat",
    "completions": "text_completion",
    "embeddings": "embeddings",
}
REQUEST_KEYS = {
    "model": "gen_ai.request.model",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "max_tokens": "gen_ai.request.max_tokens",
    "max_completion_tokens": "gen_ai.request.max_tokens",
    "max_output_tokens": "gen_ai.request.max_tokens",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "seed": "gen_ai.request.seed",
    "reasoning_effort": "gen_ai.request.reasoning.level",
    "previous_response_id": "gen_ai.request.previous_response.id",
    "dimensions": "gen_ai.embeddings.dimension.count",
    "service_tier": "openai.request.service_tier",
}
RESPONSE_KEYS = {
    "id": "gen_ai.response.id",
    "model": "gen_ai.response.model",
    "system_fingerprint": "openai.response.system_fingerprint",
    "service_tier": "openai.response.service_tier",
}
USAGE_KEYS = {
    "gen_ai.usage.input_tokens": ("prompt_tokens", "input_tokens"),
    "gen_ai.usage.output_tokens": ("completion_tokens", "output_tokens"),
}


_MADE_UP = re.compile(
    r"(?:resp|msg|fc|rs|chatcmpl|call|cache|agents|run)(?:[-_]\w+)*[-_][0-9a-f]{12,}[-0-9a-f]*"
)
"""Ids that are drawn anew for each request or answer, and come back in the next request."""
_OWN_HEADERS = ("idempotency-key", "host", "x-stainless-read-timeout", "x-amzn-trace-id")
"""Headers that are drawn at random for each request, or name the server's port."""


def sent(exchange: LogEntry) -> str:
    """A request as it was sent, byte for byte but for what is drawn at random."""
    headers = {name: text for name, text in exchange.headers.items() if name not in _OWN_HEADERS}
    return _MADE_UP.sub("ID", json.dumps([exchange.path, exchange.request, headers]))


def calls(recording: Recording) -> list[Span]:
    return [span for span in recording.spans() if c.OPERATION in span.attributes]


def agree(span: Span, exchange: LogEntry, **more: Any) -> None:
    """Assert that every attribute of the span is what the log says, and none is missing."""
    first_chunk_s = span.attributes.get(c.TIME_TO_FIRST_CHUNK)

    wrong = differences(span, exchange, **more)
    assert not wrong, wrong
    assert (first_chunk_s is not None) == exchange.is_stream
    assert (span.kind, span.status, span.scope) == ("CLIENT", "UNSET", c.SCOPE)
    assert span.end_ns is not None
    assert 0 <= (first_chunk_s or 0) * 1e9 <= span.end_ns - span.start_ns


def differences(span: Span, exchange: LogEntry, **more: Any) -> dict[str, tuple[Any, Any]]:
    """By attribute what the span says and what it should say, where these differ."""
    found, wanted = told(span), {**attributes(exchange, **more), **read(content(exchange))}
    found["name"] = span.name
    wanted["name"] = f"{wanted[c.OPERATION]} {wanted[c.REQUEST_MODEL]}"
    keys = [key for key in found | wanted if found.get(key) != wanted.get(key)]
    return {key: (found.get(key), wanted.get(key)) for key in keys}


def told(span: Span) -> dict[str, Any]:
    """A span's attributes with its content read, but for stamps, times and attempts."""
    left = (
        c.ROLLOUT_ID, c.ATTEMPT_ID, c.SEQUENCE_ID, c.TIME_TO_FIRST_CHUNK, c.RESENDS,
        c.FAILED_ATTEMPTS,
    )  # fmt: skip
    held = {key: value for key, value in span.attributes.items() if key not in left}
    return held | read({key: held[key] for key in c.CONTENT_KEYS if key in held})


def attributes(exchange: LogEntry, **more: Any) -> dict[str, Any]:
    """The attributes a finished call has, without content."""
    request, response = exchange.request or {}, exchange.response or {}
    name = endpoint(exchange)
    host, _, port = exchange.headers["host"].partition(":")
    found = {
        "gen_ai.operation.name": OPERATIONS[name],
        "gen_ai.provider.name": more.get("provider", "openai"),
        "server.address": host,
        "server.port": int(port),
    }
    found |= {key: request[name] for name, key in REQUEST_KEYS.items() if name in request}
    found |= {key: response[name] for name, key in RESPONSE_KEYS.items() if name in response}
    if name in ("chat/completions", "responses"):
        found["openai.api.type"] = name.replace("/", "_")
    if request.get("stream"):
        found["gen_ai.request.stream"] = True
    if "stop" in request:
        stop = request["stop"]
        found["gen_ai.request.stop_sequences"] = [stop] if isinstance(stop, str) else stop
    if request.get("n", 1) != 1:
        found["gen_ai.request.choice.count"] = request["n"]
    if name == "embeddings":
        found["gen_ai.embeddings.dimension.count"] = request.get("dimensions", 8)
        found["gen_ai.request.encoding_formats"] = [request["encoding_format"]]
    keys = {"agent": c.AGENT_NAME, "conversation": c.CONVERSATION_ID, "output_type": c.OUTPUT_TYPE}
    found |= {key: more[name] for name, key in keys.items() if name in more}
    return found | finish(exchange) | usage(exchange)


def endpoint(exchange: LogEntry) -> str:
    """The endpoint's name, such as ``chat/completions``."""
    path = urlsplit(exchange.path).path
    return next(name for name in OPERATIONS if path.endswith(f"/{name}"))


def finish(exchange: LogEntry) -> dict[str, Any]:
    """Why each choice ended."""
    response = exchange.response or {}
    reasons = [choice["finish_reason"] for choice in response.get("choices", ())]
    if "output" in response:
        called = any(item["type"] == "function_call" for item in response["output"])
        reasons = ["tool_calls" if called else "stop"]
        if response["status"] == "incomplete":
            reasons = ["length"]
    return {"gen_ai.response.finish_reasons": reasons} if reasons else {}


def usage(exchange: LogEntry) -> dict[str, int]:
    """The token counts, where the server sent them."""
    counts = (exchange.response or {}).get("usage") or {}
    is_chat_stream = exchange.is_stream and "choices" in (exchange.response or {})
    if is_chat_stream and not any(chunk.get("usage") for chunk in exchange.chunks):
        return {}
    found = {
        key: counts[name] for key, names in USAGE_KEYS.items() for name in names if name in counts
    }
    for given in ("prompt_tokens_details", "input_tokens_details"):
        if given in counts:
            found["gen_ai.usage.cache_read.input_tokens"] = counts[given]["cached_tokens"]
    for made in ("completion_tokens_details", "output_tokens_details"):
        if made in counts:
            found["gen_ai.usage.reasoning.output_tokens"] = counts[made]["reasoning_tokens"]
    return found


def content(exchange: LogEntry) -> dict[str, str]:
    """Messages, tools, token ids and logprobs, as texts."""
    request, response = exchange.request or {}, exchange.response or {}
    given = request.get("messages", request.get("prompt", request.get("input")))
    found: dict[str, Any] = {c.INPUT_MESSAGES: read_items([given] if type(given) is str else given)}
    if "messages" in request:
        found[c.INPUT_MESSAGES] = [read_message(message) for message in given]
    choices = response.get("choices", ())
    if "output" in response:
        (turn,) = read_items(response["output"], "assistant")
        (reason,) = finish(exchange).values()
        found[c.OUTPUT_MESSAGES] = [{**turn, "finish_reason": reason[0]}]
    elif choices:
        found[c.OUTPUT_MESSAGES] = [
            read_message(
                choice.get("message") or {"content": choice["text"]},
                "assistant",
                finish_reason=choice["finish_reason"],
            )
            for choice in choices
        ]
    if request.get("instructions"):
        found[c.SYSTEM_INSTRUCTIONS] = [text_part(request["instructions"])]
    if request.get("tools"):
        found[c.TOOL_DEFINITIONS] = [
            {"type": "function", **tool.get("function", tool)} for tool in request["tools"]
        ]
    return {key: json.dumps(value) for key, value in found.items()} | tokens(response)


def tokens(response: dict[str, Any]) -> dict[str, str]:
    choices = response.get("choices", ())
    found = {}
    holders = [response, *choices]
    prompts = [held["prompt_token_ids"] for held in holders if held.get("prompt_token_ids")]
    if prompts:
        found[c.PROMPT_TOKEN_IDS] = pack("i", prompts[0])
    if any(choice.get("token_ids") for choice in choices):
        packed = [pack("i", choice["token_ids"]) for choice in choices]
        found[c.RESPONSE_TOKEN_IDS] = ",".join(packed)
    logprobs = [logprobs_of(choice) for choice in choices]
    if not choices:
        parts = [part for item in response.get("output", ()) for part in item.get("content", ())]
        logprobs = [[entry["logprob"] for part in parts for entry in part["logprobs"]]]
    if any(logprobs):
        found[c.RESPONSE_LOGPROBS] = ",".join(pack("d", held) for held in logprobs)
    return found


def read(content: dict[str, Any]) -> dict[str, Any]:
    """Content with its JSON parsed: a tool call's arguments keep the spaces the model wrote."""
    return {
        key: json.loads(text) if isinstance(text, str) and text.startswith("[") else text
        for key, text in content.items()
    }


def pack(code: str, values: list[Any]) -> str:
    """Base64 of little-endian numbers."""
    return base64.b64encode(struct.pack(f"<{len(values)}{code}", *values)).decode()


def logprobs_of(choice: dict[str, Any]) -> list[float]:
    """The logprobs of a choice of either completions endpoint."""
    held = choice.get("logprobs") or {}
    return held.get("token_logprobs") or [entry["logprob"] for entry in held.get("content", ())]
