"""An agent whose errors, names and settings quote what was said: quoting_agent.py BASE_URL.

Each canary is a text of a message, a model or a tool, at a place that is no message.
"""

import asyncio
import contextlib
import sys
from typing import Any

import openai
from agents import Agent, OpenAIChatCompletionsModel, RunConfig, Runner, function_tool
from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient
from langchain_core.exceptions import OutputParserException
from langchain_core.output_parsers import JsonOutputParser
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import tool
from opentelemetry import trace
from pydantic import BaseModel

import lightning_otel as lo

BASE_URL = sys.argv[1]
client = openai.OpenAI(base_url=BASE_URL, api_key="k", max_retries=0)
tracer = trace.get_tracer("theirs")


class Number(BaseModel):
    """What an answer is read as."""

    value: int


def ask(text: str, model: str = "toy", **options: Any) -> Any:
    """Ask the server, which quotes what it refuses."""
    messages: list[Any] = [{"role": "user", "content": text}]
    return client.chat.completions.create(model=model, messages=messages, **options)


@lo.operation
def parse(text: str) -> None:
    try:
        Number.model_validate({"value": text})
    except ValueError as exc:
        raise RuntimeError(f"no number in CANARY-chained {text}") from exc


@tool
def look_up(query: str) -> str:
    """Look something up."""
    raise ValueError(f"nothing about {query}")


@function_tool(failure_error_function=None)
def broken(text: str) -> str:
    """Fail with what the model said."""
    raise LookupError("CANARY-agents")


async def run_agents() -> None:
    """Fail within agents of two frameworks, and in a task."""
    own = openai.AsyncOpenAI(base_url=BASE_URL, api_key="k", max_retries=0)
    model = OpenAIChatCompletionsModel("call:broken", own)
    agent = Agent(name="ann", tools=[broken], model=model)
    with contextlib.suppress(Exception):
        await Runner.run(agent, "go", run_config=RunConfig(tracing_disabled=False))
    info: Any = {
        "vision": False, "function_calling": True, "json_output": False, "family": "unknown",
        "structured_output": False,
    }  # fmt: skip
    theirs = OpenAIChatCompletionClient(
        model="refuse", base_url=BASE_URL, api_key="k", model_info=info, max_retries=0
    )
    with contextlib.suppress(Exception):
        await AssistantAgent("bob", theirs).run(task="CANARY-autogen")

    @lo.operation
    async def fail() -> None:
        raise OSError("CANARY-task")

    await asyncio.gather(fail(), return_exceptions=True)
    await own.close()


with lo.auto_trace(name="quoting"):
    with contextlib.suppress(RuntimeError):
        parse("CANARY-pydantic")
    with contextlib.suppress(openai.BadRequestError):
        ask("CANARY-body", model="refuse")
    with contextlib.suppress(openai.APIError):
        list(ask("x", model="break", stream=True))  # breaks off with an error that quotes
    ask("hello", stop=["CANARY-stop"])
    with contextlib.suppress(ValueError):
        look_up.invoke({"query": "CANARY-tool"})
    with contextlib.suppress(OutputParserException):
        answer = RunnableLambda(lambda _: "CANARY-parser is no JSON")
        (answer | JsonOutputParser()).invoke("x")
    try:
        raise ExceptionGroup("CANARY-group", [ValueError("CANARY-member")])
    except ExceptionGroup as exc:
        exc.add_note("CANARY-note")
        lo.emit_exception(exc)
    lo.emit_action("CANARY-action", "x")
    lo.emit_observation("CANARY-observation", "x")
    lo.emit_state("failed", message="CANARY-state")
    with contextlib.suppress(KeyError), tracer.start_as_current_span("own"):
        raise KeyError("CANARY-own")
    with tracer.start_as_current_span("foreign") as span:
        span.set_attribute("llm.input_messages.0.message.content", "CANARY-openinference")
        span.add_event("gen_ai.user.message", {"content": "CANARY-event"})
    asyncio.run(run_agents())
    lo.emit_reward(1.0)
