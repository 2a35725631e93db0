"""LangChain's create_agent with two tools, run to its end, streamed, and async."""

import asyncio

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def calculator(expression: str) -> str:
    """Work out a product."""
    left, right = expression.split("*")
    return str(int(left) * int(right))


@tool
async def get_weather(city: str) -> str:
    """The weather in a city."""
    await asyncio.sleep(0)
    return f"rain in {city}"


@tool
def failing_lookup(query: str) -> str:
    """Look something up."""
    raise LookupError(f"nothing about {query}")


model = ChatOpenAI(model="toy", logprobs=True, extra_body={"return_token_ids": True})


def ask(agent, question):
    return agent.invoke({"messages": [("user", question)]})["messages"][-1].content


async def stream(agent, question):
    steps = []
    async for update in agent.astream({"messages": [("user", question)]}, stream_mode="updates"):
        steps += update
    return steps


if __name__ == "__main__":
    sums = create_agent(
        model, [calculator, failing_lookup], system_prompt="Be exact.", name="accountant"
    )
    print(ask(sums, "What is 17*23, and what is 3*4?"))
    weather = create_agent(model, [get_weather], system_prompt="Be brief.", name="reporter")
    print(asyncio.run(stream(weather, "Tell me the weather in 'Bergen'.")))
    try:
        ask(sums, "A failing lookup of 'unicorns', please.")
    except LookupError as problem:
        print("failed:", problem)
