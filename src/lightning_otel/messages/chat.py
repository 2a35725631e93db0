"""Messages as the chat API writes them, of those the GenAI conventions write, and the way back.

Nothing is thrown away: text beside tool calls stays, several choices stay several messages, media
stay media, and a part that the chat API has no word for is handed on as it is.

Source: OpenAI's API reference for chat completions; ``reasoning_content`` and ``audio_url`` and
``video_url`` parts as vLLM reads them; the message schemas of the GenAI semantic conventions.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lightning_otel.messages import read_message
from lightning_otel.messages.media import content_of, to_json, to_text
from lightning_otel.messages.parts import part_of
from lightning_otel.types import Message


def messages_of(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """The messages as chat completions take them.

    A tool's every result is a message of its own. A tool call or result without an id gets one:
    results answer the open calls in their order. Arguments are JSON text.

    Args:
        messages: As the GenAI conventions write them; those of the chat API pass as well.
    """
    return [spoken for turn in turns_of(messages) for spoken in turn]


def turns_of(messages: Iterable[Message]) -> list[list[dict[str, Any]]]:
    """The same, with what each message became in a list of its own."""
    found = [_to_chat(item) for item in messages]
    _name_calls([spoken for turn in found for spoken in turn])
    return found


def tools_of(definitions: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tool definitions as chat completions take them; of two with one name the last counts.

    Args:
        definitions: In the conventions' flat form; those of the chat API pass as well.
    """
    found: dict[str, dict[str, Any]] = {}
    for tool in definitions:
        held = tool.get("function")
        flat = held if isinstance(held, Mapping) else tool
        named = flat.get("name")
        if tool.get("type", "function") == "function" and isinstance(named, str):
            function = {key: value for key, value in flat.items() if key != "type"}
            found[named] = {"type": "function", "function": function}
        else:  # a server's own tool, such as a search, has no name or no function
            found[f"{to_text(tool.get('type'))} {to_text(named)}"] = dict(tool)
    return list(found.values())


def _to_chat(item: Message) -> list[dict[str, Any]]:
    """A message as one of the chat API, or as several where tools answered in it."""
    held = item.get("parts")
    if not isinstance(held, (list, tuple)):
        item = read_message(item)
        held = item["parts"]
    parts = [part_of(part) for part in held]
    kinds = {str(part.get("type")) for part in parts}
    role = _role_of(item, kinds)
    if "tool_call_response" not in kinds:
        return [_tool_text(item, parts) if role == "tool" else _make_turn(role, item, parts)]
    found: list[dict[str, Any]] = []
    run: list[Mapping[str, Any]] = []
    for part in [*parts, None]:
        if part is not None and part.get("type") != "tool_call_response":
            run.append(part)
            continue
        if run:
            found.append(_make_turn("user" if role == "tool" else role, item, run))
            run = []
        if part is not None:
            found.append(_make_result(part.get("id"), _tool_content(part.get("response"))))
    return found


def _role_of(item: Message, kinds: set[str]) -> str:
    """The role, or what a message that says none can only have."""
    role = item.get("role")
    if isinstance(role, str) and role:
        return "tool" if role == "function" else role
    if "tool_call_response" in kinds:
        return "tool"
    return "assistant" if kinds & {"tool_call", "reasoning", "refusal"} else "user"


def _make_turn(role: str, item: Message, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Make one turn: content, reasoning, refusal and tool calls."""
    content: list[dict[str, Any]] = []
    thought: list[str] = []
    refused: list[str] = []
    calls: list[dict[str, Any]] = []
    for part in parts:
        kind = part.get("type")
        if kind == "reasoning":
            thought.append(to_text(part.get("content") or ""))
        elif kind == "refusal":
            refused.append(to_text(part.get("content")))
        elif kind == "tool_call":
            calls.append(_make_call(part))
        else:
            content.append(content_of(part))
    found: dict[str, Any] = {"role": role}
    if isinstance(item.get("name"), str):
        found["name"] = item["name"]
    is_silent = not content and bool(calls or refused)
    found["content"] = None if is_silent else _join_content(content)
    if any(thought):
        found["reasoning_content"] = "\n".join(filter(None, thought))
    if refused:
        found["refusal"] = "\n".join(refused)
    if calls:
        found["tool_calls"] = calls
    return found


def _join_content(content: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """A text where there is nothing else, as most servers and templates take no other."""
    said = [part for part in content if part.get("type") != "text" or part["text"]]
    if not said:
        return ""
    return said[0]["text"] if len(said) == 1 and said[0].get("type") == "text" else said


def _make_call(part: Mapping[str, Any]) -> dict[str, Any]:
    name = part.get("name")
    arguments = part.get("arguments")
    if arguments is None or arguments == "":
        text = "{}"
    elif isinstance(arguments, str) and part_of(part)["arguments"] is arguments:
        text = arguments  # cut or malformed: as the model wrote it
    else:
        text = to_json(arguments)
    function = {"name": name if isinstance(name, str) else "", "arguments": text}
    return {"id": _call_id(part.get("id")), "type": "function", "function": function}


def _tool_text(item: Message, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A tool's answer that a tracer wrote as plain parts."""
    call_id = item.get("tool_call_id", item.get("id"))
    return _make_result(call_id, _join_content([content_of(part) for part in parts]))


def _make_result(call_id: object, content: object) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": _call_id(call_id), "content": content}


def _call_id(found: object) -> str:
    return "" if found is None else str(found)


def _tool_content(response: object) -> str | list[dict[str, Any]]:
    """Return a tool's answer: text, parts of the chat API, or anything else as JSON text."""
    if parts := result_parts(response):
        return _join_content(list(map(content_of, parts)))
    return "" if response is None else to_text(response)


def result_parts(response: object) -> list[Mapping[str, Any]]:
    """Return the parts that a tool's answer is a list of; empty if it is anything else."""
    parts = response if isinstance(response, (list, tuple)) else ()
    are_parts = all(
        isinstance(part, Mapping) and isinstance(part.get("type"), str) for part in parts
    )
    return list(map(part_of, parts)) if are_parts else []


def _name_calls(found: Sequence[dict[str, Any]]) -> None:
    """Give an id to the calls that have none, and to each result that of the call it answers."""
    known = {call["id"] for item in found for call in item.get("tool_calls", ())}
    waiting: list[str] = []
    made = 0
    for item in found:
        if item["role"] == "tool":
            if not item["tool_call_id"]:
                item["tool_call_id"] = waiting[0] if waiting else f"call_{made}"
            if item["tool_call_id"] in waiting:
                waiting.remove(item["tool_call_id"])
            continue
        for call in item.get("tool_calls", ()):
            while not call["id"]:
                call["id"] = "" if f"call_{made}" in known else f"call_{made}"
                made += 1
        waiting = [call["id"] for call in item.get("tool_calls", ())] or waiting
