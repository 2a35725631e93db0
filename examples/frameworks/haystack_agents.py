"""Haystack: an agent is another one's tool, in a pipeline. `stream`: streamed."""

import os
import sys

from haystack import Pipeline
from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import tool


@tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"fog in {city}"


@tool
def ask_reporter(city: str) -> str:
    """Ask the reporter about a city."""
    return ask("reporter", "Report.", get_weather, f"How is the weather in '{city}'?")


def ask(name, system_prompt, tool, question):
    generator = OpenAIChatGenerator(
        model="toy",
        api_base_url=os.environ["OPENAI_BASE_URL"],
        streaming_callback=(lambda chunk: None) if "stream" in sys.argv else None,
    )
    pipeline = Pipeline()
    pipeline.add_component(
        name, Agent(chat_generator=generator, system_prompt=system_prompt, tools=[tool])
    )
    result = pipeline.run({name: {"messages": [ChatMessage.from_user(question)]}})
    return result[name]["last_message"].text


if __name__ == "__main__":
    print(ask("desk", "Be kind.", ask_reporter, "Ask the reporter about 'Oslo'."))
