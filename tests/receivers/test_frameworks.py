"""Traces of many frameworks in Langfuse: every message, tool call and result is found again."""

import json
from typing import Any

import pytest
from tests.cli.conftest import _invoke
from tests.receivers.frameworks import ARGUMENTS, ASKED, FORMS, RESULT, SAID, SYSTEM, observe

from lightning_otel import Store
from lightning_otel.messages.chat import messages_of, tools_of
from lightning_otel.types import Transition

Steps = dict[str, list[Transition]]


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Steps:
    """The transitions of each framework's trace, out of one file that the command line read."""
    folder = tmp_path_factory.mktemp("frameworks")
    file, store = folder / "page.json", Store(folder / "s.duckdb")
    traces = {f"{number:032x}": name for number, name in enumerate(FORMS, 1)}
    records = [each for trace, name in traces.items() for each in observe(trace, FORMS[name])]
    file.write_text(json.dumps({"data": records, "meta": {"page": 1}}))
    done = _invoke("import", str(file), "--store", store.name)
    assert done.returncode == 0, done.stderr
    found: Steps = {}
    for step in store.transitions():
        found.setdefault(traces[step.rollout_id], []).append(step)
    return found


def _shorten(message: dict[str, Any]) -> tuple[Any, ...]:
    """Role, text, and the tools called with their arguments."""
    content = message.get("content") or ""
    if content == json.dumps({"result": RESULT}):  # Google's results are objects
        content = RESULT
    calls = [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
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

    said = [messages_of([*each.observation, *each.action]) for each in (first, second)]
    assert [_shorten(each) for each in said[0]] == [*begin, call]
    assert [_shorten(each) for each in said[1]] == [*begin, call, result, ("assistant", SAID)]
    asked = [each["id"] for message in said[1] for each in message.get("tool_calls", ())]
    told = [message["tool_call_id"] for message in said[1] if message["role"] == "tool"]
    assert told == ([] if "tool" in lacks else asked)
    for step in () if "tools" in lacks else (first, second):
        (tool,) = tools_of(step.tools or ())
        assert tool["function"]["name"] == "weather"
        assert list(tool["function"]["parameters"]["properties"]) == ["city"]
