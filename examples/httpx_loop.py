"""No SDK at all: a model asked by httpx and by requests, with tools, streamed, and at once."""

import asyncio
import json
import os

import httpx
import requests

URL = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Work out an arithmetic expression.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    }
]


def user(text):
    return {"role": "user", "content": text}


def message_of(answer):
    return answer.json()["choices"][0]["message"]


def calculate(expression):
    left, right = expression.split("*")
    return str(int(left) * int(right))


def solve(question):
    messages = [user(question)]
    ids = {"logprobs": True, "top_logprobs": 0, "return_token_ids": True}
    while True:
        body = {"model": "toy", "messages": messages, "tools": TOOLS, **ids}
        message = message_of(requests.post(URL, json=body))
        messages.append(message)
        if not message.get("tool_calls"):
            return message["content"]
        for call in message["tool_calls"]:
            result = calculate(**json.loads(call["function"]["arguments"]))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})


def tell(question):
    body = {"model": "toy", "messages": [user(question)], "stream": True}
    pieces = []
    with httpx.stream("POST", URL, json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    pieces.append(choice["delta"].get("content") or "")
    return "".join(pieces)


async def ask_all(questions):
    async with httpx.AsyncClient() as client:
        bodies = [{"model": "toy", "messages": [user(question)]} for question in questions]
        answers = await asyncio.gather(*(client.post(URL, json=body) for body in bodies))
    return [message_of(answer)["content"] for answer in answers]


if __name__ == "__main__":
    print(solve("What is 17*23, and what is 12*12?"))
    print(tell("Tell me a story."))
    print(asyncio.run(ask_all(["One?", "Two?", "Three?"])))
