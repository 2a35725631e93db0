"""AutoGen's agents, teams, tools and models as spans, for ``autogen_agentchat`` and ``_core`` 0.7.

AutoGen's own spans have no content, and leave their context attached across every yield. Ours
replace them; teams, which it has no span of, get one too.
"""

import functools
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, Final

from lightning_otel import capture
from lightning_otel.instrumentors.autogen import models, runs
from lightning_otel.instrumentors.base import LibraryInstrumentor, Patch
from lightning_otel.instrumentors.wrappers import wrap_call, wrap_generator

_OURS: Final = "lightning_otel.instrumentors."


class AutoGenInstrumentor(LibraryInstrumentor):
    """Switches the capture of AutoGen on and off; AutoGen itself is never imported."""

    requires = ("autogen-core >= 0.7.5, < 0.8",)

    def patches(self) -> Mapping[str, Patch]:
        """The packages whose modules hold the methods themselves."""
        return {
            "autogen_core": self._patch_runtime,
            "autogen_core.tools": self._patch_tools,
            "autogen_core.models": self._patch_models,
            "autogen_agentchat.agents": self._patch_agents,
            "autogen_agentchat.teams": self._patch_teams,
            "autogen_ext.tools.mcp._workbench": self._patch_mcp,
        }

    def _patch_runtime(self, package: ModuleType) -> None:
        helper = package._telemetry._tracing.TraceHelper
        self._replace_span(helper, "trace_block", runs.replace_messaging)
        self.wrap_calls(package.RoutedAgent, runs.begin_message, "on_message_impl")
        module = package._single_threaded_agent_runtime
        self.wrap(module, "get_telemetry_envelope_metadata", self._carry_context)
        for name, is_published in (("_process_send", False), ("_process_publish", True)):
            begin = functools.partial(runs.begin_delivery, is_published=is_published)
            self.wrap(package.SingleThreadedAgentRuntime, name, wrap_call(self.if_active(begin)))

    def _patch_tools(self, package: ModuleType) -> None:
        self._replace_span(package._base, "trace_tool_span", runs.skip_span)
        self.wrap_calls(package.BaseTool, runs.begin_tool, "run_json")
        self.wrap_steps(package.BaseStreamTool, runs.begin_tool, "run_json_stream")

    def _patch_models(self, package: ModuleType) -> None:
        stream = functools.partial(models.begin_call, is_stream=True)
        methods = {
            "create": wrap_call(self.if_wanted(models.begin_call)),
            "create_stream": wrap_generator(self.if_wanted(stream)),
        }
        self.wrap_family(package.ChatCompletionClient, methods, models.is_delegate)

    def _patch_agents(self, package: ModuleType) -> None:
        module = package._base_chat_agent
        self._replace_span(module, "trace_invoke_agent_span", runs.skip_span)
        self._replace_span(module, "trace_create_agent_span", runs.replace_creation)
        self.wrap_calls(package.BaseChatAgent, runs.begin_agent, "run")
        self.wrap_steps(package.BaseChatAgent, runs.begin_agent, "run_stream")
        begin = self.if_wanted(runs.begin_turn)
        methods = {"on_messages": wrap_call(begin), "on_messages_stream": wrap_generator(begin)}
        self.wrap_family(module.ChatAgent, methods)

    def _patch_teams(self, package: ModuleType) -> None:
        modules = package._group_chat
        self.wrap_steps(package.BaseGroupChat, runs.begin_team, "run_stream")
        part = modules._sequential_routed_agent.SequentialRoutedAgent
        self.wrap(part, "on_message_impl", wrap_call(self.if_active(runs.begin_part)))
        container = modules._chat_agent_container
        self._replace_span(container, "trace_invoke_agent_span", runs.replace_turn)
        error = modules._events.SerializableException
        self.wrap(error, "from_exception", functools.partial(_without_our_frames, error))

    def _patch_mcp(self, module: ModuleType) -> None:
        self._replace_span(module, "trace_tool_span", runs.skip_span)
        begin = functools.partial(runs.begin_tool, names=runs.SERVER_TOOL_PARAMETERS)
        self.wrap_calls(module.McpWorkbench, begin, "call_tool")

    def _replace_span(self, owner: Any, name: str, block_of: Callable[..., Any]) -> None:
        def make(original: Any) -> Any:
            def block(*args: Any, **kwargs: Any) -> Any:
                inner = capture.guard_call(block_of, *args, **kwargs) if self.is_wanted() else None
                return original(*args, **kwargs) if inner is None else inner

            return block

        self.wrap(owner, name, make)

    def _carry_context(self, original: Any) -> Any:
        def get_telemetry_envelope_metadata() -> Any:
            metadata = original()
            if self.is_wanted():
                capture.guard_call(runs.carry_context, metadata)
            return metadata

        return get_telemetry_envelope_metadata


def _without_our_frames(owner: type, original: Any) -> Any:
    """Remove our functions from the traceback in a team's error, which the program reads."""

    def from_exception(*args: Any) -> Any:  # called on an instance it is given that, too
        capture.guard_call(_forget_our_frames, args[-1])
        return original.__get__(None, owner)(args[-1])

    return from_exception


def _forget_our_frames(exc: BaseException) -> None:
    unread: list[BaseException | None] = [exc]
    ids: set[int] = set()
    while unread:
        one = unread.pop()
        if one is None or id(one) in ids:
            continue
        ids.add(id(one))
        unread += [one.__cause__, one.__context__]
        if isinstance(one, BaseExceptionGroup):
            unread += one.exceptions
        entries, entry = [], one.__traceback__
        while entry is not None:
            if not str(entry.tb_frame.f_globals.get("__name__")).startswith(_OURS):
                entries.append(entry)
            entry = entry.tb_next
        for entry, following in zip(entries, [*entries[1:], None], strict=True):
            entry.tb_next = following
        one.__traceback__ = entries[0] if entries else None
