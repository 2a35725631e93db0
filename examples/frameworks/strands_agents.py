"""Strands: an agent asks another one, which has a tool. `stream`: streamed."""

import os
import sys

from strands import Agent, tool
from strands.models.openai import OpenAIModel

settings = {"base_url": os.environ["OPENAI_BASE_URL"], "api_key": "none"}
model = OpenAIModel(client_args=settings, model_id="toy", stream="stream" in sys.argv)


@tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"fog in {city}"


@tool
def ask_reporter(city: str) -> str:
    """Ask the reporter about a city."""
    return str(reporter(f"How is the weather in '{city}'?"))


def make_agent(name, system_prompt, tools):
    return Agent(model, name=name, system_prompt=system_prompt, tools=tools, callback_handler=None)


reporter = make_agent("reporter", "Report.", [get_weather])
desk = make_agent("desk", "Be kind.", [ask_reporter])

if __name__ == "__main__":
    print(desk("Ask the reporter about 'Oslo'."))
