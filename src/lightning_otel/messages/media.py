"""Parts of a message's content, texts and media, as the chat API writes them and back.

Source: OpenAI's API reference for chat completions and responses; ``audio_url`` and ``video_url``
as vLLM reads them; the message schemas of the GenAI semantic conventions.
"""

import json
import math
from collections.abc import Mapping
from types import NoneType
from typing import Any, Final

from lightning_otel.types.values import is_object, make_plain

_TEXTS: Final = frozenset(
    {"text", "input_text", "output_text", "summary_text", "reasoning_text", "plaintext"}
)
_URLS: Final = {"image_url": "image", "audio_url": "audio", "video_url": "video"}
_IMAGES: Final = frozenset({"image_url", "input_image"})
_FILES: Final = frozenset({"file", "input_file"})
_BASE64: Final = ";base64,"
_KINDS: Final[Mapping[type, str]] = {
    NoneType: "null", bool: "boolean", int: "number", float: "number", list: "array",
}  # fmt: skip
"""JSON's names of values that are no part of a message."""


def text_part(content: str) -> dict[str, Any]:
    """A part of plain text."""
    return {"type": "text", "content": content}


def content_of(part: Mapping[str, Any]) -> dict[str, Any]:
    """A part of the conventions as one of the chat API; one it has no word for as it is."""
    kind, modality = part.get("type"), part.get("modality")
    if kind == "text":
        return {"type": "text", "text": to_text(part.get("content"))}
    if kind == "uri" and isinstance(part.get("uri"), str):
        return _make_uri(str(modality), part["uri"], part)
    if kind == "blob" and isinstance(part.get("content"), str):
        mime_type = str(part.get("mime_type") or "")
        if modality == "audio":
            form = mime_type.partition("/")[2] or "wav"
            held = {"data": part["content"], "format": "mp3" if form == "mpeg" else form}
            return {"type": "input_audio", "input_audio": held}
        return _make_uri(str(modality), f"data:{mime_type}{_BASE64}{part['content']}", part)
    if kind == "file" and isinstance(part.get("file_id"), str):
        name = "image_file" if modality == "image" else "file"
        return {"type": name, name: _make_named({"file_id": part["file_id"]}, part)}
    return dict(part)


def _make_uri(modality: str, url: str, part: Mapping[str, Any]) -> dict[str, Any]:
    if modality in _URLS.values():
        held = {"url": url, **({"detail": part["detail"]} if "detail" in part else {})}
        return {"type": f"{modality}_url", f"{modality}_url": held}
    key = "file_data" if url.startswith("data:") else "file_url"
    return {"type": "file", "file": _make_named({key: url}, part)}


def _make_named(file: dict[str, Any], part: Mapping[str, Any]) -> dict[str, Any]:
    return {**file, **({"filename": part["filename"]} if "filename" in part else {})}


def named_part(part: object) -> Mapping[str, Any]:
    """An item of a message as a part with a name: what is no part is named by its kind."""
    if is_object(part):
        kind = part.get("type")
        return part if kind is None or isinstance(kind, str) else {**part, "type": to_text(kind)}
    if type(part) in _KINDS:
        return {"type": _KINDS[type(part)], "content": part}
    return text_part(to_text(part))


def part_of(part: object) -> dict[str, Any]:
    """A part of the chat API as one of the conventions; one of these as it is."""
    part = named_part(part)
    kind = to_text(part.get("type"))
    found = part.get(kind)
    held = found if isinstance(found, Mapping) else {}
    if kind in _TEXTS and isinstance(part.get("text"), str):
        return text_part(part["text"])
    if kind == "refusal" and isinstance(part.get("refusal"), str):
        return {"type": "refusal", "content": part["refusal"]}
    if kind in _URLS or kind in _IMAGES:
        url = held.get("url") or part.get("image_url")
        extra = {"detail": held["detail"]} if "detail" in held else {}
        if isinstance(url, str):
            return _make_media(_URLS.get(kind, "image"), url) | extra
    file_id = held.get("file_id") if kind == "image_file" else part.get("file_id")
    if kind in ("image_file", "input_image") and isinstance(file_id, str):
        return {"type": "file", "modality": "image", "file_id": file_id}
    if kind == "input_audio" and isinstance(held.get("data"), str):
        mime_type = f"audio/{held.get('format', 'wav')}"
        blob = {"type": "blob", "modality": "audio", "mime_type": mime_type}
        return {**blob, "content": held["data"]}
    if kind in _FILES and "modality" not in part:
        return _make_file(held or part)
    return dict(part)


def _make_file(held: Mapping[str, Any]) -> dict[str, Any]:
    extra = {"filename": held["filename"]} if "filename" in held else {}
    if isinstance(held.get("file_id"), str):
        return {"type": "file", "modality": "document", "file_id": held["file_id"], **extra}
    url = held.get("file_data") or held.get("file_url")
    return _make_media("document", url) | extra if isinstance(url, str) else dict(held)


def _make_media(modality: str, url: str) -> dict[str, Any]:
    head, mark, data = url.partition(_BASE64)
    if not (mark and head.startswith("data:")):
        return {"type": "uri", "modality": modality, "uri": url}
    found = {"type": "blob", "modality": modality, "mime_type": head[len("data:") :]}
    return {**{key: value for key, value in found.items() if value}, "content": data}


def name_media(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Put a medium's name in place of its bytes."""
    parts = message.get("parts")
    if not isinstance(parts, (list, tuple)):
        return message
    named = [
        {"type": "text", "content": f"[{to_text(part.get('modality')) or 'file'}]"}
        if isinstance(part, Mapping) and part.get("type") == "blob"
        else part
        for part in parts
    ]
    return {**message, "parts": named}


def to_text(value: object) -> str:
    """A value as text: a text as it is, anything else as JSON."""
    if issubclass(type(value), str):
        return value  # type: ignore[return-value]  # by its type
    return "" if value is None else to_json(value)


def to_json(value: object) -> str:
    """JSON text of a value; what is bottomless is said to be.

    NaN and infinities are null; of what else JSON has no word for, no code runs.
    """
    write = json.JSONEncoder(ensure_ascii=False, allow_nan=False, default=_make_plain).encode
    if type(value) not in (dict, list, tuple, str, int, float, bool, NoneType):
        value = _make_plain(value)
    try:
        try:
            return write(value)
        except (ValueError, TypeError):
            return write(_replace_infinite(value))
    except RecursionError:
        return '"nested too deeply"'


def _make_plain(value: object) -> object:
    return dict(value) if is_object(value) else make_plain(value)


def _replace_infinite(value: Any) -> object:
    kind = type(value)
    if issubclass(kind, float):
        return value if math.isfinite(value) else None
    # A comprehension is a frame of its own: half the depth would be too much.
    if is_object(value):
        return dict(zip(map(to_text, value), map(_replace_infinite, value.values()), strict=True))
    return [*map(_replace_infinite, value)] if issubclass(kind, (list, tuple)) else value
