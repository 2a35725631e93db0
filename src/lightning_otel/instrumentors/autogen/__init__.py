"""AutoGen's agents, teams, tools and models as spans, for ``autogen_agentchat`` and ``_core`` 0.7.

AutoGen makes spans of agents and tools itself: without content, and with its context left attached
across every yield. Ours stand in their place, so that there is one span of each; of a team, which
AutoGen has none of, there is one too.
"""

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from lightning_otel.instrumentors.autogen import (
    agents,
    core,
    messaging,
    models,
    teams,
    tools,
    tracebacks,
)
from lightning_otel.instrumentors.autogen.families import Family
from lightning_otel.instrumentors.library import LibraryInstrumentor, Patch


class AutoGenInstrumentor(LibraryInstrumentor):
    """Switches the capture of AutoGen on and off; AutoGen itself is never imported."""

    requires = ("autogen-core >= 0.7.5, < 0.8",)

    def __init__(self) -> None:
        super().__init__()
        if not hasattr(self, "_leave"):
            self._leave: list[Callable[[], None]] = []

    def patches(self) -> Mapping[str, Patch]:
        """The modules that hold the methods themselves, not those they are imported into."""
        teams_at = "autogen_agentchat.teams._group_chat"
        return {
            "autogen_core._telemetry._tracing": self._patch_messaging,
            "autogen_core._routed_agent": self._patch_core_agents,
            "autogen_core._single_threaded_agent_runtime": self._patch_runtime,
            "autogen_core.tools._base": self._patch_tools,
            "autogen_core.models._model_client": self._patch_models,
            "autogen_agentchat.agents._base_chat_agent": self._patch_agents,
            f"{teams_at}._base_group_chat": self._patch_teams,
            f"{teams_at}._sequential_routed_agent": self._patch_delivery,
            f"{teams_at}._chat_agent_container": self._patch_containers,
            f"{teams_at}._events": self._patch_errors,
            "autogen_ext.tools.mcp._workbench": self._patch_mcp,
        }

    def _patch_messaging(self, module: ModuleType) -> None:
        self.wrap(module.TraceHelper, "trace_block", messaging.trace_block(self.is_wanted))

    def _patch_core_agents(self, module: ModuleType) -> None:
        self.wrap(module.RoutedAgent, "on_message_impl", core.on_message(self.is_wanted))

    def _patch_runtime(self, module: ModuleType) -> None:
        runtime = module.SingleThreadedAgentRuntime
        self.wrap(module, "get_telemetry_envelope_metadata", core.metadata(self.is_wanted))
        self.wrap(runtime, "_process_send", core.process(self._is_on, is_published=False))
        self.wrap(runtime, "_process_publish", core.process(self._is_on, is_published=True))

    def _patch_tools(self, module: ModuleType) -> None:
        self.wrap(module, "trace_tool_span", agents.native_span(self.is_wanted))
        self.wrap(module.BaseTool, "run_json", tools.run_json(self.is_wanted))
        self.wrap(module.BaseStreamTool, "run_json_stream", tools.run_json_stream(self.is_wanted))

    def _patch_models(self, module: ModuleType) -> None:
        clients = Family(
            module.ChatCompletionClient,
            {
                "create": models.create(self.is_wanted),
                "create_stream": models.create_stream(self.is_wanted),
            },
            models.is_left_out,
        )
        self._leave.append(clients.leave)

    def _patch_agents(self, module: ModuleType) -> None:
        self.wrap(module, "trace_invoke_agent_span", agents.native_span(self.is_wanted))
        self.wrap(module, "trace_create_agent_span", agents.create_span(self.is_wanted))
        self.wrap(module.BaseChatAgent, "run", agents.run(self.is_wanted))
        self.wrap(module.BaseChatAgent, "run_stream", agents.run_stream(self.is_wanted))
        family = Family(
            module.BaseChatAgent,
            {
                "on_messages": agents.on_messages(self.is_wanted),
                "on_messages_stream": agents.on_messages_stream(self.is_wanted),
            },
        )
        self._leave.append(family.leave)

    def _patch_teams(self, module: ModuleType) -> None:
        self.wrap(module.BaseGroupChat, "run_stream", teams.run_stream(self.is_wanted))

    def _patch_delivery(self, module: ModuleType) -> None:
        self.wrap(module.SequentialRoutedAgent, "on_message_impl", teams.on_message(self._is_on))

    def _patch_containers(self, module: ModuleType) -> None:
        self.wrap(module, "trace_invoke_agent_span", teams.native_span(self.is_wanted))
        self.wrap(module.ChatAgentContainer, "_log_message", teams.log_message(self._is_on))

    def _patch_errors(self, module: ModuleType) -> None:
        self._leave.append(tracebacks.from_exception(module.SerializableException))

    def _patch_mcp(self, module: ModuleType) -> None:
        self.wrap(module, "trace_tool_span", agents.native_span(self.is_wanted))
        self.wrap(module.McpWorkbench, "call_tool", tools.call_tool(self.is_wanted))

    def _is_on(self) -> bool:
        return self.is_active

    def _uninstrument(self, **kwargs: Any) -> None:
        super()._uninstrument(**kwargs)
        while self._leave:
            self._leave.pop()()
