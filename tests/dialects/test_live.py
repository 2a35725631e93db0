"""Drawn conversations through the ``openai`` client: transitions say what went over the wire."""

import json
import random
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import openai
import pytest

from lightning_otel import Store, auto_trace

CONVERSATIONS = 200
Drawn = tuple[list[Any], list[Any], list[Any], list[Any]]
"""Input on the wire and as messages, answer on the wire and as parts."""


class _Server(BaseHTTPRequestHandler):
    """Sends the answer that is next, in one piece or in random ones."""

    protocol_version = "HTTP/1.1"
    answer: ClassVar[bytes] = b""
    is_stream: ClassVar[bool] = False
    sizes: ClassVar[random.Random] = random.Random(3)

    def do_POST(self) -> None:
        """Answer."""
        # The next answer may be set while the rest of this one, after its end mark, is sent.
        answer, is_stream = self.answer, self.is_stream
        self.rfile.read(int(self.headers["content-length"]))
        kind = "text/event-stream" if is_stream else "application/json"
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        at = 0
        while at < len(answer):
            size = self.sizes.randint(1, 200) if is_stream else len(answer)
            self.wfile.write(answer[at : at + size])
            at += size

    def log_message(self, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture
def base_url() -> Iterator[str]:
    """A server on loopback."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Server)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    server.shutdown()
    thread.join()
    server.server_close()


def draw_call(draw: random.Random, number: int) -> tuple[str, str, dict[str, Any]]:
    """An id, a tool's name and arguments."""
    arguments = {"q": "".join(draw.choices('aé"\\n{} ', k=draw.randint(0, 9)))}
    return f"call_{number}_{draw.randint(0, 999)}", draw.choice(["look", "run"]), arguments


def make_call(call: tuple[str, str, dict[str, Any]]) -> dict[str, Any]:
    """A call as the conventions say it."""
    return {"type": "tool_call", "id": call[0], "name": call[1], "arguments": call[2]}


def make_result(call_id: str) -> dict[str, Any]:
    """A result as the conventions say it."""
    return {"type": "tool_call_response", "id": call_id, "response": "done"}


def make_text(text: str) -> dict[str, Any]:
    """A text as the conventions say it."""
    return {"type": "text", "content": text}


def draw_chat(draw: random.Random, number: int) -> Drawn:
    """A conversation of chat completions."""
    url = "data:image/png;base64,aGk="
    image = {"type": "blob", "modality": "image", "mime_type": "image/png", "content": "aGk="}
    asked, parts = f"question {number}", [make_text(f"question {number}")]
    content: list[Any] = [{"type": "text", "text": asked}]
    if draw.random() < 0.3:
        content.append({"type": "image_url", "image_url": {"url": url}})
        parts.append(image)
    sent: list[Any] = [{"role": "user", "content": content}]
    said: list[Any] = [{"role": "user", "parts": parts}]
    for place in range(draw.randint(0, 3)):
        calls = [draw_call(draw, place) for _ in range(draw.randint(1, 3))]
        sent.append({"role": "assistant", "content": None, "tool_calls": write_calls(calls)})
        said.append({"role": "assistant", "parts": [make_call(call) for call in calls]})
        for call in calls:
            sent.append({"role": "tool", "tool_call_id": call[0], "content": "done"})
            said.append({"role": "tool", "parts": [make_result(call[0])]})
    text = f"answer é {number} " * draw.randint(0, 3)
    calls = [draw_call(draw, 9) for _ in range(draw.randint(0 if text else 1, 3))]
    answer: dict[str, Any] = {"role": "assistant", "content": text or None}
    found = [make_text(text)] if text else []
    if draw.random() < 0.4:
        answer["reasoning_content"] = "a thought"
        found.insert(0, {"type": "reasoning", "content": "a thought"})
    if calls:
        answer["tool_calls"] = write_calls(calls)
    return sent, said, [answer], [*found, *map(make_call, calls)]


def write_calls(calls: list[tuple[str, str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Calls as chat completions write them."""
    return [
        {"id": call_id, "type": "function",
         "function": {"name": name, "arguments": json.dumps(arguments)}}
        for call_id, name, arguments in calls
    ]  # fmt: skip


def draw_responses(draw: random.Random, number: int) -> Drawn:
    """A conversation of responses."""
    sent: list[Any] = [{"role": "user", "content": f"question {number}"}]
    said: list[Any] = [{"role": "user", "parts": [make_text(f"question {number}")]}]
    for place in range(draw.randint(0, 3)):
        calls = [draw_call(draw, place) for _ in range(draw.randint(1, 3))]
        sent += [write_item(call) for call in calls]
        said.append({"role": "assistant", "parts": [make_call(call) for call in calls]})
        for call in calls:
            sent.append({"type": "function_call_output", "call_id": call[0], "output": "done"})
            said.append({"role": "tool", "parts": [make_result(call[0])]})
    text = f"answer é {number} " * draw.randint(1, 3)
    part = {"type": "output_text", "text": text, "annotations": []}
    thought = {"type": "summary_text", "text": "a thought"}
    calls = [draw_call(draw, 9) for _ in range(draw.randint(0, 3))]
    output: list[Any] = [
        {"type": "reasoning", "id": "rs", "summary": [thought]},
        {"type": "message", "id": "m", "role": "assistant", "status": "completed",
         "content": [part]},
        *map(write_item, calls),
    ]  # fmt: skip
    reasoning = {"type": "reasoning", "content": "a thought"}
    return sent, said, output, [reasoning, make_text(text), *map(make_call, calls)]


def write_item(call: tuple[str, str, dict[str, Any]]) -> dict[str, Any]:
    """A call as responses write it."""
    arguments = json.dumps(call[2])
    return {"type": "function_call", "call_id": call[0], "name": call[1], "arguments": arguments}


def pieces_of(text: str, draw: random.Random) -> list[str]:
    """A text in pieces of random size."""
    size = draw.randint(1, 9)
    return [text[at : at + size] for at in range(0, len(text), size)]


def stream_chat(answer: dict[str, Any], draw: random.Random) -> Iterator[dict[str, Any]]:
    """The chunks of an answer, parallel calls by their indexes."""
    deltas: list[dict[str, Any]] = [{"role": "assistant"}]
    for name in ("reasoning_content", "content"):
        deltas += [{name: piece} for piece in pieces_of(answer.get(name) or "", draw)]
    for index, call in enumerate(answer.get("tool_calls", ())):
        function = {**call["function"], "arguments": ""}
        deltas.append({"tool_calls": [{**call, "index": index, "function": function}]})
        for piece in pieces_of(call["function"]["arguments"], draw):
            deltas.append({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
    for delta in deltas:
        yield chunk_of({"index": 0, "delta": delta})
    yield chunk_of({"index": 0, "delta": {}, "finish_reason": "stop"})


def chunk_of(choice: dict[str, Any]) -> dict[str, Any]:
    """A chunk of one choice."""
    head = {"id": "r", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return {**head, "choices": [choice]}


def stream_responses(whole: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of an answer."""
    yield {"type": "response.created", "response": {**whole, "output": []}}
    for index, item in enumerate(whole["output"]):
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": "response.completed", "response": whole}


def write_events(events: Iterator[dict[str, Any]]) -> bytes:
    """Server-sent events."""
    return b"".join(b"data: %s\n\n" % json.dumps(event).encode() for event in events)


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_transitions_say_what_went_over_the_wire(api: str, base_url: str, tmp_path: Path) -> None:
    """Every message, tool call, result, image and thought of 200 drawn conversations."""
    draw, expected, store = random.Random(11), {}, tmp_path / "s.duckdb"
    with openai.OpenAI(base_url=base_url, api_key="k", max_retries=0) as client:
        for number in range(CONVERSATIONS):
            _Server.is_stream = draw.random() < 0.5
            is_stream: Any = _Server.is_stream
            drawer = draw_chat if api == "chat" else draw_responses
            sent, said, answer, parts = drawer(draw, number)
            if api == "chat":
                choice = {"index": 0, "message": answer[0], "finish_reason": "stop"}
                whole = {**chunk_of(choice), "object": "chat.completion"}
                events, create = stream_chat(answer[0], draw), client.chat.completions.create
                request: Any = {"messages": sent}
            else:
                whole = {"id": f"r{number}", "object": "response", "created_at": 1, "model": "m",
                         "status": "completed", "output": answer, "tools": []}  # fmt: skip
                events, create = stream_responses(whole), client.responses.create
                request = {"input": sent}
            end = b"data: [DONE]\n\n" if api == "chat" else b""
            _Server.answer = write_events(events) + end if is_stream else json.dumps(whole).encode()
            with auto_trace(store=store, rollout_id=f"r{number}"):
                made: Any = create(model="m", stream=is_stream, **request)
                if is_stream:
                    list(made)
            expected[f"r{number}"] = (said, parts)
    steps = list(Store(store).transitions())
    assert len(steps) == CONVERSATIONS
    for step in steps:
        said, parts = expected[step.rollout_id]
        assert [{"role": m["role"], "parts": [*m["parts"]]} for m in step.observation] == said
        assert [*step.action[0]["parts"]] == parts
