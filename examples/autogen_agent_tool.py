"""An AutoGen agent that has other agents as its tools, and a nested team as one more."""

import asyncio

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_agentchat.tools import AgentTool, TeamTool
from autogen_ext.models.openai import OpenAIChatCompletionClient


async def main():
    model = OpenAIChatCompletionClient(
        model="gpt-4.1-mini-2025-04-14",
        parallel_tool_calls=False,
        logprobs=True,
        extra_body={"return_token_ids": True},
    )
    poet = AssistantAgent("poet", model, system_message="Make verses.")
    singer = AssistantAgent("singer", model, system_message="Sing.")
    drummer = AssistantAgent("drummer", model, system_message="Drum.")
    band = RoundRobinGroupChat(
        [singer, drummer], name="band", termination_condition=MaxMessageTermination(3)
    )
    host = AssistantAgent(
        "host",
        model,
        tools=[
            AgentTool(poet, return_value_as_last_message=True),
            TeamTool(band, name="band", description="A band that plays."),
        ],
        system_message="Host the evening.",
        max_tool_iterations=4,
    )
    result = await host.run(task="Let the poet speak of the sea, then let the band play.")
    print([type(message).__name__ for message in result.messages])
    print(result.messages[-1].to_text())
    await model.close()


if __name__ == "__main__":
    asyncio.run(main())
