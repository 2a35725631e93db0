"""The OpenAI Agents SDK: tools, a hand-off, an agent as a tool, and typed output."""

import asyncio

from agents import (
    Agent,
    ModelSettings,
    Runner,
    function_tool,
    set_default_openai_api,
    set_trace_processors,
)
from pydantic import BaseModel

# The traces of the SDK itself would go to OpenAI, whatever server is used.
set_trace_processors([])
set_default_openai_api("chat_completions")


class Bill(BaseModel):
    customer: str
    is_paid: bool


@function_tool
def calculator(expression: str) -> int:
    """Work out a product."""
    left, right = expression.split("*")
    return int(left) * int(right)


settings = ModelSettings(temperature=0.1, extra_body={"return_token_ids": True})
translator = Agent("translator", instructions="Translate.", model="toy", model_settings=settings)
accountant = Agent(
    "accountant",
    instructions="Work it out.",
    model="toy",
    model_settings=settings,
    tools=[calculator, translator.as_tool("translate", "Translate a text.")],
)
front = Agent(
    "front",
    instructions="Leave all numbers to the accountant.",
    model="toy",
    model_settings=settings,
    handoffs=[accountant],
)
clerk = Agent("clerk", instructions="Write bills.", model="toy", output_type=Bill)


async def main():
    result = await Runner.run(front, "What is 17*23?")
    print(result.last_agent.name, "|", result.final_output)
    result = await Runner.run(accountant, "What is 2*4? Please translate 'good morning' too.")
    print(result.last_agent.name, "|", result.final_output)
    many = await asyncio.gather(*(Runner.run(clerk, f"Bill number {i}.") for i in range(3)))
    print([each.final_output for each in many])


if __name__ == "__main__":
    asyncio.run(main())
