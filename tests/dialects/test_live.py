"""Drawn conversations through the ``openai`` client: transitions say what went over the wire."""

import contextlib
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.instrumentors.http.drawn import draw_arguments, make_text, pieces_of
from tests.instrumentors.http.wire import Answer, serve, write_events

from lightning_otel import Store, auto_trace

CONVERSATIONS = 200
Drawn = tuple[list[Any], list[Any], list[Any], list[Any]]
"""Input on the wire and as messages, answer on the wire and as parts."""


def draw_call(draw: random.Random, number: int) -> tuple[str, str, dict[str, Any]]:
    """An id, a tool's name and arguments."""
    arguments = draw_arguments(draw)
    return f"call_{number}_{draw.randint(0, 999)}", draw.choice(["look", "run"]), arguments


def make_call(call: tuple[str, str, dict[str, Any]]) -> dict[str, Any]:
    return {"type": "tool_call", "id": call[0], "name": call[1], "arguments": call[2]}


def make_result(call_id: str) -> dict[str, Any]:
    return {"type": "tool_call_response", "id": call_id, "response": "done"}


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
    if draw.random() < 0.3:
        answer["refusal"] = "I would rather not."
        found.append({"type": "refusal", "content": "I would rather not."})
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
    part, made = {"type": "output_text", "text": text, "annotations": []}, make_text(text)
    if draw.random() < 0.3:
        part, made = {"type": "refusal", "refusal": text}, {"type": "refusal", "content": text}
    thought = {"type": "summary_text", "text": "a thought"}
    calls = [draw_call(draw, 9) for _ in range(draw.randint(0, 3))]
    output: list[Any] = [
        {"type": "reasoning", "id": "rs", "summary": [thought]},
        {"type": "message", "id": "m", "role": "assistant", "status": "completed",
         "content": [part]},
        *map(write_item, calls),
    ]  # fmt: skip
    reasoning = {"type": "reasoning", "content": "a thought"}
    return sent, said, output, [reasoning, made, *map(make_call, calls)]


def write_item(call: tuple[str, str, dict[str, Any]]) -> dict[str, Any]:
    arguments = json.dumps(call[2])
    return {"type": "function_call", "call_id": call[0], "name": call[1], "arguments": arguments}


def stream_chat(answer: dict[str, Any], draw: random.Random) -> Iterator[dict[str, Any]]:
    """The chunks of an answer, parallel calls by their indexes."""
    deltas: list[dict[str, Any]] = [{"role": "assistant"}]
    for name in ("reasoning_content", "content", "refusal"):
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
    head = {"id": "r", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return {**head, "choices": [choice]}


def stream_responses(whole: dict[str, Any], draw: random.Random) -> Iterator[dict[str, Any]]:
    """The events of an answer, each item in pieces."""
    yield {"type": "response.created", "response": {**whole, "status": "in_progress", "output": []}}
    for index, item in enumerate(whole["output"]):
        empty = {key: [] if key in ("content", "summary") else each for key, each in item.items()}
        if item["type"] == "function_call":
            empty["arguments"] = ""
        yield {"type": "response.output_item.added", "output_index": index, "item": empty}
        for kind, text in texts_of(item):
            for piece in pieces_of(text, draw):
                yield {"type": f"response.{kind}.delta", "output_index": index, "delta": piece,
                       "content_index": 0, "summary_index": 0, "item_id": "i",
                       "logprobs": [], "sequence_number": 0}  # fmt: skip
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": "response.completed", "response": whole}


def texts_of(item: dict[str, Any]) -> list[tuple[str, str]]:
    """The texts of an item that stream, by the kinds of their events."""
    if item["type"] == "function_call":
        return [("function_call_arguments", item["arguments"])]
    if item["type"] == "reasoning":
        return [("reasoning_summary_text", item["summary"][0]["text"])]
    return [(part["type"], part.get("text", part.get("refusal"))) for part in item["content"]]


def read_chat(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The parts that some chunks say."""
    texts, calls = {"reasoning_content": "", "content": "", "refusal": ""}, dict[int, Any]()
    for event in events:
        delta = event["choices"][0]["delta"]
        for name in texts:
            texts[name] += delta.get(name) or ""
        for call in delta.get("tool_calls", ()):
            known = calls.setdefault(call["index"], {**call, "function": {**call["function"]}})
            if "id" not in call:
                known["function"]["arguments"] += call["function"]["arguments"]
    kinds = {"reasoning_content": "reasoning", "content": "text", "refusal": "refusal"}
    said = [{"type": kinds[name], "content": text} for name, text in texts.items() if text]
    made = [(call["id"], call["function"]) for call in calls.values()]
    return [*said, *(read_call(each, function) for each, function in made)]


def read_responses(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    kinds = {"output_text": "text", "refusal": "refusal", "reasoning_summary_text": "reasoning"}
    items: dict[int, tuple[Any, str, str]] = {}
    for event in events:
        index, kind = event.get("output_index", 0), event["type"].removeprefix("response.")
        if kind == "output_item.added":
            items[index] = (event["item"], "", "")
        elif kind == "output_item.done":
            items[index] = (event["item"], *texts_of(event["item"])[0])
        elif "delta" in event:
            item, _, text = items[index]
            items[index] = (item, kind.removesuffix(".delta"), text + event["delta"])
    parts = []
    for item, kind, text in items.values():
        if item["type"] == "function_call":
            parts.append(read_call(item["call_id"], {**item, "arguments": text}))
        elif text:
            parts.append({"type": kinds[kind], "content": text})
    return parts


def read_call(call_id: str, held: dict[str, Any]) -> dict[str, Any]:
    """A call with the arguments as far as they came."""
    arguments = held["arguments"]
    with contextlib.suppress(ValueError):
        arguments = json.loads(arguments)
    return make_call((call_id, held["name"], arguments))


def ask(create: Any, request: dict[str, Any], most: int | None) -> None:
    """Ask as a program does that reads so many events at most, and goes on after errors."""
    with contextlib.suppress(Exception):
        made = create(model="m", **request)
        if request["stream"]:
            with made as stream:
                list(itertools.islice(stream, most))


def draw_ending(draw: random.Random, *, is_stream: bool) -> str:
    """How an exchange ends."""
    if draw.random() < 0.5:
        return "whole"
    return draw.choice(["left", "cut", "error"]) if is_stream else "refused"


def make_answer(
    ending: str, api: str, events: list[Any], whole: Any, draw: random.Random
) -> tuple[Answer, int]:
    """What the server sends, and how many events of it come for sure."""
    error = {"error": {"message": "no", "type": "server_error"}}
    count = draw.randint(1, len(events) - 1) if ending in ("left", "cut", "error") else len(events)
    sent = events if ending == "left" else events[:count]
    end = b"data: [DONE]\n\n" if api == "chat" and ending in ("whole", "left") else b""
    if ending in ("refused", "error"):
        whole, sent = error, [*sent, error]
    body = write_events(iter(sent)) + end if events else json.dumps(whole).encode()
    kind = "text/event-stream" if events else "application/json"
    status = 400 if ending == "refused" else 200
    return Answer(body, status, {"content-type": kind}, is_cut=ending == "cut"), count


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_transitions_say_what_went_over_the_wire(api: str, tmp_path: Path) -> None:
    """Every message, call, result, image and thought of 200 drawn conversations, whole and cut."""
    draw, store = random.Random(11), tmp_path / "s.duckdb"
    expected, partial, refused = {}, {}, set[str]()
    with (
        serve() as server,
        openai.OpenAI(base_url=server.url, api_key="k", max_retries=0) as client,
    ):
        for number in range(CONVERSATIONS):
            name, is_stream = f"r{number}", draw.random() < 0.6
            drawer = draw_chat if api == "chat" else draw_responses
            sent, said, answer, parts = drawer(draw, number)
            if api == "chat":
                choice = {"index": 0, "message": answer[0], "finish_reason": "stop"}
                whole = {**chunk_of(choice), "object": "chat.completion"}
                events, create = stream_chat(answer[0], draw), client.chat.completions.create
                request: Any = {"messages": sent}
            else:
                whole = {"id": name, "object": "response", "created_at": 1, "model": "m",
                         "status": "completed", "output": answer, "tools": []}  # fmt: skip
                events, create = stream_responses(whole, draw), client.responses.create
                request = {"input": sent}
            ending = draw_ending(draw, is_stream=is_stream)
            wire = list(events) if is_stream else []
            answered, count = make_answer(ending, api, wire, whole, draw)
            server.answers = [answered]
            with auto_trace(store=store, rollout_id=name):
                ask(create, {**request, "stream": is_stream}, count if ending == "left" else None)
            if ending == "refused":
                refused.add(name)
            elif ending == "whole":
                expected[name] = (said, parts)
            else:
                read = read_chat if api == "chat" else read_responses
                rest = len(wire) if ending == "left" else count
                partial[name] = [read(wire[:end]) for end in range(count, rest + 1)]
    steps = {step.rollout_id: step for step in Store(store).transitions()}
    assert steps.keys() - partial.keys() == expected.keys()
    for name, (said, parts) in expected.items():
        step = steps[name]
        assert [{"role": m["role"], "parts": [*m["parts"]]} for m in step.observation] == said
        assert [*step.action[0]["parts"]] == parts
    for span in Store(store).spans():
        if span.rollout_id in partial and span.name.startswith("chat"):
            (message,) = json.loads(str(span.attributes["gen_ai.output.messages"])) or [{}]
            assert message.get("parts", []) in partial[span.rollout_id], span.rollout_id
        assert not (span.rollout_id in refused and span.name == "chat m" and span.status != "ERROR")
    assert min(len(expected), len(partial), len(refused)) > CONVERSATIONS // 10
