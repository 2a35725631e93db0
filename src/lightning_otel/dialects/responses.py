"""The wire format of ``/responses``.

Source: OpenAI's API reference for responses; its streams end with an event that holds the whole
answer, so only a stream that was left early is put together from its pieces.
"""

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any, Final

from lightning_otel.adapter.tokens import token_content
from lightning_otel.dialects.chat import Chat
from lightning_otel.dialects.dialect import Attributes, Dialect, Json, add_tools, dump, pick_texts
from lightning_otel.dialects.prompts import (
    prompt_text,
    replace_prompt,
    role_of,
    text_example,
)
from lightning_otel.errors import ConfigError
from lightning_otel.messages import (
    RULES,
    content_parts,
    object_of,
    objects,
    raw_call_part,
    read_items,
)
from lightning_otel.redact import Scrubbed, scrub
from lightning_otel.types import Prompt
from lightning_otel.types import conventions as c

_REFUSED: Final = frozenset({"stop", "seed", "presence_penalty", "frequency_penalty", "logit_bias"})
_PARTS: Final[Mapping[str, tuple[str, str, str]]] = {
    "output_text": ("message", "content", "text"),
    "refusal": ("message", "content", "refusal"),
    "reasoning_text": ("reasoning", "content", "text"),
    "summary_text": ("reasoning", "summary", "text"),
}
"""By kind of a part that streams: the item it is in, the list of that, and its own text."""
_FIELDS: Final[Mapping[str, tuple[str, str]]] = {
    "function_call_arguments": ("function_call", "arguments"),
    "custom_tool_call_input": ("custom_tool_call", "input"),
    "mcp_call_arguments": ("mcp_call", "arguments"),
    "code_interpreter_call_code": ("code_interpreter_call", "code"),
}
"""By kind of a text that streams: the item it is in, and its field there."""
_TURN: Final = '{"role":"assistant","parts":['
_END: Final = "]}"
_SPOKEN: Final = ('{"role":"assistant"', '{"role": "assistant"')
_CALLS: Final = ("function_call", "custom_tool_call")
_AWAITED: Final = frozenset(
    {
        *_CALLS, "local_shell_call", "shell_call", "apply_patch_call", "computer_call",
        "mcp_approval_request",
    }
)  # fmt: skip
"""Items that the program answers; the server runs its other tools by itself."""


class Responses(Chat):
    """``/responses``."""

    end_marks = frozenset({"response.completed", "response.incomplete", "response.failed"})
    api = "responses"
    token_limit = "max_output_tokens"

    def request_attributes(self, body: Json) -> Attributes:
        """Attributes of a request, with its effort and conversation."""
        attributes = {**super().request_attributes(body), **_conversation_id(body)}
        if c.CONVERSATION_ID in attributes:
            attributes[c.REQUEST_CONVERSATION] = attributes[c.CONVERSATION_ID]
        if body.get("background") is True:
            attributes[c.REQUEST_BACKGROUND] = True
        prompt, reasoning = object_of(body.get("prompt")), object_of(body.get("reasoning"))
        attributes |= pick_texts(prompt, {"id": c.PROMPT_ID, "version": c.PROMPT_VERSION})
        return attributes | pick_texts(reasoning, {"effort": c.REQUEST_REASONING_LEVEL})

    def output_format(self, body: Json) -> Json:
        """Return the response format that a request wants."""
        return object_of(object_of(body.get("text")).get("format"))

    def request_content(self, body: Json) -> dict[str, str]:
        """Instructions, messages and tools of a request."""
        value = body.get("input")
        items = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
        content = {c.INPUT_MESSAGES: self.write_messages(items)}
        instructions = content_parts(body.get("instructions"))
        if instructions:
            content[c.SYSTEM_INSTRUCTIONS] = dump(instructions)
        if variables := object_of(body.get("prompt")).get("variables"):
            content[c.PROMPT_VARIABLES] = dump(variables)
        # Codex says its tools in an item.
        added = [item for item in objects(items) if item.get("type") == "additional_tools"]
        tools = [*objects(body.get("tools")), *(tool for item in added for tool in _tools_in(item))]
        return add_tools(content, tools)

    def read_message(self, item: Any) -> Json:
        """Return an item of a request as a message."""
        return read_items([item], call=raw_call_part)[0]

    def write_messages(self, items: Sequence[Any]) -> str:
        """Return items as a JSON list of messages; one turn of the model is one message."""
        texts: list[str] = []
        for text in self.write_each(items):
            is_turn = text.startswith(_TURN) and text.endswith(_END)
            if not is_turn and text.startswith(_SPOKEN):  # with a name, or half a character
                return Scrubbed(scrub(dump(read_items(items, call=raw_call_part))))
            if not (is_turn and texts and texts[-1].startswith(_TURN) and texts[-1].endswith(_END)):
                texts.append(text)
                continue
            pieces = (texts[-1][len(_TURN) : -len(_END)], text[len(_TURN) : -len(_END)])
            texts[-1] = f"{_TURN}{','.join(filter(None, pieces))}{_END}"
        return Scrubbed(f"[{','.join(texts)}]")

    def instruct(self, body: Json, prompt: Prompt, task: object) -> dict[str, Any]:
        """Return the instructions, or what stands for them in the input, with the examples."""
        value = body.get("input")
        # What the server remembers begins with the examples already.
        refers = body.get("previous_response_id") or body.get("conversation")
        is_bare = value is None or bool(refers)
        examples = [] if is_bare else [text_example(example) for example in prompt.examples]
        items = [{"role": "user", "content": value}] if isinstance(value, str) else value or []
        if not isinstance(items, Sequence) or isinstance(items, str):
            kind = type(value).__name__
            raise ConfigError(f"its input is {kind}; substitution wants text or a list")
        system = body.get("instructions")
        is_in_input = system is None and bool(items) and role_of(items[0]) in RULES
        changes: dict[str, Any] = {}
        if not is_in_input:
            changes["instructions"] = prompt_text(prompt, system, task)
        if is_in_input or examples:
            changes["input"] = replace_prompt(prompt, items, task, examples, is_needed=is_in_input)
        return changes

    def spell_setting(self, name: str, value: Any, body: Json) -> dict[str, Any]:
        """Return a setting, its effort within the reasoning; none that this API refuses."""
        if name == "reasoning_effort":
            return {"reasoning": {**(body.get("reasoning") or {}), "effort": value}}
        return {} if name in _REFUSED else {name: value}

    wanted_ids, is_complete = Dialect.wanted_ids, Dialect.is_complete

    def response_attributes(self, body: Json) -> Attributes:
        """Attributes of an answer, with its conversation."""
        return {**super().response_attributes(body), **_conversation_id(body)}

    def error_of(self, body: Json) -> tuple[str, str] | None:
        """Return kind and message of an error; an answer that was cancelled is none."""
        if body.get("status") == "cancelled":
            return "cancelled", "the program cancelled the answer"
        return super().error_of(body)

    def finish_reasons(self, body: Json) -> list[object]:
        """Return the finish reason, which this API says by status and kind of output."""
        status = body.get("status")
        if status == "completed":
            called = any(item.get("type") in _AWAITED for item in objects(body.get("output")))
            return ["tool_calls" if called else "stop"]
        if status == "incomplete":
            why = object_of(body.get("incomplete_details")).get("reason")
            return ["length" if why == "max_output_tokens" else str(why or "length")]
        return ["error"] if status == "failed" else []

    def response_content(self, body: Json) -> dict[str, str]:
        """The answer as one message; token ids and logprobs where an engine gives them."""
        output = objects(body.get("output"))
        messages = read_items(output, "assistant", raw_call_part)
        for reason in self.finish_reasons(body) if messages else ():
            messages[-1]["finish_reason"] = reason
        logprobs = [
            token.get("logprob")
            for item in output
            for part in objects(item.get("content"))
            for token in objects(part.get("logprobs"))
        ]
        return {
            c.OUTPUT_MESSAGES: dump(messages),
            **_stored_prompt(body),
            **token_content(body.get("prompt_token_ids"), [body.get("token_ids")], [logprobs]),
        }

    def assemble(self, events: Sequence[Json]) -> Json:
        """The whole answer: the closing event's, else what the pieces so far add up to."""
        whole: dict[str, Any] = {}
        items: dict[int, Json] = {}
        pieces: dict[int, dict[tuple[str, int], str]] = {}
        for event in events:
            kind, index = str(event.get("type")), event.get("output_index")
            whole.update(object_of(event.get("response")))
            if kind == "error" or isinstance(event.get("error"), dict):
                whole["error"] = event.get("error") or {**event, "type": event.get("code")}
                continue
            place = index if isinstance(index, int) else 0
            if item := object_of(event.get("item")):
                items[place] = item
                pieces[place] = {}  # one that is done has it all
            elif kind.endswith(".delta") and isinstance(event.get("delta"), str):
                name = kind.removeprefix("response.").removesuffix(".delta")
                name = name.removeprefix("reasoning_") if "summary" in name else name
                number = event.get("content_index", event.get("summary_index"))
                key = (name, number if isinstance(number, int) else 0)
                texts = pieces.setdefault(place, {})
                texts[key] = texts.get(key, "") + event["delta"]
        if not (self.is_complete(events) and whole.get("output")):
            whole["output"] = [
                _unfinished_item(items.get(place, {}), pieces.get(place, {}))
                for place in sorted({*items, *pieces})
            ]
        return whole


def _stored_prompt(body: Json) -> dict[str, str]:
    """Return the messages of a stored prompt, which the answer has for instructions."""
    value = body.get("instructions") if object_of(body.get("prompt")) else None
    if not value:
        return {}
    items = value if isinstance(value, (list, tuple)) else [{"role": "system", "content": value}]
    return {c.PROMPT_MESSAGES: dump(read_items(items, "system"))}


def _tools_in(holder: Json) -> list[Json]:
    """Return the tools that an item lists, those of its namespaces too."""
    tools: list[Json] = []
    for tool in objects(holder.get("tools")):
        if tool.get("type") == "namespace":
            tools += [{**inner, "namespace": tool.get("name")} for inner in _tools_in(tool)]
        else:
            tools.append(tool)
    return tools


def _conversation_id(body: Json) -> Attributes:
    conversation = body.get("conversation")
    value = conversation.get("id") if isinstance(conversation, dict) else conversation
    return {c.CONVERSATION_ID: value} if isinstance(value, str) else {}


def _unfinished_item(item: Json, pieces: Mapping[tuple[str, int], str]) -> Json:
    """Return an output item with the pieces that came of it, by their kinds and numbers."""
    lists: dict[str, list[Json]] = {}
    fields: dict[str, str] = {}
    kind = item.get("type")
    for name, number in sorted(pieces, key=itemgetter(1)):
        text = pieces[name, number]
        if name in _PARTS:
            default, holder, field = _PARTS[name]
            lists.setdefault(holder, []).append({"type": name, field: text})
        else:
            default, field = _FIELDS.get(name, (name, name))
            fields[field] = text
        kind = kind or default
    return {**item, "type": kind or "message", **lists, **fields}
