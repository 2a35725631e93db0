"""Messages of any library as those of the GenAI conventions, and their JSON.

Chat completions, the Responses API and all libraries that speak either are read here, once; what
has no word in the conventions is handed on as it is.

Source: the input, output and tool JSON schemas of the GenAI semantic conventions; OpenAI's API
references for chat completions and responses.
"""

import contextlib
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NoReturn, TypeAlias

import orjson

from lightning_otel.messages.media import is_object
from lightning_otel.messages.media import part_of as part_of
from lightning_otel.messages.media import text_part as text_part
from lightning_otel.types import Message
from lightning_otel.types.text import plain_text as plain_text

Part: TypeAlias = dict[str, Any]

_CALLS: Final = frozenset({"function_call", "custom_tool_call"})


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


_STRICT: Final = json.JSONDecoder(parse_constant=_refuse_constant)


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


def raw_call_part(call_id: Any, name: Any, arguments: object) -> Part:
    """Return a part that asks for a tool, for writing alone: JSON text stays as it was written.

    It is only checked and not made anew: a long history's arguments are read with every call.
    """
    if type(arguments) is str:
        try:
            orjson.loads(arguments)
        except ValueError:
            return tool_call_part(call_id, name, arguments)
        arguments = orjson.Fragment(arguments)
    return {"type": "tool_call", "id": call_id, "name": name, "arguments": arguments}


def message(role: str, parts: list[dict[str, Any]], **extra: Any) -> dict[str, Any]:
    """One message; keyword arguments become further fields, None ones are left out."""
    return {
        "role": role,
        "parts": parts,
        **{key: value for key, value in extra.items() if value is not None},
    }


def parse_messages(text: object) -> tuple[Message, ...] | None:
    """Messages from their JSON text; None where it is absent, cut or no list of objects."""
    if not isinstance(text, str) or not text:
        return None
    try:
        found = _load_messages(text)
    except (ValueError, RecursionError):
        return None
    if type(found) is not list or set(map(type, found)) - {dict}:
        return None
    return tuple(found)


def _load_messages(text: str) -> object:
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


_DICT: Final = frozenset({dict})

ToolCall: TypeAlias = Callable[[Any, Any, object], Part]
"""Makes the part of a tool call, as :func:`tool_call_part` and :func:`raw_call_part` do."""


def objects(value: object) -> list[Any]:
    """Return the objects in a list; nothing of anything else, which is never iterated."""
    if not isinstance(value, (list, tuple)):
        return []
    if _DICT.issuperset(map(type, value)):  # of a stream each chunk is asked
        return [*value]
    return [item for item in value if is_object(item)]


def object_of(value: object) -> Mapping[str, Any]:
    """Return the value if it is an object, else an empty one."""
    return value if type(value) is dict or is_object(value) else {}


def content_parts(content: object) -> list[Part]:
    """Return a message's content, a text or a list of parts, as parts."""
    kind = type(content)
    if issubclass(kind, str):
        return [text_part(content)] if content else []  # type: ignore[arg-type]  # by its type
    if issubclass(kind, (list, tuple)):
        return [part_of(item) for item in content]  # type: ignore[attr-defined]  # by its type
    return [part_of(content)] if is_object(content) else []


def read_message(
    item: Mapping[str, Any], role: str = "", call: ToolCall = tool_call_part, **extra: Any
) -> Part:
    """Return a message of the chat API as one of the conventions.

    Args:
        item: The message.
        role: Its role, where it does not say it.
        call: Makes the parts of its tool calls.
        extra: Further fields of the result.
    """
    role, content = str(item.get("role") or role), item.get("content")
    if role in ("tool", "function") or "tool_call_id" in item:
        call_id = item.get("tool_call_id", item.get("id")) or None
        return message("tool", [tool_response_part(call_id, _unwrap_response(content))], **extra)
    parts = []
    reasoning = item.get("reasoning_content") or item.get("reasoning")
    if isinstance(reasoning, str):
        parts.append(reasoning_part(reasoning))
    parts += content_parts(content)
    if isinstance(item.get("refusal"), str) and item["refusal"]:
        parts.append({"type": "refusal", "content": item["refusal"]})
    calls = objects(item.get("tool_calls") or [item.get("function_call")])
    parts += [read_call(each, call) for each in calls]
    role = role or ("assistant" if calls else "user")
    return message(role, parts, name=item.get("name"), **extra)


def _unwrap_response(content: object) -> object:
    """Return a tool's answer: a list that holds one text is that text."""
    if isinstance(content, (list, tuple)) and len(content) == 1:
        (only,) = content_parts(content)
        return only["content"] if only.get("type") == "text" else content
    return content


def read_call(item: Mapping[str, Any], call: ToolCall = tool_call_part) -> Part:
    """Return a tool call of the chat API, nested in its function or flat, as a part."""
    held = object_of(item.get("function") or item.get("custom")) or item
    arguments = held.get("arguments", held.get("input"))
    return call(item.get("id") or None, held.get("name"), arguments)


def read_items(
    items: Iterable[object], role: str = "user", call: ToolCall = tool_call_part
) -> list[Part]:
    """Return items of the Responses API as messages; one turn of the model is one message.

    Args:
        items: Input or output items; messages of the chat API pass as well.
        role: Who speaks where an item does not say it.
        call: Makes the parts of tool calls.
    """
    found: list[Part] = []
    for item in items:
        made = _read_item(item, role, call) if isinstance(item, Mapping) else None
        if made is None:
            made = message(role, content_parts([item]))
        if found and made["role"] == found[-1]["role"] == "assistant":
            found[-1]["parts"] += made["parts"]
        else:
            found.append(made)
    return found


def _read_item(item: Mapping[str, Any], role: str, call: ToolCall) -> Part:
    kind = str(item.get("type") or "message")
    if kind == "message":
        return read_message(item, role, call)
    if kind in _CALLS:
        call_id = item.get("call_id") or item.get("id")
        arguments = item.get("arguments", item.get("input"))
        return message("assistant", [call(call_id, item.get("name"), arguments)])
    if kind.endswith("_output") and "call_id" in item:
        return message("tool", [tool_response_part(item["call_id"], item.get("output"))])
    if kind == "reasoning":
        pieces = objects(item.get("summary")) + objects(item.get("content"))
        text = "\n".join(str(piece.get("text", "")) for piece in pieces)
        return message("assistant", [reasoning_part(text)] if text else [])
    return message("assistant", [{**item, "type": f"openai.{kind}"}])


def flatten_tools(tools: object) -> list[Part]:
    """Return tool definitions of the chat API in the conventions' flat form."""
    flat = []
    for tool in objects(tools):
        function = tool.get("function")
        if isinstance(function, Mapping):
            flat.append({"type": "function", **function})
        else:
            flat.append(dict(tool) if "type" in tool else {"type": "function", **tool})
    return flat
