"""What the endpoints' formats have in common: attributes by name, usage, parts, token data."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import orjson
from opentelemetry.util.types import AttributeValue

from lightning_otel import conventions as c
from lightning_otel.adapter.messages import text_part
from lightning_otel.adapter.tokens import encode_ids, encode_logprobs

Json: TypeAlias = Mapping[str, Any]
Attributes: TypeAlias = dict[str, AttributeValue]

_NUMBER = (int, float)
_SCALARS: Mapping[str, tuple[str, type | tuple[type, ...]]] = {
    "temperature": (c.REQUEST_TEMPERATURE, _NUMBER),
    "top_p": (c.REQUEST_TOP_P, _NUMBER),
    "top_k": (c.REQUEST_TOP_K, int),
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
_RESPONSE: Mapping[str, str] = {
    "id": c.RESPONSE_ID,
    "model": c.RESPONSE_MODEL,
    "system_fingerprint": c.OPENAI_FINGERPRINT,
    "service_tier": c.OPENAI_RESPONSE_TIER,
}


def dump(value: object) -> str:
    """JSON text of a value made of JSON; what is not becomes text, what is invalid is repaired."""
    try:
        return orjson.dumps(value, default=str, option=orjson.OPT_NON_STR_KEYS).decode()
    except (TypeError, ValueError):
        import json

        return json.dumps(value, default=str)


def request_scalars(body: Json) -> Attributes:
    """Sampling parameters and the like, where they have the type the conventions name."""
    found: Attributes = {}
    for name, (key, kind) in _SCALARS.items():
        value = body.get(name)
        if isinstance(value, kind) and not isinstance(value, bool):
            found[key] = float(value) if kind == _NUMBER else value  # type: ignore[arg-type, assignment]  # checked by kind
    stop = body.get("stop")
    if isinstance(stop, str):
        found[c.REQUEST_STOP] = [stop]
    elif isinstance(stop, Sequence) and all(isinstance(item, str) for item in stop):
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


def usage(body: Json) -> Attributes:
    """Token counts, under either of the two names the API has for each."""
    counts = body.get("usage")
    if not isinstance(counts, Mapping):
        return {}
    given = counts.get("prompt_tokens_details") or counts.get("input_tokens_details") or {}
    made = counts.get("completion_tokens_details") or counts.get("output_tokens_details") or {}
    values = {
        c.INPUT_TOKENS: counts.get("prompt_tokens", counts.get("input_tokens")),
        c.OUTPUT_TOKENS: counts.get("completion_tokens", counts.get("output_tokens")),
        c.CACHED_TOKENS: given.get("cached_tokens"),
        c.REASONING_TOKENS: made.get("reasoning_tokens"),
    }
    return {key: value for key, value in values.items() if isinstance(value, int)}


def tool_definitions(tools: object) -> str | None:
    """Function tools in the conventions' flat form; tools of another kind as they are."""
    if not isinstance(tools, Sequence) or isinstance(tools, str) or not tools:
        return None
    flat = []
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        flat.append({"type": "function", **function} if isinstance(function, Mapping) else tool)
    return dump(flat)


def content_parts(content: object) -> list[dict[str, Any]]:
    """A message's content, text or list of parts, as the conventions' parts."""
    if content is None:
        return []
    if isinstance(content, str):
        return [text_part(content)] if content else []
    if isinstance(content, Mapping):
        return [_part(content)]
    if isinstance(content, Iterable):
        return [
            _part(item) if isinstance(item, Mapping) else text_part(str(item)) for item in content
        ]
    return [text_part(str(content))]


def _part(part: Json) -> dict[str, Any]:
    kind = part.get("type")
    if kind in ("text", "input_text", "output_text", "summary_text", "reasoning_text"):
        return text_part(part.get("text", ""))
    if kind == "refusal":
        return {"type": "refusal", "content": part.get("refusal", "")}
    if kind in ("image_url", "input_image"):
        image = part.get("image_url")
        url = image.get("url") if isinstance(image, Mapping) else image
        return _media("image", url, part.get("file_id"))
    if kind == "input_audio":
        audio = part.get("input_audio") or {}
        mime_type = f"audio/{audio.get('format', 'wav')}"
        return {
            "type": "blob",
            "modality": "audio",
            "mime_type": mime_type,
            "content": audio.get("data"),
        }
    if kind in ("file", "input_file"):
        file = part.get("file")
        held = file if isinstance(file, Mapping) else part
        return _media(
            "document", held.get("file_data") or held.get("file_url"), held.get("file_id")
        )
    return dict(part)


def _media(modality: str, url: object, file_id: object) -> dict[str, Any]:
    if isinstance(url, str) and url.startswith("data:"):
        head, _, data = url.partition(",")
        mime_type = head[len("data:") :].partition(";")[0]
        return {"type": "blob", "modality": modality, "mime_type": mime_type, "content": data}
    if url:
        return {"type": "uri", "modality": modality, "uri": url}
    return {"type": "file", "modality": modality, "file_id": file_id}


def token_content(
    prompt_ids: object, response_ids: Sequence[object], logprobs: Sequence[Sequence[float] | None]
) -> dict[str, str]:
    """Token ids and logprobs by attribute key, where a server gave them.

    Args:
        prompt_ids: Ids of the prompt, [P].
        response_ids: Ids of each choice, [choices][R]; None where a choice has none.
        logprobs: Log-probabilities of each choice, [choices][R]; likewise.
    """
    found: dict[str, str] = {}
    if isinstance(prompt_ids, list) and prompt_ids:
        found[c.PROMPT_TOKEN_IDS] = encode_ids([prompt_ids])
    choices = [ids if isinstance(ids, list) else [] for ids in response_ids]
    if any(choices):
        found[c.RESPONSE_TOKEN_IDS] = encode_ids(choices)
    if any(logprobs):
        found[c.RESPONSE_LOGPROBS] = encode_logprobs([values or [] for values in logprobs])
    return found


def extended(held: Any, delta: Any) -> Any:
    """Two pieces of one streamed value: texts and lists grow, anything else is replaced."""
    if delta is None:
        return held
    if isinstance(held, str) and isinstance(delta, str):
        return held + delta
    if isinstance(held, list) and isinstance(delta, list):
        held.extend(delta)
        return held
    return list(delta) if isinstance(delta, list) else delta
