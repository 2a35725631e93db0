"""Google ADK over LiteLLM: an agent is another one's tool. `stream`: streamed."""

import asyncio
import sys

from google.adk.agents import LlmAgent
from google.adk.agents.run_config import RunConfig, StreamingMode
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.adk.tools.agent_tool import AgentTool
from google.genai.types import Content, Part


def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"fog in {city}"


model = LiteLlm("openai/toy")
reporter = LlmAgent(
    name="reporter", model=model, instruction="Get the weather in 'Oslo'.", tools=[get_weather]
)
desk = LlmAgent(name="desk", model=model, instruction="Be kind.", tools=[AgentTool(reporter)])


async def main():
    runner = InMemoryRunner(desk, app_name="news")
    session = await runner.session_service.create_session(app_name="news", user_id="ada")
    mode = StreamingMode.SSE if "stream" in sys.argv else StreamingMode.NONE
    question = Content(role="user", parts=[Part(text="Ask the reporter about 'Oslo'.")])
    async for event in runner.run_async(
        user_id="ada",
        session_id=session.id,
        new_message=question,
        run_config=RunConfig(streaming_mode=mode),
    ):
        if event.is_final_response():
            print(event.content.parts[0].text)


if __name__ == "__main__":
    asyncio.run(main())
