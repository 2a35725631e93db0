"""The Responses API: a tool loop over input items, then a streamed answer."""

import json

from openai import OpenAI

CALCULATOR = {
    "type": "function",
    "name": "calculator",
    "description": "Work out an arithmetic expression.",
    "parameters": {
        "type": "object",
        "properties": {"expression": {"type": "string"}},
        "required": ["expression"],
        "additionalProperties": False,
    },
    "strict": True,
}


def solve(client, question):
    items = [{"role": "user", "content": question}]
    while True:
        reply = client.responses.create(
            model="toy",
            instructions="Use the calculator.",
            input=items,
            tools=[CALCULATOR],
            include=["message.output_text.logprobs"],
        )
        calls = [item for item in reply.output if item.type == "function_call"]
        if not calls:
            return reply.output_text
        for call in calls:
            left, right = json.loads(call.arguments)["expression"].split("+")
            items.append(call.model_dump(exclude_none=True))
            items.append(
                {
                    "type": "function_call_output",
                    "call_id": call.call_id,
                    "output": str(int(left) + int(right)),
                }
            )


if __name__ == "__main__":
    client = OpenAI()
    print(solve(client, "What is 250+141?"))
    with client.responses.stream(model="toy", input="Say it in a stream.") as stream:
        kinds = [event.type for event in stream]
        print(len(kinds), kinds[-1], stream.get_final_response().output_text)
