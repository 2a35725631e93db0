"""Messages under the spellings of other libraries, as their traces hold them, through an import."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.command import invoke

TEXTS = ("Weather in Oslo?", "It rains.")
_CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"at":1}'}}
_OFFER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
_LANGCHAIN = ["langchain", "schema", "messages"]


def _construct(kind: str, **fields: Any) -> dict[str, Any]:
    return {"lc": 1, "type": "constructor", "id": [*_LANGCHAIN, kind], "kwargs": fields}


# By spelling: the question, the model's call of a tool, the tool's answer; and what was offered.
SPELLINGS: dict[str, tuple[list[Any], Any]] = {
    "conventions": (
        [{"role": "user", "parts": [{"type": "text", "content": TEXTS[0]}]},
         {"role": "assistant", "parts": [
             {"type": "tool_call", "id": "c1", "name": "weather", "arguments": {"at": 1}}]},
         {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c1", "result": "rain"}]}],
        [{"type": "function", "name": "weather", "parameters": {"type": "object"}}],
    ),
    "chat with nulls": (
        [{"role": "user", "content": TEXTS[0], "tool_calls": None, "tool_call_id": None},
         {"role": "assistant", "content": None, "tool_calls": [_CALL], "tool_call_id": None},
         {"role": "tool", "content": "rain", "tool_call_id": "c1", "tool_calls": None}],
        [_OFFER],
    ),
    "anthropic": (
        [{"role": "user", "content": [
            {"type": "text", "text": TEXTS[0], "cache_control": {"type": "ephemeral"}}]},
         {"role": "assistant", "content": [
             {"type": "tool_use", "id": "c1", "name": "weather", "input": {"at": 1}}]},
         {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1",
                                       "content": [{"type": "text", "text": "rain"}]}]}],
        [{"name": "weather", "input_schema": {"type": "object"}}],
    ),
    "vercel": (
        [{"role": "user", "content": [{"type": "text", "text": TEXTS[0]}]},
         {"role": "assistant", "content": [{"type": "tool-call", "toolCallId": "c1",
                                            "toolName": "weather", "input": {"at": 1}}]},
         {"role": "tool", "content": [{"type": "tool-result", "toolCallId": "c1", "toolName": "w",
                                       "output": {"type": "text", "value": "rain"}}]}],
        [{"type": "function", "name": "weather", "inputSchema": {"type": "object"}}],
    ),
    "bedrock": (
        [{"role": "user", "content": [{"text": TEXTS[0]}]},
         {"role": "assistant", "content": [
             {"toolUse": {"toolUseId": "c1", "name": "weather", "input": {"at": 1}}}]},
         {"role": "user", "content": [
             {"toolResult": {"toolUseId": "c1", "content": [{"text": "rain"}]}}]}],
        [_OFFER],
    ),
    "google": (
        [{"role": "user", "parts": [{"text": TEXTS[0]}]},
         {"role": "model", "parts": [
             {"functionCall": {"id": "c1", "name": "weather", "args": {"at": 1}}}]},
         {"role": "user", "parts": [
             {"functionResponse": {"id": "c1", "name": "weather", "response": "rain"}}]}],
        [{"function_declarations": [
            {"name": "weather", "parameters_json_schema": {"type": "object"}}]}],
    ),
    "langchain": (
        [_construct("HumanMessage", content=TEXTS[0], type="human"),
         _construct("AIMessage", type="ai", content=[
             {"type": "tool_use", "id": "c1", "name": "weather", "input": {"at": 1}}],
             tool_calls=[{"id": "c1", "name": "weather", "args": {"at": 1}}]),
         _construct("ToolMessage", content="rain", tool_call_id="c1", type="tool")],
        [_OFFER],
    ),
    "langchain's callback": (
        [{"role": "user", "content": TEXTS[0]},
         {"role": "assistant", "content": "", "additional_kwargs": {"tool_calls": [_CALL]}},
         {"role": "tool", "content": "rain", "tool_call_id": "c1"},
         {"role": "tool", "content": _OFFER}],
        None,
    ),
    "a role that is the tool's name": (
        [{"role": "user", "content": TEXTS[0]},
         {"role": "assistant", "content": "", "tool_calls": [_CALL]},
         {"role": "weather", "content": "rain", "additional_kwargs": {}}],
        [_OFFER],
    ),
}  # fmt: skip


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_calls_results_and_tools_are_found_again(spelling: str, tmp_path: Path) -> None:
    """Whoever wrote them, the row says who asked, which tool was called and what it said."""
    given, offer = SPELLINGS[spelling]
    record = {
        "id": "o1", "traceId": "t1", "type": "GENERATION", "name": "m", "model": "m",
        "startTime": "2026-11-01T12:00:01Z", "endTime": "2026-11-01T12:00:02Z",
        "input": given if offer is None else {"messages": given, "tools": offer},
        "output": {"role": "assistant", "content": TEXTS[1]},
    }  # fmt: skip
    file, store = tmp_path / "traces.jsonl", str(tmp_path / "s.duckdb")
    file.write_text(json.dumps(record))
    assert invoke("import", str(file), "--store", store).returncode == 0

    row = json.loads(invoke("export", "openai-sft", "--store", store).stdout)

    user, call, result, answer = row["messages"]
    assert user == {"role": "user", "content": TEXTS[0]}
    function = call["tool_calls"][0]["function"]
    assert (function["name"], json.loads(function["arguments"])) == ("weather", {"at": 1})
    assert result == {"role": "tool", "tool_call_id": "c1", "content": "rain"}
    assert answer["content"] == TEXTS[1]
    assert [tool["function"]["parameters"] for tool in row["tools"]] == [{"type": "object"}]
