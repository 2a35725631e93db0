"""Messages of the GenAI conventions as the chat API's, and the way back, without losses.

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
    """Return messages as chat completions take them.

    Every tool result is a message of its own. Calls and results without an id get one: results
    answer the open calls in their order.
    """
    return [spoken for turn in turns_of(messages) for spoken in turn]


def turns_of(messages: Iterable[Message]) -> list[list[dict[str, Any]]]:
    """The same, with what each message became in a list of its own."""
    turns = [_to_chat(item) for item in messages]
    _name_calls([spoken for turn in turns for spoken in turn])
    return turns


def tools_of(definitions: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return tool definitions as chat completions take them; of equal names the last counts."""
    by_name: dict[str, dict[str, Any]] = {}
    for tool in definitions:
        inner = tool.get("function")
        flat = inner if isinstance(inner, Mapping) else tool
        name = flat.get("name")
        if tool.get("type", "function") == "function" and isinstance(name, str):
            function = {key: value for key, value in flat.items() if key != "type"}
            by_name[name] = {"type": "function", "function": function}
        else:  # a server's own tool, such as a search, has no name or no function
            by_name[f"{to_text(tool.get('type'))} {to_text(name)}"] = dict(tool)
    return list(by_name.values())


def _to_chat(item: Message) -> list[dict[str, Any]]:
    raw = item.get("parts")
    if not isinstance(raw, (list, tuple)):
        item = read_message(item)
        raw = item["parts"]
    parts = [part_of(part) for part in raw]
    kinds = {str(part.get("type")) for part in parts}
    role = _role_of(item, kinds)
    if "tool_call_response" not in kinds:
        if role != "tool":
            return [_make_turn(role, item, parts)]
        call_id = item.get("tool_call_id", item.get("id"))
        return [_make_result(call_id, _join_content(list(map(content_of, parts))))]
    turns: list[dict[str, Any]] = []
    run: list[Mapping[str, Any]] = []
    for part in [*parts, None]:
        if part is not None and part.get("type") != "tool_call_response":
            run.append(part)
            continue
        if run:
            turns.append(_make_turn("user" if role == "tool" else role, item, run))
            run = []
        if part is not None:
            turns.append(_make_result(part.get("id"), _tool_content(part.get("response"))))
    return turns


def _role_of(item: Message, kinds: set[str]) -> str:
    role = item.get("role")
    if isinstance(role, str) and role:
        return "tool" if role == "function" else role
    if "tool_call_response" in kinds:
        return "tool"
    return "assistant" if kinds & {"tool_call", "reasoning", "refusal"} else "user"


def _make_turn(role: str, item: Message, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
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
    turn: dict[str, Any] = {"role": role}
    if isinstance(item.get("name"), str):
        turn["name"] = item["name"]
    is_silent = not content and bool(calls or refused)
    turn["content"] = None if is_silent else _join_content(content)
    if any(thought):
        turn["reasoning_content"] = "\n".join(filter(None, thought))
    if refused:
        turn["refusal"] = "\n".join(refused)
    if calls:
        turn["tool_calls"] = calls
    return turn


def _join_content(content: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """A text where there is nothing else, as most servers and templates take no other."""
    parts = [part for part in content if part.get("type") != "text" or part["text"]]
    if not parts:
        return ""
    return parts[0]["text"] if len(parts) == 1 and parts[0].get("type") == "text" else parts


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


def _make_result(call_id: object, content: object) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": _call_id(call_id), "content": content}


def _call_id(value: object) -> str:
    return "" if value is None else str(value)


def _tool_content(response: object) -> str | list[dict[str, Any]]:
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


def _name_calls(messages: Sequence[dict[str, Any]]) -> None:
    """Give an id to the calls that have none, and to each result that of the call it answers."""
    ids = {call["id"] for item in messages for call in item.get("tool_calls", ())}
    open_ids: list[str] = []
    count = 0
    for item in messages:
        if item["role"] == "tool":
            if not item["tool_call_id"]:
                item["tool_call_id"] = open_ids[0] if open_ids else f"call_{count}"
            if item["tool_call_id"] in open_ids:
                open_ids.remove(item["tool_call_id"])
            continue
        for call in item.get("tool_calls", ()):
            while not call["id"]:
                call["id"] = "" if f"call_{count}" in ids else f"call_{count}"
                count += 1
        open_ids = [call["id"] for call in item.get("tool_calls", ())] or open_ids
