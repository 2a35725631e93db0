"""The classic AutoGen API as users write it: every call once, under the agent that replied."""

import asyncio
import json
import random
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import pytest
from tests.instrumentors.outline import (
    agents_of,
    assert_each_call_once,
    named,
    outline,
)

from lightning_otel import Store, auto_trace
from lightning_otel import conventions as c
from lightning_otel.demo.policy import Reply, ToolCall, ToyPolicy, message_text
from lightning_otel.demo.server import DemoServer

autogen = pytest.importorskip("autogen", reason="could not import 'autogen': it has an environment")
pytestmark = pytest.mark.filterwarnings("ignore")

Way = Callable[..., Any]


def sync(agent: Any, recipient: Any, **options: Any) -> Any:
    """In this thread."""
    return agent.initiate_chat(recipient, silent=True, **options)


def in_coroutines(agent: Any, recipient: Any, **options: Any) -> Any:
    """In coroutines."""
    return asyncio.run(agent.a_initiate_chat(recipient, silent=True, **options))


WAYS = pytest.mark.parametrize("way", [sync, in_coroutines])


@pytest.fixture
def config(server: DemoServer) -> dict[str, Any]:
    """Names the demo server; answers are not cached on disk."""
    return config_of(server)


def config_of(server: DemoServer, model: str = "toy") -> dict[str, Any]:
    """A configuration as the classic API has them."""
    entry = {"model": model, "base_url": server.base_url, "api_key": "k", "price": [0, 0]}
    return {"config_list": [entry], "cache_seed": None}


def calculator(expression: Annotated[str, "what to work out"]) -> str:
    """Works out an expression."""
    return str(eval(expression, {}))


def broken(expression: Annotated[str, "what to work out"]) -> str:
    """Fails."""
    raise ZeroDivisionError(f"no {expression}")


def pair(config: dict[str, Any], function: Any = calculator) -> tuple[Any, Any]:
    """A user that executes what the assistant calls."""
    assistant = autogen.AssistantAgent("assistant", llm_config=config)
    user = autogen.UserProxyAgent(
        "user",
        human_input_mode="NEVER",
        code_execution_config=False,
        max_consecutive_auto_reply=1,
    )
    autogen.register_function(
        function, caller=assistant, executor=user, name="calculator", description="Works out."
    )
    return user, assistant


PAIR = """
invoke_workflow user and assistant
  invoke_agent assistant
    chat toy
  invoke_agent user
    execute_tool calculator
  invoke_agent assistant
    chat toy
  invoke_agent user
""".strip()


async def slow(expression: Annotated[str, "what to work out"]) -> str:
    """Works out an expression; in a plain chat AG2 runs it in a loop on a thread of its own."""
    await asyncio.sleep(0)
    return calculator(expression)


def without_ids(found: tuple[Any, list[Any]]) -> str:
    """The run without its tool call ids, which differ from run to run."""
    text = json.dumps(found)
    for message in found[0][0]:
        for call in message.get("tool_calls") or ():
            text = text.replace(call["id"], "call")
    return text


@WAYS
@pytest.mark.parametrize("function", [calculator, broken, slow])
@pytest.mark.parametrize("is_streaming", [False, True])
def test_chat_of_two_is_an_outline_of_their_replies(
    is_streaming: bool, function: Any, way: Way, store: Store, facts: Any
) -> None:
    """Each reply is an agent span, call and tool stand under who made them; nothing is changed."""

    def run(server: DemoServer) -> tuple[Any, list[Any]]:
        config = config_of(server)
        config["config_list"][0]["stream"] = is_streaming
        result = way(*pair(config, function), message="What is 17*23?")
        said = [result.chat_history, result.summary, result.cost]
        return said, [exchange.request for exchange in server.log]

    with DemoServer() as plain, DemoServer() as server:
        untraced = run(plain)
        with auto_trace(store=store) as recording:
            traced = run(server)
        facts.server = server
        assert_each_call_once(recording, server, facts)

    assert without_ids(traced) == without_ids(untraced)
    assert outline(recording) == PAIR
    assert agents_of(recording) == ["assistant", "assistant"]
    called = (server.log[0].response or {})["choices"][0]["message"]["tool_calls"][0]
    tool = named(recording, "execute_tool calculator")
    done = tool.attributes
    assert done[c.TOOL_CALL_ID] == called["id"]
    assert done[c.TOOL_ARGUMENTS] == called["function"]["arguments"]
    assert done[c.AGENT_NAME] == "user"
    if function is broken:
        assert (tool.status, tool.status_message) == ("ERROR", "Error: no 17*23")
    assert done[c.TOOL_RESULT] == ("Error: no 17*23" if function is broken else "391")
    whole = named(recording, "invoke_workflow user and assistant").attributes
    assert json.loads(str(whole[c.INPUT_MESSAGES]))[0]["parts"][0]["content"] == "What is 17*23?"
    assert json.loads(str(whole[c.OUTPUT_MESSAGES]))[0]["parts"][0]["content"] == traced[0][1]


def test_chat_in_the_background_is_in_the_same_trace(
    config: dict[str, Any], store: Store, server: DemoServer, facts: Any
) -> None:
    """``run`` starts a thread and hands out events; its spans stand where it was called."""
    user, assistant = pair(config)

    with auto_trace(store=store) as recording:
        response = user.run(assistant, message="What is 17*23?")
        for _ in response.events:
            pass

    assert outline(recording) == PAIR
    assert_each_call_once(recording, server, facts)


@WAYS
@pytest.mark.parametrize("selection", ["round_robin", "auto"])
def test_group_chat_is_a_workflow_of_its_speakers(
    selection: str,
    way: Way,
    config: dict[str, Any],
    store: Store,
    server: DemoServer,
    facts: Any,
) -> None:
    """The manager is no agent but the group; whoever selects a speaker is an agent of its own."""
    server.policy = Speaker()
    ann, bob = (autogen.AssistantAgent(name, llm_config=config) for name in ("ann", "bob"))
    group = autogen.GroupChat(
        [ann, bob], messages=[], max_round=3, speaker_selection_method=selection
    )
    manager = autogen.GroupChatManager(group, llm_config=config, silent=True)

    with auto_trace(store=store) as recording:
        way(ann, manager, message="hello")

    assert_each_call_once(recording, server, facts)
    lines = outline(recording).splitlines()
    assert lines[0] == "invoke_workflow chat_manager"
    assert lines.count("invoke_workflow chat_manager") == 1
    speakers = [line.split()[-1] for line in lines if line.startswith("  invoke_agent ")]
    if selection == "round_robin":
        assert speakers == ["bob", "ann"]
        assert agents_of(recording) == ["bob", "ann"]
    else:
        assert agents_of(recording) == ["speaker_selection_agent", "bob"] * 2
        assert "  invoke_workflow checking_agent and speaker_selection_agent" in lines


class Speaker(ToyPolicy):
    """Selects bob whenever it is asked who is next."""

    def reply(self, body: Mapping[str, Any], rng: random.Random) -> Reply:
        """A name, or some words."""
        asked = "".join(message_text(message) for message in body["messages"])
        return Reply("bob" if "select the next" in asked.lower() else "well")


@WAYS
def test_nested_chat_stands_under_the_agent_that_holds_it(
    way: Way, config: dict[str, Any], store: Store, server: DemoServer, facts: Any
) -> None:
    """Its calls are those of the inner agent."""
    outer = autogen.ConversableAgent("outer", llm_config=False, human_input_mode="NEVER")
    inner = autogen.AssistantAgent("inner", llm_config=config)
    user = autogen.UserProxyAgent("user", human_input_mode="NEVER", code_execution_config=False)
    queue = [{"recipient": inner, "max_turns": 1, "summary_method": "last_msg", "chat_id": 1}]
    outer.register_nested_chats(queue, trigger=user, use_async=way is in_coroutines)

    with auto_trace(store=store) as recording:
        way(user, outer, message="hello", max_turns=1)

    wanted = """
invoke_workflow user and outer
  invoke_agent outer
    invoke_workflow outer and inner
      invoke_agent inner
        chat toy
"""
    assert outline(recording) == wanted.strip()
    assert_each_call_once(recording, server, facts)


class Hands(ToyPolicy):
    """Hands over to whom a tool names, else speaks."""

    def reply(self, body: Mapping[str, Any], rng: random.Random) -> Reply:
        """A call of a transfer tool that has not been called yet."""
        names = [tool["function"]["name"] for tool in body.get("tools") or ()]
        if names and not any(message["role"] == "tool" for message in body["messages"]):
            call = ToolCall("call_1", names[0], "{}")
            return Reply("", tool_calls=(call,), finish_reason="tool_calls")
        return Reply("done")


@pytest.mark.parametrize("is_async", [False, True])
def test_group_of_a_pattern_hands_over_between_agents(
    is_async: bool, config: dict[str, Any], store: Store, server: DemoServer, facts: Any
) -> None:
    """Group chats by pattern: one workflow, a hand-off by tool, each call under its agent."""
    from autogen.agentchat import a_initiate_group_chat, initiate_group_chat
    from autogen.agentchat.group import AgentTarget, OnCondition, StringLLMCondition
    from autogen.agentchat.group.patterns import DefaultPattern

    server.policy = Hands()
    ann, bob = (autogen.ConversableAgent(name, llm_config=config) for name in ("ann", "bob"))
    ann.handoffs.add_llm_condition(
        OnCondition(target=AgentTarget(bob), condition=StringLLMCondition("for bob"))
    )
    pattern = DefaultPattern(initial_agent=ann, agents=[ann, bob])

    with auto_trace(store=store) as recording:
        if is_async:
            asyncio.run(a_initiate_group_chat(pattern, messages="hello", max_rounds=4))
        else:
            initiate_group_chat(pattern, messages="hello", max_rounds=4)

    assert_each_call_once(recording, server, facts)
    lines = outline(recording).splitlines()
    assert [line for line in lines if "invoke_workflow" in line] == ["invoke_workflow chat_manager"]
    assert agents_of(recording) == ["ann", "bob"]
    assert len([line for line in lines if line.startswith("    execute_tool transfer")]) == 1


def test_cancelled_chat_ends_its_spans(
    store: Store, server: DemoServer, config: dict[str, Any]
) -> None:
    """Cancelled while the model answers, every span has ended, and failed."""
    server.chunk_delay_s = 0.2
    config["config_list"][0]["stream"] = True

    async def leave() -> None:
        user, assistant = pair(config)
        talking = asyncio.create_task(user.a_initiate_chat(assistant, message="a b c", silent=True))
        await asyncio.sleep(0.3)
        talking.cancel()
        await asyncio.wait([talking])

    with auto_trace(store=store) as recording:
        asyncio.run(leave())

    outline(recording)
    workflow = named(recording, "invoke_workflow user and assistant")
    assert (workflow.status, workflow.attributes[c.ERROR_TYPE]) == (
        "ERROR",
        "asyncio.exceptions.CancelledError",
    )
