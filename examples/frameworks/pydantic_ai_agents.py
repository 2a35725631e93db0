"""Pydantic AI: an agent asks another one, which has a tool. `stream`: streamed."""

import asyncio
import sys

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel

model = OpenAIChatModel("toy")
reporter = Agent(model, name="reporter", instructions="Report.")
desk = Agent(model, name="desk", instructions="Be kind.")


async def ask(agent, question):
    if "stream" not in sys.argv:
        return (await agent.run(question)).output
    async with agent.run_stream(question) as result:
        return await result.get_output()


@reporter.tool_plain
def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"fog in {city}"


@desk.tool_plain
async def ask_reporter(city: str) -> str:
    """Ask the reporter about a city."""
    return await ask(reporter, f"How is the weather in '{city}'?")


if __name__ == "__main__":
    print(asyncio.run(ask(desk, "Ask the reporter about 'Oslo'.")))
