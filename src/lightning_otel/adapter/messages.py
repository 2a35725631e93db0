"""GenAI message JSON: the small vocabulary of parts, and text back out of it.

Source: the input, output and tool JSON schemas of the GenAI semantic conventions.
"""

import contextlib
import json
from typing import Any, Final, NoReturn

import orjson

from lightning_otel.types import Message
from lightning_otel.types.wording import plain_text as plain_text


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


_STRICT: Final = json.JSONDecoder(parse_constant=_refuse)


def text_part(content: str) -> dict[str, Any]:
    """A part of plain text."""
    return {"type": "text", "content": content}


def reasoning_part(content: str) -> dict[str, Any]:
    """A part that holds a model's visible reasoning."""
    return {"type": "reasoning", "content": content}


def tool_call_part(call_id: str | None, name: str | None, arguments: object) -> dict[str, Any]:
    """A part that asks for a tool; argument text that is JSON is stored as what it says."""
    if isinstance(arguments, str):
        # A cut, malformed or bottomless text is kept as the model wrote it.
        with contextlib.suppress(ValueError, RecursionError):
            arguments = _STRICT.decode(arguments)
    return {"type": "tool_call", "id": call_id, "name": name, "arguments": arguments}


def tool_response_part(call_id: str | None, response: object) -> dict[str, Any]:
    """A part that holds a tool's answer."""
    return {"type": "tool_call_response", "id": call_id, "response": response}


def message(role: str, parts: list[dict[str, Any]], **extra: Any) -> dict[str, Any]:
    """One message; keyword arguments become further fields, None ones are left out."""
    return {
        "role": role,
        "parts": parts,
        **{key: value for key, value in extra.items() if value is not None},
    }


def parse_messages(text: str | None) -> tuple[Message, ...] | None:
    """Messages from their JSON text; None where it is absent, cut or no list of objects."""
    if not text:
        return None
    try:
        found = _loads(text)
    except (ValueError, RecursionError):
        return None
    if type(found) is not list or not all(type(item) is dict for item in found):
        return None
    return tuple(found)


def _loads(text: str) -> object:
    """JSON of messages; of the two parsers the quick one wherever both say the same.

    Half of an adaptation is spent here. The quick one takes a whole number of more than 64 bits for
    a float, but numbers stand only where tools are called and answer; and it refuses what the other
    one reads, such as half of a surrogate pair.
    """
    if '"tool' not in text:
        try:
            return orjson.loads(text)
        except ValueError:
            pass
    return json.loads(text)
