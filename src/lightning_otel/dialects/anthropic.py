"""The wire format of Anthropic's Messages API.

Source: Anthropic's API reference for messages and their streams. ``cache_control`` is left out: it
moves from turn to turn, and is no part of what is said.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from lightning_otel.dialects.dialect import Attributes, Dialect, Json, add_tools, dump, pick_texts
from lightning_otel.dialects.prompts import LIMITS, prompt_text, text_example
from lightning_otel.messages import message, object_of, objects, part_of, read_settings, text_part
from lightning_otel.types import Prompt
from lightning_otel.types import conventions as c

_REASONS: Final = {
    "end_turn": "stop", "stop_sequence": "stop", "tool_use": "tool_calls", "max_tokens": "length",
    "model_context_window_exceeded": "length", "refusal": "content_filter",
}  # fmt: skip
_SETTINGS: Final = {
    **{name: name for name in ("temperature", "top_p", "top_k")},
    **dict.fromkeys(LIMITS, "max_tokens"),
}
_FIELDS: Final[Mapping[str, frozenset[str]]] = {
    "text": frozenset({"text"}),
    "thinking": frozenset({"thinking", "signature"}),
    "tool_use": frozenset({"id", "name", "input"}),
    "tool_result": frozenset({"tool_use_id", "content", "is_error"}),
    "image": frozenset({"source"}),
    "document": frozenset({"source"}),
}
"""By kind of a block that the conventions have a word for, what its part says already."""


class Anthropic(Dialect):
    """``/v1/messages``."""

    provider = "anthropic"
    end_marks = frozenset({"message_stop"})

    def request_attributes(self, body: Json) -> Attributes:
        """Sampling parameters, effort and the format of the answer."""
        config = object_of(body.get("output_config"))
        settings = {**body, "stop": body.get("stop_sequences")}
        attributes = read_settings({**settings, "reasoning_effort": config.get("effort")})
        if object_of(config.get("format") or body.get("output_format")).get("type"):
            attributes[c.OUTPUT_TYPE] = "json"
        return attributes

    def request_content(self, body: Json) -> dict[str, str]:
        """Instructions, messages and tools of a request."""
        content = {c.INPUT_MESSAGES: self.write_messages(objects(body.get("messages")))}
        if system := _read_blocks(body.get("system")):
            content[c.SYSTEM_INSTRUCTIONS] = dump(system)
        return add_tools(content, [_without_cache(tool) for tool in objects(body.get("tools"))])

    def instruct(self, body: Json, prompt: Prompt, task: object) -> dict[str, Any]:
        """Return the system prompt, which stays as far cached as the agent's, and the examples."""
        system = body.get("system")
        text = prompt_text(prompt, system, task)
        marks = [block["cache_control"] for block in objects(system) if block.get("cache_control")]
        block = {"type": "text", "text": text}
        changes: dict[str, Any] = {"system": text}
        if marks:
            changes["system"] = [{**block, "cache_control": marks[-1]}]
        if prompt.examples:
            examples = [text_example(example) for example in prompt.examples]
            changes["messages"] = [*examples, *objects(body.get("messages"))]
        return changes

    def sample(self, body: Json, endpoint: Json) -> dict[str, Any]:
        """Return model and sampling of an endpoint, as far as this API has words for them."""
        changes: dict[str, Any] = {}
        for name, value in endpoint.get("sampling", {}).items():
            if spelt := _SETTINGS.get(name):
                changes[spelt] = value
            elif name == "stop":
                changes["stop_sequences"] = [value] if isinstance(value, str) else value
            elif name == "reasoning_effort":
                config = object_of(body.get("output_config"))
                changes["output_config"] = {**config, "effort": value}
        return changes | ({"model": endpoint["model"]} if endpoint.get("model") else {})

    def read_message(self, item: Any) -> Mapping[str, Any]:
        """Return a message of a request in the conventions' form."""
        return message(item.get("role") or "user", _read_blocks(item.get("content")))

    def response_attributes(self, body: Json) -> Attributes:
        """Id, model, counts and finish reason; the cache's tokens count as input."""
        usage = object_of(body.get("usage"))
        names = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
        numbers = [usage[name] for name in names if type(usage.get(name)) is int]
        thinking = object_of(usage.get("output_tokens_details")).get("thinking_tokens")
        counts = {
            c.INPUT_TOKENS: sum(numbers) if numbers else None,
            c.OUTPUT_TOKENS: usage.get("output_tokens"),
            c.CACHED_TOKENS: usage.get("cache_read_input_tokens"),
            c.CACHE_CREATION_TOKENS: usage.get("cache_creation_input_tokens"),
            c.REASONING_TOKENS: thinking,
        }
        attributes: Attributes = {key: value for key, value in counts.items() if type(value) is int}
        attributes |= pick_texts(body, {"id": c.RESPONSE_ID, "model": c.RESPONSE_MODEL})
        if (reason := _finish_reason(body)) is not None:
            attributes[c.FINISH_REASONS] = [reason]
        return attributes

    def response_content(self, body: Json) -> dict[str, str]:
        """The answer as one message; none where the body holds an error alone."""
        if "content" not in body:
            return {c.OUTPUT_MESSAGES: "[]"}
        parts, role = _read_blocks(body["content"]), body.get("role") or "assistant"
        return {c.OUTPUT_MESSAGES: dump([message(role, parts, finish_reason=_finish_reason(body))])}

    def write_error(self, status: int, message: str) -> Json:
        """Return the body of an error."""
        return {"type": "error", "error": {"type": "api_error", "message": message}}

    def assemble(self, events: Sequence[Json]) -> Json:
        """The whole answer that a stream's events add up to."""
        whole: dict[str, Any] = {}
        blocks: list[dict[str, Any]] = []
        places: dict[object, dict[str, Any]] = {}
        for event in events:
            kind, index = event.get("type"), event.get("index")
            delta = object_of(event.get("delta"))
            if kind == "message_start":
                whole.update(object_of(event.get("message")))
            elif kind == "content_block_start":
                places[index] = dict(object_of(event.get("content_block")))
                blocks.append(places[index])
            elif kind == "content_block_delta":
                if index not in places:  # its start did not come
                    name = str(delta.get("type")).removesuffix("_delta")
                    places[index] = {"type": "tool_use" if name == "input_json" else name}
                    blocks.append(places[index])
                _extend_block(places[index], delta)
            elif kind == "message_delta":
                whole.update(delta)
                counts = object_of(event.get("usage"))
                usage = {name: count for name, count in counts.items() if count is not None}
                whole["usage"] = {**object_of(whole.get("usage")), **usage}
            elif kind == "error":
                whole["error"] = event.get("error")
        if whole.keys() - {"error"} or blocks:
            whole["content"] = [*(whole.get("content") or []), *blocks]
        return whole


def _extend_block(block: dict[str, Any], delta: Json) -> None:
    """Add a piece to a block: texts grow, all else is a list."""
    for name, value in delta.items():
        if name == "partial_json" and isinstance(value, str):
            text = block.get("input")
            if value:
                block["input"] = (text if isinstance(text, str) else "") + value
        elif name != "type" and isinstance(value, str):
            block[name] = (block.get(name) or "") + value
        elif name != "type" and value is not None:
            block[f"{name}s"] = [*(block.get(f"{name}s") or []), value]


def _finish_reason(body: Json) -> str | None:
    reason = body.get("stop_reason")
    return _REASONS.get(reason, reason) if isinstance(reason, str) else None


def _read_blocks(content: object) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [text_part(content)] if content else []
    return [_read_block(block) for block in content] if isinstance(content, list) else []


def _read_block(block: Any) -> dict[str, Any]:
    """Return a block as a part; one that the conventions have no word for is named by its kind."""
    if not isinstance(block, Mapping):
        return part_of(block)
    block = _without_cache(block)
    kind = str(block.get("type"))
    if isinstance(block.get("content"), list):
        content = [_without_cache(inner) for inner in block["content"]]
        block = {**block, "content": content}
    part = part_of(block) if kind in _FIELDS else {}
    if part.get("type") in (None, "image", "document", "tool_use", "tool_result"):
        return {**block, "type": f"anthropic.{kind}"}
    extra = block.keys() - _FIELDS.get(kind, frozenset()) - {"type"}
    return {**part, **{name: block[name] for name in block if name in extra and block[name]}}


def _without_cache(value: Any) -> Any:
    if not isinstance(value, Mapping) or "cache_control" not in value:
        return value
    return {name: value[name] for name in value if name != "cache_control"}
