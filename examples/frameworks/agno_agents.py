"""agno: an agent asks another one, which has a tool. `stream`: streamed."""

import os
import sys

from agno.agent import Agent
from agno.models.openai import OpenAIChat


def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"fog in {city}"


def ask_reporter(city: str) -> str:
    """Ask the reporter about a city."""
    return ask(reporter, f"How is the weather in '{city}'?")


def make_agent(name, instructions, tool):
    model = OpenAIChat(id="toy", base_url=os.environ["OPENAI_BASE_URL"])
    return Agent(model=model, name=name, instructions=instructions, tools=[tool], telemetry=False)


def ask(agent, question):
    if "stream" not in sys.argv:
        return agent.run(question).content
    events = agent.run(question, stream=True)
    return "".join(event.content for event in events if event.event == "RunContent")


reporter = make_agent("reporter", "Report.", get_weather)
desk = make_agent("desk", "Be kind.", ask_reporter)

if __name__ == "__main__":
    print(ask(desk, "Ask the reporter about 'Oslo'."))
