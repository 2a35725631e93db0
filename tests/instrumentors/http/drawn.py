"""Drawn conversations of two vendors: what goes over the wire, and what it says."""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tests.instrumentors.http.wire import write_events

SIGNATURE = "+/+/c2lnbmF0dXJlLTE="
IMAGE = "aGk/+/8="
"""Bytes in the alphabet that google-genai does not send them in."""
_IMAGE = {"type": "blob", "modality": "image", "mime_type": "image/png", "content": IMAGE}


@dataclass(frozen=True)
class Vendor:
    """One API."""

    draw: Callable[[random.Random, int], tuple[list[Any], list[Any], list[Any], list[Any]]]
    whole: Callable[[list[Any]], dict[str, Any]]
    stream: Callable[[list[Any], random.Random], bytes]


def make_text(text: str) -> dict[str, Any]:
    return {"type": "text", "content": text}


def draw_arguments(draw: random.Random) -> dict[str, Any]:
    return {"q": "".join(draw.choices('aé"\\n{} ', k=draw.randint(0, 9)))}


def pieces_of(text: str, draw: random.Random) -> list[str]:
    size = draw.randint(1, 9)
    return [text[at : at + size] for at in range(0, len(text), size)]


# --- Anthropic ------------------------------------------------------------------------------------


def _draw_blocks(draw: random.Random, number: int) -> tuple[list[Any], list[Any]]:
    """An answer: a thought, texts and calls, some of them parallel."""
    blocks: list[Any] = []
    parts: list[Any] = []
    if draw.random() < 0.4:
        blocks.append({"type": "thinking", "thinking": "a thought é", "signature": SIGNATURE})
        parts.append({"type": "reasoning", "content": "a thought é", "signature": SIGNATURE})
    if draw.random() < 0.2:
        blocks.append({"type": "redacted_thinking", "data": "ZGF0YQ=="})
        parts.append({"type": "anthropic.redacted_thinking", "data": "ZGF0YQ=="})
    if draw.random() < 0.7 or not blocks:
        blocks.append({"type": "text", "text": f"answer é {number}"})
        parts.append(make_text(f"answer é {number}"))
    for place in range(draw.randint(0, 3)):
        call_id, arguments = f"toolu_{number}_{place}", draw_arguments(draw)
        blocks.append({"type": "tool_use", "id": call_id, "name": "look", "input": arguments})
        parts.append({"type": "tool_call", "id": call_id, "name": "look", "arguments": arguments})
    return blocks, parts


def _draw_anthropic(draw: random.Random, number: int) -> Any:
    content: list[Any] = [{"type": "text", "text": f"question {number}"}]
    parts = [make_text(f"question {number}")]
    if draw.random() < 0.3:
        source = {"type": "base64", "media_type": "image/png", "data": IMAGE}
        content.append({"type": "image", "source": source})
        parts.append(_IMAGE)
    sent: list[Any] = [{"role": "user", "content": content}]
    said: list[Any] = [{"role": "user", "parts": parts}]
    for turn in range(draw.randint(0, 2)):
        blocks, spoken = _draw_blocks(draw, 10 * number + turn)
        sent.append({"role": "assistant", "content": blocks})
        said.append({"role": "assistant", "parts": spoken})
        ids = [block["id"] for block in blocks if block["type"] == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": i, "content": "done"} for i in ids]
        told = [{"type": "tool_call_response", "id": i, "response": "done"} for i in ids]
        sent.append({"role": "user", "content": [*results, {"type": "text", "text": "go on"}]})
        said.append({"role": "user", "parts": [*told, make_text("go on")]})
    return sent, said, *_draw_blocks(draw, 10 * number + 9)


def _whole_anthropic(blocks: list[Any]) -> dict[str, Any]:
    is_call = blocks[-1]["type"] == "tool_use"
    return {
        "id": f"msg_{abs(hash(str(blocks)))}", "type": "message", "role": "assistant", "model": "m",
        "content": blocks, "stop_reason": "tool_use" if is_call else "end_turn",
        "stop_sequence": None, "usage": {"input_tokens": 3, "output_tokens": 5},
    }  # fmt: skip


_STARTS: dict[str, dict[str, Any]] = {
    "text": {"text": ""},
    "thinking": {"thinking": "", "signature": ""},
    "tool_use": {"input": {}},
}


def _stream_anthropic(blocks: list[Any], draw: random.Random) -> bytes:
    def events() -> Iterator[dict[str, Any]]:
        whole = _whole_anthropic(blocks)
        start = {**whole, "content": [], "stop_reason": None}
        yield {"type": "message_start", "message": start}
        for index, block in enumerate(blocks):
            at = {"index": index}
            begun = {**block, **_STARTS.get(block["type"], {})}
            yield {"type": "content_block_start", **at, "content_block": begun}
            deltas: list[dict[str, Any]] = []
            for name in ("text", "thinking"):
                pieces = pieces_of(block.get(name, ""), draw)
                deltas += [{"type": f"{name}_delta", name: piece} for piece in pieces]
            if "signature" in block:
                deltas.append({"type": "signature_delta", "signature": block["signature"]})
            if "input" in block:
                pieces = pieces_of(json.dumps(block["input"]), draw)
                deltas += [{"type": "input_json_delta", "partial_json": each} for each in pieces]
            for delta in deltas:
                yield {"type": "content_block_delta", **at, "delta": delta}
            yield {"type": "content_block_stop", **at}
        ended = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
        yield {"type": "message_delta", "delta": ended, "usage": {"output_tokens": 5}}
        yield {"type": "message_stop"}

    return write_events(events(), is_named=True)


# --- Gemini ---------------------------------------------------------------------------------------


def _draw_parts(draw: random.Random, number: int) -> tuple[list[Any], list[Any]]:
    wire: list[Any] = []
    parts: list[Any] = []
    if draw.random() < 0.4:
        wire.append({"text": "a thought é", "thought": True})
        parts.append({"type": "reasoning", "content": "a thought é"})
    if draw.random() < 0.7 or not wire:
        wire.append({"text": f"answer é {number}"})
        parts.append(make_text(f"answer é {number}"))
    for _ in range(draw.randint(0, 3)):
        arguments = draw_arguments(draw)
        wire.append({"functionCall": {"name": "look", "args": arguments}})
        parts.append({"type": "tool_call", "id": None, "name": "look", "arguments": arguments})
        if draw.random() < 0.5:
            wire[-1]["thoughtSignature"] = SIGNATURE
            parts[-1]["thought_signature"] = SIGNATURE
    return wire, parts


def _draw_gemini(draw: random.Random, number: int) -> Any:
    content: list[Any] = [{"text": f"question {number}"}]
    parts = [make_text(f"question {number}")]
    if draw.random() < 0.3:
        content.append({"inlineData": {"mimeType": "image/png", "data": IMAGE}})
        parts.append(_IMAGE)
    sent: list[Any] = [{"role": "user", "parts": content}]
    said: list[Any] = [{"role": "user", "parts": parts}]
    for turn in range(draw.randint(0, 2)):
        wire, spoken = _draw_parts(draw, 10 * number + turn)
        sent.append({"role": "model", "parts": wire})
        said.append({"role": "assistant", "parts": spoken})
        count = sum("functionCall" in part for part in wire)
        result = {"functionResponse": {"name": "look", "response": {"result": "done"}}}
        told = {"type": "tool_call_response", "id": None, "response": {"result": "done"},
                "name": "look"}  # fmt: skip
        sent.append({"role": "user", "parts": [*[result] * count, {"text": "go on"}]})
        said.append({"role": "user", "parts": [*[told] * count, make_text("go on")]})
    return sent, said, *_draw_parts(draw, 10 * number + 9)


def _whole_gemini(parts: list[Any]) -> dict[str, Any]:
    candidate = {"content": {"role": "model", "parts": parts}, "index": 0, "finishReason": "STOP"}
    usage = {"promptTokenCount": 3, "candidatesTokenCount": 5, "totalTokenCount": 8}
    return {
        "candidates": [candidate], "usageMetadata": usage, "modelVersion": "m",
        "responseId": f"r{abs(hash(str(parts)))}",
    }  # fmt: skip


def _stream_gemini(parts: list[Any], draw: random.Random) -> bytes:
    pieces: list[Any] = []
    for part in parts:
        texts = pieces_of(part["text"], draw) if "text" in part else []
        pieces += [{**part, "text": text} for text in texts] or [part]
    whole = _whole_gemini(parts)

    def events() -> Iterator[dict[str, Any]]:
        for place, piece in enumerate(pieces):
            candidate = {"content": {"role": "model", "parts": [piece]}, "index": 0}
            if place == len(pieces) - 1:
                candidate["finishReason"] = "STOP"
            yield {**whole, "candidates": [candidate]}

    return write_events(events())


VENDORS = {
    "anthropic": Vendor(_draw_anthropic, _whole_anthropic, _stream_anthropic),
    "gemini": Vendor(_draw_gemini, _whole_gemini, _stream_gemini),
}
