"""Frameworks whose requests are made with live resources, by the agents that they name."""

import asyncio
from typing import Any

import pytest

from lightning_otel import Resources, State, Store, auto_trace
from lightning_otel.demo.server import DemoServer, Exchange

OWN = "the agent's own"


@pytest.fixture
def resources(store: Store) -> Resources:
    """A prompt for all, and another for the planner."""
    found = Resources(State(store.name))
    found.publish("system_prompt", "for all")
    found.publish("planner/system_prompt", "for the planner")
    return found


def prompts(server: DemoServer) -> list[object]:
    """What each request was instructed by."""
    return [prompt_of(exchange) for exchange in server.log]


def prompt_of(exchange: Exchange) -> object:
    """What a request was instructed by."""
    body = exchange.request or {}
    return body.get("instructions") or body["messages"][0]["content"]


def stamped(store: Store) -> list[tuple[str, str | None]]:
    """Agent and version of each call; a request is one call, whichever libraries made it."""
    return [(step.agent, step.resource_version) for step in store.transitions().rows()]


def test_langchain_requests_are_made_with_what_is_live(
    store: Store, server: DemoServer, resources: Resources
) -> None:
    """Whole and streamed; the call says which version, and what it was sent."""
    models: Any = pytest.importorskip("langchain_openai")
    asked = [("system", OWN), ("user", "hello")]

    with auto_trace(store=store, apply=True):
        model = models.ChatOpenAI(model="toy", base_url=server.base_url, api_key="k")
        model.invoke(asked)
        list(model.stream(asked))

    assert prompts(server) == ["for all"] * 2
    assert stamped(store) == [("", "system_prompt@1")] * 2
    for step in store.transitions().rows():
        assert step.observation[0]["parts"][0]["content"] == "for all"


@pytest.mark.parametrize("kind", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
def test_openai_agents_get_what_is_theirs(
    kind: str, store: Store, server: DemoServer, resources: Resources
) -> None:
    """Each agent by its name, in both APIs."""
    agents: Any = pytest.importorskip("agents")
    import openai

    async def work() -> None:
        async with openai.AsyncOpenAI(base_url=server.base_url, api_key="k") as client:
            model = getattr(agents, kind)(model="toy", openai_client=client)
            for name in ("planner", "writer"):
                agent = agents.Agent(name=name, model=model, instructions=OWN)
                await agents.Runner.run(agent, "hello")

    with auto_trace(store=store, apply=True):
        asyncio.run(work())

    assert prompts(server) == ["for the planner", "for all"]
    assert stamped(store) == [
        ("planner", "planner/system_prompt@1"),
        ("writer", "system_prompt@1"),
    ]


def test_autogen_requests_are_made_with_what_is_live(
    store: Store, server: DemoServer, resources: Resources
) -> None:
    """An assistant's request, by its name."""
    clients: Any = pytest.importorskip("autogen_ext.models.openai")
    chat: Any = pytest.importorskip("autogen_agentchat.agents")
    info = {
        "vision": False, "function_calling": True, "json_output": True, "family": "unknown",
        "structured_output": True,
    }  # fmt: skip

    async def work() -> None:
        client = clients.OpenAIChatCompletionClient(
            model="toy", base_url=server.base_url, api_key="k", model_info=info
        )
        await chat.AssistantAgent("planner", client, system_message=OWN).run(task="hello")
        await client.close()

    with auto_trace(store=store, apply=True):
        asyncio.run(work())

    assert prompts(server) == ["for the planner"]
    assert stamped(store) == [("planner", "planner/system_prompt@1")]
