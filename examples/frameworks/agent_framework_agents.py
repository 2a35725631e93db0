"""Microsoft Agent Framework: an agent is another one's tool. `stream`: streamed."""

import asyncio
import sys
from typing import Annotated

from agent_framework import Agent
from agent_framework.openai import OpenAIChatCompletionClient

client = OpenAIChatCompletionClient(model="toy")


def get_weather(city: Annotated[str, "A city."]) -> str:
    """The weather in a city."""
    return f"fog in {city}"


async def ask_reporter(city: Annotated[str, "A city."]) -> str:
    """Ask the reporter about a city."""
    return await ask(reporter, f"How is the weather in '{city}'?")


reporter = Agent(client, "Report.", name="reporter", tools=[get_weather])
desk = Agent(client, "Be kind.", name="desk", tools=[ask_reporter])


async def ask(agent, question):
    if "stream" not in sys.argv:
        return (await agent.run(question)).text
    return "".join([update.text async for update in agent.run(question, stream=True)])


if __name__ == "__main__":
    print(asyncio.run(ask(desk, "Ask the reporter about 'Oslo'.")))
