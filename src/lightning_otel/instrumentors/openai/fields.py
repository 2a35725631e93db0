"""What the endpoints' formats have in common: attributes by name, usage, parts, token data."""

import contextlib
import itertools
import json
from collections.abc import Callable, Container, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeAlias

import orjson
from opentelemetry.util.types import AttributeValue

from lightning_otel import conventions as c
from lightning_otel.adapter.messages import text_part, tool_call_part
from lightning_otel.adapter.tokens import encode_ids, encode_logprobs

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
    """JSON text of a value made of JSON; what is not becomes text, what is invalid is repaired."""
    try:
        return orjson.dumps(value).decode()
    except (TypeError, ValueError):
        return json.dumps(value, default=_plain, skipkeys=True)


def tool_call(call_id: Any, name: Any, arguments: object) -> dict[str, Any]:
    """A tool call's part, its arguments ready JSON where they are JSON.

    Only checked and not made anew: a long history's arguments are read with every call.
    """
    if type(arguments) is str:
        try:
            orjson.loads(arguments)
        except ValueError:
            return tool_call_part(call_id, name, arguments)
        arguments = orjson.Fragment(arguments)
    return {"type": "tool_call", "id": call_id, "name": name, "arguments": arguments}


def _plain(value: Any) -> Any:
    """A value in the form the client sends it in, if it can send it at all."""
    if type(value) is orjson.Fragment:
        return json.loads(orjson.dumps(value))
    dump_model = getattr(value, "model_dump", None)
    if dump_model is not None:
        return dump_model(mode="json", exclude_unset=True, by_alias=True)
    return value.isoformat() if isinstance(value, datetime) else f"<{type(value).__name__}>"


def objects(value: object) -> list[dict[str, Any]]:
    """The objects in a JSON list; empty for anything else, which is never iterated."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def object_of(value: object) -> dict[str, Any]:
    """The value if it is a JSON object, else an empty one."""
    return value if isinstance(value, dict) else {}


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


def usage(body: Json) -> Attributes:
    """Token counts, under either of the two names the API has for each."""
    counts = body.get("usage")
    if not isinstance(counts, dict):
        return {}
    given = object_of(counts.get("prompt_tokens_details", counts.get("input_tokens_details")))
    made = object_of(counts.get("completion_tokens_details", counts.get("output_tokens_details")))
    values = {
        c.INPUT_TOKENS: counts.get("prompt_tokens", counts.get("input_tokens")),
        c.OUTPUT_TOKENS: counts.get("completion_tokens", counts.get("output_tokens")),
        c.CACHED_TOKENS: given.get("cached_tokens"),
        c.REASONING_TOKENS: made.get("reasoning_tokens"),
    }
    return {key: value for key, value in values.items() if isinstance(value, int)}


def finish_reasons(body: Json) -> Attributes:
    """Why each choice ended, of those that did."""
    reasons = [choice.get("finish_reason") for choice in objects(body.get("choices"))]
    known = [reason for reason in reasons if isinstance(reason, str)]
    return {c.FINISH_REASONS: known} if known else {}


def tool_definitions(tools: object) -> str | None:
    """Function tools in the conventions' flat form; tools of another kind as they are."""
    flat = []
    for tool in objects(tools):
        function = tool.get("function")
        flat.append({"type": "function", **function} if isinstance(function, dict) else tool)
    return dump(flat) if flat else None


def content_parts(content: object) -> list[dict[str, Any]]:
    """A message's content, text or list of parts, as the conventions' parts."""
    if isinstance(content, str):
        return [text_part(content)] if content else []
    if isinstance(content, dict):
        return [_part(content)]
    if isinstance(content, list):
        return [_part(item) if isinstance(item, dict) else text_part(str(item)) for item in content]
    return []


def _part(part: Json) -> dict[str, Any]:
    kind = part.get("type")
    if kind in ("text", "input_text", "output_text", "summary_text", "reasoning_text"):
        return text_part(part.get("text", ""))
    if kind == "refusal":
        return {"type": "refusal", "content": part.get("refusal", "")}
    if kind in ("image_url", "input_image"):
        image = part.get("image_url")
        url = image.get("url") if isinstance(image, dict) else image
        return _media("image", url, part.get("file_id"))
    if kind == "input_audio":
        audio = object_of(part.get("input_audio"))
        mime_type = f"audio/{audio.get('format', 'wav')}"
        return {
            "type": "blob",
            "modality": "audio",
            "mime_type": mime_type,
            "content": audio.get("data"),
        }
    if kind in ("file", "input_file"):
        file = part.get("file")
        held = file if isinstance(file, dict) else part
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
    prompt_ids: object, response_ids: Sequence[object], logprobs: Sequence[object]
) -> dict[str, str]:
    """Token ids and logprobs by attribute key, where a server gave them, whole and as numbers.

    Args:
        prompt_ids: Ids of the prompt, [P].
        response_ids: Ids of each choice, [choices][R]; None where a choice has none.
        logprobs: Log-probabilities of each choice, [choices][R]; likewise.
    """
    found: dict[str, str] = {}
    if isinstance(prompt_ids, list) and prompt_ids:
        _add(found, c.PROMPT_TOKEN_IDS, encode_ids, [prompt_ids])
    ids_of = [ids if isinstance(ids, list) else [] for ids in response_ids]
    if any(ids_of):
        _add(found, c.RESPONSE_TOKEN_IDS, encode_ids, ids_of)
    logprobs_of = [values if isinstance(values, list) else [] for values in logprobs]
    if any(logprobs_of):
        _add(found, c.RESPONSE_LOGPROBS, encode_logprobs, logprobs_of)
    return found


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
        _add(found, c.LOGPROB_TOKEN_IDS, encode_ids, named)
    return found


def prompt_ids_of(body: Json, choices: Sequence[Json]) -> object:
    """Ids of the prompt: at the top, or on the first choice that has them.

    Source: vLLM's chat completions have them at the top; its completions, and SGLang, on choices.
    """
    return body.get("prompt_token_ids") or next(
        (held for choice in choices if (held := choice.get("prompt_token_ids"))), None
    )


def _add(
    found: dict[str, str], key: str, encode: Callable[[Any], str], choices: list[list[Any]]
) -> None:
    # A null among the logprobs, as of an echoed prompt's first token, leaves no list to trust.
    with contextlib.suppress(TypeError, OverflowError):
        found[key] = encode(choices)


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
    """What the pieces of one streamed value add up to."""
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
