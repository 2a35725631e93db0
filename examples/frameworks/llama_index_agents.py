"""LlamaIndex: an agent asks another one, which has a tool. `stream`: streamed."""

import asyncio
import os
import sys

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai_like import OpenAILike


def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"fog in {city}"


async def ask_reporter(city: str) -> str:
    """Ask the reporter about a city."""
    return str(await reporter.run(f"How is the weather in '{city}'?"))


def make_agent(name, system_prompt, tool):
    llm = OpenAILike(
        "toy",
        api_base=os.environ["OPENAI_BASE_URL"],
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
    )
    return FunctionAgent(
        name=name,
        system_prompt=system_prompt,
        tools=[tool],
        llm=llm,
        streaming="stream" in sys.argv,
    )


reporter = make_agent("reporter", "Report.", get_weather)
desk = make_agent("desk", "Be kind.", ask_reporter)


async def main():
    print(await desk.run("Ask the reporter about 'Oslo'."))


if __name__ == "__main__":
    asyncio.run(main())
