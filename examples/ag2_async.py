"""The classic autogen API, asynchronous: chats at once, with a model that streams its answers."""

import asyncio
import contextlib
import io
import os

from autogen import AssistantAgent, UserProxyAgent

config = {
    "config_list": [
        {
            "model": "toy",
            "base_url": os.environ["OPENAI_BASE_URL"],
            "api_key": os.environ["OPENAI_API_KEY"],
            "price": [0, 0],
            "stream": True,
        }
    ],
    "cache_seed": None,
}


async def talk(name):
    helper = AssistantAgent(name, system_message="Help.", llm_config=config)
    user = UserProxyAgent("user", human_input_mode="NEVER", code_execution_config=False)
    found = await user.a_initiate_chat(helper, message=f"Hello, {name}.", max_turns=1)
    return found.summary


async def main():
    return await asyncio.gather(talk("alpha"), talk("beta"))


if __name__ == "__main__":
    with contextlib.redirect_stdout(io.StringIO()):
        answers = asyncio.run(main())
    print(answers)
