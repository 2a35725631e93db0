"""The toy model, in the forms that the frameworks of the examples ask for."""

import random
from collections.abc import Mapping
from typing import Any

from lightning_otel.demo.policy import Reply, ToolCall, ToyPolicy
from lightning_otel.demo.requests import message_text

FINAL = "final_answer"
"""The tool by which an agent of smolagents ends."""


class FrameworkPolicy(ToyPolicy):
    """Calls each tool once before smolagents' last one, and fills the fields that DSPy asks for."""

    def reply(self, body: Mapping[str, Any], rng: random.Random) -> Reply:
        """The toy model's answer where the request is of no such form."""
        text = message_text((body.get("messages") or [{}])[-1])
        if "[[ ## " in text:
            return Reply(text=_fill_fields(text))
        tools = body.get("tools") or []
        others = [tool for tool in tools if tool.get("function", {}).get("name") != FINAL]
        if len(others) == len(tools):
            return super().reply(body, rng)
        if text.startswith("Observation"):
            answer = f'{{"answer": "{text.split()[-1]}"}}'
            call = ToolCall(f"call_{rng.getrandbits(96):024x}", FINAL, answer)
            return Reply(text="", tool_calls=(call,), finish_reason="tool_calls")
        return super().reply({**body, "tools": others}, rng)


def _fill_fields(text: str) -> str:
    if "[[ ## next_tool_name ## ]]" not in text:
        fields = {"reasoning": "The tool said so.", "answer": "fog"}
    elif "observation_0" in text:
        fields = {"next_thought": "Done.", "next_tool_name": "finish", "next_tool_args": "{}"}
    else:
        city = '{"city": "Oslo"}'
        fields = {"next_thought": "Ask.", "next_tool_name": "get_weather", "next_tool_args": city}
    parts = [f"[[ ## {name} ## ]]\n{value}" for name, value in fields.items()]
    return "\n\n".join([*parts, "[[ ## completed ## ]]"])
