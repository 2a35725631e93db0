"""Semantic Kernel: an agent asks another one, which has a tool. `stream`: streamed."""

import asyncio
import sys

from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.functions import kernel_function


class Weather:
    @kernel_function(name="get_weather", description="The weather in a city.")
    def get_weather(self, city: str) -> str:
        return f"fog in {city}"


class Newsroom:
    @kernel_function(name="ask_reporter", description="Ask the reporter about a city.")
    async def ask_reporter(self, city: str) -> str:
        return await ask(reporter, f"How is the weather in '{city}'?")


def make_agent(name, instructions, plugin):
    service = OpenAIChatCompletion(ai_model_id="toy")
    return ChatCompletionAgent(
        service=service, name=name, instructions=instructions, plugins=[plugin]
    )


async def ask(agent, question):
    if "stream" not in sys.argv:
        return str(await agent.get_response(question))
    return "".join([str(chunk.content) async for chunk in agent.invoke_stream(question)])


reporter = make_agent("reporter", "Report.", Weather())
desk = make_agent("desk", "Be kind.", Newsroom())

if __name__ == "__main__":
    print(asyncio.run(ask(desk, "Ask the reporter of the newsroom about 'Oslo'.")))
