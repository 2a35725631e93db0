"""Structured output of the anthropic client: parsed whole, streamed, as JSON and in coroutines."""

import asyncio

from anthropic import Anthropic, AsyncAnthropic
from pydantic import BaseModel

QUESTION = [{"role": "user", "content": "How much is 17*23?"}]
ASKED = {"model": "claude-toy", "max_tokens": 256, "messages": QUESTION}


class Product(BaseModel):
    answer: int


def read_stream(client):
    with client.messages.stream(output_format=Product, **ASKED) as stream:
        return stream.get_final_message().parsed_output


def create(client):
    schema = {**Product.model_json_schema(), "additionalProperties": False}
    config = {"format": {"type": "json_schema", "schema": schema}}
    return client.messages.create(output_config=config, **ASKED).content[0].text


async def ask_all():
    async with AsyncAnthropic() as client:
        parse = client.messages.parse
        messages = await asyncio.gather(*(parse(output_format=Product, **ASKED) for _ in range(2)))
        async with client.messages.stream(output_format=Product, **ASKED) as stream:
            last = await stream.get_final_message()
        return [message.parsed_output for message in [*messages, last]]


if __name__ == "__main__":
    client = Anthropic()
    print(client.messages.parse(output_format=Product, **ASKED).parsed_output)
    print(read_stream(client))
    print(create(client))
    print(asyncio.run(ask_all()))
