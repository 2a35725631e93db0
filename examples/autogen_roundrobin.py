"""An AutoGen team that takes turns: one agent works with a tool, the other one comments."""

import asyncio

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_ext.models.openai import OpenAIChatCompletionClient


async def calculator(expression: str) -> int:
    """Work out a product."""
    left, right = expression.split("*")
    return int(left) * int(right)


async def main():
    model = OpenAIChatCompletionClient(
        model="gpt-4.1-mini-2025-04-14", logprobs=True, extra_body={"return_token_ids": True}
    )
    solver = AssistantAgent(
        "solver",
        model,
        tools=[calculator],
        system_message="Solve what you are asked.",
        reflect_on_tool_use=True,
    )
    critic = AssistantAgent("critic", model, system_message="Comment on what was said.")
    team = RoundRobinGroupChat([solver, critic], termination_condition=MaxMessageTermination(6))

    result = await team.run(task="What is 17*23?")
    for message in result.messages:
        print(message.source, "|", message.to_text() if message.source != "solver" else "...")
    print(result.stop_reason)

    await team.reset()
    kinds = [type(item).__name__ async for item in team.run_stream(task="What is 3*5?")]
    print(kinds)
    await model.close()


if __name__ == "__main__":
    asyncio.run(main())
