"""Requests and answers as the traces of libraries hold them: messages, tools, the system prompt.

What stands around messages is taken off, and the fields of a message are named as in the chat API;
its parts have readers of their own, by their kind. A text that was JSON and is cut is no message.

Source: Langfuse's OTLP ingestion and its callbacks; the bodies of OpenAI's, Anthropic's, Google's
and Amazon Bedrock's APIs; events of the GenAI semantic conventions up to 1.36; OpenInference's
flattened messages; messages of LangChain, LlamaIndex, Haystack, AutoGen, smolagents, LiveKit and
Semantic Kernel.
"""

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from lightning_otel.messages import (
    SETTINGS,
    content_parts,
    flatten_tools,
    message,
    object_of,
    objects,
    read_items,
    text_part,
    tool_response_part,
    unwrap_message,
)
from lightning_otel.messages.media import to_text
from lightning_otel.messages.parts import READERS, Part, named_part, part_of, unwrap_response
from lightning_otel.types.values import is_object, parse_json

_ROLES: Final = {
    "user": "user", "assistant": "assistant", "system": "system", "developer": "developer",
    "tool": "tool", "tool-call": "assistant", "tool-response": "user",
}  # fmt: skip
"""Roles in lower case; smolagents sends the last two to the model as what stands beside them."""
_FIELDS: Final = {
    "toolCalls": "tool_calls", "toolCallId": "tool_call_id", "blocks": "content",
    "contents": "content",
}  # fmt: skip
"""Fields of a message as others name them."""
_EVENT: Final = "gen_ai.event.content"
_MARKS: Final = frozenset({"role", "parts", "kwargs", "data", "tool_calls", *_FIELDS, _EVENT})
"""A message has one of these, or ``content`` beside nothing but the fields of an answer."""
_OF_ANSWER: Final = frozenset(
    {"content", "finish_reason", "usage", "cached", "logprobs", "thought", "id", "index", "model"}
)
_LISTS: Final = (
    "messages", "choices", "generations", "candidates", "contents", "replies", "items", "prompts",
)  # fmt: skip
_WRAPPERS: Final = ("message", "response", "output", "input", "prompt", "completion")
"""What holds messages: lists of them, and what else may be a text."""
_AROUND: Final = frozenset({"finish_reason", "index", "tool.result", "model", *SETTINGS})
"""Fields that may stand beside a message that is a text."""
_ITEMS: Final = frozenset({"message", "function_call", "function_call_output", "reasoning"})
_CANDIDATE_KEYS: Final = frozenset({"finishReason", "finish_reason", "index"})
_SYSTEMS: Final = ("system", "systemInstruction", "system_instruction", "instructions")
_CONFIGS: Final = ("config", "toolConfig", "kwargs", "invocation_params")
"""Objects in a request that hold its system prompt or its tools."""
_MOST_QUOTES: Final = 3
_CUT: Final = re.compile(r'\[?\{\s*"(role|messages|parts|content|choices|candidates|message)"')


class Exchange(NamedTuple):
    """A request with its answer."""

    messages: list[Part]
    answer: list[Part]
    tools: list[Part]


def is_cut(text: object) -> bool:
    """Return whether a text is the beginning of JSON that holds messages, and no JSON."""
    return isinstance(text, str) and bool(_CUT.match(text)) and parse_json(text) is text


def read_exchange(request: Any, response: Any, offers: Any = None, system: Any = None) -> Exchange:
    """Return what a request and its answer say.

    Args:
        request: The request, or its messages.
        response: The answer.
        offers: Tools that are kept beside both, which count if the request has none.
        system: The system prompt that is kept beside both, likewise.
    """
    request, response = _load(request), _load(response)
    messages, tools = _split_tools(request)
    # An answer of the Responses API says again what was asked with it.
    places = (object_of(request), offers, object_of(response))
    tools = tools or next(filter(None, map(_find_tools, places)), [])
    turns = read_messages(messages, "user")
    if not any(entry["role"] in ("system", "developer") for entry in turns):
        rules = _read_system({"system": parse_json(system)}) or _read_system(object_of(response))
        turns = [*rules, *turns]
    answer = read_messages(response, "assistant")
    if turns and answer[: len(turns)] == turns:  # the state of a graph, with what was asked
        answer = answer[len(turns) :]
    return Exchange(_name_tools(turns), answer, flatten_tools(tools))


def _load(value: Any) -> Any:
    """Return what JSON text says, even if it is quoted again, or alone in an object."""
    for _ in range(_MOST_QUOTES):
        value = parse_json(value)
        inner = next(iter(value.items())) if is_object(value) and len(value) == 1 else ("", None)
        if inner[0] in _WRAPPERS and is_object(parse_json(inner[1])):
            value = inner[1]
    return value


def read_messages(content: Any, role: str) -> list[Part]:
    """Return the messages of an input or output, however a library wrote them."""
    content = parse_json(content)
    if is_object(content):
        inner = None if "role" in content else _unwrap(content)
        if inner is not None:
            rules = _read_system(content) if role == "user" else []
            return [*rules, *read_messages(inner, role)]
        content = [content] if _is_spoken(content) else content
    if not isinstance(content, list):
        return [message(role, [text_part(to_text(content))])] if content else []
    if content and isinstance(content[0], list):  # a batch: one prompt, or the generations of one
        return read_messages(content[0], role)
    if not all(map(_is_spoken, content)):
        is_mixed = all(isinstance(entry, str) or _is_part(entry) for entry in content)
        parts = content_parts(content) if is_mixed else [text_part(to_text(content))]
        return [message(role, parts)]
    turns: list[Part] = []
    is_open = False
    for item in (entry if _is_part(entry) else spell_message(entry) for entry in content):
        is_item = "role" not in item or item.get("type") == "message"
        read = _read_item(item, role)
        # One turn of the model may be several items.
        if is_open and is_item and read and read[0]["role"] == turns[-1]["role"] == "assistant":
            turns[-1]["parts"] += read.pop(0)["parts"]
        turns += read
        is_open = is_item and "message" not in item and bool(turns)
    return turns


def spell_message(item: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message with its fields named as in the chat API; anything else as it is."""
    value = parse_json(item.get(_EVENT))
    if is_object(value):  # Semantic Kernel's
        item = object_of(value.get("message")) or value
    elif is_object(inner := item.get("message")) and "role" in inner and len(item) == 1:
        item = inner  # OpenInference's
    fields = {_FIELDS.get(name, name): entry for name, entry in item.items()}
    if "blocks" in item:  # LlamaIndex'
        fields = {**object_of(item.get("additional_kwargs")), **fields}
    if "tool_calls" in fields:
        calls = objects(parse_json(fields["tool_calls"]))
        fields["tool_calls"] = [_spell_call(call) for call in calls] or None
    fields = dict(unwrap_message(fields))
    role, content = fields.get("role"), fields.get("content")
    if isinstance(role, str):
        fields["role"] = _ROLES.get(role.lower(), role)
    if isinstance(content, str) and content.startswith("[{"):
        blocks = parse_json(content)
        if isinstance(blocks, list) and all(map(_is_part, blocks)):
            fields["content"] = blocks
    elif isinstance(content, list):
        fields["content"] = [_open_part(entry) for entry in content]
    return fields


def _open_part(part: Any) -> Any:
    """Return a part out of the object that OpenInference puts it in."""
    return object_of(part).get("message_content") or part


def _spell_call(call: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = call.get("tool_call")
    call = inner if is_object(inner) and len(call) == 1 else call
    if is_object(call.get("function")) or is_object(call.get("custom")):
        return call
    return part_of({**call, "type": "tool_call"})


def _is_part(item: object) -> bool:
    """Return whether an item is a part of a message and not a message."""
    return is_object(item) and "role" not in item and named_part(item).get("type") in READERS


def _read_item(item: Mapping[str, Any], role: str) -> list[Part]:
    answer = item.get("message")  # a choice, or a generation
    if is_object(item.get("content")) and (
        item.keys() & _CANDIDATE_KEYS or "parts" in item["content"]
    ):
        answer = item["content"]
    if answer and "role" not in item:
        return read_messages(answer, role)
    text = item.get("text")
    if isinstance(text, str) and text and not item.keys() & _MARKS and not _is_part(item):
        return [message(role, [text_part(text)])]
    if _is_part(item) and item.get("type") not in _ITEMS:
        return [message(role, [part_of(item)])]
    return read_items([item], role)


def _is_spoken(item: Any) -> bool:
    """Return whether an item is a message, an answer's choice, or a part of a message."""
    if not is_object(item):
        return False
    content = item.get("content")
    is_answer = content is not None and (
        not item.keys() - _OF_ANSWER or not isinstance(content, str)
    )
    is_named = isinstance(item.get("type"), str) or isinstance(item.get("text"), str)
    is_message = bool(item.keys() & _MARKS) or is_answer or is_named
    return is_message or _is_part(item) or _unwrap(item) is not None


def _does_speak(value: Any) -> bool:
    """Return whether a value is messages, or holds some."""
    if isinstance(value, list):
        return all(_is_spoken(entry) or isinstance(entry, (str, list)) for entry in value)
    return _is_spoken(value)


def _unwrap(content: Mapping[str, Any]) -> Any:
    """Return what a request or answer holds its messages in; None where it is none."""
    if "args" in content and is_object(content.get("kwargs")):  # the arguments of a function
        value = next(filter(_does_speak, (content["kwargs"], content["args"])), None)
        return value or None
    for name in _LISTS:
        value = parse_json(content.get(name))
        if name == "items" and not _ITEMS.issuperset(entry.get("type") for entry in objects(value)):
            continue
        if _does_speak(value) or (isinstance(value, str) and value and name == "contents"):
            return value
    for name in _WRAPPERS:
        value = parse_json(content.get(name))
        is_alone = content.keys() - {name} <= _AROUND
        if (_does_speak(value) and value) or (isinstance(value, str) and is_alone):
            return value
    return None


def _read_system(content: Mapping[str, Any]) -> list[Part]:
    """Return the system prompt that stands beside a request's messages, as Anthropic's does."""
    places = (content, *(object_of(content.get(name)) for name in _CONFIGS))
    prompt = next((value[key] for value in places for key in _SYSTEMS if value.get(key)), None)
    if is_object(prompt):  # Google's
        prompt = prompt.get("parts")
    return [message("system", parts)] if (parts := content_parts(prompt)) else []


def _find_tools(content: Any) -> list[Any]:
    """Return the tool definitions that stand in a request, each of which may be JSON text."""
    content = parse_json(content)
    if is_object(content):
        value = next((content[k] for k in ("tools", "functions") if content.get(k)), None)
        inner = (_find_tools(content.get(name)) for name in _CONFIGS)
        return _find_tools(value) if value else next(filter(None, inner), [])
    return objects([parse_json(entry) for entry in content]) if isinstance(content, list) else []


def _split_tools(messages: Any) -> tuple[Any, list[Any]]:
    """Return messages, and the tool definitions that Langfuse's callback puts among them."""
    if is_object(messages) and isinstance(messages.get("messages"), list):
        rest, tools = _split_tools(messages["messages"])
        return {**messages, "messages": rest}, tools
    if not isinstance(messages, list):
        return messages, []
    offers = [entry for entry in messages if _is_offer(entry)]
    turns = [entry for entry in messages if entry not in offers]
    return turns, [entry["content"] for entry in offers]


def _is_offer(item: Any) -> bool:
    content = object_of(object_of(item).get("content"))
    if object_of(item).get("role") != "tool" or item.get("tool_call_id") is not None:
        return False
    return content.get("type") == "function" or any(
        "name" in tool and ("parameters" in tool or "input_schema" in tool)
        for tool in flatten_tools([content])
    )


def _name_tools(messages: list[Part]) -> list[Part]:
    """Return messages in which a tool's answer whose role is the tool's name is the tool's."""
    calls: dict[str, Any] = {}
    for item in messages:
        role = item["role"]
        requests = [part for part in item["parts"] if part.get("type") == "tool_call"]
        calls |= {to_text(part.get("name")): part.get("id") for part in requests}
        if role in calls and role not in _ROLES:
            item["role"] = "tool"
            response = unwrap_response(item["parts"])
            item["parts"] = [tool_response_part(calls.pop(role), response)]
    return messages
