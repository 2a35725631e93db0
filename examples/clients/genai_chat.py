"""google-genai: functions that it calls by itself, a chat, a stream, and questions at once."""

import asyncio

from google import genai
from google.genai import types

MODEL = "gemini-toy"


def calculator(expression: str) -> str:
    """Work out an arithmetic expression."""
    left, right = expression.split("*")
    return str(int(left) * int(right))


def solve(client, question):
    config = types.GenerateContentConfig(
        system_instruction="Be exact.", temperature=0.5, tools=[calculator]
    )
    chat = client.chats.create(model=MODEL, config=config)
    first = chat.send_message(question).text
    return [first, chat.send_message("Thank you.").text]


def tell(client, question):
    chunks = client.models.generate_content_stream(model=MODEL, contents=question)
    return "".join(chunk.text or "" for chunk in chunks)


async def ask_all(client, questions):
    ask = client.aio.models.generate_content
    answers = await asyncio.gather(*(ask(model=MODEL, contents=each) for each in questions))
    stream = await client.aio.models.generate_content_stream(model=MODEL, contents="And now?")
    last = "".join([chunk.text or "" async for chunk in stream])
    await client.aio.aclose()
    return [*(answer.text for answer in answers), last]


if __name__ == "__main__":
    client = genai.Client()
    print(solve(client, "What is 17*23, and what is 12*12?"))
    print(tell(client, "Tell me a story."))
    print(asyncio.run(ask_all(client, ["One?", "Two?", "Three?"])))
