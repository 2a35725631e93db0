"""Traces of many frameworks in Langfuse: every message, tool call and result is found again."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.adapter.forest import text_of
from tests.command import invoke
from tests.receivers.frameworks import ARGUMENTS, ASKED, FORMS, RESULT, SAID, SYSTEM, observe

from lightning_otel import Store
from lightning_otel.types import Transition

Steps = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Steps:
    """The steps of each framework's trace as chat messages; the command line read one file."""
    folder = tmp_path_factory.mktemp("frameworks")
    file, store = folder / "page.json", Store(folder / "s.duckdb")
    traces = {f"{number:032x}": name for number, name in enumerate(FORMS, 1)}
    records = [each for trace, name in traces.items() for each in observe(trace, FORMS[name])]
    file.write_text(json.dumps({"data": records, "meta": {"page": 1}}))
    done = invoke("import", str(file), "--store", store.name)
    assert done.returncode == 0, done.stderr
    found: Steps = {}
    for row in store.rows("prompt-completion"):
        found.setdefault(traces[row["rollout_id"]], []).append(dict(row))
    return found


def _parse(arguments: Any) -> Any:
    return json.loads(arguments) if isinstance(arguments, str) else arguments


def _shorten(message: dict[str, Any]) -> tuple[Any, ...]:
    """Role, text, and the tools called with their arguments."""
    content = message.get("content") or ""
    if content == json.dumps({"result": RESULT}):  # Google's results are objects
        content = RESULT
    calls = [
        (call["function"]["name"], _parse(call["function"]["arguments"]))
        for call in message.get("tool_calls", ())
    ]
    return message["role"], content, *calls


@pytest.mark.parametrize("name", FORMS)
def test_a_trace_is_read_message_by_message(name: str, steps: Steps) -> None:
    """Question, call with arguments, result and answer; the tools, and which result is whose."""
    lacks = FORMS[name].lacks
    begin = [("system", SYSTEM), ("user", ASKED)]["system" in lacks :]
    call = ("assistant", "", ("weather", ARGUMENTS))
    result = ("user" if "tool" in lacks else "tool", RESULT)

    first, second = steps[name]

    said = [[*row["prompt"], *row["completion"]] for row in (first, second)]
    assert [_shorten(each) for each in said[0]] == [*begin, call]
    assert [_shorten(each) for each in said[1]] == [*begin, call, result, ("assistant", SAID)]
    asked = [each["id"] for message in said[1] for each in message.get("tool_calls", ())]
    told = [message["tool_call_id"] for message in said[1] if message["role"] == "tool"]
    assert told == ([] if "tool" in lacks else asked)
    for step in () if "tools" in lacks else (first, second):
        (tool,) = step["tools"]
        assert tool["function"]["name"] == "weather"
        assert list(tool["function"]["parameters"]["properties"]) == ["city"]


def _construct_ai(**fields: Any) -> dict[str, Any]:
    held = {"content": "", "type": "ai", "additional_kwargs": {}, **fields}
    names = ["langchain", "schema", "messages", "AIMessage"]
    message = {"lc": 1, "type": "constructor", "id": names, "kwargs": held}
    return {"generations": [[{"text": "", "type": "ChatGeneration", "message": message}]]}


_CALL = {
    "role": "assistant", "content": "",
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "w", "arguments": "{}"}}],
}  # fmt: skip
PLAIN: list[Any] = [
    {"message": "hi", "score": 3},
    {"items": [{"name": "a"}], "input": "x"},
    {"output": {"x": 1}, "y": 2},
    {"name": "Bob", "arguments": "none"},
    [{"name": "Bob", "age": 3}, {"name": "Al", "age": 4}],
    {"content": "text", "title": "t"},
    {"name": "Bob", "role": "engineer"},
    {"action": "search", "content": "x", "role": "user"},
    {"text": "x", "label": "spam"},
    [{"type": "bug", "text": "boom"}, {"type": "feature", "text": "y"}],
    {"contents": "hi", "title": "t"},
    {"message": {"text": "hi"}, "score": 3},
    {"response": "hello"},
    {"image": "cat.png", "caption": "c"},
    {"choices": [{"text": "yes", "p": 0.5}]},
    {"messages": [{"role": "user", "content": "made"}, {"role": "assistant", "content": "up"}]},
    {"messages": ["a", "b"]},
    [{"id": 1, "type": "phone_call"}],
    [],
    {},
]
TEXTS = [
    "null", "3.50", "1e3", "7.50", '"quoted"', '{"a":1,"a":2}', '{"name":"Bob","role":"x"}',
    '{"a": 1,   "b": [1,2]}', "12345678901234567890123",
]  # fmt: skip
"""What a model may write, each of which is JSON."""
ROWS = '[{"text": "a", "label": 1}]'
_RUN = {"id": "c1", "name": "w", "args": {"q": "a"}, "type": "tool_call"}
_BROKEN = {"id": "c2", "name": "w", "args": '{"q": ', "error": "cut", "type": "invalid_tool_call"}
_BLOCK = {"type": "tool_use", "id": "c1", "name": "w", "input": {}}
_ITEM = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "w", "arguments": "{}"}
_VERCEL_CALL = {"toolCallId": "c1", "toolName": "w", "input": {"q": "a"}}
CALLS: dict[str, tuple[Any, list[Any]]] = {
    "streamed by Anthropic": (
        {"role": "assistant", "content": [{**_BLOCK, "partial_json": '{"q": "a"}'}]},
        ["c1", {"q": "a"}],
    ),
    "streamed, and whole beside": (
        {"role": "assistant", "content": [_BLOCK], "tool_calls": [_RUN]}, ["c1", {"q": "a"}],
    ),
    "an item with two ids": (
        {"role": "assistant", "content": [_ITEM], "tool_calls": [_RUN]}, ["c1", {"q": "a"}],
    ),
    "the Vercel AI SDK's result": (
        {"text": "Look.", "toolCalls": [_VERCEL_CALL], "finishReason": "tool-calls"},
        ["Look.", "c1", {"q": "a"}],
    ),
    "the same without text": ({"text": "", "toolCalls": [_VERCEL_CALL]}, ["c1", {"q": "a"}]),
    "a call that is no JSON": (
        _construct_ai(tool_calls=[_RUN], invalid_tool_calls=[_BROKEN]),
        ["c1", {"q": "a"}, "c2", '{"q": '],
    ),
    "such a call alone": (
        _construct_ai(tool_calls=[], invalid_tool_calls=[_BROKEN]), ["c2", '{"q": '],
    ),
}  # fmt: skip
HELD: list[tuple[Any, Any, str, str]] = [
    ({"prompt": "Say", "model": "m"}, {"completion": "hi"}, "Say", "hi"),
    ({"args": [], "kwargs": {"messages": [{"role": "user", "content": "q"}]}}, "a", "q", "a"),
    ({"prompts": ["q"]}, {"generations": [[{"text": "a", "type": "Generation"}]]}, "q", "a"),
    ("q", {"messages": [{"type": "human", "content": "q"}, {"type": "ai", "content": "a"}]},
     "q", "a"),
    ({"messages": [["human", "q"]]}, {"output": "a"}, "q", "a"),
    ("q", {"messages": [{"role": "assistant", "content": "a"}], "usage_metadata": {}}, "q", "a"),
    ("q", {"output": [{"type": "reasoning", "id": "r", "new": 1}, {
        "type": "message", "role": "assistant", "content": "a"}], "id": "x"}, "q",
     "a"),
    ({"prompt": None, "messages": [{"role": "user", "content": "q"}]}, ["a"], "q", "a"),
    ({"prompt": "q", "system": ""}, {"text": "a", "files": [], "object": None}, "q", "a"),
    ({"contents": ["q"]}, {"candidates": [{"content": {"parts": [{"text": "a"}]}}]}, "q", "a"),
]  # fmt: skip


def test_an_answer_that_is_no_message_stays_as_it_came(tmp_path: Path) -> None:
    """Structured output is its JSON, even if it has a field that others hold messages in."""
    cases = [*HELD, *(("q", made, "q", json.dumps(made)) for made in PLAIN)]

    steps = _import_calls([(given, made) for given, made, *_ in cases], tmp_path)

    told = [(text_of(step.observation), text_of(step.action)) for step in steps]
    assert told == [(asked, said) for _, _, asked, said in cases]


def test_a_text_stays_as_it_was_written_even_if_it_is_json(tmp_path: Path) -> None:
    """Numbers, spaces and doubled keys are those of the text, of prompts and results, too."""
    asked = [{"role": "user", "content": ROWS}]
    result = [*asked, _CALL, {"role": "tool", "tool_call_id": "c1", "content": ROWS}]
    exchanges: list[tuple[Any, Any]] = [(text, text) for text in TEXTS] + [("q", "[]")]

    *plain, whole, alone, told = _import_calls(
        [*exchanges, (ROWS, "a"), (asked, "a"), (result, "a")], tmp_path
    )

    said = [(text_of(step.observation), text_of(step.action)) for step in plain]
    assert said == exchanges
    assert [text_of(step.observation) for step in (whole, alone)] == [ROWS, ROWS]
    assert told.observation[-1]["parts"][0]["response"] == ROWS


@pytest.mark.parametrize("name", CALLS)
def test_a_call_comes_once_and_whole(name: str, tmp_path: Path) -> None:
    """Arguments that stand beside the call, or are no JSON, are kept; an id names one call."""
    made, parts = CALLS[name]

    (step,) = _import_calls([("q", made)], tmp_path)

    told: list[Any] = []
    for part in step.action[0]["parts"]:
        is_call = part["type"] == "tool_call"
        told += [part["id"], part["arguments"]] if is_call else [part["content"]]
    assert told == parts


def test_a_text_that_was_cut_is_no_message(tmp_path: Path) -> None:
    """A request whose JSON breaks off makes no step, and the report says that it is unreadable."""
    cut = json.dumps([{"role": "user", "content": "q" * 99}])[:60]
    record = observe(f"{1:032x}", FORMS["OpenAI"])[1]
    file, store = tmp_path / "cut.json", str(tmp_path / "s.duckdb")
    file.write_text(json.dumps({**record, "input": cut}))
    assert invoke("import", str(file), "--store", store).returncode == 0

    done = invoke("export", "sft", "--store", store)

    assert done.stdout == ""
    assert "unreadable" in done.stderr


def _import_calls(exchanges: list[tuple[Any, Any]], folder: Path) -> list[Transition]:
    file, store = folder / "calls.jsonl", Store(folder / "s.duckdb")
    record = observe(f"{1:032x}", FORMS["OpenAI"])[1]
    file.write_text("\n".join(
        json.dumps({**record, "id": f"o{place}", "traceId": f"{place + 1:032x}",
                    "parentObservationId": None, "input": given, "output": made})
        for place, (given, made) in enumerate(exchanges)
    ))  # fmt: skip
    assert invoke("import", str(file), "--store", store.name).returncode == 0
    return sorted(store.transitions(), key=lambda step: step.rollout_id)
