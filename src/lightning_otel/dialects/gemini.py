"""The wire format of Google's ``generateContent`` and ``streamGenerateContent``.

Source: the API references of the Gemini API and of Vertex AI; names in camel and in snake case.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from lightning_otel.dialects.dialect import Attributes, Dialect, Json, add_tools, dump, pick_texts
from lightning_otel.dialects.prompts import LIMITS, prompt_text, text_example
from lightning_otel.errors import ConfigError
from lightning_otel.messages import message, object_of, objects, part_of, read_settings
from lightning_otel.types import Prompt
from lightning_otel.types import conventions as c

_PATH: Final = re.compile(r"/([^/:]+):(generateContent|streamGenerateContent)$")
_REASONS: Final = {
    "STOP": "stop", "MAX_TOKENS": "length", "SAFETY": "content_filter",
    "RECITATION": "content_filter", "BLOCKLIST": "content_filter", "SPII": "content_filter",
    "PROHIBITED_CONTENT": "content_filter", "IMAGE_SAFETY": "content_filter",
}  # fmt: skip
_MARKS: Final = frozenset({"thought", "thought_signature"})
_CALLS: Final = frozenset({"function_call", "function_response"})
_WORDS: Final = frozenset({"text", "inline_data", "file_data", *_CALLS})
"""Kinds of parts that the conventions have a word for."""
_SPOKEN: Final = frozenset({"id", "name", "args", "response"})


_SETTINGS: Final = {
    **{name: name for name in ("temperature", "top_p", "top_k", "seed")},
    **{name: name for name in ("presence_penalty", "frequency_penalty")},
    **dict.fromkeys(LIMITS, "max_output_tokens"),
    "stop": "stop_sequences",
}


class Gemini(Dialect):
    """``models/X:generateContent``, whole and streamed.

    Attributes:
        provider: Google's AI Studio, or Vertex AI.
    """

    operation = c.GENERATE_CONTENT

    def __init__(self, provider: str = "gcp.gemini") -> None:
        """Name the provider."""
        self.provider = provider

    def model_of(self, body: Json, path: str) -> str | None:
        """Return the model, which stands in the path."""
        match = _PATH.search(path.partition("?")[0])
        return match[1] if match else super().model_of(body, path)

    def is_stream(self, body: Json, path: str) -> bool:
        """Return whether the path asks for a stream."""
        return ":streamGenerateContent" in path

    def request_attributes(self, body: Json) -> Attributes:
        """Sampling parameters, level of thinking and format of the answer."""
        config = _spell_names(_spell_names(body).get("generation_config"))
        thinking = _spell_names(config.get("thinking_config"))
        settings = {**config, "stop": config.get("stop_sequences")}
        attributes = read_settings({**settings, "reasoning_effort": thinking.get("thinking_level")})
        if type(count := config.get("candidate_count")) is int and count != 1:
            attributes[c.REQUEST_CHOICES] = count
        kind = config.get("response_mime_type")
        if kind in ("application/json", "text/plain"):
            attributes[c.OUTPUT_TYPE] = "json" if kind == "application/json" else "text"
        return attributes

    def request_content(self, body: Json) -> dict[str, str]:
        """Instructions, messages and tools of a request."""
        body = _spell_names(body)
        contents = body.get("contents")
        items = contents if isinstance(contents, list) else [contents] if contents else []
        content = {c.INPUT_MESSAGES: self.write_messages(items)}
        if body.get("system_instruction"):
            system = self.read_message(body["system_instruction"])["parts"]
            content[c.SYSTEM_INSTRUCTIONS] = dump(system)
        return add_tools(content, _split_tools(body.get("tools")))

    def instruct(self, body: Json, prompt: Prompt, task: object) -> dict[str, Any]:
        """Return the system instruction and, before the contents, the examples."""
        name = "system_instruction" if "system_instruction" in body else "systemInstruction"
        system = self.read_message(body[name])["parts"] if body.get(name) else None
        changes: dict[str, Any] = {name: {"parts": [{"text": prompt_text(prompt, system, task)}]}}
        if prompt.examples:
            contents = body.get("contents") or []
            items = contents if isinstance(contents, list) else [contents]
            changes["contents"] = [*map(_write_example, prompt.examples), *items]
        return changes

    def sample(self, body: Json, endpoint: Json) -> dict[str, Any]:
        """Return the sampling of an endpoint, as far as this API has words for it."""
        if endpoint.get("model"):
            raise ConfigError("its model stands in the address; leave model out of the endpoint")
        name = "generation_config" if "generation_config" in body else "generationConfig"
        config = {**object_of(body.get(name))}
        for setting, value in endpoint.get("sampling", {}).items():
            if setting not in _SETTINGS:
                continue
            for key in [key for key in config if _spell_name(key) == _SETTINGS[setting]]:
                del config[key]
            is_list = setting == "stop" and isinstance(value, str)
            config[_SETTINGS[setting]] = [value] if is_list else value
        return {name: config} if config else {}

    def read_message(self, item: Any) -> Mapping[str, Any]:
        """Return a content, or the text that stands for one, in the conventions' form."""
        if not isinstance(item, Mapping):
            return message("user", [part_of(item)])
        role, parts = item.get("role") or "user", item.get("parts")
        parts = parts if isinstance(parts, list) else [parts] if parts else []
        return message("assistant" if role == "model" else role, [*map(_read_part, parts)])

    def write_error(self, status: int, message: str) -> Json:
        """Return the body of an error."""
        return {"error": {"code": status, "message": message, "status": "UNAVAILABLE"}}

    def response_attributes(self, body: Json) -> Attributes:
        """Id, model, counts and finish reasons; thoughts count as output."""
        body = _spell_names(body)
        usage = _spell_names(body.get("usage_metadata"))
        counts = (
            (c.INPUT_TOKENS, ("prompt_token_count", "tool_use_prompt_token_count")),
            (c.OUTPUT_TOKENS, ("candidates_token_count", "thoughts_token_count")),
            (c.CACHED_TOKENS, ("cached_content_token_count",)),
            (c.REASONING_TOKENS, ("thoughts_token_count",)),
        )
        attributes: Attributes = {}
        for key, names in counts:
            numbers = [usage[name] for name in names if type(usage.get(name)) is int]
            if numbers:
                attributes[key] = sum(numbers)
        attributes |= pick_texts(
            body, {"response_id": c.RESPONSE_ID, "model_version": c.RESPONSE_MODEL}
        )
        candidates = objects(body.get("candidates"))
        reasons: list[str | None] = [*map(_finish_reason, candidates)]
        if _spell_names(body.get("prompt_feedback")).get("block_reason"):
            reasons.append("content_filter")
        if stated := [reason for reason in reasons if reason is not None]:
            attributes[c.FINISH_REASONS] = stated
        return attributes

    def response_content(self, body: Json) -> dict[str, str]:
        """The candidates as messages."""
        answers = [
            {
                **self.read_message({"role": "model", **object_of(candidate.get("content"))}),
                **({"finish_reason": reason} if (reason := _finish_reason(candidate)) else {}),
            }
            for candidate in objects(body.get("candidates"))
        ]
        return {c.OUTPUT_MESSAGES: dump(answers)}

    def is_complete(self, events: Sequence[Json]) -> bool:
        """Return whether every candidate has its finish reason, or the prompt was blocked."""
        whole = self.response_attributes(self.assemble(events))
        candidates = objects(self.assemble(events).get("candidates"))
        return len(whole.get(c.FINISH_REASONS, ())) >= max(len(candidates), 1)

    def assemble(self, events: Sequence[Json]) -> Json:
        """The whole answer: parts of a candidate follow each other, pieces of a text are joined."""
        whole: dict[str, Any] = {}
        candidates: dict[object, dict[str, Any]] = {}
        for event in map(_spell_names, events):
            chunks = objects(event.get("candidates"))
            usage = {**object_of(whole.get("usage_metadata"))}
            usage |= _spell_names(event.get("usage_metadata"))
            fields = {name: value for name, value in event.items() if value is not None}
            whole.update({**fields, "usage_metadata": usage})
            for chunk in chunks:
                candidate = candidates.setdefault(chunk.get("index") or 0, {"parts": []})
                content = object_of(chunk.get("content"))
                parts = content.get("parts")
                for part in parts if isinstance(parts, list) else ():
                    _add_part(candidate["parts"], part)
                fields = {name: value for name, value in chunk.items() if value is not None}
                candidate.update({**fields, "content": {**content, "parts": candidate["parts"]}})
        if candidates:
            whole["candidates"] = list(candidates.values())
        return whole


def _add_part(parts: list[Any], part: Any) -> None:
    """Add a part; a piece of the same text is joined, unless a signature closed that."""
    last, piece = _spell_names(parts[-1] if parts else None), _spell_names(part)
    is_text = piece.keys() <= {"text", *_MARKS} and isinstance(piece.get("text"), str)
    is_same = last.keys() <= {"text", "thought"} and isinstance(last.get("text"), str)
    if is_text and is_same and bool(last.get("thought")) == bool(piece.get("thought")):
        parts[-1] = {**last, **piece, "text": last["text"] + piece["text"]}
    else:
        parts.append(part)


def _finish_reason(candidate: Json) -> str | None:
    fields = _spell_names(candidate)
    reason = fields.get("finish_reason")
    if not isinstance(reason, str):
        return None
    parts = object_of(fields.get("content")).get("parts")
    if reason == "STOP" and any("function_call" in _spell_names(part) for part in objects(parts)):
        return "tool_calls"
    return _REASONS.get(reason, reason.lower())


def _read_part(part: Any) -> dict[str, Any]:
    """Return a part; one that the conventions have no word for is named by its kind."""
    if not isinstance(part, Mapping):
        return part_of(part)
    fields = {**_spell_names(part)}
    kind = next((name for name in fields if name not in _MARKS), "part")
    inner = object_of(fields.get(kind))
    if "thought_signature" in fields:
        fields["thought_signature"] = _spell_bytes(fields["thought_signature"])
    if kind == "inline_data" and "data" in inner:
        inner = fields[kind] = {**inner, "data": _spell_bytes(inner["data"])}
    extra = {name: fields[name] for name in fields if name not in (kind, "thought")}
    if kind not in _WORDS:
        thought = {"thought": True} if fields.get("thought") else {}
        return {"type": f"gemini.{kind}", kind: fields.get(kind), **extra, **thought}
    word = part_of({name: fields[name] for name in fields if name in (kind, "thought")})
    if kind in _CALLS:
        spoken = _SPOKEN - {"name"} if kind == "function_response" else _SPOKEN
        extra = {**{name: inner[name] for name in inner if name not in spoken}, **extra}
    return {**word, **extra}


def _split_tools(tools: object) -> list[Json]:
    """Return the functions among tools, and each tool of Google's own by its name."""
    split: list[Json] = []
    for tool in map(_spell_names, objects(tools)):
        for name, value in tool.items():
            if name == "function_declarations":
                split += objects(value)
            else:
                split.append({"type": name, name: value})
    return split


def _spell_names(value: object) -> Json:
    """Return an object with the names of its fields in snake case; they are Google's, not data."""
    fields = object_of(value)
    return {_spell_name(name): fields[name] for name in fields}


def _spell_name(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


def _spell_bytes(value: Any) -> Any:
    """Return bytes in the alphabet that servers write; Google's own client sends the other one."""
    return value.replace("-", "+").replace("_", "/") if isinstance(value, str) else value


def _write_example(example: Json) -> Json:
    spoken = text_example(example)
    role = "model" if spoken["role"] == "assistant" else "user"
    return {"role": role, "parts": [{"text": spoken["content"]}]}
