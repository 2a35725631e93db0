"""The wire format of ``/chat/completions``, with vLLM's token ids.

Source: OpenAI's API reference for chat completions; vLLM's ``return_token_ids``: prompt ids at the
top level (in a stream on its first chunk), sampled ids on each choice.
"""

from collections.abc import Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any, Final

import orjson

from lightning_otel import conventions as c
from lightning_otel.adapter.tokens import sampled_ids, token_content
from lightning_otel.instrumentors.openai import fields
from lightning_otel.instrumentors.openai.fields import Attributes, Json
from lightning_otel.instrumentors.reading import token_counts
from lightning_otel.messages import object_of, objects
from lightning_otel.redact import Scrubbed, scrub

OPERATION: Final = c.CHAT

_REMEMBERED: Final = 512
_LONGEST_REMEMBERED: Final = 8192
"""Messages whose JSON is kept, and their characters: some MB at most."""
_PLAIN: Final = {
    role: f'{{"role":"{role}","parts":[{{"type":"text","content":'
    for role in ("system", "developer", "user", "assistant")
}
_TOOL: Final = '{"role":"tool","parts":[{"type":"tool_call_response","id":'
_GROWING: Final = frozenset({"logprobs", "token_ids"})
_CALLED: Final = frozenset({"function", "custom"})


def request_attributes(body: Json) -> Attributes:
    """Attributes of the request."""
    return {
        c.OPENAI_API: "chat_completions",
        **fields.request_scalars(body),
        **fields.output_type(object_of(body.get("response_format")).get("type")),
    }


def request_content(body: Json) -> dict[str, str]:
    """Messages and tools of the request."""
    texts = [_message_json(item) for item in objects(body.get("messages"))]
    content: dict[str, str] = {c.INPUT_MESSAGES: Scrubbed(f"[{','.join(texts)}]")}
    tools = fields.tool_definitions(body.get("tools"))
    if tools:
        content[c.TOOL_DEFINITIONS] = tools
    return content


def _message_json(item: Json) -> str:
    """A message as JSON text without secrets.

    Most messages of a long history are plain, and each comes again with every call: these are
    written as they are read, as every object made in between calls for the garbage collector.
    """
    role, content = item.get("role"), item.get("content")
    if content and type(content) is str and type(role) is str:
        written = _remembered if len(content) <= _LONGEST_REMEMBERED else _write_message
        try:
            if len(item) == 2 and role in _PLAIN:
                return written(_PLAIN[role], content)
            if len(item) == 3 and role == "tool" and type(item.get("tool_call_id")) is str:
                call_id = orjson.dumps(item["tool_call_id"]).decode()
                return written(f'{_TOOL}{call_id},"response":', content)
        except TypeError:  # a lone surrogate
            pass
    return scrub(fields.dump(fields.read_message(item)))


def _write_message(opening: str, content: str) -> str:
    """The JSON of a message that is one text."""
    return scrub(f"{opening}{orjson.dumps(content).decode()}}}]}}")


_remembered: Final = lru_cache(_REMEMBERED)(_write_message)


def response_attributes(body: Json) -> Attributes:
    """Attributes of the answer."""
    return {
        **fields.response_scalars(body),
        **token_counts(body.get("usage")),
        **fields.finish_reasons(body),
    }


def response_content(body: Json) -> dict[str, str]:
    """Messages, token ids and logprobs of the answer."""
    choices = objects(body.get("choices"))
    sampled = [_read_sampled(choice) for choice in choices]
    content = {
        c.OUTPUT_MESSAGES: fields.dump([_read_answer(choice) for choice in choices]),
        **token_content(
            fields.prompt_ids_of(body, choices),
            sampled_ids(body, [choice.get("token_ids") for choice in choices]),
            [[token.get("logprob") for token in tokens] for tokens in sampled],
        ),
    }
    return fields.add_named_ids(
        content, [[token.get("token") for token in tokens] for tokens in sampled]
    )


def _read_answer(choice: Json) -> dict[str, Any]:
    reason = choice.get("finish_reason")
    return fields.read_message(object_of(choice.get("message")), "assistant", finish_reason=reason)


def _read_sampled(choice: Json) -> list[dict[str, Any]]:
    """Return the logprobs of each sampled token."""
    held = choice.get("logprobs")
    if not isinstance(held, dict):  # as of most calls
        return []
    return objects(held.get("content")) + objects(held.get("refusal"))


def is_complete(events: Sequence[Json]) -> bool:
    """Return whether the stream ended, or every choice has its finish reason."""
    if any(event.get("done") for event in events[-1:]):
        return True
    finished: dict[int, bool] = {}
    for event in events:
        for choice in objects(event.get("choices")):
            index = fields.index_of(choice)
            finished[index] = finished.get(index, False) or bool(choice.get("finish_reason"))
    return bool(finished) and all(finished.values())


def assemble(events: Sequence[Json]) -> Json:
    """The answer that the chunks add up to."""
    return fields.assembled(events, _join_choice)


def _join_choice(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    whole = fields.grown(chunks, _GROWING)
    deltas = [object_of(chunk.get("delta")) for chunk in chunks]
    said = [name for delta in deltas for name in delta]
    message = fields.grown(deltas, frozenset(said) - {"role", "tool_calls"})
    calls = [call for delta in deltas for call in objects(delta.get("tool_calls"))]
    return {**whole, "message": {**message, "tool_calls": _tool_calls(calls)}}


def _tool_calls(pieces: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tool calls of their pieces: each belongs to the call of its index, else id, else the last."""
    calls: list[tuple[int, list[dict[str, Any]]]] = []
    for piece in pieces:
        index, call_id = piece.get("index"), piece.get("id")
        if isinstance(index, int):
            known = [held for place, held in calls if place == index]
        elif call_id:
            known = [held for _, held in calls if held[0].get("id") == call_id]
        else:
            known = [held for _, held in calls[-1:]]
        if known:
            known[0].append(piece)
        else:
            calls.append((index if isinstance(index, int) else len(calls), [piece]))
    return [fields.grown(held, _CALLED) for _, held in sorted(calls, key=itemgetter(0))]
