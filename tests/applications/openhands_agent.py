"""An agent of OpenHands with a shell in tmux, a condenser and a title."""

import os
from pathlib import Path

from openhands.sdk import LLM, Agent, Conversation, LLMSummarizingCondenser, Tool
from openhands.tools.terminal import TerminalTool
from pydantic import SecretStr


def main() -> None:
    """Solve the task in the working directory."""
    model = LLM(model="openai/m", base_url=os.environ["OPENAI_BASE_URL"],
                api_key=SecretStr("none"), usage_id="agent")  # fmt: skip
    condenser = LLMSummarizingCondenser(llm=model, max_size=10, keep_first=2)
    agent = Agent(llm=model, tools=[Tool(name=TerminalTool.name)], condenser=condenser)
    conversation = Conversation(agent=agent, workspace=str(Path.cwd()))
    conversation.send_message("Mend add")
    conversation.run()
    conversation.generate_title()
    conversation.close()


main()
