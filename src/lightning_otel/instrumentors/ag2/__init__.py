"""AG2, both products of that name: chats, turns, agents' replies and tools as spans.

The classic AutoGen API, ``autogen`` of AG2 0.x, is wrapped where every way of starting a chat
passes; AG2 1.x, ``ag2``, is given a middleware. Where a client's own instrumentor sees the request,
the model call's payload is left to it. AG2's own instrumentation of either, where a program uses
it, goes on as it was: it is put onto single agents by hand.
"""

from collections.abc import Mapping
from types import ModuleType

from lightning_otel.instrumentors.ag2 import reading, turns
from lightning_otel.instrumentors.library import LibraryInstrumentor, Patch
from lightning_otel.instrumentors.steps import steps


class AG2Instrumentor(LibraryInstrumentor):
    """Switches the capture of AG2 on and off; neither ``autogen`` nor ``ag2`` is ever imported."""

    requires = ("ag2 >= 0.14",)

    def patches(self) -> Mapping[str, Patch]:
        """The modules of the class that all agents are, of either product."""
        return {
            "autogen.agentchat.conversable_agent": self._patch_classic_agent,
            "ag2.agent": self._patch_agent,
        }

    def _patch_agent(self, module: ModuleType) -> None:
        self.wrap(module.Agent, "_turn_scope", turns.wrapped(self.is_wanted))

    def _patch_classic_agent(self, module: ModuleType) -> None:
        agent = module.ConversableAgent
        chat = steps(("recipient",), reading.chat, reading.chat_result)
        self.wrap_calls(agent, chat, "initiate_chat", "a_initiate_chat")
        reply = steps(("messages", "sender"), reading.reply, reading.reply_result)
        self.wrap_calls(agent, reply, "generate_reply", "a_generate_reply")
        tool = steps(("func_call", "call_id"), reading.tool, reading.tool_result)
        self.wrap_calls(agent, tool, "execute_function", "a_execute_function")
