"""Streams: read to the end, left early, and through the client's own helper; sync and async."""

import asyncio

from openai import AsyncOpenAI, OpenAI


def whole(client):
    stream = client.chat.completions.create(
        model="toy",
        messages=[{"role": "user", "content": "Say all of this slowly, please."}],
        stream=True,
        stream_options={"include_usage": True},
        logprobs=True,
        extra_body={"return_token_ids": True},
    )
    text = ""
    for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
    return text


def left_early(client):
    words = []
    with client.chat.completions.create(
        model="big", messages=[{"role": "user", "content": "Tell me a lot."}], stream=True
    ) as stream:
        for chunk in stream:
            words.append(chunk.choices[0].delta.content or "")
            if len(words) == 5:
                break
    return "".join(words)


def helper(client):
    with client.chat.completions.stream(
        model="toy", messages=[{"role": "user", "content": "Stream it for me."}]
    ) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        return len(deltas), stream.get_final_completion().choices[0].message.content


async def words_of(client, text):
    stream = await client.chat.completions.create(
        model="toy", messages=[{"role": "user", "content": text}], stream=True
    )
    async for chunk in stream:
        yield chunk.choices[0].delta.content or ""


async def main():
    async with AsyncOpenAI() as client:
        print("".join([word async for word in words_of(client, "An async stream.")]))


if __name__ == "__main__":
    with OpenAI() as client:
        print(whole(client))
        print(left_early(client))
        print(*helper(client))
    asyncio.run(main())
