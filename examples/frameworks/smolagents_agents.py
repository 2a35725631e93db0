"""smolagents: an agent manages another one, which has a tool. `stream`: streamed."""

import os
import sys

from smolagents import OpenAIModel, ToolCallingAgent, tool

model = OpenAIModel("toy", api_base=os.environ["OPENAI_BASE_URL"], api_key="none")


@tool
def get_weather(city: str) -> str:
    """Tell the weather in a city.

    Args:
        city: The city.
    """
    return f"fog in {city}"


def make_agent(name, tools, **options):
    stream = "stream" in sys.argv
    return ToolCallingAgent(
        tools, model, name=name, stream_outputs=stream, verbosity_level=0, **options
    )


reporter = make_agent("reporter", [get_weather], description="Reports the weather.")
desk = make_agent("desk", [], managed_agents=[reporter])

if __name__ == "__main__":
    print(desk.run("Ask the reporter about 'Oslo'."))
