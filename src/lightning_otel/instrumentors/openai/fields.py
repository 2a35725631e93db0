"""Fields that the endpoints' formats share: attributes, usage, parts, token data."""

import itertools
import json
from collections.abc import Callable, Container, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeAlias

import orjson
from opentelemetry.util.types import AttributeValue

from lightning_otel import conventions as c
from lightning_otel import messages
from lightning_otel.adapter.tokens import add_encoded, encode_ids
from lightning_otel.messages import called_part, flat_tools, objects, values

Json: TypeAlias = Mapping[str, Any]
Attributes: TypeAlias = dict[str, AttributeValue]

_NUMBER = (int, float)
_SCALARS: Mapping[str, tuple[str, type | tuple[type, ...]]] = {
    "temperature": (c.REQUEST_TEMPERATURE, _NUMBER),
    "top_p": (c.REQUEST_TOP_P, _NUMBER),
    "top_k": (c.REQUEST_TOP_K, int),
    "min_p": (c.REQUEST_MIN_P, _NUMBER),
    "repetition_penalty": (c.REQUEST_REPETITION_PENALTY, _NUMBER),
    "max_tokens": (c.REQUEST_MAX_TOKENS, int),
    "max_completion_tokens": (c.REQUEST_MAX_TOKENS, int),
    "max_output_tokens": (c.REQUEST_MAX_TOKENS, int),
    "frequency_penalty": (c.REQUEST_FREQUENCY_PENALTY, _NUMBER),
    "presence_penalty": (c.REQUEST_PRESENCE_PENALTY, _NUMBER),
    "seed": (c.REQUEST_SEED, int),
    "reasoning_effort": (c.REQUEST_REASONING_LEVEL, str),
    "previous_response_id": (c.REQUEST_PREVIOUS_RESPONSE, str),
    "dimensions": (c.EMBEDDING_DIMENSIONS, int),
}
_NAMED = "token_id:"
_RESPONSE: Mapping[str, str] = {
    "id": c.RESPONSE_ID,
    "model": c.RESPONSE_MODEL,
    "system_fingerprint": c.OPENAI_FINGERPRINT,
    "service_tier": c.OPENAI_RESPONSE_TIER,
}


def dump(value: object) -> str:
    """Return JSON text of what a client sends or was sent."""
    return values.dump(value, _as_sent)


def _as_sent(value: Any) -> Any:
    """Return a value in the form the client sends it in, if it can send it at all."""
    if type(value) is orjson.Fragment:
        return json.loads(orjson.dumps(value))
    dump_model = getattr(value, "model_dump", None)
    if dump_model is not None:
        return dump_model(mode="json", exclude_unset=True, by_alias=True)
    return value.isoformat() if isinstance(value, datetime) else f"<{type(value).__name__}>"


def read_message(item: Json, role: str = "", **extra: Any) -> dict[str, Any]:
    """Return a message of the chat API in the conventions' form, for writing."""
    return messages.read_message(item, role, called_part, **extra)


def index_of(choice: Json) -> int:
    """A choice's number; servers with only one may leave it out."""
    index = choice.get("index")
    return index if isinstance(index, int) else 0


def request_scalars(body: Json) -> Attributes:
    """Sampling parameters and the like, where they have the type the conventions name."""
    found: Attributes = {}
    for name, value in body.items():
        if name not in _SCALARS:
            continue
        key, kind = _SCALARS[name]
        if isinstance(value, kind) and not isinstance(value, bool):
            found[key] = float(value) if kind == _NUMBER else value  # type: ignore[arg-type, assignment]  # checked by kind
    stop = body.get("stop")
    if isinstance(stop, str):
        found[c.REQUEST_STOP] = [stop]
    elif isinstance(stop, list) and all(isinstance(item, str) for item in stop):
        found[c.REQUEST_STOP] = list(stop)
    choices = body.get("n")
    if isinstance(choices, int) and choices != 1:
        found[c.REQUEST_CHOICES] = choices
    tier = body.get("service_tier")
    if isinstance(tier, str) and tier != "auto":
        found[c.OPENAI_REQUEST_TIER] = tier
    return found


def output_type(format_type: object) -> Attributes:
    """The output type that a response format asks for."""
    if format_type in ("json_object", "json_schema"):
        return {c.OUTPUT_TYPE: "json"}
    return {c.OUTPUT_TYPE: "text"} if format_type == "text" else {}


def response_scalars(body: Json) -> Attributes:
    """Id, model, tier and fingerprint of an answer."""
    return {
        key: value for name, key in _RESPONSE.items() if isinstance(value := body.get(name), str)
    }


def finish_reasons(body: Json) -> Attributes:
    """Return the finish reason of each choice that has one."""
    reasons = [choice.get("finish_reason") for choice in objects(body.get("choices"))]
    known = [reason for reason in reasons if isinstance(reason, str)]
    return {c.FINISH_REASONS: known} if known else {}


def tool_definitions(tools: object) -> str | None:
    """Return function tools in the conventions' flat form; tools of another kind as they are."""
    flat = flat_tools(tools) if tools else ()
    return dump(flat) if flat else None


def named_ids(tokens: Sequence[object]) -> list[int]:
    """The ids that tokens written ``token_id:N`` name; empty unless all are.

    Source: vLLM's ``return_tokens_as_token_ids``.
    """
    texts = [text for text in tokens if type(text) is str and text.startswith(_NAMED)]
    if not texts or len(texts) < len(tokens):
        return []
    try:
        return [int(text[len(_NAMED) :]) for text in texts]
    except ValueError:
        return []


def add_named_ids(found: dict[str, str], choices: Sequence[Sequence[object]]) -> dict[str, str]:
    """Content with the ids that the logprobs' tokens name, where they name some.

    Args:
        found: The content so far, added to.
        choices: The tokens of each choice, [choices][R].
    """
    named = [named_ids(tokens) for tokens in choices]
    if any(named):
        add_encoded(found, c.LOGPROB_TOKEN_IDS, encode_ids, named)
    return found


def prompt_ids_of(body: Json, choices: Sequence[Json]) -> object:
    """Ids of the prompt: at the top, or on the first choice that has them.

    Source: vLLM's chat completions have them at the top; its completions, and SGLang, on choices.
    """
    return body.get("prompt_token_ids") or next(
        (held for choice in choices if (held := choice.get("prompt_token_ids"))), None
    )


def assembled(
    events: Sequence[Json], choice_of: Callable[[list[dict[str, Any]]], dict[str, Any]]
) -> Json:
    """The answer that a stream's chunks add up to.

    Args:
        events: The chunks.
        choice_of: Makes one choice of its chunks.
    """
    whole: dict[str, Any] = {}
    for name in ("id", "model", "system_fingerprint", "service_tier", "prompt_token_ids"):
        whole[name] = next((held for event in events if (held := event.get(name))), None)
    for name in ("usage", "error"):
        whole[name] = next((held for event in reversed(events) if (held := event.get(name))), None)
    chunks: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        for chunk in objects(event.get("choices")):
            chunks.setdefault(index_of(chunk), []).append(chunk)
    whole["choices"] = [choice_of(chunks[index]) for index in sorted(chunks)]
    return whole


def grown(pieces: Sequence[Json], growing: Container[str]) -> dict[str, Any]:
    """One object of its streamed pieces: named fields grow, of the others the last value counts."""
    whole = {}
    for name in dict.fromkeys(itertools.chain.from_iterable(pieces)):
        values = [value for piece in pieces if (value := piece.get(name)) is not None]
        if values:
            whole[name] = joined(values) if name in growing else values[-1]
    return whole


def joined(values: list[Any]) -> Any:
    """Join the pieces of one streamed value."""
    if len(values) == 1:
        return values[0]
    kinds = set(map(type, values))
    if kinds == {str}:
        return "".join(values)
    if kinds == {list}:
        return list(itertools.chain.from_iterable(values))
    if kinds == {dict}:
        return grown(values, frozenset(itertools.chain.from_iterable(values)))
    return values[-1]
