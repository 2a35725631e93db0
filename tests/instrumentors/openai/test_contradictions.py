"""Streams whose pieces contradict each other, and items that no reader knows."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.instrumentors.transport import answering

from lightning_otel import Store, auto_trace


def _ask(pieces: list[dict[str, Any]], store: Path) -> list[tuple[str, Any]]:
    """Stream an answer of these pieces of tool calls; return the names and arguments recorded."""
    chunks = [
        {"id": "r1", "object": "chat.completion.chunk", "created": 1, "model": "m",
         "choices": [{"index": 0, "delta": {"role": "assistant", "tool_calls": [piece]}}]}
        for piece in pieces
    ]  # fmt: skip
    text = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    client = answering(text.encode(), **{"content-type": "text/event-stream"})
    with auto_trace(store=store):
        asked: Any = [{"role": "user", "content": "x"}]
        list(client.chat.completions.create(model="m", messages=asked, stream=True))
    [step] = Store(store).transitions()
    return [(part["name"], part["arguments"]) for part in step.action[0]["parts"]]


def _piece(name: str | None, arguments: str, **rest: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}, **rest}


_TWO = [("get_weather", {"at": 1}), ("get_time", {"at": 2})]
_ONE = [("get_weather", {"at": 1})]
CASES = {
    "one index, two ids": (
        [_piece("get_weather", '{"at":1}', index=0, id="a"),
         _piece("get_time", '{"at":2}', index=0, id="b")], _TWO),
    "one index, one id, two names": (
        [_piece("get_weather", '{"at":1}', index=0, id="a"),
         _piece("get_time", '{"at":2}', index=0, id="a")], _TWO),
    "neither index nor id": (
        [_piece("get_weather", '{"at":1}'), _piece("get_time", '{"at":2}')], _TWO),
    "one tool twice": (
        [_piece("f", '{"at":1}', index=0), _piece("f", '{"at":2}', index=0)],
        [("f", {"at": 1}), ("f", {"at": 2})]),
    "a name in each piece": (
        [_piece("get_weather", part, index=0, id="a") for part in ('{"at"', ":1", "}")], _ONE),
    "a name in pieces": (
        [_piece("get_", "", index=0, id="a"), _piece("weather", "", index=0),
         _piece(None, '{"at":1}', index=0)], _ONE),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_new_id_or_name_begins_a_call(case: str, tmp_path: Path) -> None:
    """However a server numbers the pieces, the calls are those that it made."""
    pieces, calls = CASES[case]

    assert _ask(pieces, tmp_path / "s.duckdb") == calls


def test_an_unknown_item_keeps_its_own_role(tmp_path: Path) -> None:
    """What the program sent is not the model's, and is kept whole under the name of its kind."""
    items: Any = [
        {"type": "additional_tools", "role": "developer", "tools": [{"type": "namespace"}]},
        {"type": "mcp_approval_response", "approval_request_id": "a", "approve": True},
        {"type": "local_shell_call_output", "id": "sh", "output": "ok"},
        {"type": "web_search_call", "id": "w", "status": "completed"},
        {"role": "user", "content": "go on"},
    ]
    answer = {
        "id": "resp_1", "object": "response", "created_at": 1, "model": "m", "status": "completed",
        "output": [{"type": "message", "id": "m1", "role": "assistant", "status": "completed",
                    "content": [{"type": "output_text", "text": "done", "annotations": []}]}],
    }  # fmt: skip
    client = answering(json.dumps(answer).encode())
    with auto_trace(store=tmp_path / "s.duckdb"):
        client.responses.create(model="m", input=items)

    [step] = Store(tmp_path / "s.duckdb").transitions()
    roles = [message["role"] for message in step.observation]
    parts = [message["parts"][0] for message in step.observation]
    assert roles == ["developer", "user", "tool", "assistant", "user"]
    assert parts[0]["tools"] == [{"type": "namespace"}]
    assert parts[1]["approve"] is True
    assert parts[2] == {"type": "tool_call_response", "id": "sh", "response": "ok"}


def test_a_stored_prompt_is_what_the_model_was_told(tmp_path: Path) -> None:
    """The request names it, the answer has it rendered; an answer may wait for the program."""
    prompt = {"id": "pmpt_1", "version": "3", "variables": {"name": "Ada"}}
    text = [{"type": "input_text", "text": "Say hello to Ada"}]
    shell = {"type": "local_shell_call", "id": "sh", "call_id": "sh", "status": "completed",
             "action": {"type": "exec", "command": ["ls"]}}  # fmt: skip
    answer = {
        "id": "resp_1", "object": "response", "created_at": 1, "model": "m", "status": "completed",
        "prompt": prompt, "output": [shell],
        "instructions": [{"type": "message", "role": "user", "content": text}],
    }  # fmt: skip
    client = answering(json.dumps(answer).encode())
    store = Store(tmp_path / "s.duckdb")
    with auto_trace(store=store):
        client.responses.create(model="m", prompt=prompt, input="Politely")  # type: ignore[call-overload]

    [step] = store.transitions()
    assert [(m["role"], m["parts"][0]["content"]) for m in step.observation] == [
        ("user", "Say hello to Ada"),
        ("user", "Politely"),
    ]
    assert step.finish_reason == "tool_calls"
    [call] = [span for span in store.spans() if span.attributes.get("gen_ai.response.id")]
    told = {
        key.rpartition(".")[2]: value for key, value in call.attributes.items() if ".prompt." in key
    }
    assert (told["id"], told["version"]) == ("pmpt_1", "3")
    assert json.loads(told["variables"]) == {"name": "Ada"}
