"""Requests of a chat body to the toy model, by their words: tools, the next speaker, JSON."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from lightning_otel.messages import object_of
from lightning_otel.types.values import parse_json

Json = Mapping[str, Any]

EXPRESSION: Final = re.compile(r"\d+(?:\.\d+)?(?:\s*[-+*/]\s*\d+(?:\.\d+)?)+")
_NUMBER: Final = re.compile(r"-?\d+(?:\.\d+)?")
_QUOTED: Final = re.compile(r"\"([^\"]+)\"|(?<!\w)'([^']+)'(?!\w)")
_WORD: Final = re.compile(r"[a-z]+|\d+", re.IGNORECASE)
_CHOICE_OF_SPEAKER: Final = re.compile(r"select the next (?:role|speaker) from \[([^\]]+)\]", re.I)
_HANDS_OVER: Final = ("transfer to ", "transfer back to ", "handoff to ", "delegate to ")
_LITTLE_WORDS: Final = frozenset({"a", "an", "and", "by", "for", "from", "get", "of", "the", "to"})

ToolRequest = tuple[str, dict[str, Any]]


def message_text(message: Json) -> str:
    """Text of a chat message whose content is a string, a list of parts or nothing."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text") or "") for part in content or () if isinstance(part, dict))


def requested_calls(body: Json) -> list[ToolRequest]:
    """Return the tool calls that should come next, in the order their words stand in the request.

    The last user message may repeat a tool; the instructions' are done once. A tool that takes an
    expression is named by arithmetic expressions, and called for each one at once.
    """
    offered = [tool.get("function") for tool in body.get("tools") or ()]
    tools = [function for function in offered if isinstance(function, Mapping)]
    choice = body.get("tool_choice") or "auto"
    messages = body.get("messages") or ()
    places = [i for i, item in enumerate(messages) if item.get("role") == "user"]
    turn = messages[places[-1] :] if places else messages
    calls = _read_calls(turn)
    # A tool's result that answers no known call ends all.
    if choice == "none" or (turn and turn[-1].get("role") == "tool" and not calls):
        return []
    texts = [message_text(messages[i]) for i in places]
    rules = [message_text(m) for m in messages if m.get("role") in ("system", "developer")]
    requests = _find_named(tools, texts[-1:], calls) or _find_named(
        [tool for tool in tools if not _takes_expression(tool)],
        rules,
        _read_calls(messages),
        values=texts,
    )
    if requests or calls or not tools or choice == "auto":
        return requests
    forced = (choice.get("function") or choice).get("name") if isinstance(choice, Mapping) else None
    tool = next((tool for tool in tools if tool["name"] == forced), tools[0])
    return [(tool["name"], arguments(tool.get("parameters") or {}, "\n".join(texts[-1:])))]


def requested_speaker(body: Json) -> str | None:
    """Return the speaker that a prompt asks for, who has spoken least so far; None if none."""
    for message in reversed(body.get("messages") or ()):
        text = message_text(message)
        match = _CHOICE_OF_SPEAKER.search(text)
        if match:
            roles = [role.strip(" '\"") for role in match[1].split(",")]
            speakers = [str(item.get("name") or "") for item in body.get("messages") or ()]
            speakers += re.findall(r"^(\w+):", text, re.MULTILINE)
            return min(roles, key=speakers.count)
    return None


def arguments(schema: Json, text: str) -> dict[str, Any]:
    """An object of a function's parameters, filled with what the text holds for them."""
    numbers = iter(_NUMBER.findall(text))
    quoted = iter([first or second for first, second in _QUOTED.findall(text)])
    expressions = iter(EXPRESSION.findall(text))

    def value_of(name: str, entry: Json) -> object:
        kind = entry.get("type")
        if kind == "string" and not entry.get("enum"):
            return next(expressions if "expression" in name else quoted, text)
        if kind in ("integer", "number"):
            number = next(numbers, "1")
            return float(number) if kind == "number" else int(float(number))
        return example(entry, text, {**schema, **entry})

    properties = schema.get("properties") or {}
    required = schema.get("required") or list(properties)
    return {name: value_of(name, schema) for name, schema in properties.items() if name in required}


def example(schema: Json, text: str, root: Json | None = None) -> object:
    """A value that satisfies a JSON schema of the plain kind a pydantic model makes."""
    root = schema if root is None else root
    if "$ref" in schema:
        return example(root["$defs"][schema["$ref"].rsplit("/", 1)[-1]], text, root)
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        values = [value for value in schema["enum"] if str(value).lower() in text.lower()]
        return (values or schema["enum"])[0]
    for key in ("anyOf", "oneOf", "allOf"):
        if schema.get(key):
            return example(schema[key][0], text, root)
    kind = schema.get("type")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object" or "properties" in schema:
        properties = schema.get("properties") or {}
        return {name: example(value, text, root) for name, value in properties.items()}
    examples = {"string": "text", "integer": 1, "number": 1.5, "boolean": True, "array": []}
    return examples.get(str(kind))


def _find_named(
    tools: Sequence[Json],
    texts: Sequence[str],
    past: list[ToolRequest],
    *,
    values: Sequence[str] = (),
) -> list[ToolRequest]:
    text = "\n".join(texts)
    words_text = "\n".join(reversed(values or texts))
    places = sorted((_find_tool(tool, text), i) for i, tool in enumerate(tools))
    for tool in (tools[i] for place, i in places if place >= 0):
        parts = EXPRESSION.findall(words_text) if _takes_expression(tool) else [words_text]
        calls: list[ToolRequest] = [
            (tool["name"], arguments(tool.get("parameters") or {}, part)) for part in parts
        ]
        new = [call for call in calls if call not in past]
        # A hand-over is made once, whatever it is told.
        if new and not (_handoff_target(tool) and any(name == tool["name"] for name, _ in past)):
            return new
    return []


def _find_tool(tool: Json, text: str) -> int:
    if _takes_expression(tool):
        match = EXPRESSION.search(text)
        return match.start() if match else -1
    words = _WORD.findall((_handoff_target(tool) or tool["name"]).lower())
    keywords = [word for word in words if len(word) > 2 and word not in _LITTLE_WORDS]
    places = [
        match.start()
        for word in keywords
        if (match := re.search(rf"(?<![a-z]){re.escape(word)}", text.lower()))
    ]
    return min(places) if len(places) == len(keywords) and places else -1


def _handoff_target(tool: Json) -> str:
    name = str(tool["name"]).replace("_", " ").lower()
    return next((name.removeprefix(start) for start in _HANDS_OVER if name.startswith(start)), "")


def _takes_expression(tool: Json) -> bool:
    return "expression" in ((tool.get("parameters") or {}).get("properties") or {})


def _read_calls(messages: Sequence[Json]) -> list[ToolRequest]:
    calls = [call.get("function") or {} for m in messages for call in m.get("tool_calls") or ()]
    return [
        (str(call.get("name")), dict(object_of(parse_json(call.get("arguments")))))
        for call in calls
    ]
