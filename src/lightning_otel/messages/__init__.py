"""Messages, settings and token counts of any library as those of the GenAI conventions.

Chat completions and the Responses API are read here; unknown content is handed on as it is.

Source: the input, output and tool JSON schemas of the GenAI semantic conventions; OpenAI's API
references for chat completions and responses.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeAlias

import orjson

from lightning_otel.messages.media import text_part as text_part
from lightning_otel.messages.media import to_text
from lightning_otel.messages.parts import READERS, Part, media_beside, named_part, unwrap_response
from lightning_otel.messages.parts import part_of as part_of
from lightning_otel.messages.parts import reasoning_part as reasoning_part
from lightning_otel.messages.parts import tool_call_part as tool_call_part
from lightning_otel.messages.parts import tool_response_part as tool_response_part
from lightning_otel.messages.settings import SETTINGS as SETTINGS
from lightning_otel.messages.settings import fields_of as fields_of
from lightning_otel.messages.settings import read_settings as read_settings
from lightning_otel.messages.settings import token_counts as token_counts
from lightning_otel.types import Message
from lightning_otel.types.text import plain_text as plain_text
from lightning_otel.types.values import is_object

RULES: Final = ("system", "developer")
"""Who says instructions."""
_CALLS: Final = frozenset({"function_call", "custom_tool_call"})
_MODEL_ITEMS: Final = frozenset({"mcp_list_tools", "compaction", "item_reference"})
"""Items of the model whose names do not tell; others end in ``_call`` or ``_request``."""


def raw_call_part(call_id: Any, name: Any, arguments: object) -> Part:
    """Return a tool call, for writing alone: a long history's JSON arguments stay text, checked."""
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
    """Return messages from JSON text; None where it is absent, cut, bottomless or no such list."""
    items = _load_list(text)
    if items is None or set(map(type, items)) - _DICT:
        return None
    return tuple([item if _is_whole(item) else _normalize_message(item) for item in items])


def parse_parts(text: object) -> tuple[Mapping[str, Any], ...] | None:
    """Parts or tools from their JSON text, each an object; None where it is absent or no list."""
    items = _load_list(text)
    return None if items is None else tuple(map(named_part, items))


_FIELDS: Final = {
    "text": "content", "reasoning": "content", "refusal": "content", "tool_call": "name",
    "tool_call_response": "response", "uri": "uri", "blob": "content", "file": "modality",
}  # fmt: skip
"""By kind of a part the field that it has as the conventions write it."""


def _is_whole(item: Message) -> bool:
    try:
        parts = item["parts"]
        for part in parts:
            part[_FIELDS[part["type"]]]
        return type(parts) is list and type(item["role"]) is str
    except (KeyError, TypeError):
        return False


def _normalize_message(item: Message) -> Message:
    changes: dict[str, Any] = {}
    if (role := item.get("role")) is not None:
        changes["role"] = to_text(role)
    if (parts := item.get("parts")) is not None:
        changes["parts"] = [*map(part_of, parts if isinstance(parts, list) else [parts])]
    return {**item, **changes}


def _load_list(text: object) -> list[Any] | None:
    if not isinstance(text, str) or not text:
        return None
    try:
        items = _load_messages(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(items, list) or _is_bottomless(text, items):
        return None
    return items


def _is_bottomless(text: str, items: list[Any]) -> bool:
    """Return whether JSON is nested deeper than its writers follow; short texts need no look."""
    if text.count("{") + text.count("[") <= _DEEPEST:
        return False
    level: list[Any] = [items]
    for _ in range(_DEEPEST):
        inner = (item.values() if type(item) is dict else item for item in level)
        level = [value for values in inner for value in values if type(value) in _CONTAINERS]
        if not level:
            return False
    return True


def _load_messages(text: str) -> object:
    """Load JSON of messages with the quick parser wherever it agrees with the standard one.

    Half of an adaptation is spent here. The quick one takes a whole number of more than 64 bits for
    a float, but numbers stand only in tool calls and results; and it refuses half of a surrogate
    pair.
    """
    if '"tool' not in text:
        try:
            return orjson.loads(text)
        except ValueError:
            pass
    return json.loads(text)


_DICT: Final = frozenset({dict})
_CONTAINERS: Final = frozenset({dict, list})
_DEEPEST: Final = 500
"""Levels of a stored list: Python writes a few hundred more, whatever called it."""

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
        return [{"type": "text", "content": content}] if content else []
    if issubclass(kind, (list, tuple)):
        return [part_of(item) for item in content]  # type: ignore[attr-defined]  # by its type
    return [part_of(content)] if is_object(content) else []


def read_message(
    item: Mapping[str, Any], role: str = "", call: ToolCall = tool_call_part, **extra: Any
) -> Part:
    """Return a chat API message in the conventions' form; ``role`` counts where it names none."""
    if "role" not in item or "additional_kwargs" in item:
        item = unwrap_message(item)
    role = to_text(item.get("role") or role)
    role, content, parts = _ROLES.get(role, role), item.get("content"), item.get("parts")
    if role == "tool" or (not role and item.get("tool_call_id") is not None):
        results = content_parts(parts or content) if not isinstance(content, str) else []
        if not any(part.get("type") == "tool_call_response" for part in results):
            call_id = item.get("tool_call_id", item.get("id")) or None
            results = [tool_response_part(call_id, unwrap_response(content))]
        return message("tool", results, **extra)
    spoken = [*map(part_of, parts)] if isinstance(parts, (list, tuple)) else []
    reasoning = item.get("reasoning_content") or item.get("reasoning")
    if isinstance(reasoning, str):
        spoken.append(reasoning_part(reasoning))
    else:
        spoken += content_parts(item.get("thinking_blocks"))
    spoken += [*content_parts(content), *media_beside(item)]
    if isinstance(item.get("refusal"), str) and item["refusal"]:
        spoken.append({"type": "refusal", "content": item["refusal"]})
    tool_calls = [part for part in spoken if part.get("type") == "tool_call"]
    calls = objects(item.get("tool_calls") or [item.get("function_call")])
    for part in [read_call(raw, call) for raw in calls]:
        # Those that the content says, too, come once; a stream leaves their arguments empty there.
        same = next((twin for twin in tool_calls if twin.get("id") == part["id"] is not None), None)
        if same is None:
            spoken.append(part)
        elif not same.get("arguments"):
            same["arguments"] = part["arguments"] or {}
    role = role or ("assistant" if calls else "user")
    return message(role, spoken, name=item.get("name"), **extra)


_ROLES: Final = {
    "human": "user", "ai": "assistant", "model": "assistant", "function": "tool",
    "functionexecutionresult": "tool",
}  # fmt: skip
_SERIALISED: Final = frozenset(
    {"human", "ai", "system", "tool", "function", "user", "assistant", "functionexecutionresult"}
)
"""LangChain's types of messages, and AutoGen's, without ``Message`` and ``Chunk``."""


def unwrap_message(item: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message that LangChain serialised with its role; any other as it is."""
    fields, names = object_of(item.get("kwargs") or item.get("data")) or item, item.get("id")
    kind = fields.get("type") or (names[-1] if isinstance(names, list) and names else "")
    spelt = str(kind).removesuffix("Chunk").removesuffix("Message").lower()
    role = fields.get("role") or (spelt if spelt in _SERIALISED else None)
    if role is None:
        return item
    more, calls = object_of(fields.get("additional_kwargs")), objects(fields.get("tool_calls"))
    calls += objects(fields.get("invalid_tool_calls"))
    tool_calls = [{**call, "arguments": call["args"]} if "args" in call else call for call in calls]
    extra = {"tool_calls": tool_calls or more.get("tool_calls"), "invalid_tool_calls": None}
    return {**more, **fields, "role": role, **extra}


def read_call(item: Mapping[str, Any], call: ToolCall = tool_call_part) -> Part:
    """Return a tool call of the chat API, nested in its function or flat, as a part."""
    fields = object_of(item.get("function") or item.get("custom")) or item
    arguments = fields.get("arguments", fields.get("input"))
    return call(item.get("id") or None, fields.get("name"), arguments)


def read_items(
    items: Iterable[object], role: str = "user", call: ToolCall = tool_call_part
) -> list[Part]:
    """Return items of the Responses or chat API as messages, one for each turn of the model."""
    messages: list[Part] = []
    for item in items:
        turn = _read_item(item, role, call) if isinstance(item, Mapping) else None
        if turn is None:
            turn = message(role, content_parts([item]))
        last = messages[-1] if messages else {}
        names = {last.get("name"), turn.get("name")} - {None}
        if turn["role"] == last.get("role") == "assistant" and len(names) < 2:
            last["parts"] += turn["parts"]
            last.update(_given_fields(turn, "name"))
        else:
            messages.append(turn)
    return messages


def _read_item(item: Mapping[str, Any], role: str, call: ToolCall) -> Part:
    if "role" not in item or "additional_kwargs" in item:
        item = unwrap_message(item)
    kind = str(item.get("type") or "message")
    if kind == "message" or ("role" in item and ("content" in item or "parts" in item)):
        return read_message(item, role, call)
    call_id = item.get("call_id") or item.get("id")
    if kind in _CALLS:
        part = call(call_id, item.get("name"), item.get("arguments", item.get("input")))
        return message("assistant", [part | _given_fields(item, "namespace")])
    if kind.endswith("_output") and ("output" in item or "call_id" in item):
        return message("tool", [tool_response_part(call_id, item.get("output"))])
    if kind == "reasoning":
        pieces = objects(item.get("summary")) + objects(item.get("content"))
        text = "\n".join(str(piece.get("text", "")) for piece in pieces)
        sealed = _given_fields(item, "encrypted_content")
        return message("assistant", [reasoning_part(text) | sealed] if text or sealed else [])
    if kind in READERS:
        return message(role, [part_of(item)])
    is_of_model = kind.endswith(("_call", "_request")) or kind in _MODEL_ITEMS
    stated = to_text(item.get("role")) or ("assistant" if is_of_model else role)
    return message(stated, [{**item, "type": f"openai.{kind}"}])


def _given_fields(item: Mapping[str, Any], *names: str) -> Part:
    return {name: item[name] for name in names if item.get(name) is not None}


def flatten_tools(tools: object) -> list[Part]:
    """Return tool definitions, as any of the wires and libraries write them, in the flat form."""
    flat: list[Part] = []
    for tool in objects(tools):
        inner = tool.get("function")
        declared = tool.get("function_declarations") or tool.get("functionDeclarations")
        if isinstance(inner, Mapping):
            flat.append({"type": "function", **_spell_schema(inner)})
        elif declared:  # Google's
            flat += flatten_tools(declared)
        elif spec := object_of(tool.get("toolSpec") or tool.get("data")):  # Bedrock's, Haystack's
            flat.append({"type": "function", **_spell_schema(spec)})
        else:
            flat.append({"type": "function", **_spell_schema(tool)})
    return flat


_SCHEMAS: Final = ("input_schema", "inputSchema", "parametersJsonSchema", "parameters_json_schema")


def _spell_schema(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    name = next((name for name in _SCHEMAS if is_object(tool.get(name))), None)
    if name is None or "parameters" in tool:
        return tool
    remainder = {key: value for key, value in tool.items() if key != name}
    schema = object_of(tool[name].get("json")) or tool[name]
    return {**remainder, "type": "function", "parameters": schema}


def field_of(value: Any, name: str) -> Any:
    """Return a field of a dict or an object."""
    return value.get(name) if isinstance(value, dict) else getattr(value, name, None)


def read_word(value: Any) -> str | None:
    """The value if it is a text of more than blanks, without those around it."""
    return (str.strip(value) or None) if issubclass(type(value), str) else None
