"""An AutoGen team whose next speaker a model selects; the agents stream their answers."""

import asyncio

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.teams import SelectorGroupChat
from autogen_ext.models.openai import OpenAIChatCompletionClient


async def main():
    model = OpenAIChatCompletionClient(
        model="gpt-4.1-mini-2025-04-14", logprobs=True, extra_body={"return_token_ids": True}
    )
    planner = AssistantAgent("planner", model, description="Plans.", system_message="Make a plan.")
    writer = AssistantAgent(
        "writer",
        model,
        description="Writes.",
        system_message="Write it down.",
        model_client_stream=True,
    )
    editor = AssistantAgent("editor", model, description="Edits.", system_message="Make it better.")
    team = SelectorGroupChat(
        [planner, writer, editor],
        model_client=model,
        termination_condition=MaxMessageTermination(5),
    )
    async for item in team.run_stream(task="A short text about lighthouses, please."):
        if type(item).__name__ == "TextMessage":
            print(item.source, "|", item.content)
    await model.close()


if __name__ == "__main__":
    asyncio.run(main())
