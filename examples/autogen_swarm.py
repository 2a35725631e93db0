"""An AutoGen swarm: agents hand the task over to one another by calling hand-off tools."""

import asyncio

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import MaxMessageTermination, TextMentionTermination
from autogen_agentchat.teams import Swarm
from autogen_ext.models.openai import OpenAIChatCompletionClient


def get_refund(order: int) -> str:
    """Pay an order back."""
    return f"order {order} was paid back, DONE"


async def main():
    model = OpenAIChatCompletionClient(
        model="gpt-4.1-mini-2025-04-14",
        parallel_tool_calls=False,
        logprobs=True,
        extra_body={"return_token_ids": True},
    )
    triage = AssistantAgent(
        "triage",
        model,
        handoffs=["cashier"],
        system_message="Send money questions to the cashier.",
    )
    cashier = AssistantAgent(
        "cashier",
        model,
        tools=[get_refund],
        handoffs=["triage"],
        system_message="Give a refund where it is due.",
    )
    swarm = Swarm(
        [triage, cashier],
        termination_condition=TextMentionTermination("DONE") | MaxMessageTermination(12),
    )
    result = await swarm.run(task="I want my money back for order 42.")
    for message in result.messages:
        print(message.source, "|", type(message).__name__)
    print(result.messages[-1].to_text())
    await model.close()


if __name__ == "__main__":
    asyncio.run(main())
