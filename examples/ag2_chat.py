"""The classic autogen API: an assistant with a tool, its user proxy, and a group chat."""

import contextlib
import io
import os

from autogen import AssistantAgent, GroupChat, GroupChatManager, UserProxyAgent, register_function

config = {
    "config_list": [
        {
            "model": "toy",
            "base_url": os.environ["OPENAI_BASE_URL"],
            "api_key": os.environ["OPENAI_API_KEY"],
            "extra_body": {"return_token_ids": True},
            "price": [0, 0],
        }
    ],
    "cache_seed": None,
}


def calculator(expression: str) -> str:
    """Work out a product."""
    left, right = expression.split("*")
    return str(int(left) * int(right))


def main():
    assistant = AssistantAgent("assistant", system_message="Solve it.", llm_config=config)
    user = UserProxyAgent(
        "user",
        human_input_mode="NEVER",
        code_execution_config=False,
        max_consecutive_auto_reply=1,
        default_auto_reply="",
    )
    register_function(
        calculator, caller=assistant, executor=user, description="Work out a product."
    )
    first = user.initiate_chat(assistant, message="What is 17*23?", max_turns=2)

    planner = AssistantAgent("planner", system_message="Plan.", llm_config=config)
    writer = AssistantAgent("writer", system_message="Write.", llm_config=config)
    editor = AssistantAgent("editor", system_message="Edit.", llm_config=config)
    group = GroupChat(agents=[planner, writer, editor], messages=[], max_round=4)
    manager = GroupChatManager(groupchat=group, llm_config=config)
    second = planner.initiate_chat(manager, message="A text about tides.")
    return first, second


if __name__ == "__main__":
    with contextlib.redirect_stdout(io.StringIO()):
        first, second = main()
    print(first.summary)
    print([(message.get("name"), message["content"]) for message in second.chat_history])
