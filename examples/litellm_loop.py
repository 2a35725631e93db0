"""A tool loop on LiteLLM's completion(), then a streamed and an async answer."""

import asyncio
import json

import litellm

CALCULATOR = {
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
MODEL = "openai/toy"


def solve(question):
    messages = [{"role": "user", "content": question}]
    while True:
        reply = litellm.completion(
            model=MODEL,
            messages=messages,
            tools=[CALCULATOR],
            logprobs=True,
            extra_body={"return_token_ids": True},
        )
        message = reply.choices[0].message
        if not message.tool_calls:
            return message.content
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            left, right = json.loads(call.function.arguments)["expression"].split("*")
            result = str(int(left) * int(right))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def stream(text):
    messages = [{"role": "user", "content": text}]
    chunks = litellm.completion(model=MODEL, messages=messages, stream=True)
    return "|".join(chunk.choices[0].delta.content or "" for chunk in chunks)


async def ask(text):
    messages = [{"role": "user", "content": text}]
    reply = await litellm.acompletion(model=MODEL, messages=messages)
    return reply.choices[0].message.content


async def ask_all(texts):
    return await asyncio.gather(*map(ask, texts))


if __name__ == "__main__":
    print(solve("What is 17*23?"))
    print(stream("Say it in parts."))
    print(asyncio.run(ask_all(["one", "two", "three"])))
