"""An agent on the plain openai client that knows nothing of lightning-otel.

Usage: unaware_agent.py BASE_URL. It prints one line at the end.
"""

import asyncio
import json
import sys
from typing import Any

import openai

CALCULATOR: Any = {
    "name": "calculator",
    "description": "Works out an expression.",
    "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
}
TOOL: Any = {"type": "function", "strict": False, **CALCULATOR}


def loop_over_tools(client: openai.OpenAI) -> str | None:
    """A chat that calls the calculator and goes on with its answer."""
    messages: list[Any] = [
        {"role": "system", "content": "Use the calculator."},
        {"role": "user", "content": "What is 17*23?"},
    ]
    for _ in range(4):
        reply = client.chat.completions.create(
            model="toy",
            messages=messages,
            tools=[{"type": "function", "function": CALCULATOR}],
            temperature=0.5,
            logprobs=True,
            extra_body={"return_token_ids": True},
        )
        answer = reply.choices[0].message
        if not answer.tool_calls:
            return answer.content
        messages.append(answer.model_dump(exclude_none=True))
        for call in answer.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "391"})
    return None


async def gather(base_url: str, count: int) -> list[str | None]:
    async with openai.AsyncOpenAI(base_url=base_url, api_key="k") as client:
        replies = await asyncio.gather(
            *(
                client.chat.completions.create(
                    model="toy", messages=[{"role": "user", "content": f"number {number}"}]
                )
                for number in range(count)
            )
        )
    return [reply.choices[0].message.content for reply in replies]


def leave_a_stream(client: openai.OpenAI) -> int:
    """A stream that is left after two chunks, and one that is read to its end."""
    chunks = 0
    with client.chat.completions.create(
        model="left", messages=[{"role": "user", "content": "tell me more"}], stream=True
    ) as stream:
        for _ in stream:
            chunks += 1
            if chunks == 2:
                break
    with client.chat.completions.create(
        model="toy",
        messages=[{"role": "user", "content": "tell me all"}],
        stream=True,
        stream_options={"include_usage": True},
    ) as whole:
        return chunks + sum(1 for _ in whole)


def respond(client: openai.OpenAI) -> list[str]:
    reply = client.responses.create(
        model="toy",
        instructions="Use the calculator.",
        input="What is 5*6?",
        tools=[TOOL],
    )
    return [item.type for item in reply.output]


def main(base_url: str) -> None:
    """Do all of it, once."""
    with openai.OpenAI(base_url=base_url, api_key="k", max_retries=0) as client:
        found: dict[str, Any] = {"answer": loop_over_tools(client)}
        found["many"] = len(asyncio.run(gather(base_url, 20)))
        found["chunks"] = leave_a_stream(client)
        found["items"] = respond(client)
        found["size"] = len(
            client.embeddings.create(model="toy", input=["a", "b"]).data[1].embedding
        )
        try:
            client.chat.completions.create(
                model="fail-429", messages=[{"role": "user", "content": "too much"}]
            )
        except openai.RateLimitError as exc:
            found["error"] = exc.status_code
    print(json.dumps(found))  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1])
