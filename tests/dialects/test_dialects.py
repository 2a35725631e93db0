"""The readers of wires: transcripts of harnesses, drawn conversations, and what finds a reader."""

import copy
import json
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.instrumentors.http.drawn import VENDORS

from lightning_otel.dialects import Dialect, find_dialect, register_dialect
from lightning_otel.types import Prompt
from lightning_otel.types import conventions as c

WIRE = Path(__file__).with_name("wire")
PATHS = {
    "anthropic": "/v1/messages",
    "gemini": "/v1beta/models/gemini-x:streamGenerateContent",
    "responses": "/v1/responses",
}


def dialect_of(name: str) -> Dialect:
    dialect = find_dialect("POST", PATHS[name.partition("_")[0]])
    assert dialect is not None
    return dialect


def answer_of(dialect: Dialect, body: Mapping[str, Any]) -> list[Any]:
    """The answer's messages."""
    return json.loads(dialect.response_content(body)[c.OUTPUT_MESSAGES])


@pytest.mark.parametrize(
    ("path", "provider"),
    [
        ("/chat/completions", "openai"),
        (
            "https://x.azure.com/openai/deployments/d/chat/completions?api-version=1",
            "openai",
        ),
        ("/v1/completions", "openai"),
        ("/api/v1/responses", "openai"),
        ("/v1/messages", "anthropic"),
        ("/anthropic/v1/messages?beta=true", "anthropic"),
        ("/v1beta/models/g:generateContent", "gcp.gemini"),
        ("/v1beta/models/g:streamGenerateContent?alt=sse", "gcp.gemini"),
        ("/v1/projects/p/locations/l/publishers/google/models/g:generateContent", "gcp.vertex_ai"),
        ("/v1/messages/count_tokens", None),
        ("/v1/threads/t/messages", None),
        ("/v1beta/models/g:countTokens", None),
        ("/v1/models", None),
    ],
)
def test_path_finds_its_dialect(path: str, provider: str | None) -> None:
    """Behind any prefix; what counts tokens or lists messages asks no model."""
    dialect = find_dialect("post", path)
    assert (dialect and dialect.provider) == provider
    assert find_dialect("GET", path) is None


CALL = {"type": "tool_call", "id": None, "name": "run_shell_command"}
EXACT = {
    "anthropic_parallel_tools": [
        {"type": "reasoning", "content": "Both files are needed.", "signature": "c2lnLTE="},
        {"type": "text", "content": "I read zwei Dateien – é."},
        {"type": "tool_call", "id": "toolu_1", "name": "Read", "arguments": {"path": "a.txt"}},
        {
            "type": "tool_call", "id": "toolu_2", "name": "Read",
            "arguments": {"path": "b.txt", "lines": [1, 2]},
        },
    ],
    "anthropic_empty_input": [
        {"type": "tool_call", "id": "toolu_9", "name": "ListAgents", "arguments": {}}
    ],
    "anthropic_cut": [
        {
            "type": "tool_call", "id": "toolu_7", "name": "Write",
            "arguments": '{"path": "c.txt", "text": "un',
        }
    ],
    "anthropic_error_midstream": [{"type": "text", "content": "Half an ans"}],
    "anthropic_late_usage": [{"type": "text", "content": "ok"}],
    "gemini_call_without_id": [
        {"type": "reasoning", "content": "I look first."},
        {**CALL, "arguments": {"command": "ls"}, "thought_signature": "c2ln"},
    ],
    "responses_codex": [
        {"type": "reasoning", "content": "I look first.", "encrypted_content": "Z0FBQQ=="},
        {
            "type": "tool_call", "id": "call_1", "name": "exec",
            "arguments": "text(await tools.exec_command({cmd: 'ls'}))",
            "namespace": "functions",
        },
    ],
}  # fmt: skip
SAID: dict[str, tuple[Any, ...]] = {
    # whether it ended, finish reason, tokens in, out, cached; error
    "anthropic_parallel_tools": (True, "tool_calls", 543, 61, 500, None),
    "anthropic_empty_input": (True, "tool_calls", 543, 9, 500, None),
    "anthropic_cut": (False, None, 543, 1, 500, None),
    "anthropic_error_midstream": (False, None, 543, 1, 500, ("overloaded_error", "Overloaded")),
    "anthropic_late_usage": (True, "stop", 20, 2, 8, None),
    "anthropic_server_tools": (True, "stop", 543, 30, 500, None),
    "gemini_call_without_id": (True, "tool_calls", 20, 10, 16, None),
    "responses_codex": (True, "tool_calls", 9, 3, 4, None),
}


@pytest.mark.parametrize("name", SAID)
def test_transcript_is_read_whole(name: str) -> None:
    """Parts, counts, reason and error of a stream; its end is known at its last byte alone."""
    data, dialect = (WIRE / f"{name}.sse").read_bytes(), dialect_of(name)
    answer = dialect.read_body(data)
    get = dialect.response_attributes(answer.body).get
    keys = (c.INPUT_TOKENS, c.OUTPUT_TOKENS, c.CACHED_TOKENS)
    reason = (get(c.FINISH_REASONS) or [None])[0]
    numbers = tuple(map(get, keys))
    assert (answer.is_complete, reason, *numbers, dialect.error_of(answer.body)) == SAID[name]
    (message,) = answer_of(dialect, answer.body)
    assert message["role"] == "assistant"
    assert message["parts"] == EXACT.get(name, message["parts"])
    ends = [size for size in range(len(data) + 1) if dialect.is_ended(data[:size])]
    assert bool(ends) == (answer.is_complete and bool(dialect.end_marks))
    assert all(not data[size:].strip() for size in ends)


def test_server_tools_keep_their_blocks() -> None:
    """What the conventions have no word for stays whole, named after its kind."""
    dialect = dialect_of("anthropic")
    body = dialect.read_body((WIRE / "anthropic_server_tools.sse").read_bytes()).body
    (message,) = answer_of(dialect, body)
    thought, call, result, text = message["parts"]
    assert thought == {"type": "anthropic.redacted_thinking", "data": "cmVkYWN0ZWQ="}
    assert call["type"] == "anthropic.server_tool_use"
    assert json.loads(call["input"]) == {"query": "tea"}
    assert result["type"] == "anthropic.web_search_tool_result"
    assert result["content"][0]["title"] == "Tea"
    assert text["content"] == "Tea is old."
    assert text["citations"][0]["cited_text"] == "old"


@pytest.mark.parametrize("name", ["anthropic_claude_code", "gemini", "responses_codex"])
def test_history_of_a_harness_goes_on(name: str) -> None:
    """The second request begins with the messages, instructions and tools of the first one."""
    dialect = dialect_of(name)
    requests = json.loads((WIRE / f"{name}_requests.json").read_text())
    first, second = (dialect.request_content(body) for body in requests)
    asked, history = (json.loads(each[c.INPUT_MESSAGES]) for each in (first, second))
    assert history[: len(asked)] == asked
    results = [part for message in history for part in message["parts"]]
    assert any(part["type"] == "tool_call_response" for part in results)
    for key in (c.SYSTEM_INSTRUCTIONS, c.TOOL_DEFINITIONS):
        assert first.get(key) == second.get(key)
    tools = json.loads(first[c.TOOL_DEFINITIONS])
    assert all(tool["name"] and tool.get("parameters", tool.get("format")) for tool in tools)
    assert "cache_control" not in json.dumps(second)


# --- drawn conversations: what the server sent is what the messages say ---------------------------
SIGNED = {"text": "é", "thought": True, "thoughtSignature": "-_"}
ODD: dict[str, tuple[list[Any], list[Any]]] = {
    "anthropic": ([{"type": "new", "held": None}], [{"type": "anthropic.new", "held": None}]),
    "gemini": (
        # Bytes, which Google's client writes in another alphabet than its server.
        [{"newThing": {"a": 1}}, SIGNED],
        [
            {"type": "gemini.new_thing", "new_thing": {"a": 1}},
            {"type": "reasoning", "content": "é", "thought_signature": "+/"},
        ],
    ),
}
"""Parts that no client of today sends, or that one writes in its own way."""


@pytest.mark.parametrize("name", VENDORS)
@settings(max_examples=250, deadline=None)
@given(draw=st.randoms(use_true_random=False), share=st.floats(0, 1))
def test_drawn_conversation_is_read_as_it_was_said(
    name: str, draw: random.Random, share: float
) -> None:
    """Requests, whole answers and streams, in pieces of any size and cut anywhere."""
    dialect, vendor, (wire, meaning) = dialect_of(name), VENDORS[name], ODD[name]
    sent, messages, answer, parts = vendor.draw(draw, 1)
    key, field = ("messages", "content") if name == "anthropic" else ("contents", "parts")
    request = dialect.request_content({key: [*sent, {"role": "user", field: wire}]})
    expected = [*messages, {"role": "user", "parts": meaning}]
    assert json.loads(request[c.INPUT_MESSAGES]) == expected

    stream = vendor.stream(answer, draw)
    whole = json.dumps(vendor.whole(answer)).encode()
    for data in (whole, stream, stream.replace(b"\n", b"\r\n")):
        assert answer_of(dialect, dialect.read_body(data).body)[0]["parts"] == parts
    assert dialect.read_body(stream).is_complete
    events = stream.split(b"\n\n")[:-1]
    start = b"".join(b"%s\n\n" % event for event in events[: int(share * (len(events) - 1))])
    partial = dialect.read_body(start)
    assert not partial.is_complete
    pieces = [part for message in answer_of(dialect, partial.body) for part in message["parts"]]
    assert len(pieces) <= len(parts)
    for piece, part in list(zip(pieces, parts, strict=False))[:-1]:
        assert piece == part


PROMPT = Prompt(
    "{system_prompt} Task: {task}",
    examples=({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}),
)
BETTER = "Own. Task: t"
SAMPLING = {"temperature": 0.5, "max_tokens": 7, "stop": "x", "logit_bias": {}}
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "anthropic": (
        {
            "messages": [{"role": "user", "content": "q"}],
            "system": [{"type": "text", "text": "Own.", "cache_control": {"type": "ephemeral"}}],
        },
        {
            "messages": [*PROMPT.examples, {"role": "user", "content": "q"}],
            "system": [{"type": "text", "text": BETTER, "cache_control": {"type": "ephemeral"}}],
        },
        {"temperature": 0.5, "max_tokens": 7, "stop_sequences": ["x"]},
    ),
    "gemini": (
        {
            "contents": [{"role": "user", "parts": [{"text": "q"}]}],
            "systemInstruction": {"parts": [{"text": "Own."}]},
            "generationConfig": {"maxOutputTokens": 3, "topK": 2},
        },
        {
            "contents": [
                {"role": "user", "parts": [{"text": "a"}]},
                {"role": "model", "parts": [{"text": "b"}]},
                {"role": "user", "parts": [{"text": "q"}]},
            ],
            "systemInstruction": {"parts": [{"text": BETTER}]},
        },
        {
            "generationConfig": {
                "topK": 2, "temperature": 0.5, "max_output_tokens": 7, "stop_sequences": ["x"],
            }
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_request_takes_prompt_and_sampling(name: str) -> None:
    """In the API's own words; the agent's request stays as it is, and no ids are asked for."""
    dialect, (body, instructed, sampled) = dialect_of(name), CHANGES[name]
    before = copy.deepcopy(body)
    assert dialect.instruct(body, PROMPT, "t") == instructed
    assert dialect.sample(body, {"sampling": SAMPLING}) == sampled
    assert dialect.wanted_ids(body) == {}
    assert body == before


class Speech(Dialect):
    """A dialect of a user's own."""

    provider = "speech"

    def response_content(self, body: Mapping[str, Any]) -> dict[str, str]:
        """Return the words that were said."""
        part = {"type": "text", "content": body["words"]}
        return {c.OUTPUT_MESSAGES: json.dumps([{"role": "assistant", "parts": [part]}])}


def test_own_dialect_goes_first() -> None:
    """A registered reader is found behind any prefix."""
    speech = Speech()
    assert find_dialect("POST", "/gateway/v9/speak") is None
    register_dialect(r"/v\d/speak", speech)
    assert find_dialect("POST", "https://host/gateway/v9/speak?x=1") is speech
    assert answer_of(speech, {"words": "hello"})[0]["parts"][0]["content"] == "hello"


@pytest.mark.parametrize(
    ("name", "body", "error"),
    [
        ("anthropic", {"error": {"type": "not_found_error", "message": "m"}}, "not_found_error"),
        ("gemini", {"error": {"code": 429, "status": "RESOURCE_EXHAUSTED"}}, "RESOURCE_EXHAUSTED"),
        ("responses", {"error": {"code": "bad", "message": "m"}}, "bad"),
    ],
)
def test_error_bodies_name_their_kind(name: str, body: dict[str, Any], error: str) -> None:
    """An answer that is an error has its kind and no message."""
    dialect = dialect_of(name)
    found = dialect.error_of(dialect.read_body(json.dumps(body).encode()).body)
    assert found is not None
    assert found[0] == error
    assert answer_of(dialect, body) == []


def test_gemini_stream_may_be_a_list() -> None:
    """Without server-sent events a stream is one JSON list."""
    data = (WIRE / "gemini_call_without_id.sse").read_bytes()
    events = re.findall(rb"^data: (.*)$", data, re.MULTILINE)
    dialect = dialect_of("gemini")
    assert dialect.read_body(b"[%s]" % b",".join(events)) == dialect.read_body(data)
    path = "/v1beta/models/gemini-x:streamGenerateContent?alt=sse"
    assert dialect.model_of({}, path) == "gemini-x"
    assert dialect.is_stream({}, path)
