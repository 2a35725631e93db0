"""Many questions at once on the async openai client, under a limit of concurrency."""

import asyncio

from openai import AsyncOpenAI


async def ask(client, limit, number):
    async with limit:
        first = await client.chat.completions.create(
            model="toy",
            messages=[{"role": "user", "content": f"Tell me of number {number}."}],
            logprobs=True,
            extra_body={"return_token_ids": True},
        )
        await asyncio.sleep(0)
        second = await client.chat.completions.create(
            model="toy",
            messages=[
                {"role": "user", "content": f"Tell me of number {number}."},
                {"role": "assistant", "content": first.choices[0].message.content},
                {"role": "user", "content": f"Now of number {number + 100}."},
            ],
            n=2,
        )
        return [choice.message.content for choice in second.choices]


async def main():
    limit = asyncio.Semaphore(4)
    async with AsyncOpenAI() as client:
        answers = await asyncio.gather(*(ask(client, limit, number) for number in range(8)))
        vectors = await client.embeddings.create(model="toy", input=["one", "two"])
    for answer in answers:
        print(*answer, sep=" | ")
    print([len(vector.embedding) for vector in vectors.data])


if __name__ == "__main__":
    asyncio.run(main())
