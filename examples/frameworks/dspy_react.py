"""DSPy: a module that reasons and calls a tool. `stream`: streamed."""

import asyncio
import os
import sys

import dspy


def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"fog in {city}"


async def main():
    url = os.environ["OPENAI_BASE_URL"]
    dspy.configure(lm=dspy.LM("openai/toy", api_base=url, api_key="none", cache=False))
    agent = dspy.ReAct("question -> answer", tools=[get_weather])
    question = "How is the weather in 'Oslo'?"
    if "stream" not in sys.argv:
        print((await agent.acall(question=question)).answer)
        return
    async for value in dspy.streamify(agent)(question=question):
        if isinstance(value, dspy.Prediction):
            print(value.answer)


if __name__ == "__main__":
    asyncio.run(main())
