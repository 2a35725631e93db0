"""Chat files, logs of requests, Jaeger's traces and OTLP's logs: through the command line."""

import copy
import json
import math
from collections.abc import Iterator
from contextlib import suppress
from functools import reduce
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.command import invoke
from tests.receivers.test_platforms import WRONG

from lightning_otel import Store
from lightning_otel.errors import ReceiveError
from lightning_otel.messages import plain_text
from lightning_otel.receivers import Rejected, documents
from lightning_otel.types import Span

_TOOL = {"type": "function", "function": {"name": "weather", "parameters": {}}}
_MADE = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
_ASKED = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
_CALL = {"role": "assistant", "content": None, "tool_calls": [_MADE]}
_ANSWER = {"role": "assistant", "content": "a"}
_TALK = [*_ASKED, _CALL, {"role": "tool", "tool_call_id": "c1", "content": "rain"}, _ANSWER]
_CHOICE = {"index": 0, "finish_reason": "stop", "message": _ANSWER}
_CHUNKS = (
    {"id": "x", "choices": [{"index": 0, "delta": {"role": "assistant", "content": "a"}}]},
    {"id": "x", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
)
_TRACE, _SPAN = "a" * 32, "b" * 16
_NS = 1_761_955_200_000_000_000


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        return {"kvlistValue": {"values": _pairs(value)}}
    if isinstance(value, list):
        return {"arrayValue": {"values": [_value(each) for each in value]}}
    kinds = {str: "stringValue", int: "intValue", float: "doubleValue"}
    return {kinds[type(value)]: value}


def _pairs(attributes: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in attributes.items()]


def _request(kind: str, /, **record: Any) -> dict[str, Any]:
    """A request of one span or log record of a call."""
    held = {"traceId": _TRACE, "spanId": _SPAN, **record}
    names = {"Spans": "spans", "Logs": "logRecords"}
    scoped = {"scope": {"name": "opentelemetry.util.genai"}, names[kind]: [held]}
    return {f"resource{kind}": [{"resource": {"attributes": []}, f"scope{kind}": [scoped]}]}


def _log(name: str, attributes: dict[str, Any], at_ns: int = 9, **more: Any) -> dict[str, Any]:
    record = {"eventName": name, "attributes": _pairs(attributes), **more}
    return _request("Logs", timeUnixNano=str(_NS + at_ns), **record)


def _parts(role: str, text: str) -> list[dict[str, Any]]:
    return [{"role": role, "parts": [{"type": "text", "content": text}]}]


def _tags(attributes: dict[str, Any]) -> list[dict[str, Any]]:
    kinds = {str: "string", int: "int64"}
    return [{"key": k, "type": kinds[type(v)], "value": v} for k, v in attributes.items()]


_BARE = {
    "gen_ai.operation.name": "chat", "gen_ai.request.model": "m", "gen_ai.usage.input_tokens": 5,
    "gen_ai.usage.output_tokens": 6,
}  # fmt: skip
_CALLED = _request(
    "Spans", name="chat m", kind=3, startTimeUnixNano=str(_NS), endTimeUnixNano=str(_NS + 10),
    attributes=_pairs({**_BARE, "gen_ai.response.id": "r1"}),
)  # fmt: skip
_SAID = {
    "gen_ai.input.messages": _parts("user", "q"),
    "gen_ai.output.messages": _parts("assistant", "a"),
}
_DETAILS = "gen_ai.client.inference.operation.details"
_JAEGER = {
    "traceID": "abc", "spanID": "2f", "operationName": "chat m", "startTime": _NS // 1000,
    "references": [{"refType": "CHILD_OF", "traceID": "abc", "spanID": "1f"}], "duration": 10,
    "tags": _tags({**_BARE, **{key: json.dumps(each) for key, each in _SAID.items()}}),
    "processID": "p1", "logs": [{"timestamp": _NS // 1000, "fields": _tags({"event": "e"})}],
}  # fmt: skip


class Case(NamedTuple):
    """Documents, and of each step what was asked last, the answer, the tokens and the reward."""

    documents: list[Any]
    steps: list[tuple[Any, ...]]


_NO_COUNT = (None, None)
CASES = {
    "a row for fine-tuning": Case(
        [{"messages": _TALK, "tools": [_TOOL], "reward": 0.5}],
        [("q", "weather({})", *_NO_COUNT, None), ("rain", "a", *_NO_COUNT, 0.5)],
    ),
    "an answer of weight 0": Case(
        [{"messages": [_ASKED[1], {**_ANSWER, "weight": 0}, _ASKED[1], _ANSWER]}],
        [("q", "a", *_NO_COUNT, None)],
    ),
    "prompt and completion": Case(
        [{"prompt": _ASKED, "completion": [_ANSWER]}], [("q", "a", *_NO_COUNT, None)]
    ),
    "a request of chat completions": Case(
        [{"timestamp": "2026-11-01T12:00:00Z", "request": {"model": "m", "messages": _ASKED},
          "response": {"id": "x", "choices": [_CHOICE],
                       "usage": {"prompt_tokens": 5, "completion_tokens": 6}}}],
        [("q", "a", 5, 6, None)],
    ),
    "a stream": Case(
        [{"request": json.dumps({"model": "m", "messages": _ASKED}),
          "response": "".join(f"data: {json.dumps(each)}\n\n" for each in _CHUNKS)}],
        [("q", "a", *_NO_COUNT, None)],
    ),
    "Anthropic's, with status and address": Case(
        [{"request": {"url": "https://x/v1/messages", "body": {"messages": [_ASKED[1]]}},
          "response": {"status_code": 200, "body": {
              "id": "m1", "type": "message", "role": "assistant", "stop_reason": "end_turn",
              "content": [{"type": "text", "text": "a"}],
              "usage": {"input_tokens": 5, "output_tokens": 6}}}}],
        [("q", "a", 5, 6, None)],
    ),
    "Gemini's": Case(
        [{"request": {"contents": [{"parts": [{"text": "q"}]}]},
          "response": {"candidates": [{"content": {"parts": [{"text": "a"}], "role": "model"}}],
                       "usageMetadata": {"promptTokenCount": 5, "candidatesTokenCount": 6}}}],
        [("q", "a", 5, 6, None)],
    ),
    "responses": Case(
        [{"request": {"model": "m", "input": "q"},
          "response": {"id": "r", "object": "response", "output": [
              {"type": "message", "role": "assistant",
               "content": [{"type": "output_text", "text": "a"}]}]}}],
        [("q", "a", *_NO_COUNT, None)],
    ),
    "LiteLLM's log": Case(
        [{"id": "l", "messages": _ASKED, "model": "m", "startTime": 1761955200.5,
          "response": {"id": "l", "choices": [_CHOICE]}}],
        [("q", "a", *_NO_COUNT, None)],
    ),
    "Jaeger's trace": Case(
        [{"data": [{"traceID": "abc", "spans": [_JAEGER],
                    "processes": {"p1": {"serviceName": "svc", "tags": []}}}], "errors": None}],
        [("q", "a", 5, 6, None)],
    ),
    "a log with what was said": Case(
        [_CALLED, _log(_DETAILS, {**_BARE, **_SAID, "gen_ai.response.id": "r1"})],
        [("q", "a", 5, 6, None)],
    ),
    "a log before its span, without an id": Case(
        [_log(_DETAILS, {**_BARE, **_SAID}), _CALLED], [("q", "a", 5, 6, None)]
    ),
    "logs of single messages, and of a score": Case(
        [_CALLED,
         _log("gen_ai.evaluation.result", {"gen_ai.evaluation.name": "n",
                                           "gen_ai.evaluation.score.value": 0.5}),
         {"resourceLogs": [
             *_log("gen_ai.user.message", {}, 1, body=_value({"content": "q"}))["resourceLogs"],
             *_log("gen_ai.choice", {"gen_ai.system": "openai"}, 8, body=_value(
                 {"finish_reason": "stop", "message": {"role": "assistant", "content": "a"}},
             ))["resourceLogs"]]}],
        [("q", "a", 5, 6, 0.5)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_each_file_becomes_steps(name: str, tmp_path: Path) -> None:
    """One call a request, with its tokens, whoever told of it; read again, nothing is new."""
    file, store = tmp_path / "in.jsonl", Store(tmp_path / "s.duckdb")
    file.write_text("\n".join(map(json.dumps, copy.deepcopy(CASES[name].documents))))

    first = invoke("import", str(file), "--store", store.name)
    again = invoke("import", str(file), "--store", store.name)

    assert (first.returncode, again.returncode) == (0, 0), first.stderr
    assert " 0 new" in again.stderr
    steps = [
        (plain_text(step.observation[-1:]), plain_text(step.action), step.input_tokens,
         step.output_tokens, step.reward)
        for step in store.transitions()
    ]  # fmt: skip
    assert steps == CASES[name].steps
    assert list(store.sql("SELECT count(*) AS n FROM calls").dicts()) == [{"n": len(steps)}]


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        ({"messages": _ASKED}, "the conversation has no answer of the assistant"),
        (_log("app.started", {}), "the log record tells of no model call"),
        (_log(_DETAILS, _SAID, spanId=""), "the log record belongs to no span"),
        ({**_JAEGER, "startTime": "soon"}, "start time is no 64-bit integer"),
    ],
)
def test_a_record_that_is_not_taken_is_named(document: Any, reason: str, tmp_path: Path) -> None:
    """With its line and the exit code."""
    file = tmp_path / "in.jsonl"
    file.write_text(json.dumps(document))

    done = invoke("import", str(file), "--store", str(tmp_path / "s.duckdb"))

    assert done.returncode == 1
    assert f"line 1: {reason}" in done.stderr


@pytest.mark.parametrize("name", CASES)
def test_a_field_of_any_type_breaks_nothing(name: str) -> None:
    """Each field in turn of each other type, at any depth: spans, or a reason."""
    for document in CASES[name].documents:
        for place, value in product(_places(document), [*WRONG, 10**30, math.nan]):
            odd = copy.deepcopy(document)
            *above, last = place
            reduce(lambda held, key: held[key], above, odd)[last] = value
            with suppress(ReceiveError):
                records = documents.decode_spans(json.dumps(odd).encode())
                assert all(isinstance(each, Span | Rejected) for each in records)


def _places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    keys = (
        value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    )
    for key in keys:
        yield (*above, key)
        yield from _places(value[key], (*above, key))
