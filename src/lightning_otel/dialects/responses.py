"""The wire format of ``/responses``.

Source: OpenAI's API reference for responses; its streams end with an event that holds the whole
answer, so only a stream that was left early is put together from its pieces.
"""

from collections.abc import Sequence
from typing import Any, Final

from lightning_otel.adapter.tokens import token_content
from lightning_otel.dialects.chat import Chat
from lightning_otel.dialects.dialect import Attributes, Dialect, Json, add_tools, dump
from lightning_otel.messages import content_parts, object_of, objects, raw_call_part, read_items
from lightning_otel.redact import Scrubbed
from lightning_otel.types import conventions as c

_DELTAS: Final = frozenset(
    {
        "response.output_text.delta",
        "response.function_call_arguments.delta",
        "response.custom_tool_call_input.delta",
    }
)
_TURN: Final = '{"role":"assistant","parts":['
_END: Final = "]}"
_CALLS: Final = ("function_call", "custom_tool_call")


class Responses(Chat):
    """``/responses``."""

    end_marks = frozenset({"response.completed", "response.incomplete", "response.failed"})
    api = "responses"

    def request_attributes(self, body: Json) -> Attributes:
        """Attributes of a request, with its effort and conversation."""
        found = {**super().request_attributes(body), **_conversation_id(body)}
        effort = object_of(body.get("reasoning")).get("effort")
        if isinstance(effort, str):
            found[c.REQUEST_REASONING_LEVEL] = effort
        return found

    def output_format(self, body: Json) -> Json:
        """Return the response format that a request wants."""
        return object_of(object_of(body.get("text")).get("format"))

    def request_content(self, body: Json) -> dict[str, str]:
        """Instructions, messages and tools of a request."""
        given = body.get("input")
        items = given if isinstance(given, (list, tuple)) else [given] if given else []
        # Codex says its tools in an item.
        added = [item for item in objects(items) if _lists_tools(item)]
        spoken = [item for item in items if not _lists_tools(item)]
        content = {c.INPUT_MESSAGES: self.write_messages(spoken)}
        instructions = content_parts(body.get("instructions"))
        if instructions:
            content[c.SYSTEM_INSTRUCTIONS] = dump(instructions)
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
            if not (is_turn and texts and texts[-1].startswith(_TURN) and texts[-1].endswith(_END)):
                texts.append(text)
                continue
            pieces = (texts[-1][len(_TURN) : -len(_END)], text[len(_TURN) : -len(_END)])
            texts[-1] = f"{_TURN}{','.join(filter(None, pieces))}{_END}"
        return Scrubbed(f"[{','.join(texts)}]")

    def response_attributes(self, body: Json) -> Attributes:
        """Attributes of an answer, with its conversation."""
        return {**super().response_attributes(body), **_conversation_id(body)}

    def finish_reasons(self, body: Json) -> list[object]:
        """Return the finish reason, which this API says by status and kind of output."""
        status = body.get("status")
        if status == "completed":
            called = any(item.get("type") in _CALLS for item in objects(body.get("output")))
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
            **token_content(body.get("prompt_token_ids"), [body.get("token_ids")], [logprobs]),
        }

    def is_complete(self, events: Sequence[Json]) -> bool:
        """Return whether the event that closes an answer came."""
        return Dialect.is_complete(self, events)

    def assemble(self, events: Sequence[Json]) -> Json:
        """The whole answer: the closing event's, else what the pieces so far add up to."""
        whole: dict[str, Any] = {}
        items: dict[int, Json] = {}
        texts: dict[int, list[str]] = {}
        for event in events:
            kind, index = event.get("type"), event.get("output_index")
            whole.update(object_of(event.get("response")))
            if kind == "error" or isinstance(event.get("error"), dict):
                whole["error"] = event.get("error") or {**event, "type": event.get("code")}
            elif isinstance(index, int):
                items[index] = object_of(event.get("item")) or items.get(index, {})
                if kind in _DELTAS and isinstance(event.get("delta"), str):
                    texts.setdefault(index, []).append(event["delta"])
        if not self.is_complete(events):
            whole["output"] = [
                _unfinished_item(items[index], "".join(texts.get(index, ())))
                for index in sorted(items)
            ]
        return whole


def _lists_tools(item: object) -> bool:
    return object_of(item).get("type") == "additional_tools"


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
    held = conversation.get("id") if isinstance(conversation, dict) else conversation
    return {c.CONVERSATION_ID: held} if isinstance(held, str) else {}


def _unfinished_item(item: Json, text: str) -> Json:
    """An output item with what came of it; one that is done has it all."""
    if item.get("status") == "completed" or not text:
        return item
    if item.get("type") in _CALLS:
        return {**item, "arguments": text}
    part = {"type": "output_text", "text": text}
    return {"type": "message", "role": "assistant", **item, "content": [part]}
