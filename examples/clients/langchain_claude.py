"""ChatAnthropic of LangChain: a tool loop whole and streamed, a structured answer, a batch."""

import asyncio

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from pydantic import BaseModel


class Product(BaseModel):
    answer: int


@tool
def calculator(expression: str) -> str:
    """Work out an arithmetic expression."""
    left, right = expression.split("*")
    return str(int(left) * int(right))


def solve(model, question, ask):
    messages = [HumanMessage(question)]
    while True:
        message = ask(model.bind_tools([calculator]), messages)
        messages.append(message)
        if not message.tool_calls:
            return message.text
        messages += [calculator.invoke(call) for call in message.tool_calls]


def invoke(model, messages):
    return model.invoke(messages)


def stream(model, messages):
    first, *others = model.stream(messages)
    return sum(others, first)


def extract(model, question):
    return model.with_structured_output(Product, method="json_schema").invoke(question).answer


async def ask_all(model, questions):
    answers = await model.abatch(questions)
    pieces = [piece.text async for piece in model.astream("And now?")]
    return [*(answer.text for answer in answers), "".join(pieces)]


if __name__ == "__main__":
    model = ChatAnthropic(model="claude-toy", max_tokens=256)
    print(solve(model, "What is 17*23, and what is 12*12?", invoke))
    print(solve(model, "What is 19*21?", stream))
    print(extract(model, "How much is 17*23?"))
    print(asyncio.run(ask_all(model, ["One?", "Two?", "Three?"])))
