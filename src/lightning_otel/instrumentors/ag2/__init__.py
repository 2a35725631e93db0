"""The classic AutoGen API, ``autogen`` of AG2 0.x: chats, agents' replies and tools as spans.

Its methods of conversation are wrapped where every way of starting one passes. Model calls are left
to the layer that sends them. AG2's own ``autogen.opentelemetry``, where a program uses it, goes on
as it was: it wraps single agents by hand.
"""

from collections.abc import Mapping
from types import ModuleType

from lightning_otel.instrumentors.ag2 import reading
from lightning_otel.instrumentors.library import LibraryInstrumentor, Patch
from lightning_otel.instrumentors.steps import around, around_async


class AG2Instrumentor(LibraryInstrumentor):
    """Switches the capture of the classic API on and off; ``autogen`` itself is never imported."""

    requires = ("ag2 >= 0.9, < 1",)

    def patches(self) -> Mapping[str, Patch]:
        """The module of the class that all agents of the classic API are."""
        return {"autogen.agentchat.conversable_agent": self._patch_agent}

    def _patch_agent(self, module: ModuleType) -> None:
        agent = module.ConversableAgent
        chat = (self.is_wanted, ("recipient",), reading.chat, reading.chat_result)
        self.wrap(agent, "initiate_chat", around(*chat))
        self.wrap(agent, "a_initiate_chat", around_async(*chat))
        reply = (self.is_wanted, ("messages", "sender"), reading.reply, reading.reply_result)
        self.wrap(agent, "generate_reply", around(*reply))
        self.wrap(agent, "a_generate_reply", around_async(*reply))
        tool = (self.is_wanted, ("func_call", "call_id"), reading.tool, reading.tool_result)
        self.wrap(agent, "execute_function", around(*tool))
        self.wrap(agent, "a_execute_function", around_async(*tool))
