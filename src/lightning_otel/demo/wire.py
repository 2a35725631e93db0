"""Replies of a policy as the JSON of an OpenAI-compatible server, whole and streamed.

Source: https://platform.openai.com/docs/api-reference; the token ids as vLLM's
vllm/entrypoints/openai/protocol.py sends them (`return_token_ids`).
"""

from __future__ import annotations

import base64
import json
import random
import struct
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, zip_longest
from typing import Any

from lightning_otel.demo.policy import PieceTokenizer, Reply, pieces, prompt_tokens
from lightning_otel.demo.requests import message_text

Json = dict[str, Any]

_CHUNKS_BEFORE_FAULT = 3


@dataclass(frozen=True, slots=True)
class WireAnswer:
    """One answer in both its forms."""

    response: Json
    chunks: tuple[Json, ...] = ()
    """What a stream of it sends, in order; they add up to `response`."""
    has_event_names: bool = False
    """Whether its stream names each event and goes without the closing `[DONE]`."""
    status: int = 200


def chat(
    body: Mapping[str, Any], replies: Sequence[Reply], tokenizer: PieceTokenizer
) -> WireAnswer:
    """A chat completion with one choice per reply."""
    prompt = prompt_tokens(body)
    head = _make_head(body, "chatcmpl", "chat.completion")
    choices: list[Json] = []
    streamed: list[list[Json]] = []
    for index, reply in enumerate(replies):
        calls = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in reply.tool_calls
        ]
        message: Json = {"role": "assistant", "content": reply.text or None, "refusal": None}
        message |= {"annotations": []}
        message |= {"tool_calls": calls} if calls else {}
        message |= {"reasoning_content": reply.reasoning} if reply.reasoning else {}
        choice = {"index": index, "message": message, "finish_reason": reply.finish_reason}
        written = _Written(body, reply, tokenizer)
        choices.append(choice | written.chat_extras(slice(None)))
        streamed.append(list(_chat_deltas(index, reply, written)))
    ids = _prompt_ids(body, prompt, tokenizer)
    usage = _chat_usage([prompt], replies)
    response = {**head, "choices": choices, "usage": usage, **ids}
    chunk_head = head | {"object": "chat.completion.chunk"}
    return WireAnswer(response, _stream_chunks(body, chunk_head, streamed, usage, ids))


def completion(
    body: Mapping[str, Any],
    prompts: Sequence[Sequence[str]],
    replies: Sequence[Reply],
    tokenizer: PieceTokenizer,
) -> WireAnswer:
    """A legacy text completion; `replies` holds the same number of choices for each prompt."""
    head = _make_head(body, "cmpl", "text_completion")
    choices: list[Json] = []
    streamed: list[list[Json]] = []
    for index, reply in enumerate(replies):
        prompt = prompts[index * len(prompts) // len(replies)]
        ids = _prompt_ids(body, prompt, tokenizer)
        written = _Written(body, reply, tokenizer)
        end = {"finish_reason": reply.finish_reason}
        choices.append(written.legacy_choice(index, slice(None)) | end | ids)
        parts = [written.legacy_choice(index, slice(i, i + 1)) for i in range(len(written.tokens))]
        last = {"index": index, "text": "", "logprobs": None, **end}
        streamed.append([*parts, last])
        streamed[-1][0] |= ids
    usage = _chat_usage(prompts, replies)
    response = {**head, "choices": choices, "usage": usage}
    return WireAnswer(response, _stream_chunks(body, head, streamed, usage, {}))


def _prompt_ids(body: Mapping[str, Any], prompt: Sequence[str], tokenizer: PieceTokenizer) -> Json:
    is_wanted = body.get("return_token_ids")
    return {"prompt_token_ids": tokenizer.encode_pieces(prompt)} if is_wanted else {}


def embeddings(body: Mapping[str, Any], texts: Sequence[str]) -> WireAnswer:
    """One vector per text, the same each time for the same text, of length about one."""
    size = body.get("dimensions") or 8
    data: list[Json] = []
    for index, text in enumerate(texts):
        draw = random.Random(text)
        packed = struct.pack(f"<{size}f", *(draw.gauss(0, size**-0.5) for _ in range(size)))
        vector: str | list[float] = list(struct.unpack(f"<{size}f", packed))
        if body.get("encoding_format") == "base64":
            vector = base64.b64encode(packed).decode()
        data.append({"object": "embedding", "index": index, "embedding": vector})
    count = sum(len(pieces(text)) for text in texts)
    usage = {"prompt_tokens": count, "total_tokens": count}
    return WireAnswer({"object": "list", "data": data, "model": body.get("model"), "usage": usage})


def responses_to_chat(body: Mapping[str, Any]) -> Json:
    """The chat body that asks the same as a Responses API body."""
    content = body.get("input") or ""
    items = [{"role": "user", "content": content}] if isinstance(content, str) else content
    messages: list[Json] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": body["instructions"]})
    for item in items:
        kind = item.get("type") or "message"
        if kind == "message":
            messages.append({"role": item["role"], "content": message_text(item)})
        elif kind == "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            text = message_text({"content": item["output"]})
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": text})
    functions = [tool for tool in body.get("tools") or () if tool.get("type") == "function"]
    chat_body: Json = {"model": body.get("model"), "messages": messages}
    if functions:
        chat_body["tools"] = [{"type": "function", "function": tool} for tool in functions]
    text_format = (body.get("text") or {}).get("format") or {}
    if text_format.get("type") == "json_schema":
        chat_body["response_format"] = {"type": "json_schema", "json_schema": text_format}
    options = {
        "max_tokens": body.get("max_output_tokens"),
        "tool_choice": body.get("tool_choice"),
        "seed": body.get("seed"),
    }
    return chat_body | {name: value for name, value in options.items() if value is not None}


def response(body: Mapping[str, Any], reply: Reply) -> WireAnswer:
    """A Responses API response object and the typed events that stream it."""
    prompt_count = len(prompt_tokens(responses_to_chat(body)))
    output: list[Json] = []
    if reply.reasoning:
        summary = [{"type": "summary_text", "text": reply.reasoning}]
        output.append({"id": _new_id("rs"), "type": "reasoning", "summary": summary})
    if reply.text:
        text: Json = {"type": "output_text", "text": reply.text, "annotations": []}
        start = len(pieces(reply.reasoning))
        logprobs = _make_logprobs(reply)[start : start + len(pieces(reply.text))]
        has_logprobs = "message.output_text.logprobs" in (body.get("include") or ())
        text["logprobs"] = logprobs if has_logprobs else []
        message = {"id": _new_id("msg"), "type": "message", "role": "assistant"}
        output.append(message | {"status": "completed", "content": [text]})
    output += [
        {
            "id": _new_id("fc"),
            "type": "function_call",
            "status": "completed",
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
        }
        for call in reply.tool_calls
    ]
    is_cut = reply.finish_reason == "length"
    status = "incomplete" if is_cut else "completed"
    usage = {
        "input_tokens": prompt_count,
        "input_tokens_details": {"cached_tokens": prompt_count // 2, "cache_write_tokens": 0},
        "output_tokens": len(reply.tokens),
        "output_tokens_details": {"reasoning_tokens": len(pieces(reply.reasoning))},
        "total_tokens": prompt_count + len(reply.tokens),
    }
    head = _response_head(body)
    whole = {**head, "status": status, "output": output, "usage": usage}
    whole["incomplete_details"] = {"reason": "max_output_tokens"} if is_cut else None
    events: list[Json] = [
        {"type": "response.created", "response": head},
        {"type": "response.in_progress", "response": head},
        *chain.from_iterable(_item_events(i, item) for i, item in enumerate(output)),
        {"type": f"response.{status}", "response": whole},
    ]
    numbered = tuple({**event, "sequence_number": i} for i, event in enumerate(events))
    return WireAnswer(whole, numbered, has_event_names=True)


def spoil(chunks: tuple[Json, ...], fault: str) -> tuple[Json, ...]:
    """The chunks as a fault wants them sent: `cut`, `sse-error`, `null-choices` or `null-index`."""
    if fault in ("cut", "sse-error"):
        message = {"message": "the demo server broke off", "type": "server_error", "code": None}
        error: Json = {"error": message}
        start = chunks[:_CHUNKS_BEFORE_FAULT]
        return start if fault == "cut" else (*start, error)
    if fault == "null-choices" and "choices" in chunks[0]:
        return (chunks[0], {**chunks[0], "choices": None}, *chunks[1:])
    if fault == "null-index":
        spoiled: list[Json] = json.loads(json_bytes(chunks))
        for chunk in spoiled:
            for choice in chunk.get("choices") or ():
                for call in (choice.get("delta") or {}).get("tool_calls") or ():
                    call["index"] = None
        return tuple(spoiled)
    return chunks


def json_bytes(value: object) -> bytes:
    """Compact JSON with every character beyond ASCII escaped."""
    return json.dumps(value, separators=(",", ":")).encode()


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def _make_head(body: Mapping[str, Any], prefix: str, kind: str) -> Json:
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": body.get("model"),
        "system_fingerprint": "fp_lightning",
        "service_tier": "default",
    }


class _Written:
    def __init__(self, body: Mapping[str, Any], reply: Reply, tokenizer: PieceTokenizer) -> None:
        self.tokens = reply.tokens
        # The legacy API's 0 asks for the chosen tokens' logprobs; the chat API's false for none.
        is_wanted = body.get("logprobs") is not None and body["logprobs"] is not False
        self._logprobs = _make_logprobs(reply) if is_wanted else None
        if self._logprobs and body.get("return_tokens_as_token_ids"):
            ids = tokenizer.encode_pieces(self.tokens)
            for entry, token_id in zip(self._logprobs, ids, strict=True):
                entry["token"] = f"token_id:{token_id}"
        self._ids = tokenizer.encode_pieces(self.tokens) if body.get("return_token_ids") else None
        ends = accumulate(len(token) for token in self.tokens)
        self._offsets = [0, *ends]

    def ids(self, part: slice) -> Json:
        return {} if self._ids is None else {"token_ids": self._ids[part]}

    def chat_extras(self, part: slice) -> Json:
        entries = self._logprobs and {"content": self._logprobs[part], "refusal": None}
        return {"logprobs": entries or None, **self.ids(part)}

    def legacy_choice(self, index: int, part: slice) -> Json:
        choice: Json = {"index": index, "text": "".join(self.tokens[part]), "finish_reason": None}
        choice |= {"logprobs": None, **self.ids(part)}
        if self._logprobs is not None:
            entries = self._logprobs[part]
            choice["logprobs"] = {
                "tokens": [entry["token"] for entry in entries],
                "token_logprobs": [entry["logprob"] for entry in entries],
                "top_logprobs": [{entry["token"]: entry["logprob"]} for entry in entries],
                "text_offset": self._offsets[:-1][part],
            }
        return choice


def _make_logprobs(reply: Reply) -> list[Json]:
    return [
        {
            "token": token,
            "logprob": 0.0 if logprob is None else logprob,
            # A lone surrogate is a legal JSON escape; strict UTF-8 would refuse it.
            "bytes": list(token.encode("utf-8", "surrogatepass")),
            "top_logprobs": [],
        }
        for token, logprob in zip_longest(reply.tokens, reply.logprobs[: len(reply.tokens)])
    ]


def _chat_deltas(index: int, reply: Reply, written: _Written) -> Iterator[Json]:
    def choice(delta: Json, finish_reason: str | None = None) -> Json:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}

    yield choice({"role": "assistant", "content": "" if reply.text else None, "refusal": None})
    deltas: list[Json] = [{"reasoning_content": token} for token in pieces(reply.reasoning)]
    deltas += [{"content": token} for token in pieces(reply.text)]
    for position, call in enumerate(reply.tool_calls):
        function: Json = {"name": call.name, "arguments": ""}
        first = {"index": position, "id": call.id, "type": "function", "function": function}
        deltas.append({"tool_calls": [first]})
        for token in pieces(call.arguments):
            part = {"index": position, "function": {"arguments": token}}
            deltas.append({"tool_calls": [part]})
    for i, delta in enumerate(deltas):
        yield choice(delta) | written.chat_extras(slice(i, i + 1))
    yield choice({}, reply.finish_reason)


def _stream_chunks(
    body: Mapping[str, Any],
    head: Json,
    streamed: Sequence[Sequence[Json]],
    usage: Json,
    first_extras: Json,
) -> tuple[Json, ...]:
    has_usage = bool((body.get("stream_options") or {}).get("include_usage"))
    no_usage = {"usage": None} if has_usage else {}
    # Choices take turns, as a server that samples them together sends them.
    parts = [part for row in zip_longest(*streamed) for part in row if part is not None]
    chunks = [{**head, "choices": [part], **no_usage} for part in parts]
    chunks = chunks or [{**head, "choices": [], **no_usage}]
    chunks[0] |= first_extras
    if has_usage:
        chunks.append({**head, "choices": [], "usage": usage})
    return tuple(chunks)


def _chat_usage(prompts: Sequence[Sequence[str]], replies: Sequence[Reply]) -> Json:
    prompt = sum(len(tokens) for tokens in prompts)
    written = sum(len(reply.tokens) for reply in replies)
    reasoning = sum(len(pieces(reply.reasoning)) for reply in replies)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
        "prompt_tokens_details": {"cached_tokens": prompt // 2, "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": reasoning, "audio_tokens": 0},
    }


def _response_head(body: Mapping[str, Any]) -> Json:
    defaults: Json = {
        "instructions": None,
        "max_output_tokens": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": True,
        "temperature": 1.0,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_p": 1.0,
        "truncation": "disabled",
        "user": None,
    }
    options = {key: body[key] for key in defaults if body.get(key) is not None}
    return {
        "id": _new_id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "model": body.get("model"),
        "output": [],
        "usage": None,
        "error": None,
        "incomplete_details": None,
        "service_tier": "default",
        **defaults,
        **options,
    }


def _item_events(index: int, item: Json) -> Iterator[Json]:
    opened = item if item["type"] == "reasoning" else {**item, "status": "in_progress"}
    place = {"item_id": item["id"], "output_index": index}
    empty: Json = {"message": {"content": []}, "function_call": {"arguments": ""}}
    opened = {**opened, **empty.get(item["type"], {"summary": []})}
    yield {"type": "response.output_item.added", "output_index": index, "item": opened}
    if item["type"] == "message":
        (part,) = item["content"]
        place["content_index"] = 0
        blank = {**part, "text": "", "logprobs": []}
        yield {"type": "response.content_part.added", **place, "part": blank}
        for i, token in enumerate(pieces(part["text"])):
            extras = {"delta": token, "logprobs": part["logprobs"][i : i + 1]}
            yield {"type": "response.output_text.delta", **place, **extras}
        final_fields = {"text": part["text"], "logprobs": part["logprobs"]}
        yield {"type": "response.output_text.done", **place, **final_fields}
        yield {"type": "response.content_part.done", **place, "part": part}
    elif item["type"] == "function_call":
        for token in pieces(str(item["arguments"])):
            yield {"type": "response.function_call_arguments.delta", **place, "delta": token}
        final_fields = {"arguments": item["arguments"], "name": item["name"]}
        yield {"type": "response.function_call_arguments.done", **place, **final_fields}
    yield {"type": "response.output_item.done", "output_index": index, "item": item}
