"""Requests and answers as the traces of libraries hold them: messages, tools, the system prompt.

Envelopes are removed, and the fields of a message are named as in the chat API. JSON text that is
cut is no message. An answer is opened only where its form is known and nothing is left over: it may
be JSON itself.

Source: Langfuse's OTLP ingestion and its callbacks; the bodies of OpenAI's, Anthropic's, Google's
and Amazon Bedrock's APIs; events of the GenAI semantic conventions up to 1.36; OpenInference's
flattened messages; messages of LangChain, LlamaIndex, Haystack, AutoGen, smolagents, LiveKit and
Semantic Kernel.
"""

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from lightning_otel.messages import (
    RULES,
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
from lightning_otel.messages.parts import READERS, Part, is_part, part_of, unwrap_response
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
_EVENT: Final = "gen_ai.event.content"
_MARKS: Final = frozenset({"parts", "kwargs", "data", "tool_calls", *_FIELDS, _EVENT})
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
_MOST_QUOTES: Final = 3
_CUT: Final = re.compile(r'\[?\{\s*"(role|messages|parts|content|choices|candidates|message)"')


_TEXTS: Final = ("completion", "output")
"""Wrappers of an answer that is a text."""
_REPLY: Final = frozenset({"finish_reason", "stop_reason", "usage"})
"""One of these stands beside an answer's text."""
_GENERATION: Final = _REPLY | {"text", "type", "message", "generation_info", "index", "logprobs"}
_VERCEL: Final = frozenset({"toolCalls", "finishReason", "files"})
_OF_VERCEL: Final = _VERCEL | {"text", "completion", "reasoning", "object"}
"""What the Vercel AI SDK makes."""
_SPEAKERS: Final = frozenset({*_ROLES.values(), "model", "human", "ai", "function"})
_STATED: Final = frozenset({"content", "parts", "tool_calls", "function_call", "refusal"})
_PRODUCTS: Final = frozenset(
    {"web_search_call", "file_search_call", "computer_call", "code_interpreter_call",
     "image_generation_call", "mcp_call", "mcp_list_tools", "mcp_approval_request",
     "local_shell_call", "shell_call", "apply_patch_call", "custom_tool_call", "compaction",
     "server_tool_use", "web_search_tool_result", "redacted_thinking"}
)  # fmt: skip
"""Kinds of what a model makes that are no parts."""
_BODIES: Final = frozenset({"chat.completion", "text_completion", "response"})
_META: Final = frozenset({"usageMetadata", "usage_metadata", "promptFeedback"})


class Exchange(NamedTuple):
    """A request with its answer."""

    messages: list[Part]
    answer: list[Part]
    tools: list[Part]


def is_cut(text: object) -> bool:
    """Return whether a text is the beginning of JSON that holds messages, and no JSON."""
    return isinstance(text, str) and bool(_CUT.match(text)) and parse_json(text) is text


def read_exchange(request: Any, reply: Any, offers: Any = None, system: Any = None) -> Exchange:
    """Read a request and its answer; ``offers`` and ``system`` are default tools and prompt."""
    raw_request, raw = request, reply
    request, reply = _load(request), _load(reply)
    messages, tools = _split_tools(request)
    # An answer of the Responses API says again what was asked with it.
    places = (object_of(request), offers, object_of(reply))
    tools = tools or next(filter(None, map(_find_tools, places)), [])
    turns = read_messages(messages, "user", raw_request)
    if not any(turn["role"] in RULES for turn in turns):
        rules = _read_system({"system": parse_json(system)}) or _read_system(object_of(reply))
        turns = [*rules, *turns]
    if isinstance(reply, list) and {"prompt", "messages"} <= object_of(request).keys():  # DSPy's
        answers = [object_of(item) or {"text": item} for item in reply]
        reply = [{**item, "role": "assistant", "content": item.get("text")} for item in answers]
    is_known = _is_answer(reply)
    answer = read_messages(reply, "assistant") if is_known else []
    if turns and answer[: len(turns)] == turns:  # the state of a graph, with what was asked
        answer = answer[len(turns) :]
    if not is_known or {turn["role"] for turn in answer} - {"assistant", "tool"}:
        answer = [message("assistant", [text_part(to_text(raw))])] if to_text(raw) else []
    return Exchange(_name_tools(turns), answer, flatten_tools(tools))


def _load(text: Any) -> Any:
    value = text
    for _ in range(_MOST_QUOTES):
        value = parse_json(value)
        inner = next(iter(value.items())) if is_object(value) and len(value) == 1 else ("", None)
        if inner[0] in _WRAPPERS and is_object(parse_json(inner[1])):
            value = inner[1]
    return value if isinstance(value, (dict, list)) else text


def _is_answer(value: Any) -> bool:
    """Return whether an answer is messages in a form that is known, with nothing left over."""
    value = parse_json(value)
    if isinstance(value, list):
        is_turn = any(object_of(item).get("role") == "assistant" for item in value)
        is_typed = is_turn and all(isinstance(object_of(item).get("type"), str) for item in value)
        checks = (_is_answer(item) or is_part(item) for item in value)
        return bool(value) and (is_typed or all(checks))
    if not is_object(value):
        return False
    fields, content, names = spell_message(value), value.get("content"), value.keys()
    is_said = fields.get("role") in _SPEAKERS and bool(fields.keys() & _STATED)
    is_body = value.get("object") in _BODIES or ("candidates" in names and bool(names & _META))
    if is_said or is_body or value.get("type") in _PRODUCTS:
        return True
    if is_object(content):
        return "parts" in content
    if content is not None and names & _REPLY and not names - _OF_ANSWER:
        return isinstance(content, str) or _is_answer(content)
    return _is_generation(value) or _is_envelope(value)


def _is_generation(value: Mapping[str, Any]) -> bool:
    """Return whether a text has beside it what LangChain, or OpenAI's completions, say of it."""
    is_told = bool(value.keys() & {*_REPLY, "generation_info"}) or is_object(value.get("message"))
    is_told = is_told or value.get("type") == "Generation"
    return isinstance(value.get("text"), str) and is_told and not value.keys() - _GENERATION


def _is_envelope(value: Mapping[str, Any]) -> bool:
    for name in ("choices", "candidates", "generations", "messages", "replies", *_WRAPPERS):
        content = parse_json(value.get(name))
        is_alone = value.keys() - {name} <= _AROUND | _REPLY | _META
        if _is_answer(content):
            are_parts = isinstance(content, list) and all(map(is_part, content))
            return is_alone or not (are_parts or name == "messages")
        if isinstance(value.get(name), str) and is_alone:
            return name in _TEXTS or (name == "message" and "finish_reason" in value)
    return False


def read_messages(content: Any, role: str, text: Any = None) -> list[Part]:
    """Return the messages of an input or output, of default ``role``; else ``text``."""
    text = content if text is None else text
    content = parse_json(content)
    if is_object(content):
        inner = None if "role" in content else _unwrap(content)
        if inner is not None:
            rules = _read_system(content) if role == "user" else []
            return [*rules, *read_messages(inner, role)]
        content = [content] if _is_spoken(content) else content
    if not isinstance(content, list):
        return [message(role, [text_part(to_text(text))])] if text not in (None, "") else []
    if content and all(map(_is_pair, content)):  # LangChain's, a role and a text
        content = [{"role": entry[0], "content": entry[1]} for entry in content]
    if content and isinstance(content[0], list):  # a batch: one prompt, or the generations of one
        return read_messages(content[0], role)
    if not all(map(_is_spoken, content)):
        is_mixed = all(isinstance(entry, str) or is_part(entry) for entry in content)
        parts = content_parts(content) if is_mixed else [text_part(to_text(text))]
        return [message(role, parts)]
    result: list[Part] = []
    is_open = False
    for item in (entry if is_part(entry) else spell_message(entry) for entry in content):
        is_item = "role" not in item or item.get("type") == "message"
        turns = _read_item(item, role)
        # One turn of the model may be several items.
        if is_open and is_item and turns and turns[0]["role"] == result[-1]["role"] == "assistant":
            result[-1]["parts"] += turns.pop(0)["parts"]
        result += turns
        is_open = is_item and "message" not in item and bool(result)
    return result


def _is_pair(item: Any) -> bool:
    is_pair = isinstance(item, list) and len(item) == 2 and isinstance(item[1], str)
    return is_pair and isinstance(item[0], str) and item[0] in _SPEAKERS


def spell_message(item: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message with its fields named as in the chat API; anything else as it is."""
    event = parse_json(item.get(_EVENT))
    if is_object(event):  # Semantic Kernel's
        item = object_of(event.get("message")) or event
    elif is_object(inner := item.get("message")) and "role" in inner and len(item) == 1:
        item = inner  # OpenInference's
    fields = {_FIELDS.get(name, name): value for name, value in item.items()}
    if _is_of_vercel(item):
        fields |= {"role": "assistant", "content": item.get("text") or item.get("completion")}
        fields["thinking_blocks"] = objects(item.get("reasoning"))
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
        if isinstance(blocks, list) and all(map(is_part, blocks)):
            fields["content"] = blocks
    elif isinstance(content, list):
        fields["content"] = [object_of(p).get("message_content") or p for p in content]
    return fields


def _is_of_vercel(item: Mapping[str, Any]) -> bool:
    """Return whether an answer is a text beside calls and files, and nothing else."""
    return bool(item.keys() & _VERCEL) and item.keys() <= _OF_VERCEL


def _spell_call(call: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = call.get("tool_call")
    call = inner if is_object(inner) and len(call) == 1 else call
    if is_object(call.get("function")) or is_object(call.get("custom")):
        return call
    return part_of({**call, "type": "tool_call"})


def _read_item(item: Mapping[str, Any], role: str) -> list[Part]:
    answer = item.get("message")  # a choice, or a generation
    if is_object(item.get("content")) and (
        item.keys() & _CANDIDATE_KEYS or "parts" in item["content"]
    ):
        answer = item["content"]
    if answer and "role" not in item:
        return read_messages(answer, role)
    text = item.get("text")
    if isinstance(text, str) and text and not item.keys() & {"role", *_MARKS} and not is_part(item):
        return [message(role, [text_part(text)])]
    if is_part(item) and item.get("type") not in _ITEMS:
        return [message(role, [part_of(item)])]
    return read_items([item], role)


def _is_spoken(item: Any) -> bool:
    if not is_object(item):
        return False
    content = item.get("content")
    is_answer = content is not None and (
        not item.keys() - _OF_ANSWER or not isinstance(content, str)
    )
    kind = item.get("type")
    is_named = kind in READERS or (isinstance(kind, str) and "text" not in item)
    is_named = is_named or _is_generation(item) or _is_of_vercel(item)
    is_said = "role" in item and (
        to_text(item["role"]).lower() in _SPEAKERS or bool(item.keys() & _STATED)
    )
    is_message = bool(item.keys() & _MARKS) or is_said or is_answer or is_named
    return is_message or is_part(item) or _unwrap(item) is not None


def _does_speak(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_spoken(item) or isinstance(item, (str, list)) for item in value)
    return _is_spoken(value)


def _unwrap(content: Mapping[str, Any]) -> Any:
    if "args" in content and is_object(content.get("kwargs")):  # the arguments of a function
        inner = next(filter(_does_speak, (content["kwargs"], content["args"])), None)
        return inner or None
    for name in _LISTS:
        inner = parse_json(content.get(name))
        if name == "items" and not _ITEMS.issuperset(entry.get("type") for entry in objects(inner)):
            continue
        if _does_speak(inner) or (isinstance(inner, str) and inner and name == "contents"):
            return inner
    for name in _WRAPPERS:
        inner = parse_json(content.get(name))
        is_alone = content.keys() - {name, *_SYSTEMS} <= _AROUND
        if (_does_speak(inner) and inner) or (isinstance(inner, str) and is_alone):
            return inner
    return None


def _read_system(content: Mapping[str, Any]) -> list[Part]:
    places = (content, *(object_of(content.get(name)) for name in _CONFIGS))
    prompt = next((place[key] for place in places for key in _SYSTEMS if place.get(key)), None)
    if is_object(prompt):  # Google's
        prompt = prompt.get("parts")
    return [message("system", parts)] if (parts := content_parts(prompt)) else []


def _find_tools(content: Any) -> list[Any]:
    content = parse_json(content)
    if is_object(content):
        offers = next((content[k] for k in ("tools", "functions") if content.get(k)), None)
        inner = (_find_tools(content.get(name)) for name in _CONFIGS)
        return _find_tools(offers) if offers else next(filter(None, inner), [])
    return objects([parse_json(tool) for tool in content]) if isinstance(content, list) else []


def _split_tools(messages: Any) -> tuple[Any, list[Any]]:
    if is_object(messages) and isinstance(messages.get("messages"), list):
        turns, tools = _split_tools(messages["messages"])
        return {**messages, "messages": turns}, tools
    if not isinstance(messages, list):
        return messages, []
    offers = [item for item in messages if _is_offer(item)]
    return [item for item in messages if item not in offers], [item["content"] for item in offers]


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
        tool_calls = [part for part in item["parts"] if part.get("type") == "tool_call"]
        calls |= {to_text(part.get("name")): part.get("id") for part in tool_calls}
        if role in calls and role not in _ROLES:
            item["role"] = "tool"
            response = unwrap_response(item["parts"])
            item["parts"] = [tool_response_part(calls.pop(role), response)]
    return messages
