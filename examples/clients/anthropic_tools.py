"""A tool loop on the anthropic client: whole, streamed and asynchronous."""

import asyncio

from anthropic import Anthropic, AsyncAnthropic

MODEL = "claude-toy"
TOOLS = [
    {
        "name": "calculator",
        "description": "Work out an arithmetic expression.",
        "input_schema": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    }
]


def calculate(expression):
    left, right = expression.split("*")
    return str(int(left) * int(right))


def answer_calls(message):
    return [
        {
            "type": "tool_result",
            "tool_use_id": block.id,
            "content": calculate(block.input["expression"]),
        }
        for block in message.content
        if block.type == "tool_use"
    ]


def text_of(message):
    return "".join(block.text for block in message.content if block.type == "text")


def solve(client, question):
    messages = [{"role": "user", "content": question}]
    while True:
        message = client.messages.create(
            model=MODEL, max_tokens=256, system="Be exact.", messages=messages, tools=TOOLS
        )
        messages.append({"role": "assistant", "content": message.content})
        results = answer_calls(message)
        if not results:
            return text_of(message)
        messages.append({"role": "user", "content": results})


def tell(client, question):
    asked = [{"role": "user", "content": question}]
    with client.messages.stream(model=MODEL, max_tokens=256, messages=asked) as stream:
        return "".join(stream.text_stream)


async def ask_all(questions):
    async with AsyncAnthropic() as client:
        asked = [[{"role": "user", "content": question}] for question in questions]
        create = client.messages.create
        answers = [create(model=MODEL, max_tokens=256, messages=each) for each in asked]
        return [text_of(message) for message in await asyncio.gather(*answers)]


if __name__ == "__main__":
    client = Anthropic()
    print(solve(client, "What is 17*23, and what is 12*12?"))
    print(tell(client, "Tell me a story."))
    print(asyncio.run(ask_all(["One?", "Two?", "Three?"])))
