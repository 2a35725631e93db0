"""A tool loop on the plain openai client: the model asks for tools until it can answer."""

import json

from openai import OpenAI

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
    },
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
                },
                "required": ["city", "unit"],
            },
        },
    },
]


def call_tool(name, arguments):
    if name == "calculator":
        left, right = arguments["expression"].split("*")
        return str(int(left) * int(right))
    return f"It is sunny in {arguments['city']}, degrees {arguments['unit']}."


def solve(client, question):
    messages = [
        {"role": "system", "content": "Be exact."},
        {"role": "user", "content": question},
    ]
    while True:
        reply = client.chat.completions.create(
            model="toy",
            messages=messages,
            tools=TOOLS,
            temperature=0.7,
            logprobs=True,
            extra_body={"return_token_ids": True},
        )
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            result = call_tool(call.function.name, json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


if __name__ == "__main__":
    client = OpenAI()
    print(solve(client, "What is 17*23, and what is 12*12?"))
    print(solve(client, "How is the weather in 'Oslo', in celsius? Also, what is 6*7?"))
