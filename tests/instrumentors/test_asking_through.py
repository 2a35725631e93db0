"""Frameworks whose requests ask for token ids: they work as before, and their calls are exact."""

import asyncio
from typing import Any

import pytest

from lightning_otel import Store, auto_trace
from lightning_otel.demo.server import DemoServer
from lightning_otel.types import Transition


def steps_of(store: Store) -> list[Transition]:
    """The transitions, each exact with a logprob a token."""
    found = store.transitions().rows()
    assert {step.capture for step in found} == {"exact"}
    assert all(len(step.logprobs) == len(step.response_ids) for step in found)
    return found


def test_langchain_keeps_working(store: Store, server: DemoServer) -> None:
    """Whole and streamed, with what LangChain itself drops."""
    models: Any = pytest.importorskip("langchain_openai")
    with auto_trace(store=store, enable_retokenization_fix=True):
        model = models.ChatOpenAI(model="toy", base_url=server.base_url, api_key="k")
        whole = model.invoke("hello").content
        streamed = "".join(chunk.content for chunk in model.stream("hello"))

    assert whole == streamed == "You said: hello"
    assert len(steps_of(store)) == 2


def test_openai_agents_keep_working(store: Store, server: DemoServer) -> None:
    """Whole and streamed, by the chat model."""
    agents: Any = pytest.importorskip("agents")
    import openai

    async def work() -> list[str]:
        async with openai.AsyncOpenAI(base_url=server.base_url, api_key="k") as client:
            model = agents.OpenAIChatCompletionsModel(model="toy", openai_client=client)
            agent = agents.Agent(name="a", model=model)
            whole = await agents.Runner.run(agent, "hello")
            streamed = agents.Runner.run_streamed(agent, "hello")
            async for _ in streamed.stream_events():
                pass
            return [whole.final_output, streamed.final_output]

    with auto_trace(store=store, enable_retokenization_fix=True):
        said = asyncio.run(work())

    assert said == ["You said: hello"] * 2
    assert len(steps_of(store)) == 2


def test_autogen_keeps_working(store: Store, server: DemoServer) -> None:
    """Whole and streamed, by its client."""
    clients: Any = pytest.importorskip("autogen_ext.models.openai")
    models: Any = pytest.importorskip("autogen_core.models")
    info = {
        "vision": False, "function_calling": True, "json_output": True, "family": "unknown",
        "structured_output": True,
    }  # fmt: skip

    async def work() -> list[str]:
        client = clients.OpenAIChatCompletionClient(
            model="toy", base_url=server.base_url, api_key="k", model_info=info
        )
        asked = [models.UserMessage(content="hello", source="user")]
        whole = await client.create(asked)
        pieces = [piece async for piece in client.create_stream(asked)]
        await client.close()
        return [whole.content, pieces[-1].content]

    with auto_trace(store=store, enable_retokenization_fix=True):
        said = asyncio.run(work())

    assert said == ["You said: hello"] * 2
    assert len(steps_of(store)) == 2
