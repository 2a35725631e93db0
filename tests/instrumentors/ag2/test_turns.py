"""AG2 1.x as users write it: turns, tools, hand-offs by tool, and models of any client."""

import asyncio
import json
from typing import Any

import pytest
from tests.instrumentors.outline import (
    CallsOnce,
    agents_of,
    assert_each_call_once,
    calls_of,
    named,
    outline,
)

from lightning_otel import Store, auto_trace
from lightning_otel.demo.server import DemoServer
from lightning_otel.types import conventions as c

ag2 = pytest.importorskip("ag2", reason="could not import 'ag2': it has an environment")
pytestmark = pytest.mark.filterwarnings("ignore")

from ag2.config import OpenAIConfig  # noqa: E402  # after the skip


def config_of(server: DemoServer, **more: Any) -> Any:
    return OpenAIConfig("toy", api_key="k", base_url=server.base_url, max_retries=0, **more)


def calculator(expression: str) -> str:
    """Works out an expression."""
    return str(eval(expression, {}))


def broken(expression: str) -> str:
    """Fails."""
    raise ZeroDivisionError(f"no {expression}")


def mathematician(server: DemoServer, function: Any = calculator, **more: Any) -> Any:
    """An agent with a tool."""
    function.__name__ = "calculator"
    return ag2.Agent("ann", "Be right.", config=config_of(server, **more), tools=[function])


def ask(agent: Any, question: str = "What is 17*23?") -> Any:
    return asyncio.run(agent.ask(question))


TURN = """
invoke_agent ann
  chat toy
  execute_tool calculator
  chat toy
""".strip()


@pytest.mark.parametrize("function", [calculator, broken])
@pytest.mark.parametrize("is_streaming", [False, True])
def test_turn_is_an_outline_of_its_calls_and_tools(
    is_streaming: bool, function: Any, store: Store, server: DemoServer, facts: Any
) -> None:
    """Each call once, with the client's payload, each tool under the agent; nothing is changed."""
    agent = mathematician(server, function, streaming=is_streaming)
    before = agent.middleware

    with auto_trace(store=store) as recording:
        reply = ask(agent)

    assert agent.middleware == before
    assert outline(recording) == TURN
    assert_each_call_once(recording, server, facts)
    assert agents_of(recording) == ["ann", "ann"]
    called = (server.log[0].response or {})["choices"][0]["message"]["tool_calls"][0]
    tool = named(recording, "execute_tool calculator")
    assert tool.attributes[c.TOOL_CALL_ID] == called["id"]
    assert tool.attributes[c.TOOL_ARGUMENTS] == called["function"]["arguments"]
    ended = (tool.status, tool.attributes.get(c.TOOL_RESULT), tool.attributes.get(c.ERROR_TYPE))
    if function is broken:
        assert ended[::2] == ("ERROR", "ZeroDivisionError")
    else:
        assert ended == ("UNSET", "391", None)
    whole = named(recording, "invoke_agent ann").attributes
    assert json.loads(str(whole[c.INPUT_MESSAGES]))[0]["parts"][0]["content"] == "What is 17*23?"
    assert json.loads(str(whole[c.OUTPUT_MESSAGES]))[0]["parts"][0]["content"] == reply.body


def test_agent_used_as_a_tool_stands_under_the_tool(
    store: Store, server: DemoServer, facts: Any
) -> None:
    """Its calls are its own, below the tool of the agent that asked it."""
    server.policy = CallsOnce(arguments='{"objective": "add"}')
    bob = ag2.Agent("bob", config=config_of(server))
    boss = ag2.Agent("boss", config=config_of(server), tools=[bob.as_tool(description="does sums")])

    with auto_trace(store=store) as recording:
        ask(boss)

    assert_each_call_once(recording, server, facts)
    assert agents_of(recording) == ["boss", "bob", "boss"]
    lines = outline(recording).splitlines()
    assert lines[2].startswith("  execute_tool ")
    assert lines[3:5] == ["    invoke_agent bob", "      chat toy"]


def test_model_of_no_known_client_is_recorded_by_what_ag2_knows(store: Store) -> None:
    """A custom model's call is one span with messages, tool calls and the model's name."""
    from ag2.events import ModelMessage, ModelResponse, ToolCallEvent
    from ag2.testing import TestConfig

    calling = ToolCallEvent("calculator", arguments='{"expression": "17*23"}')
    said = ModelResponse(ModelMessage("391"), model="own", provider="mine", finish_reason="stop")
    agent = ag2.Agent("ann", config=TestConfig(calling, said), tools=[calculator])

    with auto_trace(store=store) as recording:
        ask(agent)

    first, second = calls_of(recording)
    assert outline(recording).splitlines()[2:] == ["  execute_tool calculator", "  chat own"]
    answer = json.loads(str(first.attributes[c.OUTPUT_MESSAGES]))[0]["parts"][0]
    assert (answer["name"], answer["arguments"]) == ("calculator", {"expression": "17*23"})
    asked = json.loads(str(second.attributes[c.INPUT_MESSAGES]))
    assert [message["role"] for message in asked] == ["user", "assistant", "tool"]
    assert asked[2]["parts"][0]["response"] == "391"
    assert second.attributes[c.PROVIDER] == "mine"
    assert second.attributes[c.FINISH_REASONS] == ["stop"]


def test_own_telemetry_of_ag2_goes_on_beside_ours(store: Store, server: DemoServer) -> None:
    """Its spans are there as without us, and the request is still one call of ours."""
    from ag2.middleware.builtin.telemetry import TelemetryMiddleware

    agent = ag2.Agent("ann", config=config_of(server), middleware=[TelemetryMiddleware()])

    with auto_trace(store=store) as recording:
        ask(agent, "hello")

    spans = recording.spans()
    assert [span.name for span in spans if span.scope == c.SCOPE][1:] == [
        "invoke_agent ann",
        "chat toy",
    ]
    theirs = [span.name for span in spans if span.scope != c.SCOPE]
    assert sorted(theirs)[:2] == ["chat toy", "invoke_agent unknown"]
