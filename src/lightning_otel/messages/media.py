"""Parts of a message's content, texts and media, as the chat API writes them.

Source: OpenAI's API reference for chat completions and responses; ``audio_url`` and ``video_url``
as vLLM reads them; the message schemas of the GenAI semantic conventions.
"""

import json
import math
from collections.abc import Mapping
from types import NoneType
from typing import Any, Final

from lightning_otel.types.values import is_object, make_plain

_URLS: Final = {"image_url": "image", "audio_url": "audio", "video_url": "video"}
_BASE64: Final = ";base64,"


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
            fields = {"data": part["content"], "format": "mp3" if form == "mpeg" else form}
            return {"type": "input_audio", "input_audio": fields}
        return _make_uri(str(modality), f"data:{mime_type}{_BASE64}{part['content']}", part)
    if kind == "file" and isinstance(part.get("file_id"), str):
        name = "image_file" if modality == "image" else "file"
        return {"type": name, name: _make_named({"file_id": part["file_id"]}, part)}
    return dict(part)


def _make_uri(modality: str, url: str, part: Mapping[str, Any]) -> dict[str, Any]:
    if modality in _URLS.values():
        fields = {"url": url, **({"detail": part["detail"]} if "detail" in part else {})}
        return {"type": f"{modality}_url", f"{modality}_url": fields}
    key = "file_data" if url.startswith("data:") else "file_url"
    return {"type": "file", "file": _make_named({key: url}, part)}


def _make_named(file: dict[str, Any], part: Mapping[str, Any]) -> dict[str, Any]:
    return {**file, **({"filename": part["filename"]} if "filename" in part else {})}


def name_media(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Put a medium's name in place of its bytes."""
    parts = message.get("parts")
    if not isinstance(parts, (list, tuple)):
        return message
    names = [
        {"type": "text", "content": f"[{to_text(part.get('modality')) or 'file'}]"}
        if isinstance(part, Mapping) and part.get("type") == "blob"
        else part
        for part in parts
    ]
    return {**message, "parts": names}


def to_text(value: object) -> str:
    """A value as text: a text as it is, anything else as JSON."""
    if issubclass(type(value), str):
        return value  # type: ignore[return-value]  # by its type
    return "" if value is None else to_json(value)


def to_json(value: object) -> str:
    """Return JSON text of a value without running its code; NaN and infinities are null."""
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
