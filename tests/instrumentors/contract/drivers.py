"""Each instrumented library as a small driver: the same few ways to ask a model one thing.

A way that a library does not have is left out; whatever asks gives the answer's text.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

import openai
import pytest

ASKED = "one two three four five six seven eight nine"
QUESTION = "What is 17*23?"
SUM = '{"expression":"17*23"}'
INFO: Any = {
    "vision": False,
    "function_calling": True,
    "json_output": True,
    "family": "unknown",
    "structured_output": False,
}


@dataclass(frozen=True, slots=True)
class Driver:
    """One library; each of its ways takes the server's address and the model's name."""

    name: str
    needs: str
    outline: str
    ask: Callable[[str, str], str] | None = None
    ask_async: Callable[[str, str], Coroutine[Any, Any, str]] | None = None
    stream: Callable[[str, str], Iterator[Any]] | None = None
    stream_async: Callable[[str, str], AsyncIterator[Any]] | None = None
    tool: Callable[[str, str], str] | None = None
    tool_outline: str = ""
    provider: str = "openai"
    is_sent_by_openai: bool = True
    can_fork: bool = True
    can_be_cancelled: bool = True

    def way(self, name: str) -> Any:
        """Return one of its ways, or skip the test."""
        found = getattr(self, name)
        if found is None:
            pytest.skip(f"{self.name} has no such way")
        return found

    def ask_somehow(self, base_url: str, model: str = "toy") -> str:
        """Ask in this thread, whichever way there is."""
        if self.ask is not None:
            return self.ask(base_url, model)
        assert self.ask_async is not None
        return asyncio.run(self.ask_async(base_url, model))


def count_pieces(stream: Any) -> int:
    """Read a stream of either kind to its end."""

    async def count() -> int:
        return len([piece async for piece in stream])

    return asyncio.run(count()) if hasattr(stream, "__aiter__") else len(list(stream))


def calculator(expression: str) -> str:
    """Works out a product."""
    left, right = expression.split("*")
    return str(int(left) * int(right))


def _message() -> Any:
    return [{"role": "user", "content": ASKED}]


def _options(base_url: str) -> Any:
    # A connection that is kept would outlive the event loop that made it.
    headers = {"Connection": "close"}
    return {"base_url": base_url, "api_key": "k", "max_retries": 0, "default_headers": headers}


# --- openai ---------------------------------------------------------------------------------------


def _openai_ask(base_url: str, model: str) -> str:
    with openai.OpenAI(**_options(base_url)) as client:
        answer = client.chat.completions.create(model=model, messages=_message())
    return str(answer.choices[0].message.content)


async def _openai_ask_async(base_url: str, model: str) -> str:
    async with openai.AsyncOpenAI(**_options(base_url)) as client:
        answer = await client.chat.completions.create(model=model, messages=_message())
    return str(answer.choices[0].message.content)


def _openai_stream(base_url: str, model: str) -> Iterator[Any]:
    with openai.OpenAI(**_options(base_url)) as client:
        yield from client.chat.completions.create(model=model, messages=_message(), stream=True)


async def _openai_stream_async(base_url: str, model: str) -> AsyncIterator[Any]:
    async with openai.AsyncOpenAI(**_options(base_url)) as client:
        create = client.chat.completions.create
        async with await create(model=model, messages=_message(), stream=True) as chunks:
            async for chunk in chunks:
                yield chunk


# --- LangChain ------------------------------------------------------------------------------------


def _chat_model(base_url: str, model: str) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(model=model, **_options(base_url))


def _langchain_ask(base_url: str, model: str) -> str:
    return str(_chat_model(base_url, model).invoke(ASKED).content)


async def _langchain_ask_async(base_url: str, model: str) -> str:
    return str((await _chat_model(base_url, model).ainvoke(ASKED)).content)


def _langchain_stream(base_url: str, model: str) -> Iterator[Any]:
    stream: Iterator[Any] = _chat_model(base_url, model).stream(ASKED)
    return stream


def _langchain_stream_async(base_url: str, model: str) -> AsyncIterator[Any]:
    stream: AsyncIterator[Any] = _chat_model(base_url, model).astream(ASKED)
    return stream


def _langchain_tool(base_url: str, model: str) -> str:
    from langchain.agents import create_agent
    from langchain_core.tools import tool

    agent: Any = create_agent(_chat_model(base_url, model), [tool(calculator)], name="ann")
    return str(agent.invoke({"messages": [("user", QUESTION)]})["messages"][-1].content)


# --- AutoGen --------------------------------------------------------------------------------------


def _assistant(base_url: str, model: str, **more: Any) -> Any:
    from autogen_agentchat.agents import AssistantAgent
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    client = OpenAIChatCompletionClient(model=model, model_info=INFO, **_options(base_url))
    return AssistantAgent("ann", model_client=client, model_client_stream=False, **more)


async def _autogen_ask_async(base_url: str, model: str) -> str:
    result = await _assistant(base_url, model).run(task=ASKED)
    return str(result.messages[-1].content)


def _autogen_stream_async(base_url: str, model: str) -> AsyncIterator[Any]:
    stream: AsyncIterator[Any] = _assistant(base_url, model).run_stream(task=ASKED)
    return stream


def _autogen_tool(base_url: str, model: str) -> str:
    agent = _assistant(base_url, model, tools=[calculator], reflect_on_tool_use=True)
    return str(asyncio.run(agent.run(task=QUESTION)).messages[-1].content)


# --- OpenAI Agents SDK ----------------------------------------------------------------------------


def _sdk_agent(base_url: str, model: str, **more: Any) -> Any:
    import agents

    agents.set_trace_processors([])
    client = openai.AsyncOpenAI(**_options(base_url))
    over = agents.OpenAIChatCompletionsModel(model=model, openai_client=client)
    return agents.Agent(name="ann", model=over, **more)


async def _agents_ask_async(base_url: str, model: str) -> str:
    import agents

    return str((await agents.Runner.run(_sdk_agent(base_url, model), ASKED)).final_output)


async def _agents_stream_async(base_url: str, model: str) -> AsyncIterator[Any]:
    import agents

    result = agents.Runner.run_streamed(_sdk_agent(base_url, model), ASKED)
    try:
        async for event in result.stream_events():
            yield event
    finally:
        assert result.run_loop_task is not None
        result.run_loop_task.cancel()
        await asyncio.wait([result.run_loop_task])


def _agents_tool(base_url: str, model: str) -> str:
    import agents

    agent = _sdk_agent(base_url, model, tools=[agents.function_tool(calculator)])
    return str(asyncio.run(agents.Runner.run(agent, QUESTION)).final_output)


# --- LiteLLM --------------------------------------------------------------------------------------


def _litellm_options(base_url: str, model: str) -> Any:
    given = {"model": f"hosted_vllm/{model}", "messages": _message(), "max_retries": 0}
    return given | {"api_base": base_url, "api_key": "k"}


def _litellm_ask(base_url: str, model: str) -> str:
    import litellm

    answer = litellm.completion(**_litellm_options(base_url, model))
    return str(answer.choices[0].message.content)


async def _litellm_ask_async(base_url: str, model: str) -> str:
    import litellm

    answer = await litellm.acompletion(**_litellm_options(base_url, model))
    return str(answer.choices[0].message.content)


async def _litellm_stream_async(base_url: str, model: str) -> AsyncIterator[Any]:
    import litellm

    stream = await litellm.acompletion(stream=True, **_litellm_options(base_url, model))
    try:
        async for chunk in stream:
            yield chunk
    finally:
        await stream.aclose()


# --- CrewAI ---------------------------------------------------------------------------------------


def _crewai_agent(base_url: str, model: str, **more: Any) -> Any:
    import crewai

    llm = crewai.LLM(model=f"openai/{model}", base_url=base_url, api_key="k", max_retries=0)
    return crewai.Agent(role="ann", goal="g", backstory="b", llm=llm, **more)


def _crewai_ask(base_url: str, model: str) -> str:
    return str(_crewai_agent(base_url, model).kickoff(ASKED).raw)


async def _crewai_ask_async(base_url: str, model: str) -> str:
    return str((await _crewai_agent(base_url, model).kickoff_async(ASKED)).raw)


def _crewai_tool(base_url: str, model: str) -> str:
    from crewai.tools import tool

    return str(_crewai_agent(base_url, model, tools=[tool(calculator)]).kickoff(QUESTION).raw)


# --- AG2 ------------------------------------------------------------------------------------------


def _classic_agent(base_url: str, model: str) -> Any:
    from autogen import ConversableAgent

    config = {"model": model, "base_url": base_url, "api_key": "k", "max_retries": 0}
    return ConversableAgent("ann", llm_config={"config_list": [config], "cache_seed": None})


def _ag2_ask(base_url: str, model: str) -> str:
    found = _classic_agent(base_url, model).generate_reply(messages=_message())
    return str(found["content"] if isinstance(found, dict) else found)


async def _ag2_ask_async(base_url: str, model: str) -> str:
    found = await _classic_agent(base_url, model).a_generate_reply(messages=_message())
    return str(found["content"] if isinstance(found, dict) else found)


async def _turn_ask_async(base_url: str, model: str) -> str:
    import ag2
    from ag2.config import OpenAIConfig

    config = OpenAIConfig(model, api_key="k", base_url=base_url, max_retries=0)
    return str((await ag2.Agent("ann", "Be right.", config=config).ask(ASKED)).body)


# --- HTTP clients ---------------------------------------------------------------------------------


def _post(base_url: str, model: str, **more: Any) -> Any:
    return f"{base_url}/chat/completions", {"model": model, "messages": _message(), **more}


def _text_of(answer: Any) -> str:
    return str(answer["choices"][0]["message"]["content"])


def _httpx_ask(base_url: str, model: str) -> str:
    import httpx

    url, body = _post(base_url, model)
    with httpx.Client() as client:
        return _text_of(client.post(url, json=body).raise_for_status().json())


async def _httpx_ask_async(base_url: str, model: str) -> str:
    import httpx

    url, body = _post(base_url, model)
    async with httpx.AsyncClient() as client:
        return _text_of((await client.post(url, json=body)).raise_for_status().json())


def _httpx_stream(base_url: str, model: str) -> Iterator[Any]:
    import httpx

    url, body = _post(base_url, model, stream=True)
    with httpx.Client() as client, client.stream("POST", url, json=body) as response:
        yield from filter(None, response.iter_lines())


async def _httpx_stream_async(base_url: str, model: str) -> AsyncIterator[Any]:
    import httpx

    url, body = _post(base_url, model, stream=True)
    async with httpx.AsyncClient() as client, client.stream("POST", url, json=body) as response:
        async for line in response.aiter_lines():
            if line:
                yield line


def _requests_ask(base_url: str, model: str) -> str:
    import requests

    url, body = _post(base_url, model)
    with requests.Session() as session:
        response = session.post(url, json=body)
        response.raise_for_status()
        return _text_of(response.json())


def _requests_stream(base_url: str, model: str) -> Iterator[Any]:
    import requests

    url, body = _post(base_url, model, stream=True)
    with requests.Session() as session, session.post(url, json=body, stream=True) as response:
        yield from filter(None, response.iter_lines(chunk_size=None))


async def _aiohttp_ask_async(base_url: str, model: str) -> str:
    import aiohttp

    url, body = _post(base_url, model)
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
        answer = await response.read()
        response.raise_for_status()
        return _text_of(json.loads(answer))


async def _aiohttp_stream_async(base_url: str, model: str) -> AsyncIterator[Any]:
    import aiohttp

    url, body = _post(base_url, model, stream=True)
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
        async for line in response.content:
            if line.strip():
                yield line


def _hub_ask(base_url: str, model: str) -> str:
    from huggingface_hub import InferenceClient

    client = InferenceClient(base_url=base_url, api_key="k")
    return str(client.chat_completion(_message(), model=model).choices[0].message.content)


def _hub_stream(base_url: str, model: str) -> Iterator[Any]:
    from huggingface_hub import InferenceClient

    client = InferenceClient(base_url=base_url, api_key="k")
    yield from client.chat_completion(_message(), model=model, stream=True)


DRIVERS = [
    Driver(
        "openai",
        "openai",
        "chat toy",
        _openai_ask,
        _openai_ask_async,
        _openai_stream,
        _openai_stream_async,
    ),
    Driver(
        "langchain",
        "langchain_openai",
        "chat toy",
        _langchain_ask,
        _langchain_ask_async,
        _langchain_stream,
        _langchain_stream_async,
        tool=_langchain_tool,
        tool_outline="""\
invoke_agent ann
  model
    chat toy
  tools
    execute_tool calculator
  model
    chat toy""",
    ),
    Driver(
        "autogen",
        "autogen_agentchat",
        "create_agent ann\ninvoke_agent ann\n  chat toy",
        ask_async=_autogen_ask_async,
        stream_async=_autogen_stream_async,
        tool=_autogen_tool,
        tool_outline="""\
create_agent ann
invoke_agent ann
  chat toy
  execute_tool calculator
  chat toy""",
    ),
    Driver(
        "agents",
        "agents",
        "invoke_workflow Agent workflow\n  invoke_agent ann\n    chat toy",
        ask_async=_agents_ask_async,
        stream_async=_agents_stream_async,
        tool=_agents_tool,
        tool_outline="""\
invoke_workflow Agent workflow
  invoke_agent ann
    chat toy
    execute_tool calculator
    chat toy""",
    ),
    Driver(
        "litellm",
        "litellm",
        "chat toy",
        _litellm_ask,
        _litellm_ask_async,
        stream_async=_litellm_stream_async,
        provider="hosted_vllm",
        is_sent_by_openai=False,
    ),
    Driver(
        "crewai",
        "crewai",
        "invoke_agent ann\n  chat toy",
        _crewai_ask,
        _crewai_ask_async,
        tool=_crewai_tool,
        tool_outline="invoke_agent ann\n  chat toy\n  execute_tool calculator\n  chat toy",
        can_fork=False,
        can_be_cancelled=False,
    ),
    Driver(
        "ag2",
        "autogen",
        "invoke_agent ann\n  chat toy",
        _ag2_ask,
        _ag2_ask_async,
        can_be_cancelled=False,
    ),
    Driver(
        "ag2-1",
        "ag2",
        "invoke_agent ann\n  chat toy",
        ask_async=_turn_ask_async,
    ),
    Driver(
        "httpx",
        "httpx",
        "chat toy",
        _httpx_ask,
        _httpx_ask_async,
        _httpx_stream,
        _httpx_stream_async,
    ),
    Driver(
        "requests",
        "requests",
        "chat toy",
        _requests_ask,
        stream=_requests_stream,
    ),
    Driver(
        "aiohttp",
        "aiohttp",
        "chat toy",
        ask_async=_aiohttp_ask_async,
        stream_async=_aiohttp_stream_async,
    ),
    Driver(
        "huggingface_hub",
        "huggingface_hub",
        "chat toy",
        _hub_ask,
        stream=_hub_stream,
    ),
]
