"""Parts of a message, under any spelling that is known, as the GenAI conventions write them.

Unreadable parts are kept as they came, named after their kind.

Source: the message schemas of the GenAI semantic conventions; OpenAI's API references for chat
completions and responses; content blocks of Anthropic's Messages API, of Amazon Bedrock's Converse
and of LangChain 1; Google's ``Part`` of ``generateContent``; message parts of the Vercel AI SDK 5;
``audio_url`` and ``video_url`` as vLLM reads them; Pydantic AI's spans.
"""

import contextlib
import json
import math
from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any, Final, NoReturn, TypeAlias

from lightning_otel.messages.media import text_part, to_text
from lightning_otel.types.values import is_object

Part: TypeAlias = dict[str, Any]
_Read: TypeAlias = Callable[[str, Mapping[str, Any], Mapping[str, Any]], Part | None]
"""Reads a part, by its kind, and the object in it of that name; None where it cannot."""

_JSON_KINDS: Final[Mapping[type, str]] = {
    NoneType: "null", bool: "boolean", int: "number", float: "number", list: "array",
}  # fmt: skip
"""JSON's names of values that are no part of a message."""
_BASE64: Final = ";base64,"
_MODALITIES: Final = ("image", "audio", "video")
_CALL_IDS: Final = ("call_id", "id", "toolCallId", "tool_call_id", "toolUseId")
_RESULT_IDS: Final = ("tool_use_id", *_CALL_IDS)
_SHAPES: Final = (
    (frozenset({"toolCallId", "toolName"}), "tool_call"),
    (frozenset({"id", "name", "arguments"}), "tool_call"),
    (frozenset({"call_id", "content"}), "tool_result"),
)
"""Fields by which a part is known that has no type: the Vercel AI SDK's and AutoGen's."""
_KINDS: Final = ("type", "block_type", "kind")
"""Where a part says its kind; the last two are LlamaIndex' and Pydantic AI's."""
_CALL_NAMES: Final = ("name", "toolName", "tool_name")
_ARGUMENTS: Final = ("arguments", "args", "input", "tool_kwargs")
_FAILURES: Final = ("is_error", "isError", "error")
_RESULTS: Final = ("response", "result", "output", "content")
_WORDS: Final = ("content", "text", "thinking", "reasoning")
_MIME_TYPES: Final = ("mime_type", "media_type", "mimeType", "mediaType")
_BYTES: Final = ("data", "base64", "bytes")
_PLACES: Final = (
    "url", "uri", "fileUri", "file_uri", "image_url", "audio_url", "video_url", "file_data",
    "file_url", "image",
)  # fmt: skip
_THOUGHTS: Final = frozenset({"thought", "thoughtSignature", "thought_signature"})
_OF_PART: Final = _THOUGHTS | frozenset(
    {"type", "block_type", "kind", "text", "content", "thinking", "reasoning", "summary",
     "encrypted_content", "signature", "id", "call_id", "tool_use_id", "toolUseId",
     "toolCallId", "tool_call_id", "toolCallType", "name", "toolName", "tool_name", "arguments",
     "args", "input", "tool_kwargs", "result", "output", "response", "is_error", "isError",
     "status", "annotations", "citations", "logprobs", "index", "partial_json", "cache_control",
     "providerOptions", "providerMetadata", "providerExecuted", "source", "url", "uri", "data",
     "base64", "detail", "file", "format", "filename", "file_id", "file_data", "file_url",
     "image_url", "mime_type", "mimeType", "media_type", "mediaType", "namespace", "origin",
     "error", "caller", "extras"}
)  # fmt: skip
_SCHEMES: Final = ("data:", "http:", "https:", "gs:", "s3:", "file:")


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _read_float(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refuse_constant(text)


_STRICT: Final = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_read_float)


def reasoning_part(content: str) -> Part:
    """A part that holds a model's visible reasoning."""
    return {"type": "reasoning", "content": content}


def tool_call_part(call_id: str | None, name: str | None, arguments: object) -> Part:
    """A part that asks for a tool; argument text that is JSON is stored as what it says."""
    if isinstance(arguments, str):
        # A cut, malformed or bottomless text is kept as the model wrote it.
        with contextlib.suppress(ValueError, RecursionError):
            arguments = _STRICT.decode(arguments)
    return {"type": "tool_call", "id": call_id, "name": name, "arguments": arguments}


def tool_response_part(call_id: str | None, response: object) -> Part:
    """A part that holds a tool's answer."""
    return {"type": "tool_call_response", "id": call_id, "response": response}


def named_part(part: object) -> Mapping[str, Any]:
    """An item of a message as a part with a name: what is no part is named by its kind."""
    if not is_object(part):
        if type(part) in _JSON_KINDS:
            return {"type": _JSON_KINDS[type(part)], "content": part}
        return text_part(to_text(part))
    kind = part.get("type")
    if isinstance(kind, str):
        return part
    kind = _first(part, _KINDS)
    if kind is not None:
        return {**part, "type": to_text(kind)}
    # Where there is no type, the key that a reader is for names the part, or the only one.
    shapes = (kind for shape, kind in _SHAPES if shape <= part.keys())
    word = next((key for key in part if key in READERS), None) or next(shapes, None)
    if word is None and len(part) == 1:
        word = to_text(next(iter(part)))
    return part if word is None else {**part, "type": word}


def part_of(part: object) -> Part:
    """A part in any spelling as one of the conventions; these, and unknown ones, as they are."""
    part = named_part(part)
    kind = to_text(part.get("type"))
    read = READERS.get(kind)
    if read is not None:
        inner = part.get(kind)
        result = read(kind, part, inner if isinstance(inner, Mapping) else {})
        if result is not None:
            return result
    return dict(part)


def is_part(item: object) -> bool:
    """Return whether an item is a part of a message, with nothing left over, and not a message."""
    if not is_object(item) or "role" in item:
        return False
    kind = to_text(named_part(item).get("type"))
    if kind not in READERS:
        return False
    if kind in item and not any(isinstance(item.get(name), str) for name in _KINDS):
        is_whole = isinstance(item[kind], str) if kind == "text" else is_object(item[kind])
        return is_whole and item.keys() - {kind} <= _THOUGHTS
    return item.keys() - {kind} <= _OF_PART


def _first(fields: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    for name in names:
        value = fields.get(name)
        if value is not None:
            return value
    return None


def _read_id(fields: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    """Return the id of a call; Agent Framework's is a list that ends with it."""
    value = _first(fields, names)
    return value[-1] if isinstance(value, list) and value else value


def _rest_of(part: Mapping[str, Any], names: tuple[str, ...]) -> Part:
    return {key: value for key, value in part.items() if key not in names and value is not None}


def _read_text(kind: str, part: Mapping[str, Any], inner: Mapping[str, Any]) -> Part | None:
    text = part.get("text")
    if not isinstance(text, str):
        return None
    if part.get("thought") is True:  # Google's
        return {**reasoning_part(text), **_rest_of(part, ("type", "text", "thought"))}
    return text_part(text)


def _read_refusal(kind: str, part: Mapping[str, Any], inner: Mapping[str, Any]) -> Part | None:
    text = part.get("refusal")
    return {"type": "refusal", "content": text} if isinstance(text, str) else None


def _read_reasoning(kind: str, part: Mapping[str, Any], inner: Mapping[str, Any]) -> Part | None:
    content = inner.get("reasoningText") if inner else part
    text = _first(content, _WORDS) if isinstance(content, Mapping) else None
    if not (isinstance(content, Mapping) and isinstance(text, str)):
        return None
    return {**reasoning_part(text), **_rest_of(content, ("type", *_WORDS))}


def _read_call(kind: str, part: Mapping[str, Any], inner: Mapping[str, Any]) -> Part | None:
    arguments = part.get("arguments")
    is_written = isinstance(arguments, str) and arguments.startswith("{")
    if kind == "tool_call" and arguments is not None and not is_written and "id" in part:
        return None
    fields = inner or part
    name = _first(fields, _CALL_NAMES)
    if not isinstance(name, str):
        return None
    arguments = _first(fields, _ARGUMENTS) or fields.get("partial_json")  # LangChain's, of a stream
    call = tool_call_part(_read_id(fields, _CALL_IDS), name, {} if arguments is None else arguments)
    signature = _first(part, ("thoughtSignature", "thought_signature"))
    return call if signature is None else {**call, "thought_signature": signature}


def _read_result(kind: str, part: Mapping[str, Any], inner: Mapping[str, Any]) -> Part | None:
    if kind == "tool_call_response" and "response" in part and type(part.get("id")) is not list:
        return None
    fields = inner or part
    result = _first(fields, _RESULTS)
    if is_object(result) and result.keys() == {"type", "value"}:  # the Vercel AI SDK's
        result = result["value"]
    origin = fields["origin"] if is_object(fields.get("origin")) else {}
    call_id = _read_id(fields, _RESULT_IDS) or _first(origin, _CALL_IDS)
    answer = tool_response_part(call_id, unwrap_response(result))
    is_failed = any(fields.get(name) for name in _FAILURES) or fields.get("status") == "error"
    return {**answer, "is_error": True} if is_failed else answer


def unwrap_response(content: object) -> object:
    """Return a tool's answer: a list of one text, or of one JSON value of Bedrock's, is that."""
    if isinstance(content, (list, tuple)) and len(content) == 1:
        if is_object(content[0]) and content[0].keys() == {"json"}:
            return content[0]["json"]
        only = part_of(content[0]) if is_object(content[0]) or type(content[0]) is str else {}
        return only.get("content", content) if only.get("type") == "text" else content
    return content


def _read_medium(kind: str, part: Mapping[str, Any], inner: Mapping[str, Any]) -> Part | None:
    if "modality" in part:
        return None
    outer = inner or part
    source = outer.get("source")
    fields = source if isinstance(source, Mapping) else outer
    mime_type, form = _first({**outer, **fields}, _MIME_TYPES) or "", outer.get("format")
    modality = _modality_of(kind, str(mime_type))
    if not mime_type and (form or kind == "input_audio"):
        mime_type = f"{modality}/{form or 'wav'}"
    extra = {key: fields[key] for key in ("detail", "filename") if key in fields}
    if isinstance(fields.get("file_id"), str):
        return {"type": "file", "modality": modality, "file_id": fields["file_id"], **extra}
    data = _first(fields, ("content",) if kind == "binary" else _BYTES)
    place = _first(fields, _PLACES) if data is None else data
    if not isinstance(place, str) or fields.get("type") == "text":  # a document's own words
        return None
    if place.startswith(_SCHEMES) or (data is None and kind != "image"):
        return _read_address(modality, place) | extra
    return _make_blob(modality, str(mime_type), place) | extra


def _modality_of(kind: str, mime_type: str) -> str:
    for modality in _MODALITIES:
        if modality in kind or mime_type.startswith(f"{modality}/"):
            return modality
    return "document"


def _read_address(modality: str, url: str) -> Part:
    head, mark, data = url.partition(_BASE64)
    if not (mark and head.startswith("data:")):
        return {"type": "uri", "modality": modality, "uri": url}
    return _make_blob(modality, head.removeprefix("data:"), data)


def _make_blob(modality: str, mime_type: str, data: str) -> Part:
    details = {"mime_type": mime_type} if mime_type else {}
    return {"type": "blob", "modality": modality, **details, "content": data}


def media_beside(item: Mapping[str, Any]) -> list[Part]:
    """Return the sound and images that stand beside an answer's text, or what refers to them."""
    media, sound, images = [], item.get("audio"), item.get("images")
    if is_object(sound):
        data, place = sound.get("data"), sound.get("id")
        extra = _rest_of(sound, ("data", "expires_at"))
        if isinstance(data, str):
            media.append({**_make_blob("audio", "", data), **extra})
        elif isinstance(place, str):
            media.append({"type": "file", "modality": "audio", "file_id": place})
    if isinstance(images, (list, tuple)):
        media += [part_of(image) for image in images if is_object(image)]
    return media


def _readers() -> Mapping[str, _Read]:
    kinds = {
        _read_text: "text input_text output_text summary_text reasoning_text plaintext",
        _read_refusal: "refusal",
        _read_reasoning: "reasoning thinking reasoningContent reasoning_content",
        _read_call: "tool_call tool-call tool_use toolUse functionCall function_call",
        _read_result: (
            "tool_call_response tool_result tool-result toolResult tool_call_result"
            " functionResponse function_response"
        ),
        _read_medium: (
            "image image_url image-url input_image image_file audio audio_url audio-url input_audio"
            " video video_url video-url document document-url file input_file media binary"
            " inlineData inline_data fileData file_data"
        ),
    }
    return {kind: read for read, names in kinds.items() for kind in names.split()}


READERS: Final = _readers()
"""By kind of a part what reads it."""
